"""Paths of the machine that measured: found wherever they stand, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from gpu_scripts import gpu_scripts
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def paths() -> Iterator[ModuleType]:
    with gpu_scripts() as loaded:
        yield loaded["paths"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("first: at /tmp/x/y.py:3", "first: at y.py:3"),
        *((f"a {sign}/b/c.py", f"a {sign}c.py") for sign in "([{<>|@+`=:,;'\"!&"),
        ("file:///home/me/x.py and file:/a/b", "x.py and b"),
        ("nvcc -I/home/me/inc -O2", "nvcc -Iinc -O2"),
        ("~root/x ~/y/z", "x z"),
        (r"C:\Users\me\x.py", "x.py"),
        (r"\\server\share\x", "x"),
        ("//home/me/x", "x"),
        ("in '/home/me/my dir/x.py'", "in 'x.py'"),
        ('in "/home/me/my dir/x.py"', 'in "x.py"'),
        (r"in /home/me/my\ dir/x.py", "in x.py"),
        ("in /home/me/my dir/x.py too", "in x.py too"),
        ("/srv/a.py ci/gpu/b.py", "a.py ci/gpu/b.py"),
        ("/home/me", "..."),
        (r"C:\Users\me", "..."),
        ("PATH=/a/b:/c/d", "PATH=b:d"),
    ],
)
def test_a_path_leaves_its_last_component(paths: ModuleType, text: str, left: str) -> None:
    assert paths.first_path([{"a": text}]) == text
    assert paths.first_path({text: 1}) == text
    assert paths.without_paths({"a": [text, 1]}) == {"a": [left, 1]}
    assert paths.first_path(left) is None


@pytest.mark.parametrize(
    "text",
    [
        "3.2 GB/s, 1/2, ~5/6, J/token and (a+b)/c",
        "verify run ci/gpu/peer_cases.py::peers/sonicmoe/small --device cuda:0",
        "moe/exact-*, tests/**/x.py, ../x, ./y, a / b // c",
        "https://example.org/a/b",
        r"a\b and \d+",
        "",
    ],
)
def test_what_is_no_path_of_a_machine_stays(paths: ModuleType, text: str) -> None:
    assert paths.removed(text) == text
    assert paths.first_path(text) is None


@given(st.text("/\\~:.-'\" aIC\n([|="))
def test_nothing_is_found_in_what_was_cleaned(paths: ModuleType, text: str) -> None:
    cleaned = paths.removed(text)
    assert paths.first_path(cleaned) is None
    if paths.first_path(text) is None:
        assert cleaned == text


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (
            "verify run ci/gpu/peer_cases.py::peers/sonicmoe/small --report /tmp/r",
            "verify run ci/gpu/peer_cases.py::peers/sonicmoe/small",
        ),
        ("verify run moe --report=/tmp/r --device cuda", "verify run moe --device cuda"),
        ("verify run '/a b/c.py' --report '/tmp/my dir' --runs 3", "verify run 'c.py' --runs 3"),
    ],
)
def test_a_command_loses_its_report_and_paths_alone(
    paths: ModuleType, command: str, left: str
) -> None:
    assert paths.command_without_report(command) == left
