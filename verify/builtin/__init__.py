"""The cases that ship with the package: the mixture-of-experts layer, and its small twins."""

from verify.builtin.exact import EXACT_CASES
from verify.builtin.float64 import FLOAT64_CASES
from verify.builtin.moe import CLAMPED, MOE
from verify.builtin.timed import MOE_1024

CASES = (MOE, CLAMPED, *EXACT_CASES, MOE_1024)
BY_NAME = FLOAT64_CASES  # found by their names and patterns, not as a part of `moe`
