"""What pyproject.toml cannot say: the CUDA sources at the root are installed inside `mok`.

A list of found packages and one mapped folder do not go together there.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["verify*", "mok*"]), "mok.csrc"],
    package_dir={"mok.csrc": "csrc"},
)
