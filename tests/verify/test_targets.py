"""Targets: files with odd names and neighbours, patterns, close names, one import per process."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch  # noqa: F401 - here for good: nothing can be imported a second time after a clean-up

from verify.errors import CaseError
from verify.targets import builtin, find, import_file, loaded_from

SOURCE = """
import torch, verify
LOADED = []
@verify.case
def alpha():
    return torch.ones(2)
beta = verify.case(name="group/beta")(lambda: torch.ones(2))
table = [verify.case(name="group/gamma")(lambda: torch.ones(2)), alpha]
"""


@pytest.fixture(autouse=True)
def _clean_path() -> Iterator[None]:
    before, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        sys.modules.pop(name)


def write(path: Path, text: str = SOURCE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_cases_of_a_file_in_order_each_with_a_target_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "mit Leerzeichen und Ümläuten" / "case file ☃.py")
    found = find(str(path))
    assert [one.case.name for one in found] == ["alpha", "group/beta", "group/gamma"]
    for one in found:
        again = find(one.target)
        assert [a.case for a in again] == [one.case]
        assert again[0].case is one.case, "a file is imported once"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alpha", ["alpha"]),
        ("group", ["group/beta", "group/gamma"]),
        ("*a", ["alpha", "group/beta", "group/gamma"]),
        ("group/g*", ["group/gamma"]),
    ],
)
def test_selection(tmp_path: Path, name: str, expected: list[str]) -> None:
    path = write(tmp_path / "cases.py")
    assert [one.case.name for one in find(f"{path}::{name}")] == expected


def test_close_names_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "cases.py")
    with pytest.raises(CaseError, match=r"no case 'alhpa'.*did you mean alpha"):
        find(f"{path}::alhpa")
    with pytest.raises(CaseError, match=r"no case 'mo'.*moe"):
        find("mo")
    empty = write(tmp_path / "empty.py", "x = 1")
    with pytest.raises(CaseError, match=r"holds no cases"):
        find(str(empty))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"no such file: .*gone.py"):
        find(str(tmp_path / "gone.py"))
    with pytest.raises(CaseError, match=r"cannot import module 'no_such_package_x'"):
        find("no_such_package_x:case")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CaseError, match="not a Python file"):
        find(str(tmp_path / "notes.txt"))


def test_two_cases_of_one_name(tmp_path: Path) -> None:
    twice = SOURCE + "\nother = verify.case(name='alpha')(lambda: torch.zeros(2))\n"
    with pytest.raises(CaseError, match="two cases called 'alpha'"):
        find(str(write(tmp_path / "twice.py", twice)))


def test_neighbours_are_importable_but_shadow_nothing(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_the_case.py", "VALUE = 3")
    write(tmp_path / "torch.py", "raise RuntimeError('the wrong torch')")
    write(tmp_path / "verify.py", "raise RuntimeError('the wrong verify')")
    write(tmp_path / "json.py", "raise RuntimeError('the wrong json')")
    path = write(
        tmp_path / "cases.py",
        "import json, neighbour_of_the_case as n; assert n.VALUE == 3\n" + SOURCE,
    )
    assert len(find(str(path))) == 3
    assert sys.path[-1] == str(tmp_path)


def test_a_file_that_raises_leaves_no_half_module(tmp_path: Path) -> None:
    path = write(tmp_path / "broken.py", "import torch\nraise KeyError('at import')")
    for _ in range(2):
        with pytest.raises(CaseError, match=r"broken.py failed: KeyError: 'at import' \(line 2\)"):
            import_file(path)
    assert loaded_from(path) is None


def test_files_of_one_name_in_two_folders_do_not_meet(tmp_path: Path) -> None:
    a = write(tmp_path / "a" / "cases.py", SOURCE + "\nWHERE = 'a'")
    b = write(tmp_path / "b" / "cases.py", SOURCE + "\nWHERE = 'b'")
    assert import_file(a).WHERE == "a"
    assert import_file(b).WHERE == "b"


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a_package_here" / "__init__.py", "")
    write(tmp_path / "a_package_here" / "inner.py")
    monkeypatch.chdir(tmp_path)
    found = find("a_package_here.inner:group")
    assert [one.target for one in found] == [
        "a_package_here.inner:group/beta",
        "a_package_here.inner:group/gamma",
    ]


def test_builtin_names_are_unique_and_moe_brings_its_exact_twins() -> None:
    names = [one.case.name for one in builtin()]
    assert len(set(names)) == len(names)
    tiny = [name for name in names if name.startswith("moe/float64-")]
    assert len(tiny) >= 8
    rest = [name for name in names if name not in tiny]
    assert [one.case.name for one in find("moe")] == [n for n in rest if n != "moe-1024"]
    assert len(find("moe/exact-*")) == len(rest) - 3
    assert [one.case.name for one in find("moe/float64-*")] == tiny
    assert [one.case.name for one in find(tiny[0])] == tiny[:1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\nimport nothing_of_this_name_x", "ModuleNotFoundError: No module named '"),
        ("x = 1\ndef f(:", "SyntaxError: invalid syntax (line 2)"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye (line 2)"),
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError: division by zero (line 2)"),
        ("class E(Exception):\n    __str__ = None\nraise E", "E: (its message cannot"),
        ("class B(BaseException): pass\nraise B('x')", "B: x (line 2)"),
        ("import verify\nverify.case(claims=('no such',))(len)", "no such"),
        ("import raises_inside_x", "RuntimeError: inside (line 1)"),
    ],
)
def test_whatever_a_file_raises_names_file_kind_and_line(
    tmp_path: Path, source: str, said: str
) -> None:
    write(tmp_path / "raises_inside_x.py", "\n\nraise RuntimeError('inside')")
    path = write(tmp_path / "my_case.py", source)
    with pytest.raises(CaseError) as caught:
        find(str(path))
    assert str(caught.value).startswith(f"importing {path} failed: ")
    assert said in str(caught.value)


def test_an_interrupt_at_import_stays_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        import_file(write(tmp_path / "stop.py", "raise KeyboardInterrupt"))


def test_a_module_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a_broken_module_x.py", "import torch\nimport not_there_x")
    monkeypatch.chdir(tmp_path)
    where = re.escape(f"({tmp_path / 'a_broken_module_x.py'}, line 2)")
    with pytest.raises(CaseError, match=f"a_broken_module_x failed: ModuleNotFoundError.*{where}"):
        find("a_broken_module_x:case")


def test_what_a_file_prints_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find(str(write(tmp_path / "loud.py", SOURCE + "\nprint('loud')")))
    assert capsys.readouterr() == ("", "loud\n")


def test_a_file_of_a_package_has_its_dotted_name(tmp_path: Path) -> None:
    inner = tmp_path / "outer_package_x" / "inner"
    write(inner / "__init__.py", "")
    write(inner.parent / "__init__.py", "")
    write(inner.parent / "common.py", "VALUE = 3")
    path = write(inner / "cases.py", "from ..common import VALUE; assert VALUE == 3\n" + SOURCE)
    assert len(find(str(path))) == 3
    assert import_file(path).__name__ == "outer_package_x.inner.cases"
    assert str(tmp_path) in sys.path
    # another package of that name is there already: the file stands alone then
    other = write(tmp_path / "deep" / "outer_package_x" / "cases.py")
    write(other.parent / "__init__.py", "")
    assert import_file(other).__name__.startswith("cases_")


def test_a_file_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "leaves.py", "import os\nos._exit(0)\n")
    before = os._exit
    with pytest.raises(CaseError, match=r"leaves\.py failed: SystemExit: os\._exit\(0\)"):
        find(str(path))
    assert os._exit is before


def test_a_child_that_a_file_forks_may_still_end_so(tmp_path: Path) -> None:
    text = "import os\npid = os.fork()\nif not pid:\n    os._exit(7)\n"
    path = write(tmp_path / "forks.py", f"{text}ENDED = os.waitpid(pid, 0)[1]\n{SOURCE}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        find(str(path))
    module = loaded_from(path)
    assert module is not None
    assert os.waitstatus_to_exitcode(module.ENDED) == 7
