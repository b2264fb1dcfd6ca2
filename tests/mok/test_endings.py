"""How a rank's process ends: with its exit code, after its threads and what atexit has."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALL = """
import atexit, sys, threading, time
from mok.endings import end_process
atexit.register(print, "atexit")

def late():
    time.sleep(0.2)
    print("thread")

threading.Thread(target=late).start()
print("main")
"""

LATE = """
import ctypes, sys, threading
from mok.endings import end_process

class Cleans:  # of the interpreter's own teardown
    def __del__(self):
        print("taken apart")

keep = Cleans()
"""


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 3])
def test_threads_end_first_then_what_atexit_has_and_the_code_is_kept(code):
    done = run(ALL + f"end_process({code})")
    assert (done.stdout.split(), done.returncode) == (["main", "thread", "atexit"], code)


def test_the_interpreter_is_not_taken_apart():
    assert run(LATE + "sys.exit(0)").stdout == "taken apart\n"
    assert run(LATE + "end_process(0)").stdout == ""


def test_a_stream_that_cannot_be_flushed_is_no_success():
    text = ALL + "sys.stdout = open('/dev/full', 'w'); print('lost'); end_process(0)"
    assert run(text).returncode == 1
