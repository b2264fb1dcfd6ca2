"""Renames and patterns, and boxes that cut a whole, against the plainest way to say the same."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.checkpoints.matching import Patterns, Renames, _texts, natural, prefix_rule, read_rules
from verify.checkpoints.parameters import tiling_problem
from verify.errors import InputFileError, VerifyError

WORDS = st.lists(st.sampled_from(["a", "b", "layers", "10", "9", "w"]), min_size=1, max_size=5)


@given(WORDS, WORDS)
def test_a_prefix_goes_and_comes_back(words, prefix) -> None:
    name, before = ".".join(words), ".".join(prefix) + "."
    assert Renames([f"{before}*=*"])(before + name) == name
    assert Renames([f"*={before}*"])(name) == before + name
    assert Renames([f"{before}*=*"])("other." + name) in (name, "other." + name)


@given(WORDS, st.integers(0, 4), st.integers(0, 4))
def test_each_star_keeps_its_text(words, one, two) -> None:
    texts = [f"x{word}" for word in words[:2]] + ["y"] * (2 - len(words[:2]))
    made = Renames(["head.*.mid.*=mid/*/head/*"])(f"head.{texts[0]}.mid.{texts[1]}")
    assert made == f"mid/{texts[0]}/head/{texts[1]}"


def test_the_first_rule_counts_and_others_are_unused() -> None:
    rules = Renames(["a.w=b.w", "a.*=c.*", "z=y"])
    assert [rules(name) for name in ("a.w", "a.v", "w")] == ["b.w", "c.v", "w"]
    assert rules.unused == ["z"]
    assert Renames(["a.+=b"])("a.+") == "b"  # no regular expression
    assert Renames(["a.+=b"])("a.x") == "a.x"


def test_patterns_know_what_they_are_for() -> None:
    patterns = Patterns(["*.bias", "optim.*"])
    assert patterns.match("a.b.bias")
    assert not patterns.match("a.bias.b")
    assert patterns.unused == ["optim.*"]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (["a"], "give OLD=NEW"),
        (["=a"], "give OLD=NEW"),
        (["a="], "give OLD=NEW"),
        (["a=b=c"], "give OLD=NEW"),
        (["a.*=b"], "the same number of *"),
        (["a=b", "a=c"], "a parameter that is split on one side is not compared"),
    ],
)
def test_renames_that_make_no_sense(rules, told) -> None:
    with pytest.raises(VerifyError) as caught:
        Renames(rules)
    assert told in str(caught.value)
    assert Renames(["a=b", "a=b"])("a") == "b"


def test_rules_of_a_file(tmp_path) -> None:
    path = tmp_path / "rules.txt"
    path.write_text("# trainer to sampler\n\n model.*=* \nhead=lm_head\n")
    assert read_rules(path) == ["model.*=*", "head=lm_head"]
    path.write_text("# nothing\n")
    with pytest.raises(InputFileError, match="holds no rename"):
        read_rules(path)
    path.write_text("a=b\na b\n")
    with pytest.raises(InputFileError, match="rule 2, 'a b'"):
        read_rules(path)


def test_prefixes_and_order() -> None:
    assert prefix_rule(["m.a.w", "m.b.w"], ["a.w", "b.w"]) == "m.*=*"
    assert prefix_rule(["a.w", "b.w"], ["m.a.w", "m.b.w"]) == "*=m.*"
    assert prefix_rule(["m.a.w"], ["a.w"]) == ""  # one name alone may be chance
    assert prefix_rule(["m.a", "m.b"], ["n.a", "n.b"]) == ""
    names = ["l.10.w", "l.9.w", "l.9.b", "l", "l.\u00b2"]
    assert sorted(names, key=natural) == ["l", "l.9.b", "l.9.w", "l.10.w", "l.\u00b2"]


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    data=st.data(),
)
def test_tilings_against_counting_every_element(shape, data) -> None:
    edges = st.integers(0, 4).flatmap(lambda a: st.tuples(st.just(a), st.integers(a, 4)))
    boxes = data.draw(
        st.lists(
            st.tuples(*(edges.map(lambda e, n=n: (min(e[0], n), min(e[1], n))) for n in shape)),
            max_size=4,
        )
    )
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(*edge) for edge in box)] += 1
    for cover in (False, True):
        told = tiling_problem(shape, boxes, cover=cover)
        overlap, gap = (counts > 1).any(), cover and (counts == 0).any()
        assert told == (
            "has parts that overlap"
            if overlap
            else "has elements that no part holds"
            if gap
            else ""
        )


@given(
    st.text("ab*", max_size=6),
    st.text("ab\n", max_size=8),
)
def test_stars_against_regular_expressions(pattern: str, name: str) -> None:
    pieces = map(re.escape, pattern.split("*"))
    found = re.fullmatch("(.*?)".join(pieces), name, re.DOTALL)
    assert _texts(pattern, name) == (None if found is None else list(found.groups()))


def test_many_stars_take_no_ages() -> None:
    assert _texts("*a" * 12 + "*b", "a" * 60) is None
    assert _texts("*" * 20 + "z", "a" * 60) is None
