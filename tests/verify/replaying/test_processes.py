"""Scripts in fresh processes: what they get, how they fail, and that none of them runs on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from replayed_scripts import HANGS, RECORDS, WHOLE
from struck_starts import strike_start

from verify.errors import CaseError, UnsupportedError
from verify.replay_cli import workplace
from verify.replaying.orders import STOPPED, VARIABLE, Orders, given, write_orders
from verify.replaying.processes import Script, command_of, last_words, recorded


def script(folder: Path, text: str, *arguments: str, timeout: float = 60.0) -> Script:
    path = folder / "toy.py"
    path.write_text(RECORDS + text)
    return Script(command_of((str(path), *arguments)), timeout)


def test_a_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    place = tmp_path / "whole"
    found = recorded(script(tmp_path, WHOLE, "--out={run}/x", "{}"), place, Orders(""))
    assert [step.number for step in found[0].steps] == [-1, 0, 1, 2]
    assert (place / "files" / "seen.json").read_text() == f'["--out={place}/files/x", "{{}}"]'
    assert (place / "log.txt").read_text() == "hello\n"
    other = tmp_path / "files"
    recorded(script(tmp_path, WHOLE, "{run}"), tmp_path / "again", Orders(""), files=other)
    assert (other / "seen.json").read_text() == f'["{other}"]'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit(3)", r"whole: ended with exit code 3: .*\nits last words:\n  hello"),
        ("os.kill(os.getpid(), 15)", "whole: was killed by SIGTERM"),
        ("", r"(?s)it recorded nothing\. .* with verify\.record\(\"run\", model, optimizer\):"),
        ("record_toy(Path(orders.folder), close=False)", "did not come to its end"),
        ("raise ValueError('mine')", r"exit code 1: (?s:.*)ValueError: mine"),
    ],
)
def test_a_script_that_fails_is_told_with_its_last_words(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(CaseError, match=said):
        recorded(script(tmp_path, text), tmp_path / "whole", Orders(""))


def test_a_script_that_was_stopped_may_end_as_it_likes(tmp_path: Path) -> None:
    text = (
        "from verify.tracing.files import TraceWriter\nfrom trace_toy import header\n"
        f"TraceWriter(Path(orders.folder), header()).close('{STOPPED}: as ordered')\nsys.exit(1)"
    )
    found = recorded(script(tmp_path, text), tmp_path / "stopped", Orders("", 1))
    assert found[0].reason == f"{STOPPED}: as ordered"


def test_a_silent_script_is_ended_with_what_it_started(tmp_path: Path) -> None:
    text = (
        "import subprocess, time\nchild = subprocess.Popen(['sleep', '60'])\n"
        "(run / 'pid').write_text(str(child.pid))\ntime.sleep(60)\n"
    )
    began = time.monotonic()
    with pytest.raises(CaseError, match="whole: no step for 2 s, so it was ended"):
        recorded(script(tmp_path, text, timeout=2.0), tmp_path / "whole", Orders(""))
    assert time.monotonic() - began < 30
    assert _gone(int((tmp_path / "whole" / "files" / "pid").read_text()))


def test_what_a_script_leaves_running_is_ended(tmp_path: Path) -> None:
    text = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"(run / 'pid').write_text(str(child.pid))\n{WHOLE}"
    )
    recorded(script(tmp_path, text), tmp_path / "whole", Orders(""))
    assert _gone(int((tmp_path / "whole" / "files" / "pid").read_text()))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_what_left_the_process_group_is_ended(tmp_path: Path) -> None:
    """As torchrun's workers do."""
    text = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"(run / 'pid').write_text(str(child.pid))\n{WHOLE}"
    )
    recorded(script(tmp_path, text), tmp_path / "whole", Orders(""))
    assert _gone(int((tmp_path / "whole" / "files" / "pid").read_text()))


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        file.truncate(2**40)  # a hole: reading it whole would not end
        file.seek(0, os.SEEK_END)
        file.write(b"\n\xffthe end\n")
    assert last_words(log).endswith("\n  \ufffdthe end")
    log.write_text("")
    assert last_words(log) == ""


def _gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have read its exit code yet."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="no-such-program: cannot be started"):
        recorded(Script(("no-such-program",)), tmp_path / "a", Orders(""))
    with pytest.raises(UnsupportedError, match="cannot be started"):
        recorded(Script(("a\0b",)), tmp_path / "b", Orders(""))


def test_an_interrupt_leaves_no_script_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = strike_start(monkeypatch, 1)
    places: list[Path] = []

    def replay() -> None:
        with workplace(None) as folder:
            places.append(folder)
            recorded(script(tmp_path, HANGS), folder / "whole", Orders(""))

    with pytest.raises(KeyboardInterrupt):
        replay()
    assert [one.returncode for one in started] == [-signal.SIGKILL]
    assert not places[0].exists()


def test_python_files_run_with_this_interpreter() -> None:
    assert command_of(("a.py", "b")) == (sys.executable, "a.py", "b")
    assert command_of(("torchrun", "a.py")) == ("torchrun", "a.py")


def test_orders_come_back(tmp_path: Path) -> None:
    orders = Orders("f", 3, ((None, -1, "a", "output", "0", 0), (1, 2, "", "rng", "", 1)), True)
    write_orders(orders, tmp_path / "orders.json")
    assert given({VARIABLE: str(tmp_path / "orders.json")}) == orders
    assert given({}) is None
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"keep": [[1]], "folder": "x"}', '"x"'])
def test_what_is_no_file_of_orders(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "orders.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnsupportedError, match="no orders of `verify replay`"):
        given({VARIABLE: str(path)})
