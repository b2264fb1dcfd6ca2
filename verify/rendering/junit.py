"""The report as JUnit XML: one test case per claim, classname the case.

MISMATCH is a failure and UNVERIFIED an error, so that a reader which knows no third state still
shows it red; a run that checked nothing is one error, since an empty file would be green.
Characters that XML cannot hold are escaped, never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from verify.rendering import gates, phrases, text
from verify.rendering.escaping import printable

_TAGS = {"MISMATCH": "failure", "UNVERIFIED": "error"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Json = Mapping[str, Any]


def render(result: Json) -> str:
    """The XML text, ending in a newline."""
    suite = ElementTree.Element("testsuite", name="verify")
    _properties(
        suite,
        {
            "verify_verdict": result["verdict"],
            "verify_exit_code": str(result["exit_code"]),
            "verify_command": result["command"],
        },
    )
    for case in result["cases"]:
        for claim in case["claims"]:
            _claim(suite, case, claim)
        if not case["claims"]:
            _empty(suite, case["case"], "no claim of this case was checked")
    if not result["cases"]:
        _empty(suite, "verify", "nothing was checked")
    if result.get("gate"):
        _gate(suite, result)
    elif result["controls"]["status"] == "failed":
        _empty(suite, "controls", f"controls failed: {', '.join(result['controls']['failed'])}")
    counts = {
        "tests": str(len(suite.findall("testcase"))),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": str(len(suite.findall("testcase/error"))),
        "time": f"{result['seconds']:.3f}",
    }
    suite.attrib.update({**counts, "timestamp": _xml(result["started"])})
    suites = ElementTree.Element("testsuites", counts)
    suites.append(suite)
    ElementTree.indent(suites)
    body = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _claim(suite: ElementTree.Element, case: Json, claim: Json) -> None:
    test = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_xml(case["case"]),
        name=_xml(claim["claim"]),
        time=f"{claim['seconds']:.3f}",
    )
    reasons = list(dict.fromkeys(finding["reason"] for finding in claim["findings"]))
    properties = {"verify_verdict": claim["verdict"], "verify_evidence": phrases.evidence(claim)}
    if reasons:
        properties["verify_reason"] = ", ".join(reasons)
    _properties(test, properties)
    tag = _TAGS.get(claim["verdict"])
    if tag is None:
        return
    first = claim["findings"][0] if claim["findings"] else None
    problem = ElementTree.SubElement(test, tag)
    problem.set("type", _xml(first["reason"] if first else claim["verdict"]))
    problem.set(
        "message", _xml(phrases.headline(case, printable(claim["claim"]), first, claim["verdict"]))
    )
    problem.text = _xml("\n".join(text.findings(case, [claim])))


def _gate(suite: ElementTree.Element, result: Json) -> None:
    """An error for each finding of the gate; one test case that passes when there is none."""
    gate = result["gate"]
    for finding in gate["findings"] or [None]:
        name = finding["reason"] if finding else gate["config"]
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name=_xml(name))
        if finding:
            problem = ElementTree.SubElement(test, "error", type=_xml(finding["reason"]))
            problem.set("message", _xml(gates.headline(gate, finding)))
            problem.text = _xml("\n".join(gates.card(finding)))
        ElementTree.SubElement(test, "system-out").text = _xml("\n".join(gates.about(result)))


def _empty(suite: ElementTree.Element, name: str, message: str) -> None:
    """An error that stands for evidence which is not there."""
    test = ElementTree.SubElement(suite, "testcase", classname=_xml(name), name="nothing-checked")
    problem = ElementTree.SubElement(test, "error", type="not-run")
    problem.set("message", _xml(f"verdict=UNVERIFIED {message}"))


def _properties(parent: ElementTree.Element, values: Mapping[str, str]) -> None:
    group = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        ElementTree.SubElement(group, "property", name=name, value=_xml(value))


def _xml(value: object) -> str:
    """Text that XML 1.0 can hold; anything else becomes a backslash escape."""
    return _NOT_XML.sub(
        lambda found: found.group().encode("unicode_escape").decode("ascii"), str(value)
    )
