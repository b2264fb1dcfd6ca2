"""The catalogue and the folder of sources agree, and the sources keep their rules."""

from __future__ import annotations

import re

import pytest

from mok import kernel_sources, kernels
from mok.building import build
from mok.kernels import CATALOGUE, Variant, needed_architectures

FAULTS = "conditions/faults/"


def test_every_source_is_in_the_catalogue_and_every_entry_of_it_exists():
    assert {variant.source for variant in CATALOGUE} == set(kernel_sources.list_sources())


def test_every_header_is_included_by_a_kernel():
    root = kernel_sources.source_root()
    headers = {path.relative_to(root).as_posix() for path in root.rglob("*.cuh")}
    included = {
        name
        for source in kernel_sources.list_sources()
        for name in kernel_sources.included_files(source)
    }
    assert headers == included


def test_nothing_else_lies_among_the_sources_than_notes_on_them():
    root = kernel_sources.source_root()
    names = [path.name for path in root.rglob("*") if path.is_file()]
    others = [name for name in names if not name.endswith((".cu", ".cuh"))]
    assert {*others} <= {"NOTES.md"}


def test_variants_are_told_apart_by_their_names():
    names = [variant.name for variant in CATALOGUE]
    assert sorted(set(names)) == sorted(names)


def test_every_variant_names_its_kernels():
    assert [variant.name for variant in CATALOGUE if not variant.entries] == []


def _logs(variant):
    return ("LOG", 1) in variant.macros


def test_only_planted_faults_and_builds_with_a_log_may_be_allowed_to_spill():
    allowed = [variant for variant in CATALOGUE if variant.planted and not _logs(variant)]
    assert [variant.name for variant in allowed if not variant.source.startswith(FAULTS)] == []


@pytest.mark.parametrize("source", kernel_sources.list_sources())
def test_sources_include_only_their_own_headers_and_are_ascii(source):
    for name in (source, *kernel_sources.included_files(source)):
        text = kernel_sources.read_source(name)
        assert text.isascii(), name
        assert re.findall(r"#\s*include\s*<.*", text) == [], name


def test_needs_are_those_of_the_variant_or_of_all_variants_of_a_source(monkeypatch):
    monkeypatch.setattr(
        kernels,
        "CATALOGUE",
        (
            Variant("a.cu", ("k",), (("N", 1),), needs=("sm_90a",)),
            Variant("a.cu", ("k",), (("N", 2),)),
            Variant("b.cu", ("k",), (("N", 1),), needs=("sm_90a",)),
            Variant("b.cu", ("k",), (("N", 2),), needs=("sm_90a",)),
        ),
    )
    assert needed_architectures("a.cu", {"N": 1}) == ("sm_90a",)
    assert needed_architectures("a.cu", {"N": 2}) == ()
    assert needed_architectures("a.cu", {"N": 3}) == ()
    assert needed_architectures("b.cu", {"N": 3}) == ("sm_90a",)
    assert needed_architectures("c.cu", {}) == ()


def test_all_kernels_are_clean_and_processes_say_what_one_would(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    several = build(("sm_90a",), jobs=2)
    alone = build(("sm_90a",), jobs=1)
    # a build that logs what it does is never timed, and may spill
    timed = [one for one in several.built if not _logs(one.variant)]
    assert [one.findings for one in timed if one.findings] == []
    assert several.clean
    assert [(one.variant, one.resources) for one in alone.built] == [
        (one.variant, one.resources) for one in several.built
    ]
    assert all(one.cached for one in alone.built)
