"""Tests marked `gpu` need a GPU.

Without one they are skipped and counted in the summary, or they fail where the environment variable
BLOCKFLASH_REQUIRE_GPU is 1. The fixture `route` runs a test with both registrations of the
operators: native kernels, and kernels in Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from blockflash import _attention, _ops

_REQUIRED = os.environ.get("BLOCKFLASH_REQUIRE_GPU") == "1"
_NO_GPU = "there is no GPU"
# Where a native kernel is not possible, `blockflash` is this, too.
_LIBRARY = _ops.register("blockflash_library", native=False)

# Tensors are small here: further threads of torch would only spin while they wait for each other.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if _REQUIRED:
            pytest.fail(f"{_NO_GPU}, and BLOCKFLASH_REQUIRE_GPU is 1", pytrace=False)
        pytest.skip(_NO_GPU)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(_NO_GPU in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"SKIPPED {count} GPU tests: {_NO_GPU}", yellow=True, bold=True)


@pytest.fixture(params=["native", "library"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have `blockflash.attention` call the operators of this registration."""
    if request.param == "library":
        monkeypatch.setattr(_attention, "_OPS", torch.ops.blockflash_library)
    yield request.param
