"""Runs people's training scripts again: afresh, stopped and resumed, or with tensors kept.

`orders` tells a script's recorder where to record, when to stop and what to keep; `processes` runs
it; `replays` and `reruns` are the two verbs; `borders`, `lost_state`, `resuming` and `suspects`
judge from recordings alone; `reporting` and `retelling` say it.
"""
