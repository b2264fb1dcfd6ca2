"""Tables of knobs: what is written is read again, what is wrong is said once and harms nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok.errors import InputError
from mok.hopper import tuned
from mok.hopper.layout import Segments, Sizes
from mok.hopper.tuned import Choice, Entry, Key

GPU = "NVIDIA H200"
SIZES = Sizes(max_tokens=7168, slots=8, experts=48, hidden=7168, width=2048)
KEY = Key(GPU, 48, 7168, 2048, 8, 8192)
_numbers = st.integers(1, 1 << 40)


def _entry(key=KEY, least=10, most=16, num_sms=0):
    choice = Choice(Segments(least, most), num_sms)
    return Entry(key, choice, 1.0213, "0.1.0", "6134d47+", "2026-11-30")


@st.composite
def _entries(draw):
    least, most = sorted(draw(st.tuples(*[st.integers(1, tuned.MOST_BLOCKS)] * 2)))
    key = Key(
        draw(st.text(min_size=1).filter(lambda text: text.isprintable())),
        *(draw(_numbers) for _ in range(4)),
        T=1 << draw(st.integers(0, 40)),
    )
    ratio = draw(st.integers(1, 9_999_999)) / 10_000
    commit = draw(st.none() | st.just("6134d47"))
    return Entry(
        key,
        Choice(Segments(least, most), draw(st.integers(0, 500))),
        ratio,
        "0.1.0",
        commit,
        "2026-11-30",
    )


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """No table of the machine that runs this: a home and a packaged table of its own."""
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    packaged = tmp_path / "packaged.json"
    packaged.write_text(tuned.table_text([]))
    monkeypatch.setattr(tuned, "_PACKAGED", packaged)
    user = tmp_path / "config" / "mok" / "tuned.json"
    user.parent.mkdir(parents=True)
    return user, packaged


@given(st.lists(_entries(), unique_by=lambda entry: entry.key, max_size=5))
def test_what_is_written_is_read_again(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("table") / "t.json"
    text = tuned.table_text(entries)
    path.write_text(text, encoding="utf-8")
    assert dict(tuned.read_table(path)) == {entry.key: entry for entry in entries}
    assert tuned.table_text(reversed(entries)) == text
    assert len(text.splitlines()) == (len(entries) + 5 if entries else 4)


@given(st.integers(0, 1 << 40))
def test_tokens_are_rounded_up_to_a_power_of_two(tokens):
    rounded = tuned.rounded_tokens(tokens)
    assert rounded.bit_count() == 1
    assert tokens <= rounded
    assert rounded < 2 * max(1, tokens)


def test_an_entry_is_found_for_its_shape_and_for_no_other(places):
    places[0].write_text(tuned.table_text([_entry(num_sms=128)]))
    assert tuned.knobs_for(GPU, SIZES) == Choice(Segments(10, 16), 128)
    for given_sizes in ({"max_tokens": 4097}, {"max_tokens": 8192}, {"shared_width": 2048}):
        assert tuned.knobs_for(GPU, _sizes(**given_sizes)) is not None
    others = ({"max_tokens": 4096}, {"max_tokens": 8193}, {"slots": 7}, {"experts": 47})
    for given_sizes in (*others, {"hidden": 7232}, {"width": 1024}, {"ranks": 2}):
        assert tuned.knobs_for(GPU, _sizes(**given_sizes)) is None
    assert tuned.knobs_for("NVIDIA H100", SIZES) is None


def _sizes(**changes):
    given_sizes = {"max_tokens": 7168, "slots": 8, "experts": 48, "hidden": 7168, "width": 2048}
    return Sizes(**(given_sizes | changes))


def test_the_users_table_is_asked_before_the_packaged_one(places, monkeypatch, tmp_path):
    user, packaged = places
    other = Key(GPU, 64, 4096, 1024, 10, 8192)
    packaged.write_text(tuned.table_text([_entry(most=30), _entry(other, most=31)]))
    user.write_text(tuned.table_text([_entry(most=20)]))
    assert tuned.knobs_for(GPU, SIZES).segments.most == 20
    sizes = _sizes(experts=64, hidden=4096, width=1024, slots=10)
    assert tuned.knobs_for(GPU, sizes).segments.most == 31
    assert tuned.describe() == f"{user}: 1 entries; {packaged}: 2 entries"

    mine = tmp_path / "mine.json"
    mine.write_text(tuned.table_text([_entry(most=40)]))
    monkeypatch.setenv(tuned.VARIABLE, str(mine))
    assert tuned.user_table() == mine
    assert tuned.knobs_for(GPU, SIZES).segments.most == 40

    monkeypatch.setenv(tuned.VARIABLE, tuned.OFF)
    assert tuned.knobs_for(GPU, SIZES) is None
    assert tuned.describe() == "none: MOK_TUNED=off"
    assert tuned.user_table() == user


def test_a_relative_folder_of_settings_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.user_table() == tmp_path / ".config" / "mok" / "tuned.json"


def test_no_table_is_no_news_but_one_that_was_named_is_missed(monkeypatch, tmp_path, caplog):
    assert tuned.knobs_for(GPU, SIZES) is None
    assert caplog.records == []
    assert tuned.describe().count(": none") == 2
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "nowhere.json"))
    for _ in range(3):
        assert tuned.knobs_for(GPU, SIZES) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "nowhere.json: there is no such file" in record.message
    assert record.message.endswith("The defaults are used.")
    assert "not usable, defaults instead: table of knobs" in tuned.describe()


def _document(**changes):
    (entry,) = json.loads(tuned.table_text([_entry()]))["entries"]
    return {"format": 1, "entries": [entry | changes]}


def _without(name):
    document = _document()
    del document["entries"][0][name]
    return document


_WRONG = [
    ("", "no JSON of ours"),
    ("[" * 100_000, "no JSON of ours"),
    ('{"format": 1, "format": 1, "entries": []}', "stands twice"),
    ('{"format": 1, "entries": [NaN]}', "NaN is no number"),
    (b"\xff\xfe", "no JSON of ours"),
    ([], "not an object of format and entries"),
    ({"format": 1}, "not an object of format and entries"),
    ({"format": 2, "entries": []}, "format 2, and this version reads 1"),
    ({"format": True, "entries": []}, "format True"),
    ({"format": 1, "entries": {}}, "entries are not a list"),
    ({"format": 1, "entries": [7]}, "entry 0: it has not exactly the names"),
    (_without("least"), "entry 0: it has not exactly the names"),
    (_document(tile=3), "entry 0: it has not exactly the names"),
    (_document(gpu=""), "gpu = '' is no text"),
    (_document(gpu=3), "gpu = 3 is no text"),
    (_document(commit=3), "commit = 3"),
    (_document(E=True), "E = True is no whole number of 1 or more"),
    (_document(H=7168.0), "H = 7168.0 is no whole number"),
    (_document(T=7168), "T = 7168 is no power of two"),
    (_document(least=0), "least = 0 is no whole number of 1 or more"),
    (_document(num_sms=-1), "num_sms = -1 is no whole number of 0 or more"),
    (_document(least=17), "segments of 17 to 16 blocks"),
    (_document(most=1025), "segments of 10 to 1025 blocks"),
    (_document(ratio=0), "ratio = 0 is no ratio"),
    (_document(ratio="1"), "ratio = '1' is no ratio"),
    (_document(ratio=10**400), "is no ratio"),
    (
        {"format": 1, "entries": [*_document()["entries"], *_document(most=20)["entries"]]},
        "entry 1: the second one for",
    ),
]


@pytest.mark.parametrize(("content", "reason"), _WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_table_is_refused_by_name_and_costs_a_launch_nothing(
    places, caplog, content, reason
):
    user, packaged = places
    packaged.write_text(tuned.table_text([_entry(most=30)]))
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    user.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"table of knobs {user}.*mok bench tune") as refused:
        tuned.read_table(user)
    assert reason in str(refused.value)
    for _ in range(2):
        assert tuned.knobs_for(GPU, SIZES).segments.most == 30
    assert [reason in record.message for record in caplog.records] == [True]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["format", "entries", "gpu", "T"]), inner, max_size=4)
    ),
    max_leaves=8,
)


_FIELDS = sorted(_document()["entries"][0])
_spoiled = st.builds(
    lambda name, value: _document(**{name: value}), st.sampled_from(_FIELDS), _json
)


@given(st.binary(max_size=40) | _json | _spoiled)
def test_a_file_is_read_or_refused_and_never_anything_else(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("table") / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with contextlib.suppress(InputError):
        entries = tuned.read_table(path)
        assert len(entries) == len(content["entries"])
        assert dict(entries) == {entry.key: entry for entry in entries.values()}


def test_what_is_no_file_of_that_size_is_not_read(places, tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large"
    large.write_text(" " * ((1 << 20) + 1))
    for path, reason in ((tmp_path / "pipe", "regular"), (tmp_path, "regular"), (large, "bytes")):
        with pytest.raises(InputError, match=reason):
            tuned.read_table(path, must_exist=False)
    assert dict(tuned.read_table(large / "below", must_exist=False)) == {}


def test_the_packaged_table_can_be_used_as_it_is(monkeypatch, caplog):
    monkeypatch.undo()
    assert all(entry.ratio > 1 for entry in tuned.read_table(tuned._PACKAGED).values())
    text = tuned._PACKAGED.read_text(encoding="utf-8")
    assert text == tuned.table_text(tuned.read_table(tuned._PACKAGED).values())
