"""What the machine offers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

from . import _native


@dataclass(frozen=True)
class Usable:
    """Whether a GPU can run the kernels: true or false, and as text the reason."""

    problem: str | None
    """Why there is no usable GPU, or `None`."""

    def __bool__(self) -> bool:
        return self.problem is None

    def __str__(self) -> str:
        return self.problem or "there is a usable GPU"


def usable() -> Usable:
    """Whether there is a GPU that can run the kernels; as text, why there is none."""
    return Usable(_native.gpu_problem())


def info() -> dict[str, Any]:
    """Versions and GPUs of this machine, for bug reports.

    Returns:
        `version` of this package, `torch` (its version or `None`), `driver` (the newest CUDA that
        the driver supports, or `None`), `gpus` (a list with `device`, `name`,
        `compute_capability`, `memory_bytes` and the number of `kernels` for each), and
        `gpu_problem` (why no GPU is usable, or `None`).

    """
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = None
    return {"torch": torch_version, **_native.describe()}
