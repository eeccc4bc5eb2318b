"""Tests marked `gpu` need a GPU.

Without one they are skipped and counted in the summary, or they fail where the environment variable
BLOCKFLASH_REQUIRE_GPU is 1.
"""

from __future__ import annotations

import os

import pytest
import torch

_REQUIRED = os.environ.get("BLOCKFLASH_REQUIRE_GPU") == "1"
_NO_GPU = "there is no GPU"


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
