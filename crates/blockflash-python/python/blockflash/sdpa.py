"""torch's `scaled_dot_product_attention` on blockflash: for a whole program, or as a function.

`activate_sdpa()` puts blockflash behind torch's own function by torch's registry of flash
attention implementations, so models need no change. torch decides per call which backend runs.
`scaled_dot_product_attention` is called by name, and raises where torch would take another backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch.nn import attention as registry

from . import _sdpa_kernels as kernels
from ._native import DeviceError, Unsupported
from ._sdpa_function import operands, scaled_dot_product_attention

__all__ = [
    "Activation",
    "activate_sdpa",
    "operands",
    "restore_sdpa",
    "scaled_dot_product_attention",
]

_NAMES = {"cuda": "blockflash", "cpu": "blockflash-cpu"}
"""Names in torch's registry, by type of device."""
_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_MATH = "_scaled_dot_product_attention_math"
_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "cuda": {
        _FLASH: kernels.flash_attention,
        f"{_FLASH}_backward": kernels.flash_attention_backward,
        _EFFICIENT: kernels.efficient_attention,
        f"{_EFFICIENT}_backward": kernels.efficient_attention_backward,
    },
    "cpu": {
        f"{_FLASH}_for_cpu": kernels.flash_attention_for_cpu,
        f"{_FLASH}_for_cpu_backward": kernels.flash_attention_for_cpu_backward,
    },
}
"""What takes the place of torch's kernels, by type of device and operator."""


def activate_sdpa(device: Literal["cuda", "cpu"] = "cuda") -> Activation:
    """Lets `torch.nn.functional.scaled_dot_product_attention` run on blockflash.

    Forward and backward are ours wherever torch selects its flash backend, and with an `attn_mask`
    (bool or added to scores, which has a gradient then) whichever backend torch selects; in graphs
    of `torch.compile` on a GPU, where torch selects its efficient backend.
    On `"cuda"` torch selects its flash backend for f16 and bf16, one head_dim up to 256, no mask,
    and with `is_causal` equal lengths of query and key; a value with another head_dim is for
    `blockflash.sdpa.scaled_dot_product_attention`. Any other call without a mask runs on another
    backend of torch, as before. What comes to blockflash and has no kernel, such as dropout, runs
    on torch's own kernel, with a warning once for each reason. With
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` it is torch's alone.
    On Hopper torch prefers cuDNN to flash, so cuDNN's attention is switched off meanwhile.
    `torch.nn.attention.varlen` stays torch's. On `"cpu"` torch selects its flash backend for f64,
    too, which stays torch's, with a warning.

    Needs torch 2.10 or newer. One implementation is active at a time: this replaces another one.
    `torch.nn.attention.activate_flash_attention_impl("blockflash")` does the same once this module
    is imported. Before torch 2.11 an activation cannot be undone.

    Args:
        device: `"cuda"` or `"cpu"`, the tensors that are affected.

    Returns:
        A context manager whose end restores what was active before. Used without `with`, the
        activation lasts until `restore_sdpa()`.

    Raises:
        ValueError: for another device.
        DeviceError: for `"cuda"` without a GPU.

    """
    if device not in _NAMES:
        raise ValueError(f'device must be "cuda" or "cpu", not {device!r}')
    before = registry.current_flash_attention_impl()
    registry.activate_flash_attention_impl(_NAMES[device])
    return Activation(before)


def restore_sdpa() -> None:
    """Undoes `activate_sdpa()`, cuDNN's switch included. Does nothing when it is not active.

    Raises:
        Unsupported: with torch 2.10, whose registry cannot take an implementation out.

    """
    if registry.current_flash_attention_impl() not in _NAMES.values():
        return
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise Unsupported("torch 2.10 cannot take an attention implementation out; 2.11 can")
    registry.restore_flash_attention_impl()


class Activation:
    """The result of `activate_sdpa`: a context manager that restores what was active before."""

    def __init__(self, before: str | None) -> None:
        """Takes the name of the implementation that was active before, if any."""
        self._before = before

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        restore_sdpa()
        if self._before is not None:
            registry.activate_flash_attention_impl(self._before)


class _Override:
    """The kernels that one activation put into torch's dispatcher. torch calls `remove`."""

    def __init__(self, device: str) -> None:
        self._cudnn: bool | None = None
        if device == "cuda":
            if not torch.cuda.is_available():
                raise DeviceError('there is no CUDA GPU; for CPU tensors say activate_sdpa("cpu")')
            self._cudnn = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        key = device.upper()
        places = [(name, key, kernel) for name, kernel in _KERNELS[device].items()]
        # torch has this one as a sum of other operators, which autograd looks into.
        places += [(_MATH, at, kernels.attention_math) for at in (key, f"Autograd{key}")]
        overrides = [
            (name, at, partial(kernel, torch.library.get_kernel(f"aten::{name}", at)))
            for name, at, kernel in places
        ]
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns of every override; this one is what the caller asked for.
            warnings.filterwarnings("ignore", message=".*only once for all operators")
            for name, at, kernel in overrides:
                self._library.impl(name, kernel, at, with_keyset=True)

    def remove(self) -> None:
        """Gives the operator back to torch, and cuDNN its switch."""
        self._library = None
        if self._cudnn is not None:
            torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


for _device, _name in _NAMES.items():
    registry.register_flash_attention_impl(_name, register_fn=partial(_Override, _device))
