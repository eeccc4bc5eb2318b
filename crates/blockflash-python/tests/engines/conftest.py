"""Tests of adapters to engines, each beside the engine itself, unpacked or installed.

`cargo xtask clients --only engines` runs them. Elsewhere those of an engine that cannot be imported
are skipped, and the summary says so, or they fail where the environment variable
BLOCKFLASH_REQUIRE_ENGINE names it.
"""

from __future__ import annotations

import pytest
from engine import ABSENT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        if ABSENT in str(report.longrepr):
            line = f"SKIPPED all of {report.nodeid}: {ABSENT}"
            terminalreporter.write_line(line, yellow=True, bold=True)
