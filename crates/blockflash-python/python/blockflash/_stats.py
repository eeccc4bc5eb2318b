"""Which calls ran on the kernels and which on what they replace, and whether the latter may."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

import torch

from ._native import Unsupported

_PATHS = {
    "attention": "blockflash.attention",
    "attention_decode": "blockflash.attention_decode",
    "comfyui": "blockflash.comfyui",
    "diffusers": "blockflash.diffusers",
    "flash_attn": "blockflash.flash_attn",
    "index_attention": "blockflash.index_attention",
    "mla_decode": "blockflash.mla_decode",
    "sdpa": "scaled_dot_product_attention",
    "sglang": "blockflash.sglang",
    "transformers": "block_attention",
    "vllm_omni": "blockflash.vllm_omni",
}
"""The paths that are counted, and what warnings call them."""
_REASONS_MAX = 100
_lock = Lock()
# The next number of each is the number of its calls and of its readings: taking it needs no lock.
_kernel = {path: itertools.count().__next__ for path in _PATHS}
_readings = 0
_fallback: dict[str, Counter[str]] = {path: Counter() for path in _PATHS}
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Calls:
    """The calls of one path to the kernels."""

    kernel: int
    """How many blockflash's kernels computed, on a GPU or on the CPU."""
    fallback: dict[str, int]
    """How many ran on what blockflash replaces there, by reason."""


def stats() -> dict[str, Calls]:
    """How many calls blockflash computed, and how many it left to what it replaces.

    Returns:
        The calls since the start of the process or the last `reset_stats()`, by path: `attention`,
        `attention_decode`, `index_attention` and `mla_decode` are all calls of these functions,
        drop-ins included. `comfyui`, `diffusers`, `flash_attn`, `sdpa` (once activated), `sglang`
        (attention to listed slots), `transformers` and `vllm_omni` are the drop-ins, by calls of
        the forward pass. Functions that are called by name have no fallback: they raise. A call
        that is compiled counts once, when it is traced, but in `sdpa` each time that it runs. What
        torch gives to another of its backends never comes to blockflash, and is not counted.

    """
    global _readings
    with _lock:
        kernel = {path: number() - _readings for path, number in _kernel.items()}
        _readings += 1
        return {path: Calls(kernel[path], dict(_fallback[path])) for path in _PATHS}


def reset_stats() -> None:
    """Lets `stats()` start again from zero, and each reason be warned of once more."""
    global _readings
    with _lock:
        _kernel.update({path: itertools.count().__next__ for path in _PATHS})
        _readings = 0
        _warned.clear()
        for reasons in _fallback.values():
            reasons.clear()


def _from_environment() -> bool:
    value = os.environ.get("BLOCKFLASH_STRICT", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"BLOCKFLASH_STRICT is {value!r}, not 0 or 1")
    return value == "1"


_strict = _from_environment()


def strict(on: bool = True) -> Strict:
    """Makes drop-ins raise `Unsupported` where they would fall back, in the whole process.

    The environment variable `BLOCKFLASH_STRICT=1` does so from the start. Code that is compiled
    is decided when it is traced.

    Args:
        on: Whether they raise, or fall back again.

    Returns:
        A context manager whose end restores what was before. Used without `with`, it lasts.

    """
    global _strict
    before, _strict = _strict, on
    return Strict(before)


class Strict:
    """The result of `strict`: a context manager that restores what was before."""

    def __init__(self, before: bool) -> None:
        """Takes what was before."""
        self._before = before

    def __enter__(self) -> Strict:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        strict(self._before)


# torch.compile calls these functions while it traces, and keeps nothing of them in the graph.


@torch.compiler.assume_constant_result
def count(path: str) -> None:
    """Counts a call that the kernels computed."""
    _kernel[path]()


@torch.compiler.assume_constant_result
def fall_back(path: str, reason: str, unless_known: bool = False) -> None:
    """Counts a call that is left to what blockflash replaces, and warns as `warn` does.

    Raises:
        Unsupported: in strict mode.

    """
    _refuse_if_strict(path, reason)
    reasons = _fallback[path]
    with _lock:
        if reason not in reasons and len(reasons) >= _REASONS_MAX:
            reason = "further reasons"  # they may contain sizes, of which there is no end
        reasons[reason] += 1
    warn(path, reason, unless_known)


def leave(path: str, reason: str) -> None:
    """Warns as `warn` does of a backward pass that is left to what blockflash replaces.

    It is counted with its forward pass.

    Raises:
        Unsupported: in strict mode.

    """
    _refuse_if_strict(path, reason)
    warn(path, reason)


def _refuse_if_strict(path: str, reason: str) -> None:
    if _strict:
        raise Unsupported(
            f"{_PATHS[path]}: {reason}; strict mode (BLOCKFLASH_STRICT, blockflash.strict) refuses "
            "to run it without blockflash's kernels"
        )


@torch.compiler.assume_constant_result
def warn(path: str, reason: str, unless_known: bool = False) -> None:
    """Warns once for each path and reason that it runs without the kernels.

    Not at all in strict mode, which raises, and `unless_known` if there was another reason.
    """
    with _lock:
        known = unless_known and any(of == path for of, _ in _warned)
        if _strict or known or (path, reason) in _warned:
            return
        _warned.add((path, reason))
    text = f"{_PATHS[path]}: {reason}; attention runs without blockflash's kernels there"
    warnings.warn(text, stacklevel=3)
