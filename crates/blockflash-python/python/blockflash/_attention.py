"""Attention for callers of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _ops
from ._native import Unsupported

if TYPE_CHECKING:
    from .block_mask import BlockMask

_OPS = torch.ops.blockflash
_NEEDED = ("q", "k", "v")
_TENSORS = (*_NEEDED, "sink", "cu_seqlens_q", "cu_seqlens_k", "out")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    top_left: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `softmax(mask(q @ k.T * scale)) @ v` for each head.

    Query `i` stands at key `p = i + Sk - Sq` (the last query at the last key), or at `p = i` with
    `top_left`. A query that attends no key gets the output 0 and the log-sum-exp -inf.

    On a GPU the element types are float16 and bfloat16 and the head dimension is at most 256; one
    that is no multiple of 8 is padded by a copy, and operands that are not aligned to 16 bytes are
    copied. The CPU takes float32, too. The work is queued on torch's current stream.

    Full and causal masks have a gradient. Everything else raises `Unsupported` if a gradient is
    required; so does `out`.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`. Any strides but
            a contiguous last dimension.
        k: Keys, `[B, Sk, Hk, D]` or `[Tk, Hk, D]`; Hq is a multiple of Hk (GQA, MQA).
        v: Values, in the shape of k.
        causal: A query attends the keys `j <= p`.
        window: A query attends the keys `p - window[0] <= j <= p + window[1]`; None is unlimited.
        top_left: Where the diagonal of `causal` and `window` starts if `Sq != Sk`.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sink: float32 `[Hq]`, a logit per head that joins the denominator of the softmax.
        cu_seqlens_q: int32 `[B + 1]` on the device of q: sequence `i` has the queries
            `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`. Rows of no sequence get the output 0.
        cu_seqlens_k: The same for keys and values.
        max_seqlen_q: The longest sequence of queries, needed with `cu_seqlens_q`.
        max_seqlen_k: The longest sequence of keys.
        block_mask: Which blocks of queries and keys are visited at all.
        return_lse: Return `(o, lse)`: lse is float32, `[B, Hq, Sq]` or `[Hq, Tq]`, the natural
            logarithm of the sum of the exponentials of each row's scores.
        out: A tensor for the output, in the shape and element type of q.

    Returns:
        The output in the shape and element type of q, contiguous, or a pair with the lse.

    Raises:
        Unsupported: No kernel takes the call, or it has no gradient.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    for name, tensor in zip(_TENSORS, (q, k, v, sink, cu_seqlens_q, cu_seqlens_k, out)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in _NEEDED):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    left, right = _sides(causal, window)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, but must be positive; None is no softcap")
    max_q, max_k = _longest(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        q, k, v = (t.to(lower) if t.dtype == torch.float32 else t for t in (q, k, v))
    head_dim = q.shape[-1] if q.dim() > 0 else 0
    padding = -head_dim % 8 if kind == "cuda" else 0
    if padding:
        if out is not None:
            raise Unsupported(f"out= for a head dimension of {head_dim}, no multiple of 8")
        scale = head_dim**-0.5 if scale is None else scale
        q, k, v = (pad(t, (0, padding)) for t in (q, k, v))
    inputs = (
        q, k, v, sink, cu_seqlens_q, cu_seqlens_k, max_q, max_k, left, right, top_left, scale,
        softcap or 0.0, 0 if block_mask is None else block_mask._native.id,
    )  # fmt: skip

    needs_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, sink, out)
    )
    if out is not None and needs_gradient:
        raise Unsupported("out= has no gradient: leave it out, or use torch.no_grad()")
    lse = None
    try:
        if out is not None:
            o, lse = out, _ops.empty_lse(q, cu_seqlens_q) if return_lse else None
            _OPS.attention_out(*inputs, out, lse)
        elif needs_gradient or return_lse:
            o, lse = _OPS.attention(*inputs)
        else:
            o = _OPS.attention_forward(*inputs)
    except RuntimeError as error:
        raise _ops.typed(error) from None
    if padding:
        o = o[..., :head_dim]
    return (o, lse) if return_lse else o


def _sides(causal: bool, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """The sides of the window as the operators have them, -1 for unlimited."""
    left, right = window
    for side in (left, right):
        if side is not None and side < 0:
            raise ValueError(f"window is {window}: a side is a number of keys, or None")
    if causal:
        if right:
            raise ValueError(f"window is {window}, but causal attention sees no later keys")
        right = 0
    return -1 if left is None else left, -1 if right is None else right


def _longest(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, int]:
    """The longest sequences, 0 if the batch is not packed."""
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if all(given is None for given in packed):
        return 0, 0
    if any(given is None for given in packed):
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k come together or not at all"
        )
    return max_seqlen_q, max_seqlen_k
