"""JUnit: one test case per claim; MISMATCH fails, UNVERIFIED errs, and no input breaks the XML."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from verify.rendering import render
from verify.rendering.junit import _xml
from verify.verdicts import CaseVerdict


def _parsed(document):
    return ElementTree.fromstring(render(document, "junit").encode("utf-8"))


def test_claims_become_test_cases(mixed):
    tree = _parsed(mixed)
    tests = {(t.get("classname"), t.get("name")): t for t in tree.iter("testcase")}
    assert set(tests) == {
        ("good", "repeat"),
        ("bad", "repeat"),
        ("gone", "rank"),
        ("gone", "process"),
    }
    assert [child.tag for child in tests["good", "repeat"]] == ["properties"]
    failure = tests["bad", "repeat"].find("failure")
    assert failure.get("type") == "bits-differ"
    assert failure.get("message").startswith("verdict=MISMATCH bad / repeat")
    assert failure.text.splitlines()[-1].strip().startswith("reproduce: verify run f.py::bad")
    assert tests["gone", "rank"].find("error").get("type") == "missing-rank"
    assert (tree.get("tests"), tree.get("failures"), tree.get("errors")) == ("4", "1", "1")


def test_properties_carry_verdict_and_reason(mixed):
    found = {
        (item.get("name"), item.get("value"))
        for item in _parsed(mixed).findall("testsuite/testcase/properties/property")
    }
    assert ("verify_verdict", "UNVERIFIED") in found
    assert ("verify_reason", "missing-rank") in found


def test_nothing_run_is_an_error(make_result):
    for document in (make_result([]), make_result([CaseVerdict("c", "c", [])])):
        tree = _parsed(document)
        assert tree.get("errors") == "1"
        assert len(list(tree.iter("testcase"))) == 1


def test_failed_controls_are_an_error(make_result):
    document = make_result(controls={"status": "failed", "passed": 0, "failed": ["a"]})
    tree = _parsed(document)
    assert tree.get("errors") == "1"
    assert "controls failed: a" in tree.find("testsuite/testcase/error").get("message")


def test_hostile_names_stay_text(nasty):
    tree = _parsed(nasty)
    assert [element.tag for element in tree.iter("script")] == []
    assert "<script>" in next(tree.iter("testcase")).get("classname")


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_survives_as_xml(text):
    element = ElementTree.Element("a", name=_xml(text))
    element.text = _xml(text)
    ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode").encode("utf-8"))
