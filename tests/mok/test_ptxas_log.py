"""What the compiler says is read in full: numbers of every kernel, and each warning that counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok.ptxas_log import Resources, find_advisories, find_warnings, parse_resources

# As NVRTC 13.0 says it: a function that is not inlined follows the kernel that calls it.
LOG = """\
a.cu(3): warning #177-D: variable "q" was declared but never referenced

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : (C7519) warpgroup.arrive is injected in around line 1158 by compiler
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 31 registers, used 2 barriers, 8 bytes cumulative stack size, 144 bytes smem
ptxas info    : Compile time = 13.945 ms
ptxas info    : Function properties for _Z3foofPf
ptxas         .     80 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""

SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to the presence of Extern calls in the function 'x'"
)
IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to "
    "determine register count at entry."
)
OTHER_CODE = "ptxas info    : (C7602) something was not done"
WARNING = "ptxas warning : Value of threads per SM for entry bad is out of range."


def test_numbers_belong_to_their_kernels():
    assert parse_resources(LOG) == (
        Resources("first", 8, 0, 0, 0, 0, 0),
        Resources("second", 31, 144, 80, 20, 32, 2),
    )
    assert [one.spills for one in parse_resources(LOG)] == [False, True]


@given(
    st.lists(
        st.builds(
            Resources,
            st.from_regex(r"\A[a-z_][a-z0-9_]{0,20}\Z"),
            *[st.integers(0, 2**20)] * 6,
        ),
        min_size=1,
        max_size=5,
        unique_by=lambda one: one.entry,
    )
)
def test_whatever_ptxas_prints_is_read_back(kernels):
    log = "".join(
        f"ptxas info    : Compiling entry function '{one.entry}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {one.entry}\n"
        f"ptxas         .     {one.stack} bytes stack frame, {one.spill_stores} bytes spill "
        f"stores, {one.spill_loads} bytes spill loads\n"
        f"ptxas info    : Used {one.registers} registers, used {one.barriers} barriers, "
        f"{one.static_shared} bytes smem\n"
        for one in kernels
    )
    assert parse_resources(log) == tuple(sorted(kernels, key=lambda one: one.entry))


@pytest.mark.parametrize("missing", ["Used 8", "0 bytes stack frame", "Compiling entry"])
def test_a_log_without_numbers_is_refused(missing):
    log = "\n".join(line for line in LOG.splitlines() if missing not in line)
    with pytest.raises(ValueError, match=r"gives no registers or no frame|names no kernel"):
        parse_resources(log if missing != "Compiling entry" else "ptxas info    : 0 bytes gmem")


@pytest.mark.parametrize("line", [SERIALISED, IGNORED, OTHER_CODE, WARNING])
def test_each_loss_of_speed_is_found_once(line):
    assert find_advisories(f"{line}\n{LOG}{line}\n") == (line,)
    assert find_warnings(line) == ()


def test_notes_are_no_findings_and_warnings_of_the_front_end_are_notes():
    assert find_advisories(LOG) == ()
    (warning,) = find_warnings(LOG)
    assert "variable" in warning
