"""Hypothesis for all tests: the same examples every time, no clock. GPU marks skip by name.

Threads of torch that wait do not spin: several processes share the cores here, and who spins takes
the time of whom it waits for, which made tests up to ten times as long. torch reads that when it is
loaded, which is after this file; processes that tests start inherit it, and workers of xdist.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


SET_BY_OTHERS = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
"""Begin names of variables that pytest and compilers set for themselves."""


@pytest.fixture(autouse=True)
def variables_left_alone() -> Iterator[None]:
    """Fails a test that leaves an environment variable changed, and puts it back.

    What one test leaves, another on the same worker takes for the user's, and fails on some
    machines only.
    """
    before = _variables()
    yield
    after = _variables()
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"left in the environment: {', '.join(changed)}; use monkeypatch.setenv"


def _variables() -> dict[str, str]:
    known = os.environ.items()
    return {name: value for name, value in known if not name.startswith(SET_BY_OTHERS)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need more CUDA devices than there are; torch is asked only if one does."""
    needs = {item: _devices_needed(item) for item in items}
    if not any(needs.values()):
        return
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, needed in needs.items():
        if needed > present:
            reason = f"needs {needed} CUDA devices, {present} here"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many faults of the field were caught, and how many of their twins stayed clean."""
    seen: dict[str, set[str]] = {"fault": set(), "twin": set()}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", ()):
            if name == "field":
                identity, side = str(value).rsplit(" ", 1)
                seen[side].add(identity)
    if seen["fault"] or seen["twin"]:
        both = len(seen["fault"] & seen["twin"])
        terminalreporter.write_line(
            f"faults of the field: {len(seen['fault'])} caught, {len(seen['twin'])} twins clean, "
            f"{both} with both"
        )


def _devices_needed(item: pytest.Item) -> int:
    several = item.get_closest_marker("gpus")
    if several is not None:
        return int(several.args[0])
    return 1 if item.get_closest_marker("gpu") is not None else 0
