"""Tests marked `gpu` need a GPU, those marked `gpu(n)` as many.

Without one they are skipped and counted in the summary, or they fail where the environment variable
BLOCKFLASH_REQUIRE_GPU is 1. Where there are some, but too few, tests are skipped and counted. The
fixture `route` runs a test with both registrations of the operators: native kernels, and kernels in
Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from blockflash import _attention, _ops

_REQUIRED = os.environ.get("BLOCKFLASH_REQUIRE_GPU") == "1"
_NO_GPU, _TOO_FEW = "there is no GPU", "there are too few GPUs"
# Where a native kernel is not possible, `blockflash` is this, too.
_LIBRARY = _ops.register("blockflash_library", native=False)

# Tensors are small here: further threads of torch would only spin while they wait for each other.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(n=1): needs a GPU, or n GPUs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker and not torch.cuda.is_available():
        if _REQUIRED:
            pytest.fail(f"{_NO_GPU}, and BLOCKFLASH_REQUIRE_GPU is 1", pytrace=False)
        pytest.skip(_NO_GPU)
    if marker and torch.cuda.device_count() < max(marker.args, default=1):
        pytest.skip(f"{_TOO_FEW}: {marker.args[0]} are needed")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    for why in (_NO_GPU, _TOO_FEW):
        count = sum(why in str(report.longrepr) for report in skipped)
        if count:
            line = f"SKIPPED {count} GPU tests: {why}"
            terminalreporter.write_line(line, yellow=True, bold=True)


@pytest.fixture(params=["native", "library"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have `blockflash.attention` call the operators of this registration."""
    if request.param == "library":
        monkeypatch.setattr(_attention, "_OPS", torch.ops.blockflash_library)
    yield request.param
