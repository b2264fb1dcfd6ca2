"""Runs people's training scripts again: afresh, stopped and resumed, or with tensors kept.

`orders` tells a script's recorder where to record, when to stop and what to keep; `processes` runs
it. `replays` is `verify replay`, said by `replay_report`; `borders`, `lost_state`, `resuming` and
`suspects` judge for it from recordings alone. `explaining` is `verify trace explain`, said by
`explain_report`.
"""
