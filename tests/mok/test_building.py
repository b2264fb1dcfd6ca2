"""`mok build`: what it compiles, what it finds, and what it stays silent about."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from small_kernels import (
    IGNORED_REGISTERS,
    SCALE,
    SCALE_HEADER,
    SERIALISED,
    SPILL,
    plant_sources,
)

from mok import building, kernels
from mok.building import build, describe_build
from mok.cli import main
from mok.kernels import Variant
from mok.toolchain import ArchitectureUnsupported, JitError, SourceMissing

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_90a",)
CLEAN = Variant("parts/scale.cu", ("scale",), (("FACTOR", 7),), dynamic_shared=512)
FAULTS = {
    "spill.cu": (Variant("spill.cu", ("spill",)), "spill spills: "),
    "ignored.cu": (Variant("ignored.cu", ("ignored",)), "(C7508)"),
    "serialised.cu": (Variant("serialised.cu", ("serialised",)), "instructions are serialized"),
    "broken.cu": (Variant("broken.cu", ("broken",)), "broken.cu(1): error: "),
}


@pytest.fixture(autouse=True)
def _sources(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "cache"))
    plant_sources(
        monkeypatch,
        tmp_path / "csrc",
        {
            "parts/scale.cu": SCALE,
            "parts/scale.cuh": SCALE_HEADER,
            "spill.cu": SPILL,
            "ignored.cu": IGNORED_REGISTERS,
            "serialised.cu": SERIALISED,
            "broken.cu": 'extern "C" __global__ void broken() { nothing; }\n',
            "warned.cu": 'extern "C" __global__ void warned() { int unused; }\n',
        },
    )


def _run(monkeypatch, catalogue, *arguments):
    monkeypatch.setattr(kernels, "CATALOGUE", catalogue)
    return CliRunner().invoke(main, ["build", "--jobs", "1", *arguments])


def test_a_clean_kernel_is_clean_and_all_of_it_is_told(monkeypatch):
    result = build(ARCHITECTURES, jobs=1, catalogue=(CLEAN,))
    assert result.clean
    assert result.built[0].findings == result.built[0].notes == ()
    (row,) = describe_build(result)["kernels"]
    assert (row["source"], row["kernel"], row["macros"]) == ("parts/scale.cu", "scale", "FACTOR=7")
    assert (row["static_shared"], row["dynamic_shared"], row["spill_loads"]) == (256, 512, 0)
    done = _run(monkeypatch, (CLEAN,))
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("clean: 1 kernels, 0 findings, 0 skipped; NVRTC")


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(name, monkeypatch):
    variant, said = FAULTS[name]
    result = build(ARCHITECTURES, jobs=1, catalogue=(CLEAN, variant))
    assert not result.clean
    clean, faulty = result.built
    assert clean.clean
    assert any(said in finding for finding in faulty.findings)
    done = _run(monkeypatch, (CLEAN, variant))
    assert done.exit_code == 1
    assert f"FINDING: {name} (sm_90a): " in done.output
    assert done.output.splitlines()[-1].startswith("NOT CLEAN: ")


def test_a_fault_stays_found_when_it_comes_from_the_cache():
    variant, _ = FAULTS["spill.cu"]
    first, second = (build(ARCHITECTURES, jobs=1, catalogue=(variant,)) for _ in range(2))
    assert second.built[0].cached
    assert not second.clean
    assert second.built[0].findings == first.built[0].findings


def test_a_planted_spill_is_told_and_allowed(monkeypatch):
    planted = Variant("spill.cu", ("spill",), planted="shows what a spill looks like")
    result = build(ARCHITECTURES, jobs=1, catalogue=(planted,))
    assert result.clean
    assert result.built[0].findings
    done = _run(monkeypatch, (planted,))
    assert done.exit_code == 0
    assert "planted (shows what a spill looks like): spill.cu" in done.output


@pytest.mark.parametrize(
    ("entries", "said"),
    [(("scale", "gone"), "names the kernel gone"), ((), "has the kernel scale")],
)
def test_a_catalogue_that_names_other_kernels_is_a_finding(entries, said):
    variant = Variant(CLEAN.source, entries, CLEAN.macros)
    (one,) = build(ARCHITECTURES, jobs=1, catalogue=(variant,)).built
    assert [said in finding for finding in one.findings] == [True]


def test_what_the_front_end_warns_of_is_a_note(monkeypatch):
    done = _run(monkeypatch, (Variant("warned.cu", ("warned",)),))
    assert done.exit_code == 0
    assert "note: warned.cu (sm_90a): warned.cu(1): warning #177-D" in done.output


def test_a_kernel_of_one_architecture_is_skipped_by_name_for_others(monkeypatch):
    special = Variant("spill.cu", ("spill",), needs=("sm_100a",))
    monkeypatch.setattr(kernels, "CATALOGUE", (CLEAN, special))
    result = build(("sm_90a", "sm_80"), jobs=1)
    assert result.clean
    assert [(one.variant, one.arch) for one in result.built] == [
        (CLEAN, "sm_90a"),
        (CLEAN, "sm_80"),
    ]
    assert result.skipped == ((special, "sm_90a"), (special, "sm_80"))
    done = _run(monkeypatch, (CLEAN, special))
    assert "skipped: spill.cu for sm_90a, it needs sm_100a" in done.output


def test_nothing_compiled_is_exit_3_and_never_clean(monkeypatch):
    special = Variant("spill.cu", ("spill",), needs=("sm_100a",))
    for catalogue in ((), (special,)):
        assert not build(ARCHITECTURES, jobs=1, catalogue=catalogue).clean
        done = _run(monkeypatch, catalogue)
        assert done.exit_code == 3
        assert "nothing was compiled for sm_90a" in done.output


def test_tool_errors_are_exit_2(monkeypatch):
    for arch in ("sm_12", "sm_75a", "sm_90f", "sm_\uff19\uff10", "sm_90\n"):
        assert _run(monkeypatch, (CLEAN,), "--arch", arch).exit_code == 2
    assert _run(monkeypatch, (Variant("gone.cu", ("gone",)),)).exit_code == 2
    assert _run(monkeypatch, (CLEAN,), "--jobs", "0").exit_code == 2
    with pytest.raises(ArchitectureUnsupported):
        build(("sm_12",), jobs=1, catalogue=(CLEAN,))
    with pytest.raises(SourceMissing):
        build(ARCHITECTURES, jobs=1, catalogue=(Variant("gone.cu", ("gone",)),))


def test_a_source_that_is_not_utf_8_is_a_tool_error(monkeypatch, tmp_path):
    (tmp_path / "csrc/latin.cu").write_bytes(b"// caf\xe9\n")
    done = _run(monkeypatch, (Variant("latin.cu", ("latin",)),))
    assert done.exit_code == 2
    assert done.stderr == (
        "error: kernel source latin.cu is not UTF-8: byte 0xe9 at 6. Save it as UTF-8\n"
    )


def test_json_says_the_same_as_the_table(monkeypatch):
    variant, _ = FAULTS["spill.cu"]
    done = _run(monkeypatch, (CLEAN, variant), "--json", "--no-cache")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["clean"] is False
    assert [row["kernel"] for row in report["kernels"]] == ["scale", "spill"]
    assert report["kernels"][1]["spill_stores"] > 0
    assert [one["variant"] for one in report["findings"]] == ["spill.cu"]
    assert report["toolchain"]["numerics"]["ftz"] is False
    assert not any(row["cached"] for row in report["kernels"])


def test_progress_follows_the_order_of_the_catalogue():
    seen = []
    variants = (CLEAN, Variant("warned.cu", ("warned",)))
    build(ARCHITECTURES, jobs=1, catalogue=variants, progress=seen.append)
    assert [one.variant for one in seen] == list(variants)


def test_a_process_that_dies_is_an_error_and_not_a_clean_build(monkeypatch):
    class Dead:
        def __init__(self, *_, **__):
            raise building.BrokenProcessPool("died")

    monkeypatch.setattr(building, "ProcessPoolExecutor", Dead)
    with pytest.raises(JitError, match="--jobs 1"):
        build(ARCHITECTURES, jobs=2, catalogue=(CLEAN, CLEAN))
