"""torch's `scaled_dot_product_attention` on blockflash: for a whole program, or as a function.

`activate_sdpa()` puts blockflash behind torch's own function by torch's registry of flash
attention implementations, so models need no change. torch decides per call which backend runs.
`scaled_dot_product_attention` is called by name, and raises where torch would take another backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry

from . import _native, _stats
from ._flash import contiguous_rows
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
_FLASH_FOR_CPU = f"{_FLASH}_for_cpu"


def activate_sdpa(device: Literal["cuda", "cpu"] = "cuda") -> Activation:
    """Lets `torch.nn.functional.scaled_dot_product_attention` run on blockflash.

    Forward and backward are ours wherever torch selects its flash backend.
    On `"cuda"` torch selects it for f16 and bf16, head_dim up to 256, no `attn_mask`, and with
    `is_causal` equal lengths of query and key. Any other call runs on another backend of torch, as
    before. What comes to blockflash and has no kernel, such as dropout, runs on torch's own flash
    backend, with a warning once for each reason.
    On Hopper torch prefers cuDNN to flash, so cuDNN's attention is switched off meanwhile.
    `torch.nn.attention.varlen` stays torch's. On `"cpu"` torch selects its flash backend for an
    `attn_mask` and f64, too, which stay torch's, with a warning.

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
            op, forward, backward = _FLASH, _flash_attention, _flash_attention_backward
        else:
            op, forward = _FLASH_FOR_CPU, _flash_attention_for_cpu
            backward = _flash_attention_for_cpu_backward
        key = device.upper()
        overrides = [
            (name, partial(kernel, torch.library.get_kernel(f"aten::{name}", key)))
            for name, kernel in ((op, forward), (f"{op}_backward", backward))
        ]
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns of every override; this one is what the caller asked for.
            warnings.filterwarnings("ignore", message=".*only once for all operators")
            for name, kernel in overrides:
                self._library.impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """Gives the operator back to torch, and cuDNN its switch."""
        self._library = None
        if self._cudnn is not None:
            torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


for _device, _name in _NAMES.items():
    registry.register_flash_attention_impl(_name, register_fn=partial(_Override, _device))


# Each override has torch's kernel in its place as the first argument, and passes to it what has no
# kernel here. A backward pass decides by the same arguments as its forward pass.


def _flash_attention(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`: tensors `[B, H, S, D]`, causal bottom-right."""
    reason = "return_debug_mask is set" if return_debug_mask else _refusal(query, dropout_p)
    if reason is None:
        try:
            o, lse = _forward(query, key, value, is_causal, top_left=False, scale=scale)
        except (Unsupported, ValueError) as error:
            reason = str(error)
        else:
            _stats.count("sdpa")
            lengths, like = (query.size(2), key.size(2)), _examples(query)
            # The state of the random generator is for dropout.
            unused = like.rng_state.new_empty(2), like.rng_state.new_empty(())
            return o, lse, None, None, *lengths, *unused, torch.empty_like(like.debug_mask)
    _stats.fall_back("sdpa", reason)
    arguments = (query, key, value, dropout_p, is_causal, return_debug_mask)
    return torchs_kernel.call_boxed(keyset, *arguments, scale=scale)


def _flash_attention_backward(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradient of `_flash_attention`."""
    tensors = (grad_out, query, key, value, out)
    if _refusal(query, dropout_p) is None:
        with suppress(Unsupported, ValueError):
            return _backward(tensors, logsumexp, is_causal, top_left=False, scale=scale)
    varlen = (cum_seq_q, cum_seq_k, max_q, max_k)
    rest = (dropout_p, is_causal, philox_seed, philox_offset)
    return torchs_kernel.call_boxed(keyset, *tensors, logsumexp, *varlen, *rest, scale=scale)


def _flash_attention_for_cpu(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, where causal is top-left."""
    reason = _refusal(query, dropout_p, attn_mask)
    if reason is None:
        try:
            results = _forward(query, key, value, is_causal, top_left=True, scale=scale)
        except (Unsupported, ValueError) as error:
            reason = str(error)
        else:
            _stats.count("sdpa")
            return results
    _stats.fall_back("sdpa", reason)
    rest = {"attn_mask": attn_mask, "scale": scale}
    return torchs_kernel.call_boxed(keyset, query, key, value, dropout_p, is_causal, **rest)


def _flash_attention_for_cpu_backward(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradient of `_flash_attention_for_cpu`, by the same kernel as its forward."""
    tensors = (grad_out, query, key, value, out)
    if _refusal(query, dropout_p, attn_mask) is None:
        with suppress(Unsupported, ValueError):
            return _backward(tensors, logsumexp, is_causal, top_left=True, scale=scale)
    rest = {"attn_mask": attn_mask, "scale": scale}
    return torchs_kernel.call_boxed(keyset, *tensors, logsumexp, dropout_p, is_causal, **rest)


def _refusal(query: Tensor, dropout_p: float, attn_mask: Tensor | None = None) -> str | None:
    """Why a call has no kernel here, by arguments that its backward pass has, too."""
    if dropout_p != 0.0:
        return "there is no kernel with dropout"
    if attn_mask is not None:  # on the CPU torch selects this backend for these calls, too
        return "there is no kernel with attn_mask"
    return "there is no kernel for float64" if query.dtype == torch.float64 else None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, *, top_left: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of `[B, H, S, D]` tensors without gradients, laid out as torch's fake kernels say.

    `torch.compile` relies on these strides: of o those of query, of lse another order on the CPU.
    """
    options = _examples(query).lse, causal, top_left, scale
    try:
        o, lse = _native.sdpa(query, key, value, *options)
    except _native.Misaligned:
        o, lse = _with_copies(_native.sdpa, (query, key, value), *options)
        if o.shape == query.shape:
            o = torch.empty_like(query).copy_(o)
    if lse.is_cpu:
        lse = torch.empty_permuted(lse.shape, (0, 2, 1), dtype=lse.dtype).copy_(lse)
    return o, lse


def _backward(
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    *,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of `[B, H, S, D]` tensors from those of the result, q, k, v and the result.

    They are laid out as torch's fake kernels say: on a GPU like the tensors, on the CPU by rows.
    """
    query = tensors[1]
    make = _empty_by_rows if query.is_cpu else torch.empty_like
    read, options = (*tensors, lse.contiguous()), (causal, top_left, scale)
    try:
        return _native.sdpa_backward(*read, make, _examples(query).bytes, *options)
    except _native.Misaligned:
        grads = _with_copies(
            _native.sdpa_backward, read, _empty_by_rows, _examples(query).bytes, *options
        )
        return tuple(make(t).copy_(grad) for t, grad in zip(tensors[1:4], grads, strict=True))


def _with_copies(
    function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], *options: Any
) -> tuple[Tensor, ...]:
    """The results of a native function that cannot take these tensors as they are."""
    rows = [contiguous_rows(tensor) for tensor in tensors]
    try:
        return function(*rows, *options)
    except _native.Misaligned:
        copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in rows)
        return function(*copies, *options)


class _Examples(NamedTuple):
    """Tensors without elements on one device, whose type and device new ones take over.

    To say them each time costs the host more.
    """

    lse: Tensor
    rng_state: Tensor
    bytes: Tensor
    debug_mask: Tensor


_EXAMPLES: dict[tuple[torch.dtype, torch.device], _Examples] = {}


def _examples(query: Tensor) -> _Examples:
    place = query.dtype, query.device
    found = _EXAMPLES.get(place)
    if found is None:
        dtypes = torch.float32, torch.uint64, torch.uint8, query.dtype
        found = _EXAMPLES[place] = _Examples(*(query.new_empty(0, dtype=dtype) for dtype in dtypes))
    return found


def _empty_by_rows(tensor: Tensor) -> Tensor:
    return torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype)
