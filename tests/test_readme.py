"""README and docs/ tell the truth: listed paths exist, and their examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from verify.cases import Case
from verify.conduct import conduct, set_up
from verify.decision import decide
from verify.evidence import Record
from verify.onpolicy.formats.table import matrix
from verify.plans import RunOptions, plan_of, with_options
from verify.sessions import Session
from verify.staging import Stage
from verify.targets import Found

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))


def _blocks(language: str) -> list[str]:
    text = "\n".join((README, *(page.read_text() for page in DOCS)))
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_paths_that_it_lists_exist() -> None:
    tree = README.split("## Files")[1].split("```")[1]
    found, parents = [], {0: ROOT}
    for line in tree.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.split(r"\s{2,}", line.strip()):
            if not re.search(r"[./]|^Makefile$", name) or " " in name:  # the comment
                break
            path = parents[depth] / name
            assert path.exists(), name
            parents[depth + 1] = path
            found.append(name)
    assert {"verify/", "_mok_verify_pytest.py", ".ci/run", "CHANGELOG.md"} <= set(found)


def test_their_cases_are_cases_and_do_what_they_say() -> None:
    expected = {
        "combine": "MISMATCH",
        "linear": "VERIFIED",
        "matmul": "VERIFIED",
        "tokens_per_expert": "VERIFIED",
    }
    seen = {}
    for block in _blocks("python"):
        if "@verify.case" not in block:
            continue
        names: dict[str, object] = {"__name__": "readme"}
        exec(compile(block, "README.md or docs", "exec"), names)
        for case in [value for value in names.values() if isinstance(value, Case)]:
            claims = ("repeat", "reference") if case.reference is not None else ("repeat",)
            options = RunOptions(claims=claims)
            found = with_options(Found(case, case.name), options)
            plan = plan_of(found, options, 1)
            records: list[Record] = []
            stage = set_up(found, 0, 1, None, lambda failure: failure)
            assert isinstance(stage, Stage)
            conduct(Session(stage, plan, records.append))
            seen[case.name] = str(decide(plan, records).verdict)
    assert seen == expected


def test_the_matrix_of_formats_is_the_one_that_is_read() -> None:
    head, *rows = matrix()
    shown = [
        [row[0], *(cell if cell in ("yes", "-") else "some" for cell in row[1:])] for row in rows
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (list(head), *shown)]
    page = (ROOT / "docs" / "onpolicy.md").read_text()
    assert "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) in page
