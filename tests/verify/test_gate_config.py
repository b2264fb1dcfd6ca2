"""The file of a gate: everything that it may say, and an error for everything else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.cases import CLAIMS
from verify.errors import InputFileError
from verify.gates.config import Config, load
from verify.gates.patterns import any_file, matches, problem_of
from verify.plans import RunOptions

FULL = """
cases = ["moe/exact-*", "checks/a.py::layer", "package.module:case"]
golden = "stored"
ranks = 2
runs = 7
processes = 1
claims = ["repeat", "exact"]
seed = 3
timeout = 60
require_clean = true

[controls]
only = "reason/*"

[sources]
kernels = ["csrc/**", "mok/*.py"]
exempt = ["mok/cli.py"]

[budget]
seconds = 600
executions = 5000
"""


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "gate.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
    return path


def test_everything_that_it_may_say(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    assert load(path) == Config(
        path=path,
        cases=("moe/exact-*", "checks/a.py::layer", "package.module:case"),
        options=RunOptions(
            ranks=2,
            runs=7,
            processes=1,
            claims=("repeat", "exact"),
            seed=3,
            timeout=60.0,
            golden=Path("stored"),
        ),
        controls="reason/*",
        kernels=("csrc/**", "mok/*.py"),
        exempt=("mok/cli.py",),
        seconds=600.0,
        executions=5000,
        require_clean=True,
    )


def test_the_least_that_it_must_say(tmp_path: Path) -> None:
    path = written(tmp_path, 'cases = ["a.py"]')
    assert load(path) == Config(path, ("a.py",), RunOptions(golden=Path("golden")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty (0 bytes)"),
        ("seed = 1", "cases is missing; allowed is a list"),
        ("cases = []", "cases is empty"),
        ('cases = "a.py"', "cases is text, it must be a list"),
        ("cases = [1]", "cases is an integer, it must be text"),
        ('cases = [""]', "must not be empty"),
        ('cases = ["a\\u0000b"]', "NUL"),
        ('cases = ["a.py"]\ncase = ["b.py"]', "unknown key 'case'; allowed are cases, golden"),
        ('cases = ["a.py"]\ngolden = 1', "golden is an integer"),
        ('cases = ["a.py"]\nranks = 0', "ranks is 0, it must be at least 1"),
        ('cases = ["a.py"]\nruns = true', "runs is a boolean, it must be an integer"),
        ('cases = ["a.py"]\nprocesses = 1.0', "processes is a number, it must be an integer"),
        ('cases = ["a.py"]\nclaims = []', "claims is empty"),
        ('cases = ["a.py"]\nclaims = ["repeat", "speed"]', "claims holds 'speed'; allowed are"),
        ('cases = ["a.py"]\nseed = -1', "seed is -1"),
        ('cases = ["a.py"]\nseed = 9223372036854775808', "seed is 9223372036854775808"),
        ('cases = ["a.py"]\ntimeout = 0', "timeout is 0, it must be a positive"),
        ('cases = ["a.py"]\ntimeout = nan', "timeout is nan"),
        ('cases = ["a.py"]\nrequire_clean = 1', "it must be true or false"),
        ('cases = ["a.py"]\ncontrols = "*"', "controls is text, it must be a table"),
        ('cases = ["a.py"]\n[controls]\nonly = 1', "controls.only is an integer"),
        ('cases = ["a.py"]\n[controls]\nskip = "a"', "unknown key 'controls.skip'; allowed in"),
        ('cases = ["a.py"]\n[sources]\nkernels = []', "sources.kernels is empty"),
        ('cases = ["a.py"]\n[sources]\nkernel = ["a"]', "unknown key 'sources.kernel'"),
        ('cases = ["a.py"]\n[sources]\nexempt = ["a"]', "without sources.kernels"),
        ('cases = ["a.py"]\n[sources]\nkernels = ["/a"]', "write it relative"),
        ('cases = ["a.py"]\n[sources]\nkernels = ["../a"]', "write it relative"),
        ('cases = ["a.py"]\n[sources]\nkernels = ["a**/b"]', "stands alone"),
        ('cases = ["a.py"]\n[budget]\nseconds = inf', "budget.seconds is inf"),
        ('cases = ["a.py"]\n[budget]\nseconds = "9"', "budget.seconds is text"),
        ('cases = ["a.py"]\n[budget]\nexecutions = 0', "budget.executions is 0"),
        ('cases = ["a.py"]\n[budget]\nexecutions = 1979-05-27', "is a date or time"),
        ("cases = [", "not TOML"),
        (b"\xff", "not UTF-8 text"),
        ("#" * (2**20 + 1), "at most 1048576 are allowed"),
        ("x = " + "[" * 5000, "not TOML"),
    ],
)
def test_anything_else_names_file_key_and_what_is_allowed(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputFileError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(InputFileError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(InputFileError, match="NUL"):
        load(tmp_path / "a\0b")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputFileError, match="cannot read"):
        load(tmp_path / "loop")


def toml(value: Any) -> str:
    """A value as TOML writes it; JSON's escapes are TOML's for text without surrogates."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


KEYS = st.sampled_from(
    ["cases", "golden", "ranks", "runs", "processes", "claims", "seed", "timeout", "require_clean",
     "controls", "sources", "budget", "only", "kernels", "exempt", "seconds", "executions", "x", ""]
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
LEAVES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | TEXT
    | st.sampled_from(["moe/exact-*", "csrc/**", "mok/*.py", "repeat", "*"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
)


@given(st.dictionaries(KEYS, VALUES, max_size=8), st.booleans())
def test_any_document_is_a_good_gate_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], with_cases: bool
) -> None:
    if with_cases:
        document["cases"] = ["moe"]
    text = "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in document.items())
    path = written(tmp_path_factory.getbasetemp(), text)
    refused = ""
    try:
        config = load(path)
    except InputFileError as error:
        refused = str(error)
    if refused:
        assert refused.startswith(f"{path}: ")
        assert "not TOML" not in refused
        return
    assert config.cases
    assert all(isinstance(case, str) and case.strip() for case in config.cases)
    assert set(config.options.claims or ()) <= set(CLAIMS)
    assert not config.exempt or config.kernels
    assert set(document) <= {*Config.__dataclass_fields__, *RunOptions.__dataclass_fields__,
                             "sources", "budget"}  # fmt: skip
    assert config.seconds is None or 0 < config.seconds < math.inf
    assert config.executions is None or config.executions >= 1


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "ignore")))
def test_any_bytes_are_a_good_gate_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = written(tmp_path_factory.getbasetemp(), content)
    with pytest.raises(InputFileError):
        load(path)  # nothing so short and arbitrary names a case


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("mok/*.py", ["mok/a.py", "mok/.py"], ["mok/a/b.py", "mok/a.pyc", "x/mok/a.py", "a.py"]),
        ("csrc/**", ["csrc/a", "csrc/a/b.cu", "csrc/a\nb"], ["csrc", "xcsrc/a"]),
        ("**/*.cu", ["a.cu", "x/a.cu", "x/y/a.cu"], ["a.cuh", "x/acu"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb", "a/b/c"]),
        ("**", ["a", "a/b"], []),
        ("a?.[ch]", ["ab.c", "a..h"], ["a.c", "a/.c", "ab.o"]),
        ("[!a]x", ["bx"], ["ax", "/x"]),
        ("a[", ["a["], ["a"]),
        ("[]]", ["]"], ["["]),
        ("a+(b)|c.d", ["a+(b)|c.d"], ["aab", "c.d", "a+(b)|cxd"]),
        ("caf\u00e9\udcff", ["caf\u00e9\udcff"], ["cafe"]),
    ],
)
def test_patterns(pattern: str, names: list[str], others: list[str]) -> None:
    assert problem_of(pattern) is None
    assert [name for name in names + others if matches(name, [pattern])] == names


@given(st.text(st.sampled_from("ab/*?[]!-^\\.{}"), min_size=1, max_size=8))
def test_every_pattern_is_refused_or_can_be_asked(pattern: str) -> None:
    if problem_of(pattern) is None:
        matches("a/b", [pattern])
        if not set(pattern) & set("*?["):
            assert matches(pattern, [pattern])


def test_a_file_for_a_pattern(tmp_path: Path) -> None:
    for name in ("csrc/deep/a.cu", "csrc/b.h", ".git/c.cu", "top.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    there = ["csrc/**", "csrc/**/*.cu", "**/*.cu", "*.py", "csrc/b.h", "cs*/b.?", "c*/d*/a.cu"]
    gone = ["csrc/*.cu", "gone/**", "*.cu", "csrc/b.hh", ".git/*.cu/x", "*/a.cu"]
    assert [pattern for pattern in there + gone if any_file(pattern, tmp_path)] == there
