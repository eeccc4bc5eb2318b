"""torch's `scaled_dot_product_attention` on blockflash: for a whole program, or as a function.

`activate_sdpa()` puts blockflash behind torch's own function by torch's registry of flash
attention implementations, so models need no change. torch decides per call which backend runs.
`scaled_dot_product_attention` is called by name, and raises where torch would take another backend.
"""

from __future__ import annotations

import warnings
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import attention as registry

from . import _ops
from ._attention import attention
from ._flash import contiguous_rows
from ._native import DeviceError, Unsupported

_NAMES = {"cuda": "blockflash", "cpu": "blockflash-cpu"}
"""Names in torch's registry, by type of device."""
_FLASH = "_scaled_dot_product_flash_attention"
_FLASH_FOR_CPU = f"{_FLASH}_for_cpu"


def activate_sdpa(device: Literal["cuda", "cpu"] = "cuda") -> Activation:
    """Lets `torch.nn.functional.scaled_dot_product_attention` run on blockflash.

    Forward and backward are ours wherever torch selects its flash backend.
    On `"cuda"` torch selects it for f16 and bf16, head_dim up to 256, no `attn_mask`, and with
    `is_causal` equal lengths of query and key. Any other call runs on another backend of torch, as
    before. On Hopper torch prefers cuDNN to flash, so cuDNN's attention is switched off meanwhile.
    `torch.nn.attention.varlen` stays torch's. On `"cpu"` a call with an `attn_mask` does, too.

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
            op, forward, backward = (
                _FLASH_FOR_CPU,
                *(
                    partial(kernel, torch.library.get_kernel(f"aten::{op}", "CPU"))
                    for op, kernel in (
                        (_FLASH_FOR_CPU, _flash_attention_for_cpu),
                        (f"{_FLASH_FOR_CPU}_backward", _flash_attention_for_cpu_backward),
                    )
                ),
            )
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns of every override; this one is what the caller asked for.
            warnings.filterwarnings("ignore", message=".*only once for all operators")
            for name, kernel in ((op, forward), (f"{op}_backward", backward)):
                self._library.impl(name, kernel, device.upper(), with_keyset=device == "cpu")

    def remove(self) -> None:
        """Gives the operator back to torch, and cuDNN its switch."""
        self._library = None
        if self._cudnn is not None:
            torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


for _device, _name in _NAMES.items():
    registry.register_flash_attention_impl(_name, register_fn=partial(_Override, _device))


def _flash_attention(
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
    _refuse_dropout(dropout_p)
    if return_debug_mask:
        raise Unsupported("return_debug_mask is for dropout, which blockflash does not have")
    o, lse = _forward(query, key, value, is_causal, top_left=False, scale=scale)
    # The state of the random generator is for dropout.
    rng_state = query.new_empty(2, dtype=torch.uint64)
    unused = query.new_empty((), dtype=torch.uint64)
    no_mask = query.new_empty(0)
    return o, lse, None, None, query.size(2), key.size(2), rng_state, unused, no_mask


def _flash_attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `_flash_attention`."""
    _refuse_dropout(dropout_p)
    tensors = (grad_out, query, key, value, out)
    return _backward(tensors, logsumexp, is_causal, top_left=False, scale=scale)


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
) -> tuple[Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, where causal is top-left.

    On the CPU torch selects this operator for masked calls and f64, too, which keep its kernel.
    """
    _refuse_dropout(dropout_p)
    if attn_mask is not None or query.dtype == torch.float64:
        rest = {"attn_mask": attn_mask, "scale": scale}
        return torchs_kernel.call_boxed(keyset, query, key, value, dropout_p, is_causal, **rest)
    return _forward(query, key, value, is_causal, top_left=True, scale=scale)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `_flash_attention_for_cpu`, by the same kernel as its forward."""
    _refuse_dropout(dropout_p)
    tensors = (grad_out, query, key, value, out)
    if attn_mask is not None or query.dtype == torch.float64:
        rest = {"attn_mask": attn_mask, "scale": scale}
        return torchs_kernel.call_boxed(keyset, *tensors, logsumexp, dropout_p, is_causal, **rest)
    return _backward(tensors, logsumexp, is_causal, top_left=True, scale=scale)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise Unsupported("blockflash has no dropout: set dropout_p to 0 or call restore_sdpa()")


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, *, top_left: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of `[B, H, S, D]` tensors without gradients: o in query's strides, and lse."""
    query, key, value = map(contiguous_rows, (query, key, value))
    o = torch.empty_like(query)
    q, k, v, out = (tensor.transpose(1, 2) for tensor in (query, key, value, o))
    lse = _ops.empty_lse(q, None)
    right = 0 if causal else -1
    try:
        with torch.no_grad():  # below autograd, where torch has attached its operator's backward
            torch.ops.blockflash.attention_out.default(
                q, k, v, out, lse, right=right, top_left=top_left, scale=scale
            )
    except RuntimeError as error:
        raise _ops.typed(error) from None
    return o, lse


def _backward(
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    *,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `[B, H, S, D]` tensors from those of the result, q, k, v and the result."""
    grad_o, q, k, v, o = (contiguous_rows(tensor).transpose(1, 2) for tensor in tensors)
    right = 0 if causal else -1
    with torch.no_grad():
        dq, dk, dv, _ = torch.ops.blockflash.attention_backward(
            grad_o, None, q, k, v, o, lse, right=right, top_left=top_left, scale=scale
        )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` that runs here or raises.

    Its meaning is torch's: `is_causal` aligns the first query with the first key, also when the
    lengths differ, and a query without keys gives 0.

    Args:
        query: `[B, Hq, Sq, D]`, or `[Hq, Sq, D]`.
        key: `[B, Hk, Sk, D]`, or `[Hk, Sk, D]`.
        value: as key.
        attn_mask: must be `None`. `blockflash.attention` has windows and block masks.
        dropout_p: must be 0.
        is_causal: query i attends to keys 0 to i.
        scale: factor of the scores, positive; `D ** -0.5` if `None`.
        enable_gqa: allows that Hk is a divisor of Hq.

    Returns:
        The shape and type of query.

    Raises:
        Unsupported: where torch has a backend and blockflash none: a mask, dropout, heads or
            batches that are broadcast, a head_dim of value that differs from query's.
        ValueError: for arguments that torch refuses, too.

    """
    q, k, v = operands(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    o = attention(q, k, v, causal=is_causal, top_left=True, scale=scale).transpose(1, 2)
    return o if query.dim() == 4 else o.squeeze(0)


def operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `blockflash.attention` takes for these arguments of torch, or their error."""
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other")
    if attn_mask is not None:
        raise Unsupported("attn_mask: blockflash.attention has windows and block masks instead")
    if dropout_p != 0.0:
        raise Unsupported("blockflash has no dropout: set dropout_p to 0")
    dims = {query.dim(), key.dim(), value.dim()}
    if dims not in ({3}, {4}):
        raise Unsupported(f"tensors have {sorted(dims)} dimensions; all must have 3 or all 4")
    if query.size(-1) != value.size(-1):
        raise Unsupported(f"head_dim of value is {value.size(-1)}, of query {query.size(-1)}")
    batched = [
        tensor if tensor.dim() == 4 else tensor.unsqueeze(0) for tensor in (query, key, value)
    ]
    (batches, heads) = ({tensor.size(dim) for tensor in batched} for dim in (0, 1))
    if len(batches) > 1:
        raise Unsupported(f"batches of {sorted(batches)} are not broadcast: expand the tensors")
    if key.size(-3) != value.size(-3) or (len(heads) > 1 and not enable_gqa):
        kind = Unsupported if enable_gqa or 1 in heads else ValueError
        sizes = ", ".join(str(tensor.size(1)) for tensor in batched)
        raise kind(
            f"query, key and value have {sizes} heads; key and value must agree, "
            "and fewer of them than of query need enable_gqa=True"
        )
    q, k, v = (contiguous_rows(tensor).transpose(1, 2) for tensor in batched)
    return q, k, v
