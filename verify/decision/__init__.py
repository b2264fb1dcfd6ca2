"""From evidence to verdicts: pure, without torch.

`deciding` forms the verdict of every claim; `agreement` compares digests, `suspicions` looks at how
executions went, `statistics` bounds what was not seen. `ensembles`, `causes` and `patterns` say
which runs agree with each other and what that suggests; they never change a verdict.
"""

from verify.decision.deciding import decide

__all__ = ["decide"]
