"""The compiled sum gives numpy's bits, and nothing breaks where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from verify import host_kernel
from verify.host_kernel import VARIANTS, HostKernel, agrees, kept_kernel
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
@pytest.mark.parametrize("fault", ["others", "garbage", "other code"])
def test_a_kept_file_that_is_not_right_is_made_anew(cache: Path, fault: str) -> None:
    assert host_kernel.host_kernel() is not None
    (path,) = cache.iterdir()
    right = path.read_bytes()
    if fault == "others":
        path.chmod(0o666)
    else:
        path.unlink()  # a library that is loaded is not written to
        path.write_bytes(b"no library" if fault == "garbage" else _wrong(cache))
        path.chmod(0o600)
    kept_kernel.cache_clear()
    host_kernel.host_kernel.cache_clear()
    assert kept_kernel() is None
    found = host_kernel.host_kernel()
    assert found is not None
    assert agrees(found)
    assert len(path.read_bytes()) == len(right)
    assert path.stat().st_mode & 0o777 == 0o600


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
