"""A source becomes a cubin without a GPU: what is in it, what decides it, and what can go wrong."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_kernels import SCALE, SCALE_HEADER, plant_sources

import mok
from mok import compilation, jit, kernel_sources, kernels, toolchain
from mok.jit import (
    ArchitectureUnsupported,
    CompilationFailed,
    CompilerMissing,
    DeviceMissing,
    JitError,
    SourceMissing,
    compile_source,
)

pytest.importorskip("cuda.core")

ARCH = "sm_90a"
MACROS = {"FACTOR": "7.0f"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path, monkeypatch):
    sources = {"parts/scale.cu": SCALE, "parts/scale.cuh": SCALE_HEADER}
    return plant_sources(monkeypatch, tmp_path / "csrc", sources)


def _sections(cubin: bytes) -> dict[str, bytes]:
    """Sections of an ELF file by name."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + size * at) for at in range(count)]
    found = {}
    for name, _, _, _, offset, length in heads:
        start = heads[names][4] + name
        found[cubin[start : cubin.index(b"\0", start)].decode()] = cubin[offset : offset + length]
    return found


def test_a_compiled_source_tells_what_its_kernels_need(root):
    compiled = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)
    (needed,) = compiled.resources
    assert needed.entry == "scale"
    assert (needed.static_shared, needed.barriers) == (256, 1)
    assert 8 <= needed.registers <= 64
    assert (needed.stack, needed.spill_stores, needed.spill_loads) == (0, 0, 0)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert ".text.scale" in _sections(compiled.cubin)
    assert compiled.macros == (("FACTOR", "7.0f"),)
    assert compiled.seconds > 0
    assert not compiled.cached
    assert "\0" not in compiled.log


def test_the_same_source_gives_the_same_cubin(root):
    first, second = (
        compile_source("parts/scale.cu", arch=ARCH, macros=MACROS, cache=False) for _ in range(2)
    )
    assert first.cubin == second.cubin
    assert not second.cached
    assert not jit.cache_folder().exists()


def test_a_second_compilation_comes_from_disk_with_its_log(root):
    first = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)
    second = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)
    assert second.cached
    assert (second.cubin, second.log, second.resources) == (first.cubin, first.log, first.resources)
    assert second.seconds == first.seconds


@pytest.mark.parametrize("changed", ["parts/scale.cu", "parts/scale.cuh"])
def test_a_changed_file_is_compiled_again_and_another_one_is_not(root, changed):
    first = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)
    (root / "other.cuh").write_text("#error unused\n")
    assert compile_source("parts/scale.cu", arch=ARCH, macros=MACROS).cached
    path = root / changed
    path.write_text(path.read_text().replace("3.0f", "5.0f").replace("+ 1", "+ 2"))
    again = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)
    assert not again.cached
    assert again.cubin != first.cubin


def test_other_macros_and_other_architectures_are_other_kernels(root):
    first = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)
    other = compile_source("parts/scale.cu", arch=ARCH, macros={"FACTOR": 9})
    older = compile_source("parts/scale.cu", arch="sm_80", macros=MACROS)
    assert (other.cached, older.cached) == (False, False)
    assert len({first.cubin, other.cubin, older.cubin}) == 3


def test_processes_share_the_cache_and_may_fill_it_at_once(tmp_path):
    code = (
        "from mok.compilation import compile_source as c; import hashlib, mok.kernels as k\n"
        "v = next(v for v in k.CATALOGUE if 'tail' in v.source)\n"
        "r = c(v.source, arch='sm_90a', macros=dict(v.macros))\n"
        "print(hashlib.sha256(r.cubin).hexdigest(), r.cached)"
    )
    top = Path(mok.__file__).parent.parent
    start = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(start, cwd=top, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    last = subprocess.run(start, cwd=top, capture_output=True, text=True, check=True, timeout=120)
    assert {digest for digest, _ in said} == {last.stdout.split()[0]}
    assert last.stdout.split()[1] == "True"
    assert last.stderr == ""


def test_includes_are_relative_to_the_root_and_never_to_the_working_directory(
    root, tmp_path, monkeypatch
):
    for folder in ("parts", "parts/parts"):  # beside the process, and beside the source's name
        decoy = tmp_path / "elsewhere" / folder
        decoy.mkdir(parents=True)
        (decoy / "scale.cuh").write_text("#error the wrong file\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compile_source("parts/scale.cu", arch=ARCH, macros=MACROS).resources
    assert kernel_sources.included_files("parts/scale.cu") == ("parts/scale.cuh",)


def test_includes_of_includes_belong_to_a_kernel_and_may_be_circular(root):
    (root / "deep.cuh").write_text('#pragma once\n#include "parts/scale.cuh"\n#include "gone.cuh"')
    (root / "parts/scale.cuh").write_text('#pragma once\n  # include "deep.cuh"\n')
    assert kernel_sources.included_files("parts/scale.cu") == ("deep.cuh", "parts/scale.cuh")
    before = kernel_sources.source_digest("parts/scale.cu")
    (root / "deep.cuh").write_text("// other\n")
    assert kernel_sources.source_digest("parts/scale.cu") != before


@pytest.mark.parametrize(
    "line",
    [
        "#include <parts/q.cuh>",
        '#include /**/ "parts/q.cuh"',
        '#define QQ "parts/q.cuh"\n#include QQ',
        '/**/ #include "parts/q.cuh"',
        '%:include "parts/q.cuh"',
        '#inc\\\nlude "parts/q.cuh"',
    ],
)
def test_an_include_in_another_form_is_compiled_again_when_its_file_changes(root, line):
    body = 'extern "C" __global__ void odd(int* x) { *x = N; }\n'
    (root / "odd.cu").write_text(f"{line}\n{body}")
    (root / "parts/q.cuh").write_text("#define N 7\n")
    first = compile_source("odd.cu", arch=ARCH)
    assert compile_source("odd.cu", arch=ARCH).cached
    (root / "parts/q.cuh").write_text("#define N 9\n")
    again = compile_source("odd.cu", arch=ARCH)
    assert not again.cached
    assert again.cubin != first.cubin


def test_our_own_sources_say_include_in_the_plain_form_only():
    names = (path.relative_to(kernel_sources.source_root()) for path in _own_sources())
    assert all(kernel_sources._plain(kernel_sources.read_source(str(name))) for name in names)


def _own_sources() -> list[Path]:
    found = [path for path in kernel_sources.source_root().rglob("*.cu*") if path.is_file()]
    assert found
    return found


def test_the_flags_that_decide_bits_reach_the_compiler(root):
    given = compilation._options("parts/scale.cu", ARCH, ()).as_bytes("nvrtc")
    expected = {b"--fmad=true", b"--ftz=false", b"--prec-div=true", b"--prec-sqrt=true"}
    assert expected <= set(given)
    assert b"--std=c++17" in given
    assert not [flag for flag in given if b"fast" in flag]
    with pytest.raises(TypeError):
        toolchain.NUMERICS["ftz"] = True
    assert jit.record()["numerics"] == dict(jit.NUMERICS)
    assert jit.record()["cuda_core"]


def test_line_numbers_for_profilers_do_not_change_the_machine_code(root):
    with_lines = compile_source("parts/scale.cu", arch=ARCH, macros=MACROS, cache=False)
    options = compilation._options("parts/scale.cu", ARCH, tuple(MACROS.items()))
    options.lineinfo = None
    program = toolchain.cuda_module("cuda.core").Program(SCALE, "c++", options)
    without = bytes(program.compile("cubin", logs=io.StringIO()).code)
    assert ".debug_line" in _sections(with_lines.cubin)
    assert ".debug_line" not in _sections(without)
    assert _sections(with_lines.cubin)[".text.scale"] == _sections(without)[".text.scale"]


@pytest.mark.parametrize(
    ("macros", "said"),
    [
        ({"A-B": 1}, "identifier of C"),
        ({"1A": 1}, "identifier of C"),
        ({"FACTOR": 1.5}, "A float goes in as text"),
        ({"FACTOR": None}, "int or a str"),
    ],
)
def test_macros_that_cannot_be_one_are_refused(root, macros, said):
    with pytest.raises(JitError, match=said):
        compile_source("parts/scale.cu", arch=ARCH, macros=macros)


def test_a_flag_of_python_is_zero_or_one():
    assert compilation._checked_macros({"B": True, "A": False}) == (("A", "0"), ("B", "1"))


def test_a_failed_compilation_shows_its_first_errors_with_their_lines(root):
    text = SCALE.replace("held[threadIdx.x] =", "unheld[threadIdx.x] =")
    (root / "parts/scale.cu").write_text(text)
    with pytest.raises(CompilationFailed) as caught:
        compile_source("parts/scale.cu", arch=ARCH)
    message = str(caught.value)
    assert message.startswith("parts/scale.cu does not compile for sm_90a")
    assert 'parts/scale.cu(6): error: identifier "unheld" is undefined' in message
    assert "unheld[threadIdx.x] = in[threadIdx.x];" in message
    assert "2 errors detected" in caught.value.log
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.log) == (message, caught.value.log)


def test_a_missing_header_is_named(root):
    (root / "parts/scale.cuh").unlink()
    with pytest.raises(CompilationFailed, match=r"parts/scale.cuh"):
        compile_source("parts/scale.cu", arch=ARCH)


def test_a_source_without_a_kernel_is_refused(root):
    (root / "empty.cu").write_text("__device__ int nothing;\n")
    with pytest.raises(CompilationFailed, match="names no kernel"):
        compile_source("empty.cu", arch=ARCH)


@pytest.mark.parametrize("name", ["parts/gone.cu", "../outside.cu", "parts"])
def test_an_unknown_source_lists_those_that_exist(root, name):
    (root.parent / "outside.cu").write_text(SCALE)
    with pytest.raises(SourceMissing, match=r"there are: parts/scale\.cu"):
        compile_source(name, arch=ARCH)


@pytest.mark.parametrize("arch", ["sm_42", "90a", "compute_90", "sm_90x", ""])
def test_an_unknown_architecture_lists_those_that_exist(root, arch):
    with pytest.raises(ArchitectureUnsupported, match=r"it knows sm_75, .*sm_90, "):
        compile_source("parts/scale.cu", arch=arch)


def test_a_kernel_for_one_architecture_is_not_compiled_for_another(root, monkeypatch):
    variant = kernels.Variant("parts/scale.cu", ("scale",), needs=("sm_90a",))
    monkeypatch.setattr(kernels, "CATALOGUE", (variant,))
    with pytest.raises(ArchitectureUnsupported, match="of sm_90a and does not exist for sm_80"):
        compile_source("parts/scale.cu", arch="sm_80", macros=MACROS)
    assert compile_source("parts/scale.cu", arch="sm_90a", macros=MACROS).resources


def test_without_cuda_core_the_extra_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(CompilerMissing, match=r'cuda-core.*pip install "mok-verify\[cuda\]"'):
        compile_source("parts/scale.cu", arch=ARCH, macros=MACROS)


class _Nvrtc:
    """Stands for cuda-bindings' module where the library itself is not installed."""

    def nvrtcVersion(self):
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nand a long list of places')


def test_without_the_library_of_nvrtc_the_extra_is_named(root, monkeypatch):
    toolchain.nvrtc_version.cache_clear()
    toolchain.known_architectures.cache_clear()
    monkeypatch.setattr(toolchain, "cuda_module", lambda name: _Nvrtc())
    with pytest.raises(CompilerMissing, match=r'libnvrtc\.so\.13"\)\. Do: pip install "mok-v'):
        compile_source("parts/scale.cu", arch=ARCH)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_loading_says_that_compiling_needs_none(root):
    for ask in (jit.architecture, lambda: jit.load("parts/scale.cu", "scale", macros=MACROS)):
        with pytest.raises(DeviceMissing, match="`mok build` compiles without one"):
            ask()


def test_packages_import_without_the_extra():
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import mok.jit, mok.building, verify, verify.cli, _mok_verify_pytest\n"
        "from mok.environment import describe; print(describe()['kernels'])"
    )
    top = Path(mok.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=top, check=True, timeout=120, capture_output=True
    )
    assert b"not usable here: kernels are compiled" in done.stdout
    assert b'pip install "mok-verify[cuda]"' in done.stdout
