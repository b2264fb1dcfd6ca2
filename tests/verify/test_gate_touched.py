"""What a change touches, in real repositories: renamed, deleted, untracked, and strange names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verify.cases import Case
from verify.errors import InputFileError
from verify.gates import touched
from verify.gates.config import Config
from verify.gates.coverage import coverage
from verify.gates.findings import findings
from verify.plans import RunOptions
from verify.targets import find

Git = Callable[..., str]
NASTY = ["a b.py", "new\nline.py", "-n.py", "caf\u00e9.py", os.fsdecode(b"\xff\xfe.py"), '"q".py']


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """An empty repository as the current directory, with a HOME of its own."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    root = tmp_path / "repo"
    root.mkdir()
    monkeypatch.chdir(root)

    def run(*words: str | Path) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", *name, *map(os.fspath, words)], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    run("init", "-q", "-b", "main")
    return run


def put(name: str, text: str = "") -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def commit(git: Git, **files: str) -> str:
    for name, text in files.items():
        put(name.replace("__", "/") + ".py", text)
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", "x")
    return git("rev-parse", "HEAD")


def test_committed_staged_unstaged_and_untracked_files(git: Git) -> None:
    commit(git, a="1", b="1", c="1", same="1", deep__d="1")
    base = commit(git)
    commit(git, a="2", deep__d="2")
    put("b.py", "2")
    git("add", "b.py")
    put("c.py", "2")
    put("new/file.py", "1")
    put(".gitignore", "*.log")
    put("x.log")
    found = touched.since(base)
    names = (".gitignore", "a.py", "b.py", "c.py", "deep/d.py", "new/file.py")
    assert (found.base, found.changed, found.gone) == (base, names, ())
    assert touched.uncommitted() == (".gitignore", "b.py", "c.py", "new/file.py")


def test_what_is_staged_counts_when_the_working_tree_was_put_back(git: Git) -> None:
    base = commit(git, a="1", b="1", c="1")
    put("a.py", "2")
    put("new.py", "1")
    git("add", "a.py", "new.py")
    put("a.py", "1")
    Path("new.py").unlink()
    Path("b.py").unlink()  # not staged: the next commit has it
    git("rm", "-q", "c.py")
    found = touched.since(base)
    assert (found.changed, found.gone) == (("a.py", "b.py", "c.py", "new.py"), ("b.py", "c.py"))
    assert touched.uncommitted() == found.changed
    config = Config(Path("g"), ("x",), RunOptions(), kernels=("*.py",))
    assert coverage(config, found, [], []).uncovered == ("a.py", "new.py")


@pytest.fixture
def submodule(git: Git, tmp_path: Path) -> Callable[[], None]:
    """`third` is a submodule with `q.cu`; the call commits `q2.cu` in it, not yet in this one."""
    git("init", "-q", tmp_path / "other")
    (tmp_path / "other" / "q.cu").write_text("1")
    git("-C", tmp_path / "other", "add", "-A")
    git("-C", tmp_path / "other", "commit", "-q", "-m", "x")
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", tmp_path / "other",
        "third")  # fmt: skip
    git("config", "-f", ".gitmodules", "submodule.third.ignore", "all")  # hides it from git diff

    def bump() -> None:
        put("third/q2.cu", "1")
        git("-C", "third", "add", "-A")
        git("-C", "third", "commit", "-q", "-m", "y")

    return bump


@pytest.mark.parametrize("committed", [False, True])
def test_a_submodule_that_changed_is_a_changed_source(
    git: Git, submodule: Callable[[], None], committed: bool
) -> None:
    put("cases_of_submodule.py", CASES.replace("../src/kernel_*.py", "third/*.cu"))
    base = commit(git)
    found = find("cases_of_submodule.py")
    assert touched.since(base).changed == ()
    submodule()
    if committed:
        git("add", "-f", "third")
        commit(git)
    changed = touched.since(base)
    assert (changed.changed, changed.gone, changed.folders) == (("third",), (), ("third",))

    def ask(cases: list[Any], *kernels: str, exempt: tuple[str, ...] = ()) -> tuple[Any, ...]:
        config = Config(Path("g"), ("x",), RunOptions(), kernels=kernels, exempt=exempt)
        asked = coverage(config, changed, cases, ())
        return sorted(asked.affected), list(asked.uncovered)

    name = "third (a submodule)"
    assert ask(found, "third/**") == ([0, 1], [])
    assert ask(found, "*/*.cu") == ([0, 1], [])
    assert ask(found[1:], "third/**") == ([0], [name])
    assert ask(found[1:], "**/*.cu") == ([0], [name])
    assert ask(found[1:], "third") == ([0], [name])
    assert ask(found[1:], "third/**", exempt=("third/**",)) == ([], [])
    assert ask(found[1:], "csrc/**", "third.cu") == ([], [])
    only = replace(found[0], case=replace(found[0].case, sources=("third/q.cu",)))
    assert ask([only], "third/**") == ([0], [name]), "q2.cu may be what changed"


def test_a_repository_inside_that_git_does_not_track(git: Git) -> None:
    base = commit(git, a="1")
    git("init", "-q", "inner")
    put("inner/new.cu")
    changed = touched.since(base)
    assert (changed.changed, changed.folders) == (("inner",), ("inner",))
    config = Config(Path("g"), ("x",), RunOptions(), kernels=("**/*.cu",))
    assert coverage(config, changed, [], ()).uncovered == ("inner (a submodule)",)


def test_only_this_side_of_a_fork_counts(git: Git) -> None:
    fork = commit(git, a="1", b="1")
    git("checkout", "-q", "-b", "topic")
    commit(git, a="2")
    git("checkout", "-q", "main")
    commit(git, b="2")
    git("checkout", "-q", "topic")
    assert touched.since("main") == touched.Changes(fork, ("a.py",), ())
    assert touched.since("HEAD").changed == ()


def test_renamed_and_deleted_files_are_gone(git: Git) -> None:
    base = commit(git, old="the same\n" * 20, dead="1", back="1")
    git("mv", "old.py", "new.py")
    git("rm", "-q", "dead.py", "back.py")
    commit(git)
    put("back.py", "1")
    found = touched.since(base)
    assert found.changed == ("back.py", "dead.py", "new.py", "old.py")
    assert found.gone == ("dead.py", "old.py")


def test_what_was_committed_and_put_back_still_counts(git: Git) -> None:
    base = commit(git, a="1")
    commit(git, a="2")
    put("a.py", "1")
    assert touched.since(base).changed == ("a.py",)


def test_names_of_any_kind(git: Git) -> None:
    base = commit(git)
    for name in NASTY[:3]:
        put(name)
    commit(git)
    for name in NASTY[3:]:
        put(name)
    found = touched.since(base)
    assert found.changed == tuple(sorted(NASTY))
    assert found.gone == ()


@pytest.mark.parametrize("option", ["renames", "mnemonicPrefix", "noprefix"])
def test_settings_of_the_user_change_nothing(git: Git, option: str) -> None:
    git("config", f"diff.{option}", "true")
    git("config", "core.quotePath", "true")
    base = commit(git, a="1", deep__b="1")
    git("mv", "a.py", "c.py")
    commit(git, deep__b="2")
    assert touched.since(base).changed == ("a.py", "c.py", "deep/b.py")


def test_from_a_folder_inside_of_the_repository(git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    git("config", "diff.relative", "true")  # would name files of this folder only
    base = commit(git, a="1", deep__b="1")
    commit(git, a="2", deep__b="2")
    put("deep/new.py")
    put("up.py")
    monkeypatch.chdir("deep")
    assert touched.since(base).changed == ("../a.py", "../up.py", "b.py", "new.py")


def test_what_the_gate_writes_is_no_change(git: Git) -> None:
    base = commit(git, a="1")
    for name in ("report/result.json", "report/mine.txt", "result.json"):
        put(name)
    own = [Path("report/result.json"), Path("report/report.md")]
    assert touched.since(base, own).changed == ("report/mine.txt", "result.json")
    assert touched.uncommitted(own) == ("report/mine.txt", "result.json")
    assert touched.uncommitted([Path("elsewhere/a.json")])[0] == "report/mine.txt"


def test_a_report_in_the_current_directory_hides_no_source(git: Git) -> None:
    base = commit(git, kernel="1", deep__kernel="1")
    put("kernel.py", "2")
    put("deep/kernel.py", "2")
    put("new.py")
    put("result.json")
    for own in (Path("result.json"), Path.cwd() / "result.json", Path("deep/../result.json")):
        assert touched.since(base, [own]).changed == ("deep/kernel.py", "kernel.py", "new.py")
        assert touched.uncommitted([own]) == ("deep/kernel.py", "kernel.py", "new.py")


def test_a_report_behind_a_link(git: Git, tmp_path: Path) -> None:
    """A linked folder is the folder; a linked file is not what it leads to."""
    base = commit(git, kernel="1")
    put("kernel.py", "2")
    put("report/result.json")
    (tmp_path / "link").symlink_to(Path("report").resolve())
    assert touched.since(base, [tmp_path / "link" / "result.json"]).changed == ("kernel.py",)
    Path("report/result.json").unlink()
    Path("report/result.json").symlink_to(Path("kernel.py").resolve())
    assert touched.since(base, [Path("report/result.json")]).changed == ("kernel.py",)


def test_a_report_that_is_tracked_and_committed_is_a_change(git: Git) -> None:
    base = commit(git, a="1")
    put("result.json", "1")
    commit(git)
    assert touched.since(base, [Path("result.json")]).changed == ("result.json",)
    put("result.json", "2")
    assert touched.uncommitted([Path("result.json")]) == ()
    assert touched.uncommitted() == ("result.json",)


@pytest.mark.parametrize("revision", ["nothing", "", "-a", "--help", "a\0b", "HEAD:a.py", "HEAD^"])
def test_revisions_that_are_none(git: Git, revision: str) -> None:
    commit(git, a="1")
    with pytest.raises(InputFileError, match="--since") as caught:
        touched.since(revision)
    assert repr(revision) in str(caught.value)
    odd = not revision or revision[0] == "-" or "\0" in revision  # never passed on to git
    assert ("not a revision" in str(caught.value)) == odd
    assert "shallow" not in str(caught.value)


def test_no_common_history(git: Git) -> None:
    commit(git, a="1")
    git("checkout", "-q", "--orphan", "other")
    commit(git, b="1")
    with pytest.raises(InputFileError, match="shares no commit with HEAD; give a revision"):
        touched.since("main")


def test_a_shallow_clone_says_what_to_fetch(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit(git, a="1")
    commit(git, a="2")
    git("branch", "topic")
    url = Path.cwd().as_uri()
    git("clone", "-q", "--depth", "1", url, tmp_path / "shallow")
    monkeypatch.chdir(tmp_path / "shallow")
    with pytest.raises(InputFileError, match=r"this clone is shallow.*fetch-depth: 0"):
        touched.since(first)
    git("fetch", "-q", "--unshallow")
    assert touched.since(first).changed == ("a.py",)


def test_no_repository_no_commit_and_no_git(
    tmp_path: Path, git: Git, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputFileError, match="git knows no commit"):
        touched.since("HEAD")
    with pytest.raises(InputFileError, match="no commit yet"):
        touched.uncommitted()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path / "none")
    with pytest.raises(InputFileError, match="git finds no working tree here"):
        touched.since("HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputFileError, match="git is not installed"):
        touched.uncommitted()


CASES = """
import verify

@verify.case(inputs={"x": verify.normal(4)}, sources=("../src/kernel_*.py",))
def one(x):
    return x

@verify.case(inputs={"x": verify.normal(4)})
def two(x):
    return x
"""
INPUTS = """
import verify
from library_of_gate import three as function

three = verify.case(inputs={"x": verify.normal(4)})(function)
"""


@pytest.fixture
def covered(git: Git) -> Callable[..., Any]:
    """Coverage of a change since the first commit, by the case `one` of cases_of_gate/cases.py."""
    put("cases_of_gate/cases.py", CASES)
    base = commit(git, src__kernel_a="1", src__kernel_b="1", src__plain="1", src__cli="1", doc="1")
    config = Config(
        Path("gate.toml"),
        ("cases_of_gate/cases.py",),
        RunOptions(),
        kernels=("src/**",),
        exempt=("src/cli.py",),
    )
    found = find("cases_of_gate/cases.py")

    def ask(golden: tuple[dict[str, Any], ...] = ()) -> tuple[list[int], list[str]]:
        result = coverage(config, touched.since(base), found, golden)
        return sorted(result.affected), list(result.uncovered)

    return ask


def test_nothing_changed(covered: Callable[..., Any]) -> None:
    assert covered() == ([], [])


@pytest.mark.parametrize(
    ("change", "affected", "uncovered"),
    [
        ({"src/kernel_a.py": "2"}, [0], []),
        ({"src/kernel_new.py": "2"}, [0], []),  # the pattern of the case covers it
        ({"src/plain.py": "2"}, [], ["src/plain.py"]),
        ({"src/plain.py": "2", "src/kernel_b.py": "2"}, [0], ["src/plain.py"]),
        ({"src/cli.py": "2", "doc.py": "2"}, [], []),
        ({"cases_of_gate/cases.py": CASES + "\n# changed"}, [0, 1], []),
        ({"src/deep/\udcff x.py": "2"}, [], ["src/deep/\udcff x.py"]),
    ],
)
def test_what_a_change_affects_and_what_nothing_covers(
    covered: Callable[..., Any],
    change: dict[str, str],
    affected: list[int],
    uncovered: list[str],
) -> None:
    for name, text in change.items():
        put(name, text)
    assert covered() == (affected, uncovered)


def test_a_rename_passes_when_the_new_file_is_covered(
    covered: Callable[..., Any], git: Git
) -> None:
    git("mv", "src/kernel_a.py", "src/kernel_c.py")
    commit(git)
    assert covered() == ([0, 1], [])  # nobody can say who used what is gone
    git("mv", "src/kernel_c.py", "src/renamed.py")
    assert covered() == ([0, 1], ["src/renamed.py"])
    git("rm", "-q", "-f", "src/renamed.py")
    assert covered() == ([0, 1], [])


def test_exempt_files_that_are_gone_affect_nothing(covered: Callable[..., Any], git: Git) -> None:
    git("rm", "-q", "src/cli.py", "doc.py")
    assert covered() == ([], [])


def test_a_golden_that_changed_affects_its_case(covered: Callable[..., Any]) -> None:
    assert covered(({"case": "two"}, {"case": "unknown"})) == ([1], [])
    assert covered(({"case": "(index)"},)) == ([0, 1], []), "what it held cannot be told"


def test_the_file_that_says_what_a_case_is_counts_too(git: Git) -> None:
    put("inputs/library_of_gate.py", "def three(x):\n    return x\n")
    put("inputs/cases_of_three.py", INPUTS)
    base = commit(git)
    found = find("inputs/cases_of_three.py")
    config = Config(Path("g"), ("x",), RunOptions())
    assert coverage(config, touched.since(base), found, ()).affected == frozenset()
    put("inputs/cases_of_three.py", INPUTS + "# other inputs")
    assert coverage(config, touched.since(base), found, ()).affected == {0}


def test_the_same_name_in_another_copy_covers_nothing(git: Git, tmp_path: Path) -> None:
    base = commit(git, kernels__a="1")
    put("kernels/a.py", "2")
    installed = tmp_path / "installed" / "kernels" / "a.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    put("cases_elsewhere.py", "import verify\n@verify.case\ndef f():\n    return None\n")
    (one,) = find("cases_elsewhere.py")
    case: Case = replace(one.case, sources=(str(installed),))
    config = Config(Path("g"), ("x",), RunOptions(), kernels=("kernels/*.py",))
    found = coverage(config, touched.since(base), [replace(one, case=case)], ())
    assert found.uncovered == ("kernels/a.py",)
    (row,) = findings(uncovered=found.uncovered, elsewhere=found.elsewhere)
    assert (row["reason"], row["verdict"]) == ("not-covered", "UNVERIFIED")
    assert f"a case has {installed} for kernels/a.py: is another copy" in row["detail"]


def test_findings_fire_one_by_one_and_stay_silent_together() -> None:
    assert findings() == []
    assert findings(elsewhere={}, spent="all") == []
    for name, reason in (
        ("uncovered", "not-covered"),
        ("failed_controls", "control-failed"),
        ("dirty", "dirty-source"),
        ("cut_off", "budget-spent"),
        ("unclaimed", "golden-unclaimed"),
    ):
        (row,) = findings(**{name: [f"n{i}" for i in range(12)]}, spent="9 s")  # type: ignore[arg-type]
        assert (row["reason"], row["verdict"]) == (reason, "UNVERIFIED")
        assert row["detail"].endswith("n9 and 2 more")
        (one,) = findings(**{name: ["only"]}, spent="9 s")  # type: ignore[arg-type]
        assert one["detail"].endswith("only")
