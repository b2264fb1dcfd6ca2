"""The compiled sum gives numpy's bits, and nothing breaks where it cannot be had."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from verify import host_kernel
from verify.host_kernel import VARIANTS, HostKernel, _digest, agrees, kept_kernel
from verify.lanes import BLOCK, DEFAULT_SEED, LaneSum

needs_compiler = pytest.mark.skipif(
    host_kernel._compiler() is None, reason="there is no compiler of C, or CC names none"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = host_kernel._compiler()
    assert compiler is not None
    path = tmp_path_factory.mktemp("kernel") / "host_kernel.so"
    host_kernel._compile(compiler, path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of compiled kernels, and no memory of what was found before."""
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "kept"))
    for function in (host_kernel.host_kernel, kept_kernel):
        function.cache_clear()
    yield tmp_path / "kept" / "host"
    for function in (host_kernel.host_kernel, kept_kernel):
        function.cache_clear()


def numpy_sum(data: np.ndarray, offset: int) -> tuple[int, int, int, int]:
    total = LaneSum(DEFAULT_SEED)
    total.add(data, offset)
    return total.lanes()


@needs_compiler
@settings(max_examples=150, deadline=None)
@drawn(
    st.integers(0, 3 * 4 * BLOCK) | st.integers(0, 80),
    st.integers(0, 20) | st.integers(0, 2**45) | st.integers(4 * BLOCK - 40, 4 * BLOCK + 40),
    st.integers(0, 17),
    st.integers(0, 2**32 - 1),
)
def test_every_variant_gives_the_bits_of_numpy(
    library: Path, size: int, offset: int, start: int, seed: int
) -> None:
    """Of any size, at any offset of the whole, and wherever in memory."""
    data = np.random.default_rng(seed).integers(0, 256, size + start, np.uint8)[start:]
    expected = numpy_sum(data, offset)
    for variant in range(VARIANTS):
        kernel = HostKernel(library, variant)
        assert kernel.sum(data.ctypes.data, size, offset) == expected
        if offset == 0:
            packed = np.frombuffer(kernel.packed(data.ctypes.data, size), "<u8")
            assert tuple(packed.tolist()) == expected


@needs_compiler
def test_the_largest_words_and_keys_do_not_overflow(library: Path) -> None:
    data = np.full(4 * BLOCK * 3 + 5, 255, np.uint8)
    for variant in range(VARIANTS):
        found = HostKernel(library, variant).sum(data.ctypes.data, data.size)
        assert found == numpy_sum(data, 0)


@needs_compiler
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_kernel() is None  # which starts no compiler
    kept_kernel.cache_clear()
    assert host_kernel.host_kernel() is not None
    assert len(list(cache.iterdir())) == 1
    kept_kernel.cache_clear()
    host_kernel.host_kernel.cache_clear()
    monkeypatch.setattr(host_kernel, "_compiler", lambda: pytest.fail("compiled again"))
    found = host_kernel.host_kernel()
    assert found is not None
    assert found is kept_kernel()


@needs_compiler
@pytest.mark.parametrize("fault", ["others", "garbage", "damage", "cut", "other code"])
def test_a_kept_file_that_is_not_right_is_made_anew(cache: Path, fault: str) -> None:
    assert host_kernel.host_kernel() is not None
    (path,) = cache.iterdir()
    right = path.read_bytes()
    if fault == "others":
        path.chmod(0o666)
    else:
        path.unlink()  # a library that is loaded is not written to
        damaged = {
            "garbage": b"no library",
            "damage": right[:4096] + bytes(4096) + right[8192:],  # ends who loads it
            "cut": right[:8192],
            "other code": _wrong(cache),
        }[fault]
        if fault == "other code":  # by its name it is whole
            path = path.with_name(f"{path.stem.partition('-')[0]}-{_digest(damaged)}.so")
        path.write_bytes(damaged)
        path.chmod(0o600)
    kept_kernel.cache_clear()
    host_kernel.host_kernel.cache_clear()
    assert kept_kernel() is None
    found = host_kernel.host_kernel()
    assert found is not None
    assert agrees(found)
    kept_kernel.cache_clear()
    again = kept_kernel()
    assert again is not None
    assert agrees(again)
    assert right in [one.read_bytes() for one in cache.iterdir()]
    assert all(one.stat().st_mode & 0o777 == 0o600 for one in cache.iterdir())


def _wrong(folder: Path) -> bytes:
    """A library of the same functions that computes something else."""
    text = host_kernel.SOURCE.read_text().replace("0x94D049BB133111EBu", "0x94D049BB133111EDu")
    source, made = folder.parent / "wrong.c", folder.parent / "wrong.so"
    source.write_text(text)
    compiler = host_kernel._compiler()
    assert compiler is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_kernel, "SOURCE", source)
        host_kernel._compile(compiler, made)
    assert not agrees(HostKernel(made))
    return made.read_bytes()


@pytest.mark.parametrize("given", ["no-such-compiler-of-c -O2", "gcc '"])
def test_without_a_compiler_digests_are_numpys(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    monkeypatch.setenv("CC", given)
    assert host_kernel.host_kernel() is None
    assert not caplog.records  # nothing is wrong: most machines that only serve have none
    assert not cache.exists()


def test_a_compiler_that_fails_is_said_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken compiler"
    compiler.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"'{compiler}' -m64")
    for _ in range(3):
        assert host_kernel.host_kernel() is None
    (record,) = caplog.records
    assert "digests on the CPU are numpy's" in record.message
    assert "out of luck" in record.message
    assert not cache.exists()


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_a_compilation(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.write_text("a file where the folder would be")
    found = host_kernel.host_kernel()
    assert found is not None
    assert agrees(found)


@needs_compiler
def test_what_cc_compiles_for_one_processor_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine that shares the folder would end in an illegal instruction."""
    compiler = host_kernel._compiler()
    assert compiler is not None
    for option, kept in (("-mtune=native", 0), ("-DSOME=1", 1)):
        monkeypatch.setenv("CC", shlex.join([*compiler, option]))
        kept_kernel.cache_clear()
        host_kernel.host_kernel.cache_clear()
        assert host_kernel.host_kernel() is not None
        assert len(list(cache.glob("*"))) == kept


def test_the_processor_that_cc_names_is_not_the_last_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler, told, made = tmp_path / "cc", tmp_path / "told", tmp_path / "made.so"
    compiler.write_text(f"#!/bin/sh\necho \"$@\" >'{told}'\n")
    compiler.chmod(0o755)
    made.touch()
    monkeypatch.setattr(host_kernel, "_OLDEST", {os.uname().machine: ("-march=oldest",)})
    host_kernel._compile([str(compiler), "-march=native"], made)
    assert [word for word in told.read_text().split() if word.startswith("-march")] == [
        "-march=native",
        "-march=oldest",
    ]


def test_processes_of_the_same_number_do_not_write_to_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share a home folder: the other is in the middle of writing."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path, made, seen = tmp_path / "host" / "kernel", tmp_path / "made.so", []
    made.write_bytes(b"whole")
    replace = os.replace

    def interrupted(source: str, target: Path) -> None:
        seen.append(source)
        if len(seen) == 1:
            host_kernel._keep(made, path)
            assert Path(source).exists()
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    host_kernel._keep(made, path)
    assert len(set(seen)) == 2
    (kept,) = path.parent.iterdir()
    assert kept.name == f"kernel-{_digest(b'whole')}.so"
    assert kept.read_bytes() == b"whole"

    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    host_kernel._keep(made, path)
    assert list(path.parent.iterdir()) == [kept]  # nothing is left over


@needs_compiler
def test_a_library_that_ends_who_loads_it_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As one that a sanitizer is built into."""
    source = tmp_path / "host_kernel.c"
    ending = "\n__attribute__((constructor)) static void end(void) { __builtin_trap(); }\n"
    source.write_text(host_kernel.SOURCE.read_text() + ending)
    monkeypatch.setattr(host_kernel, "SOURCE", source)
    assert host_kernel.host_kernel() is None
    (record,) = caplog.records
    assert "what it made cannot be loaded" in record.message
    assert not cache.exists()
