"""The package is lazy, and no submodule hides a public name."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mok


def test_importing_mok_does_not_import_torch():
    code = "import sys, mok; dir(mok); assert 'torch' not in sys.modules; mok.MoKConfig()"
    root = Path(mok.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


def test_public_names_exist_and_no_module_is_called_like_one():
    for name in mok.__all__:
        assert getattr(mok, name) is not None
    modules = {module.name for module in pkgutil.iter_modules(mok.__path__)}
    assert modules & set(mok.__all__) == {"functional"}
    assert dir(mok) == sorted(mok.__all__)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="MoE, MoKConfig, functional, moe"):
        _ = mok.mixture
