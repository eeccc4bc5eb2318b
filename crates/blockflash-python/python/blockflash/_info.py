"""What the machine offers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
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
    """Whether there is a GPU that can run the kernels; as text, why there is none.

    It does not initialise CUDA: another process asks the driver, if this one does not use it yet.
    """
    return Usable(_described()["gpu_problem"])


def set_checks(enabled: bool) -> None:
    """Have every later call of the process verify the offsets, lengths and tables it is given.

    Kernels read `cu_seqlens_q` and `cu_seqlens_k`, `seqused_k`, `block_table` and lists of `pages`
    on the GPU, and clamp what is wrong: nothing outside of the tensors is touched, but results are
    wrong without a word, for example where `max_seqlen_q` is smaller than a sequence, or a sequence
    longer than its pages. With checks, calls that have such data copy it to the host first, for
    which the host waits, and raise `ValueError`; while a CUDA graph is captured they raise
    `DeviceError`. This is for debugging. BLOCKFLASH_CHECK=1 in the environment is the same from the
    start.

    Args:
        enabled: Whether calls verify their data.

    """
    _native.set_checks(enabled)


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
    return {"torch": torch_version, **_described()}


def _described() -> dict[str, Any]:
    """What the driver says. Asked by this process, it would refuse CUDA to its forks."""
    torch = sys.modules.get("torch")
    initialised = _native.initialised() or (torch is not None and torch.cuda.is_initialized())
    if initialised or _native.driver_problem() is not None:
        return _native.describe()
    return json.loads(_asked(os.environ.get("CUDA_VISIBLE_DEVICES")))


@functools.cache
def _asked(visible: str | None) -> str:
    """The same, as JSON, by a new process, or by this one where there can be no other."""
    del visible  # What the process inherits.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import json; from blockflash import _native; "
        "print(json.dumps(_native.describe()))"
    )
    try:
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        return json.dumps(json.loads(said))
    except (OSError, subprocess.SubprocessError, ValueError):
        return json.dumps(_native.describe())
