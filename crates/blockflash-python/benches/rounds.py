"""What the benchmarks share: measuring in rounds, and records that are saved one by one."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import blockflash


def interleaved(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Takes each measure once per round; the order rotates, and every other round is reversed."""
    names, found = list(measures), {name: [] for name in measures}
    for i in range(rounds):
        start = i // 2 % len(names)
        order = names[start:] + names[:start]
        for name in order if i % 2 == 0 else reversed(order):
            found[name].append(measures[name]())
    return found


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


class Records:
    """A file of JSON lines, written as the results come, or nothing without a path."""

    def __init__(self, path: Path | None, device: str) -> None:
        """Starts the file with what was measured where."""
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        self.environment = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "blockflash": blockflash.info()["version"],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        }
        self.add(**self.environment)
        print(", ".join(f"{name} {value}" for name, value in self.environment.items()), "\n")

    def add(self, **record: Any) -> None:
        """Appends a record."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def goal(self, goal: str, reached: bool) -> None:
        """Says whether a goal is reached, and appends that."""
        self.add(goal=goal, reached=reached)
        print(f"{'pass' if reached else 'FAIL'}: {goal}", flush=True)
