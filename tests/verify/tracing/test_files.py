"""The files of a recording: what is written is read, what is cut or damaged is told."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.errors import InputFileError
from verify.tracing import frames
from verify.tracing.definitions import KINDS
from verify.tracing.files import (
    MAGIC,
    Header,
    TraceWriter,
    Whole,
    file_name,
    read_folder,
    read_recording,
)

HEADER = Header(0, 1, "module", "2026-01-02T03:04:05+00:00", {"torch": "2", "flags": {"a": True}})
SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DEFINITIONS = st.tuples(
    st.text(max_size=5), st.sampled_from(KINDS), st.text(max_size=3), st.just("float32"), SIZES
)
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=32, max_size=32)), max_size=5),
        st.booleans(),
    ),
    max_size=4,
)


def head(**fields: object) -> bytes:
    return frames.json_frame("H", {**frames.header_fields(HEADER), **fields})


@pytest.mark.parametrize("steps", [None, range(7), range(3, 10**18, 10)])
def test_a_header_comes_back_with_its_steps(steps: range | None) -> None:
    kind, payload, _ = frames.split_frame(head(steps=steps and [*_bounds(steps)]), 0)
    assert kind == "H"
    assert frames.header_of(payload) == replace(HEADER, steps=steps)
    fields = frames.header_fields(replace(HEADER, steps=steps))
    assert fields["steps"] == (None if steps is None else [*_bounds(steps)])
    assert fields["version"] == (1 if steps is None else 2)


def test_a_header_of_before_there_was_a_choice_is_of_all_steps() -> None:
    fields = frames.header_fields(HEADER)
    del fields["steps"]
    payload = frames.split_frame(frames.json_frame("H", fields), 0)[1]
    assert frames.header_of(payload) == HEADER


def _bounds(steps: range) -> tuple[int, int, int]:
    return steps.start, steps.stop, steps.step


def written(folder: Path, definitions: list, steps: list, *, close: bool = True) -> Path:
    writer = TraceWriter(folder, HEADER, overwrite=True)
    for number, (entries, failed) in enumerate(steps, start=-1):
        ids = [writer.define(*definitions[at % len(definitions)]) for at, _ in entries]
        writer.step(number, ids, b"".join(lanes for _, lanes in entries), failed=failed)
    if close:
        writer.close()
    else:  # as a kill does
        writer._file.close()
    return writer.path


def small(folder: Path, *, close: bool = True) -> Path:
    entries = [(0, bytes(range(32))), (1, bytes(32)), (0, b"\xff" * 32)]
    definitions = [("a.b", "output", "0", "float32", (2, 3)), ("w", "parameter", "", "int8", ())]
    return written(folder, definitions, [(entries, False), (entries, True)], close=close)


@settings(max_examples=40, deadline=None)
@given(st.lists(DEFINITIONS, min_size=1, max_size=4), STEPS)
def test_what_was_written_is_read(definitions: list, steps: list) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = read_recording(written(Path(folder), definitions, steps))
    assert found.header == HEADER
    assert (found.complete, found.problem, found.reason) == (True, None, "finished")
    assert [(one.number, one.failed) for one in found.steps] == [
        (number, failed) for number, (_, failed) in enumerate(steps, start=-1)
    ]
    for step, (entries, _) in zip(found.steps, steps, strict=True):
        assert step.lanes == b"".join(lanes for _, lanes in entries)
        assert len({event.key for event in step.events}) == len(entries)
        for event, (at, lanes) in zip(step.events, entries, strict=True):
            one = event.definition
            assert (one.name, one.kind, one.path, one.dtype, one.shape) == definitions[
                at % len(definitions)
            ]
            assert b"".join(x.to_bytes(8, "little") for x in event.digest.lanes) == lanes
            assert event.digest.whole


def steps_within(content: bytes, at: int, size: int) -> int:
    """Whole frames of steps in the first `size` bytes."""
    count = 0
    while at < size:
        kind, _, at = frames.split_frame(content, at)
        count += kind == "S" and at <= size
    return count


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_prefix_behind_the_header_can_be_read(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = small(Path(folder))
        content, whole = path.read_bytes(), read_recording(path)
        header = frames.split_frame(content, len(MAGIC))[2]
        size = data.draw(st.integers(0, len(content) - 1))
        path.write_bytes(content[:size])
        if size < header:
            with pytest.raises(InputFileError, match=r"rank-00000\.trace: not a recording: "):
                read_recording(path)
            return
        found = read_recording(path)
    assert not found.complete
    assert found.problem is not None
    assert "was the run killed" in found.problem or "has no end" in found.problem
    assert found.steps == whole.steps[: len(found.steps)]
    assert len(found.steps) == steps_within(content, header, size)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_flipped_byte_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = small(Path(folder))
        whole = read_recording(path)
        content = bytearray(path.read_bytes())
        header = frames.split_frame(bytes(content), len(MAGIC))[2]
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        if at < header:
            with pytest.raises(InputFileError, match="not a recording"):
                read_recording(path)
            return
        found = read_recording(path)
    assert not found.complete
    assert found.problem
    assert found.steps == whole.steps[: len(found.steps)]


def test_a_run_that_was_killed_leaves_its_steps(tmp_path: Path) -> None:
    found = read_recording(small(tmp_path, close=False))
    assert len(found.steps) == 2
    assert not found.complete
    assert "it has no end: the run was killed, or is still going" in str(found.problem)


def test_the_start_is_no_step_of_a_killed_run(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, HEADER)
    for number in range(-1, 3):
        writer.step(number, [writer.define("n", "output", "", "int8", ())], bytes(32))
    writer.leave()
    assert ", after 3 steps: it has no end" in str(read_recording(tmp_path / file_name(0)).problem)


def test_a_killed_process_leaves_what_it_wrote(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from verify.tracing.files import Header, TraceWriter
writer = TraceWriter(Path({str(tmp_path)!r}), Header(0, 1, "module", "", {{}}))
for step in range(7):
    writer.step(step, [writer.define("n", "output", str(step % 2), "int8", ())], bytes(32))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    found = read_recording(tmp_path / file_name(0))
    assert [one.number for one in found.steps] == list(range(7))
    assert not found.complete


def test_a_shard_adds_to_its_whole(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, HEADER)
    whole = Whole((4, 3), ((2, 4), (0, 3)))
    one = writer.define("w", "parameter", "", "float32", (2, 3), whole=whole)
    writer.step(0, [one], bytes(32))
    writer.close("ValueError: x", {"probe of s": "sparse"})
    found = read_recording(writer.path)
    (event,) = found.steps[0].events
    assert event.definition.whole == whole
    assert (event.digest.shape, event.digest.count) == ((4, 3), 6)
    assert found.reason == "ValueError: x"
    assert found.skipped == {"probe of s": "sparse"}
    with pytest.raises(ValueError, match="do not lie"):
        Whole((4, 3), ((2, 5), (0, 3)))


def test_steps_of_one_program_cost_32_bytes_an_event(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, HEADER)
    ids = [writer.define(f"layer.{i}", "output", "", "float32", (2,)) for i in range(1200)]
    writer.step(0, ids, bytes(32 * 1200))
    first = writer.path.stat().st_size
    for step in range(1, 21):
        writer.step(step, ids, bytes(32 * 1200))
    writer.close()
    grown = writer.path.stat().st_size - first
    assert grown < 20 * (32 * 1200 + 40)
    assert first + grown / 20 * 999 < 50e6  # 1,000 steps


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = small(tmp_path)
    with pytest.raises(InputFileError, match=r"there is a recording already: .*overwrite=True"):
        TraceWriter(tmp_path, HEADER)
    assert len(read_recording(path).steps) == 2
    TraceWriter(tmp_path, HEADER, overwrite=True).close()
    assert read_recording(path).steps == ()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputFileError, match="cannot write"):
        TraceWriter(tmp_path / "file" / "inner", HEADER)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no such folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(InputFileError, match="holds no recording"):
        read_folder(tmp_path)
    for rank in (0, 1):
        TraceWriter(tmp_path, Header(rank, 2, "op", "", {})).close()
    (tmp_path / "other.txt").write_text("x")
    assert {rank: one.header.rank for rank, one in read_folder(tmp_path).items()} == {0: 0, 1: 1}
    assert list(read_folder(tmp_path / file_name(1))) == [1]
    (tmp_path / file_name(1)).rename(tmp_path / file_name(7))
    with pytest.raises(InputFileError, match="says that it is of rank 1"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and so on", "begins with"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS"),
        (MAGIC, "at byte 8: the file is cut"),
        (MAGIC + frames.json_frame("E", {}), "its first frame is of kind 'E'"),
        (MAGIC + frames.json_frame("H", {"version": 3}), "it is of version 3, and this verify"),
        (MAGIC + frames.json_frame("H", {"version": 1, "level": "all"}), "its level is 'all'"),
        (MAGIC + frames.frame("H", b'{"version": NaN}'), "not JSON"),
        (MAGIC + frames.json_frame("H", [1]), "a list, not a dict"),
        (MAGIC + head(steps=[0, 4]), "its steps are [0, 4], which is no range"),
        (MAGIC + head(steps=[4, 4, 1]), "its steps are [4, 4, 1], which is no range"),
        (MAGIC + head(steps=[0, 4, 0]), "its steps are [0, 4, 0], which is no range"),
        (MAGIC + head(steps=[0, -4, 1]), "are no sizes"),
        (MAGIC + head(steps="all"), "are no sizes"),
    ],
)
def test_other_files_are_named_as_what_they_are(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / file_name(0)
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=r"rank-00000\.trace") as error:
        read_recording(path)
    assert told in str(error.value)
    with pytest.raises(InputFileError, match="is a folder"):
        read_recording(tmp_path)


ONE = {"id": 0, "name": "n", "kind": "output", "path": "", "dtype": "f", "shape": [], "module": ""}
STEP = (0).to_bytes(4, "little") + (5).to_bytes(8, "little") + b"\0"


@pytest.mark.parametrize(
    ("added", "told"),
    [
        (frames.frame("X", b""), "unknown kind 'X'"),
        (frames.json_frame("D", [ONE, ONE]), "definition 0 occurs twice"),
        (frames.json_frame("D", [{**ONE, "kind": "new"}]), "of kind 'new'"),
        (frames.json_frame("D", [{**ONE, "shape": [-1]}]), "no sizes"),
        (frames.json_frame("D", [{**ONE, "whole": {"shape": [1], "ranges": [[0]]}}]), "malformed"),
        (frames.json_frame("D", [{**ONE, "whole": {"shape": [1], "ranges": [[0, 1]]}}]), "ranges"),
        (frames.json_frame("D", [3]), "not an object"),
        (frames.json_frame("P", {"id": 0, "entries": [9]}), "a program is malformed"),
        (frames.json_frame("P", {"id": True, "entries": []}), "is no number"),
        (frames.frame("S", b"short"), "too short"),
        (frames.frame("S", STEP), "program 0, which was not defined"),
        (
            frames.json_frame("P", {"id": 0, "entries": []}) + frames.frame("S", STEP + b"1"),
            "not 32 for each",
        ),
        (
            frames.json_frame("P", {"id": 0, "entries": []}) + 2 * frames.frame("S", STEP),
            "after 1 step: step 5 cannot follow after step 5",
        ),
        (frames.json_frame("E", {"steps": 3, "reason": "", "skipped": {}}), "3 steps, and 0 are"),
        (frames.json_frame("E", {"steps": 0}), "its end is malformed"),
        (
            2 * frames.json_frame("E", {"steps": 0, "reason": "", "skipped": {}}),
            "bytes follow after its end",
        ),
    ],
)
def test_frames_that_say_nonsense_end_the_reading(tmp_path: Path, added: bytes, told: str) -> None:
    path = tmp_path / file_name(0)
    path.write_bytes(MAGIC + frames.json_frame("H", frames.header_fields(HEADER)) + added)
    found = read_recording(path)
    assert not found.complete
    assert told in str(found.problem)


def test_reading_imports_no_torch() -> None:
    code = "import sys, verify.tracing.files; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lanes_that_repeat_are_deflated_and_random_ones_are_not(tmp_path: Path) -> None:
    lanes = bytes(range(32))
    for name, entries in (
        ("same", [lanes] * 50),
        ("other", [bytes([n]) + lanes[1:] for n in range(50)]),
    ):
        path = written(
            tmp_path / name,
            [("a", "output", "", "int8", ())],
            [([(0, one) for one in entries], False)],
        )
        (step,) = read_recording(path).steps
        assert step.lanes == b"".join(entries)
        assert b"".join(entries) not in path.read_bytes()
    rare = random.Random(0).randbytes(32 * 50)
    entries = [(0, rare[at : at + 32]) for at in range(0, len(rare), 32)]
    path = written(tmp_path / "rare", [("a", "output", "", "int8", ())], [(entries, False)])
    assert rare in path.read_bytes()
    assert read_recording(path).steps[0].lanes == rare


@pytest.mark.parametrize(
    ("size", "data", "said"),
    [
        (64, zlib.compress(bytes(65)), "does not inflate to 64 bytes"),
        (64, zlib.compress(bytes(1 << 24)), "does not inflate to 64 bytes"),
        (64, zlib.compress(bytes(32)), "does not inflate to 64 bytes"),
        (64, zlib.compress(bytes(64)) + b"x", "does not inflate to 64 bytes"),
        (64, zlib.compress(bytes(64))[:-1], "does not inflate to 64 bytes"),
        (64, b"not deflated", "cannot be inflated"),
    ],
)
def test_what_does_not_inflate_to_its_size_is_broken(size: int, data: bytes, said: str) -> None:
    with pytest.raises(frames.BrokenFrame, match=said):
        frames.inflated(data, size)
