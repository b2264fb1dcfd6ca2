"""Which format a file is, folders of files, and the matrix of formats and fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onpolicy_files import NEMO_RL, PLAIN, PRIME_TRACE, RECORDS, VERL, write

from verify.errors import InputFileError
from verify.onpolicy.formats import folders, plain, problems, table
from verify.onpolicy.formats.heads import CONTAINERS
from verify.onpolicy.formats.table import ALWAYS, FIELDS, FORMATS, matrix, read_dump
from verify.onpolicy.samples import META, ROLLOUT, TRAINER, Dump, Sample

_DATA = Path(__file__).parents[3] / "data" / "onpolicy"


@pytest.mark.parametrize("name", RECORDS)
def test_a_format_is_found_from_the_content_whatever_the_name_says(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "train_data.parquet", [RECORDS[name]])
    dump = read_dump(path, TRAINER)
    assert (dump.format, dump.files, dump.problems) == (name, (str(path),), ())
    document = tmp_path / "document.txt"
    document.write_text(json.dumps([RECORDS[name]] * 2, indent=1))
    assert read_dump(document, TRAINER).format == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("openai_chat.jsonl", "openai-chat"),
        ("prime_rl.jsonl", "prime-rl"),
        ("prime_traces.jsonl", "prime-rl"),
    ],
)
def test_files_of_the_producers_own_code(file: str, name: str) -> None:
    assert read_dump(_DATA / file, ROLLOUT).format == name


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_reader_fills_is_in_the_matrix(tmp_path: Path, name: str) -> None:
    form = next(form for form in FORMATS if form.name == name)
    (sample,) = read_dump(write(tmp_path / "f", [RECORDS[name]]), TRAINER).samples
    filled = _filled(sample)
    assert filled <= set(form.fields)
    assert {field for field, when in form.fields.items() if when == ALWAYS} <= filled


def _filled(sample: Sample) -> set[str]:
    found = {
        "tokens": sample.tokens is not None,
        "prompt": sample.prompt is not None,
        "rollout": ROLLOUT in sample.series,
        "trainer": TRAINER in sample.series,
        "mask": sample.mask is not None,
        "routing": bool(sample.routing),
        "top": bool(sample.top),
        "text": sample.text is not None,
        "sampling": "temperature" in sample.meta,
        "version": "rollout_version" in sample.meta,
        "finish": "finish_reason" in sample.meta,
    }
    assert set(found) == set(FIELDS)
    assert set(sample.meta) <= set(META)
    return {name for name, there in found.items() if there}


def test_the_matrix_has_a_row_for_each_format() -> None:
    rows = matrix()
    assert rows[0] == ("format", *FIELDS)
    assert [row[0] for row in rows[1:]] == list(table.NAMES)
    assert all(len(row) == len(rows[0]) and all(row) for row in rows)
    for form in FORMATS:
        assert set(form.fields) <= set(FIELDS)
        assert set(form.containers) <= set(CONTAINERS)
        reader = form.reader()
        assert callable(reader.fits)
        assert callable(reader.read)


def test_what_no_format_fits_is_said_with_what_was_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "f.json", [{"loss": 1.0, "x" * 500: 2}])
    with pytest.raises(InputFileError) as raised:
        read_dump(path, TRAINER)
    told = str(raised.value)
    assert f"{path}: no format that is known: JSON" in told
    assert "'loss'" in told
    assert "plain, nemo-rl" in told
    assert "--read-as NAME" in told
    assert len(told) < 600


def test_two_formats_that_fit_are_not_chosen_from(tmp_path: Path) -> None:
    path = write(tmp_path / "f", [PLAIN | VERL])
    with pytest.raises(InputFileError, match=r"plain and verl would fit; say which: --read-as"):
        read_dump(path, TRAINER)
    assert read_dump(path, TRAINER, "verl").format == "verl"
    assert read_dump(path, TRAINER, "plain").format == "plain"


def test_a_format_that_was_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "f", [PLAIN])
    with pytest.raises(InputFileError, match="no such format; known are plain, nemo-rl"):
        read_dump(path, TRAINER, "Plain")
    with pytest.raises(InputFileError, match=r"f: is JSON.*; trl is Parquet"):
        read_dump(path, TRAINER, "trl")
    with pytest.raises(InputFileError, match="not a file of nemo-rl: no record could be read"):
        read_dump(path, TRAINER, "nemo-rl")
    with pytest.raises(ValueError, match="side is 'left'"):
        read_dump(path, "left")


def test_a_broken_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(json.dumps(PLAIN)[:50] + "\n" + json.dumps(PLAIN) + "\n")
    dump = read_dump(path, TRAINER)
    assert (len(dump.samples), len(dump.problems)) == (1, 1)


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 2):
        write(tmp_path / f"train_data_step{step}.jsonl", [NEMO_RL])
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper" / "train_data_step1.jsonl", [NEMO_RL])
    write(tmp_path / ".hidden", [PLAIN])
    write(tmp_path / "metrics.jsonl", [{"loss": 1}])
    os.mkfifo(tmp_path / "pipe")
    dump = read_dump(tmp_path, TRAINER)
    assert [sample.key for sample in dump.samples] == ["1:0", "2:0", "9:0", "10:0"]
    assert len(dump.files) == 4
    assert [note.split(": ")[0] for note in dump.notes] == ["left out"] * 2
    assert "metrics.jsonl" in dump.notes[0]
    assert "pipe" in dump.notes[1]


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [PLAIN])
    write(tmp_path / "b", [NEMO_RL])
    with pytest.raises(InputFileError, match=r"several formats: plain \(a\), nemo-rl \(b\)"):
        read_dump(tmp_path, TRAINER)
    dump = read_dump(tmp_path, TRAINER, "plain")
    assert len(dump.samples) == 1
    assert any("not a file of plain" in note for note in dump.notes)


def test_files_that_belong_together_are_read_so_without_the_broken_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def read_together(paths: list[Path], side: str) -> list[Dump]:
        asked.append([path.name for path in paths])
        return [folders.joined([plain.read(path, side) for path in paths])]

    monkeypatch.setattr(plain, "read_together", read_together, raising=False)
    for name in ("a", "b"):
        write(tmp_path / name, [PLAIN])
    assert len(read_dump(tmp_path, TRAINER).samples) == 2
    write(tmp_path / "c", [{"response_ids": None, "id": "x"}, 5])
    (tmp_path / "d").write_text('{"onpolicy": 1}\n')
    dump = read_dump(tmp_path, TRAINER)
    assert len(dump.samples) == 3
    assert asked == [["a", "b"], ["a", "b", "c", "d"], ["a", "b", "c"]]
    assert [note.split(": ")[2] for note in dump.notes if "left out" in note] == [
        "not a file of plain"
    ]


def test_folders_with_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputFileError, match=r"no file could be read \(0 tried\)"):
        read_dump(tmp_path, TRAINER)
    write(tmp_path / "a", [{"loss": 1}])
    with pytest.raises(InputFileError, match=r"\(1 tried\); the first: .*'loss'"):
        read_dump(tmp_path, TRAINER)
    write(tmp_path / "a", [{"id": 1, "response_ids": 5, "text": "x"}])
    monkeypatch.setattr(folders, "_MOST_FILES", 1)
    assert len(read_dump(tmp_path, TRAINER).samples) == 1
    write(tmp_path / "b", [PLAIN])
    with pytest.raises(InputFileError, match="more than 1 files"):
        read_dump(tmp_path, TRAINER)


def test_settings_of_files_go_to_their_samples_where_they_differ(tmp_path: Path) -> None:
    for name, heat in (("a", 0.5), ("b", 1.0)):
        header = {"onpolicy": 1, "config": {"temperature": heat, "top_p": 0.9}}
        write(tmp_path / name, [header, {"id": name, "response_ids": [1]}, {**PLAIN, "id": "x"}])
    dump = read_dump(tmp_path, TRAINER)
    assert dump.config == {"top_p": 0.9}
    heats = [sample.meta["temperature"] for sample in dump.samples]
    assert heats == [0.5, 0.7, 1.0, 0.7]  # a sample's own setting goes before the file's


@pytest.mark.parametrize("name", ["nemo-rl", "vllm", "openai-chat", "prime-rl"])
def test_records_of_many_samples_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    many = {
        "nemo-rl": {field: value * 5 for field, value in NEMO_RL.items() if field != "idx"},
        "vllm": {**RECORDS["vllm"], "outputs": [{}] * 5},
        "openai-chat": {"choices": [{}] * 5},
        "prime-rl": {**PRIME_TRACE, "nodes": [{}] * 5},
    }
    path = write(tmp_path / "f", [many[name]])
    assert len(read_dump(path, TRAINER, name).samples) == 5
    monkeypatch.setattr(problems, "MOST_SAMPLES", 3)
    dump = read_dump(path, TRAINER, name)
    assert len(dump.samples) == 3
    assert "more than 3 samples" in dump.problems[-1].what


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", Path("a\0b"), tmp_path / ("x" * 300)):
        with pytest.raises(InputFileError):
            read_dump(path, TRAINER)


def test_json_is_read_without_torch_and_pyarrow(tmp_path: Path) -> None:
    path = write(tmp_path / "f", [PRIME_TRACE])
    script = (
        "import sys; from pathlib import Path; "
        "from verify.onpolicy.formats.table import matrix, read_dump; matrix(); "
        "print(read_dump(Path(sys.argv[1]), 'trainer').format); "
        "print(sorted({'torch', 'pyarrow', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["prime-rl", "[]"]


def test_joining_keeps_what_all_files_say() -> None:
    first = Dump("plain", ("a",), (), notes=("n",), config={"step": 1, "top_p": 0.5})
    second = Dump("plain", ("b",), (Sample("k", None),), notes=("n",), config={"step": 2})  # type: ignore[arg-type]
    dump = folders.joined([first, second], ("m",))
    assert (dump.files, dump.notes, dict(dump.config)) == (("a", "b"), ("n", "m"), {})
    assert dump.samples[0].meta == {"step": 2}
