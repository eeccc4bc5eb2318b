"""Attention for callers of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _autograd, _ops, _stats
from ._arguments import UNLIMITED, lowered, refuse_types, scores, sides, together
from ._native import Unsupported
from ._schema import ATTENTION
from .block_mask import BlockMask

_OPS = torch.ops.blockflash


def _padded(x: Tensor, multiple: int) -> Tensor:
    """The tensor with further columns of zeros, to a multiple of this number of columns."""
    columns = (0, -x.shape[-1] % multiple)
    if x.dtype.itemsize == 1:  # torch pads no float8, and a zero is a byte of 0
        return pad(x.view(torch.uint8), columns).view(x.dtype)
    return pad(x, columns)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNLIMITED,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_mask: BlockMask | None = None,
    q_scale: Tensor | float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `softmax(mask(q @ k.T * scale)) @ v` for each head.

    Query `i` stands at key `p = i + Sk - Sq` (the last query at the last key), or at `p = i` with
    `top_left`. A query that attends no key gets the output 0 and the log-sum-exp -inf.

    On a GPU the element types are float16 and bfloat16, on Hopper `float8_e4m3fn`, too, and the
    head dimension is at most 512, 256 in 8 bits; one that is no multiple of 8, of 16 in 8 bits, is
    padded by a copy, and operands that are not aligned to 16 bytes are copied. The CPU takes
    float32, too, and q, k and v of all kinds of 8 bits (`float8_e4m3fn`, `float8_e5m2`, `int8`),
    which `blockflash.quantize` makes: they have no gradient. The work is queued on torch's current
    stream.

    Gradients of q, k, v, sink, bias and lse are our own, and the same bit for bit in repeats. There
    is no gradient of a gradient, no derivative in forward mode and none with `out`: they raise
    `Unsupported`. The first gradient with a block mask on a GPU transposes the mask in new memory,
    so it comes before a CUDA graph is captured. A compiled function that is differentiated does not
    keep the mask: keep it until then.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`. Any strides but
            a contiguous last dimension.
        k: Keys, `[B, Sk, Hk, D]` or `[Tk, Hk, D]`; Hq is a multiple of Hk (GQA, MQA).
        v: Values, in the shape of k but for their head dimension, which the output has.
        causal: A query attends the keys `j <= p`.
        window: A query attends the keys `p - window[0] <= j <= p + window[1]`; None is unlimited.
        top_left: Where the diagonal of `causal` and `window` starts if `Sq != Sk`.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sink: float32 `[Hq]`, a logit per head that joins the denominator of the softmax.
        bias: float16, bfloat16 or float32, broadcast to `[B, Hq, Sq, Sk]` and of any strides: added
            to the scores behind the scale and the softcap. A pair of -inf is not attended. Not with
            `cu_seqlens_q`. Its gradient sums in a fixed order where an element serves several
            pairs.
        alibi_slopes: float32 `[Hq]` or `[B, Hq]`: `-slope * |i + Sk - Sq - j|` is added to the
            score of query `i` and key `j`, with the lengths of each sequence of a packed batch.
            They have no gradient.
        cu_seqlens_q: int32 `[B + 1]` on the device of q: sequence `i` has the queries
            `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`. Rows of no sequence get the output 0.
        cu_seqlens_k: The same for keys and values.
        max_seqlen_q: The longest sequence of queries, needed with `cu_seqlens_q`.
        max_seqlen_k: The longest sequence of keys.
        block_mask: Which blocks of queries and keys are visited at all; one of `BlockMask.packed`
            with `cu_seqlens_q`. A `token_mask` that it has is applied if the call names none.
        q_scale: Only for q, k and v of 8 bits: what the codes of q are multiplied with, 1 by
            default. A number, or float32 `[1]` or `[B, H]`, where an extent may also be 1; H is Hq
            or Hk.
        k_scale: The same of k, with Hk heads.
        v_scale: The same of v.
        out_dtype: The element type of the output, float16, bfloat16 or float32: by default that of
            q, and bfloat16 if q has 8 bits. There is no gradient if it differs from that of q, and
            a GPU kernel only for q of 8 bits, with 16 bits.
        return_lse: Return `(o, lse)`: lse is float32, `[B, Hq, Sq]` or `[Hq, Tq]`, the natural
            logarithm of the sum of the exponentials of each row's scores. Its own gradient takes
            head dimensions up to 248 on a GPU.
        out: A tensor for the output, in its shape and element type. It shares no element with
            an operand, but may be between their elements.

    Returns:
        The output in the shape of q with the head dimension of v, in the element type of q or
        `out_dtype`, contiguous, or a pair with the lse.

    Raises:
        Unsupported: No kernel takes the call, or it has no gradient.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    q, k, v = lowered(q, k, v)
    # The operators have defaults: what is not passed costs nothing.
    options = scores(causal, window, scale, softcap, sink, bias, alibi_slopes)
    if top_left:
        options["top_left"] = True
    if not (cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None):
        options |= _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_mask is not None:
        options["block_mask"] = block_mask.number
        if block_mask.token_mask is not None and not causal and window == UNLIMITED:
            options["left"], options["right"] = sides(False, block_mask.token_mask)
            options["top_left"] = True

    is_coded = q.dtype.itemsize == 1
    if is_coded or not (q_scale is k_scale is v_scale is out_dtype is None):
        from . import _codes

        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        options |= _codes.options(q, k, v, out_dtype, **scales)

    head_dim, multiple = None, 16 if is_coded else 8
    if q.is_cuda and (q.shape[-1] % multiple or v.shape[-1] % multiple):
        if out is not None:
            raise Unsupported(
                f"out= on a GPU for head_dim {q.shape[-1]}, which is no multiple of {multiple}"
            )
        head_dim = v.shape[-1]
        options.setdefault("scale", q.shape[-1] ** -0.5)
        q, k, v = (_padded(t, multiple) for t in (q, k, v))

    lse = None
    try:
        if out is not None:
            if not isinstance(out, Tensor):
                refuse_types(out=out)
            o, lse = out, _ops.empty_lse(q, cu_seqlens_q) if return_lse else None
            if _autograd.passes(q, k, v, o, sink, bias) and not _autograd.is_seen():
                _autograd.note_write(o)
                _autograd.call_below(_OPS.attention_out.default, q, k, v, o, lse, **options)
            else:
                _ops.into(_OPS, q, k, v, o, lse, **options)
        elif type(q).__name__ == "DTensor":
            from . import _sharding

            o, lse = _sharding.attention(q, k, v, **options)
        elif _autograd.passes(q, k, v, sink, bias):
            given = ATTENTION.leading(options)
            if return_lse:
                o, lse = _autograd.call_below(_OPS.attention.default, q, k, v, *given)
            else:
                o = _autograd.call_below(_OPS.attention_forward.default, q, k, v, *given)
        elif not _autograd.is_transformed():
            o, lse = _ops.Differentiable.apply(q, k, v, *ATTENTION.leading(options))
        elif return_lse:
            o, lse = _OPS.attention.default(q, k, v, **options)
        else:
            o = _OPS.attention_forward.default(q, k, v, **options)
    except RuntimeError as error:
        raise _autograd.typed(error) from None
    _stats.count("attention")
    if head_dim is not None:
        o = o[..., :head_dim]
    return (o, lse) if return_lse else o


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`blockflash.attention` that visits only the blocks of a mask.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]`.
        k: Keys, `[B, Sk, Hk, D]` or `[Tk, Hk, D]`.
        v: Values, in the shape of k.
        block_mask: The visited blocks, on the device of q.
        options: The other arguments of `blockflash.attention`.

    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, not {type(block_mask).__name__}")
    return attention(q, k, v, block_mask=block_mask, **options)


def _packed(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> dict[str, Any]:
    """Options of the operators for a packed batch."""
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        together(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    if not (isinstance(cu_seqlens_q, Tensor) and isinstance(cu_seqlens_k, Tensor)):
        refuse_types(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_q": max_seqlen_q,
        "max_k": max_seqlen_k,
    }
