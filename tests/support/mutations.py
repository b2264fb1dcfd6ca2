"""Valid files made invalid: bytes changed, cut, spliced; JSON values replaced; what may follow.

A mutation may leave the content valid; what that means is then for the test to say.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from verify.errors import InputFileError

T = TypeVar("T")

# what a value of a document may be replaced with: every type, and the limits of each
ODD_VALUES = (
    *(None, True, False, 0, -1, 1, 2**63, 10**200, 10**310, 0.5, -0.0, 1e308, 1e999),
    *("", "x", "nan", "inf", "\ud800", "a\0b", "\n|`<&]]>", "../x", "/x", "VERIFIED", "MISMATCH"),
    *([], [[]], [None], [1], {}, {"a": 1}, {"x": {}}),
)


def refused(read: Callable[[Path], object], path: Path) -> str:
    """The message of a refusal: one line that names the file."""
    with pytest.raises(InputFileError) as caught:
        read(path)
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    return said


def read_or_refused(read: Callable[[Path], T], path: Path) -> T | None:
    """What was read, or None after a refusal as `refused` wants it. Nothing else may happen."""
    try:
        return read(path)
    except InputFileError as error:
        said = str(error)
    assert str(path) in said
    assert "\n" not in said
    return None


def mutated_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """`content` after one to three changes of single bytes, cuts, insertions and splices."""
    return st.lists(_EDITS, min_size=1, max_size=3).map(lambda edits: _edited(content, edits))


_EDITS = st.tuples(
    st.sampled_from(("set", "flip", "cut head", "cut tail", "insert", "remove", "double", "move")),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 64),
    st.binary(min_size=1, max_size=16),
)


def _edited(content: bytes, edits: list[tuple[str, float, int, bytes]]) -> bytes:
    for kind, place, size, new in edits:
        # half of all changes in the first 200 bytes, where the structure is
        end = len(content) if place < 0.5 else min(len(content), 200)
        at = int((2 * place) % 1 * end)
        before, part, after = content[:at], content[at : at + size], content[at + size :]
        content = {
            "set": before + new + content[at + len(new) :],
            "flip": before + bytes(b ^ new[0] for b in part[:1]) + content[at + 1 :],
            "cut head": content[at:],
            "cut tail": before,
            "insert": before + new + part + after,
            "remove": before + after,
            "double": before + part + part + after,
            "move": before + after + part,
        }[kind]
    return content


def mutated_json(value: Any) -> st.SearchStrategy[str]:
    """The text of `value` after one or two changes at random paths; not always strict JSON."""
    places = [path for path in _paths(value) if path]
    edit = st.tuples(
        st.sampled_from(places),
        st.sampled_from(("replace", "replace", "replace", "remove", "rename", "repeat")),
        st.sampled_from(ODD_VALUES),
    )
    return st.lists(edit, min_size=1, max_size=2).map(lambda edits: _changed(value, edits))


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _paths(item, (*path, key))
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _paths(item, (*path, index))


def _changed(value: Any, edits: list[tuple[tuple[Any, ...], str, Any]]) -> str:
    changed = copy.deepcopy(value)
    for path, kind, new in edits:
        node = changed
        try:
            for key in path[:-1]:
                node = node[key]
            old = node[path[-1]]
        except (KeyError, IndexError, TypeError):  # an earlier change took it away
            continue
        if not isinstance(node, dict | list):
            continue  # a text that an earlier change put there
        if kind == "remove":
            del node[path[-1]]
        elif kind == "rename" and isinstance(node, dict):
            node[str(new)] = node.pop(path[-1])
        elif kind == "repeat" and isinstance(node, list):
            node.append(copy.deepcopy(old))
        else:
            node[path[-1]] = copy.deepcopy(new)
    return json.dumps(changed)


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder, links and pipes unread: what must not change."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        else:
            found[name] = path.read_bytes() if path.is_file() else "no file"
    return found
