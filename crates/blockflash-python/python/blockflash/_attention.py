"""Attention for callers of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _autograd, _ops, _stats
from ._native import Unsupported

if TYPE_CHECKING:
    from .block_mask import BlockMask

_OPS = torch.ops.blockflash
_UNLIMITED = (None, None)
# Looked up once: every call asks.
_is_compiling = torch.compiler.is_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = _UNLIMITED,
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

    Gradients of q, k, v, sink and lse are our own, and the same bit for bit in repeats. There is no
    gradient of a gradient, no derivative in forward mode and none with `out`: they raise
    `Unsupported`. The first gradient with a
    block mask on a GPU transposes the mask in new memory, so it comes before a CUDA graph is
    captured. A compiled function that is differentiated does not keep the mask: keep it until then.

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
        block_mask: Which blocks of queries and keys are visited at all; one of `BlockMask.packed`
            with `cu_seqlens_q`. A `token_mask` that it has is applied if the call names none.
        return_lse: Return `(o, lse)`: lse is float32, `[B, Hq, Sq]` or `[Hq, Tq]`, the natural
            logarithm of the sum of the exponentials of each row's scores. Its own gradient takes
            head dimensions up to 248 on a GPU.
        out: A tensor for the output, in the shape and element type of q. It shares no element with
            an operand, but may be between their elements.

    Returns:
        The output in the shape and element type of q, contiguous, or a pair with the lse.

    Raises:
        Unsupported: No kernel takes the call, or it has no gradient.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    q, k, v = lowered(q, k, v)
    # The operators have defaults: what is not passed costs nothing.
    options: dict[str, Any] = {}
    if causal or window != _UNLIMITED:
        options["left"], options["right"] = sides(causal, window)
    if top_left:
        options["top_left"] = True
    if scale is not None:
        options["scale"] = scale
    if softcap is not None:
        if not softcap > 0:
            raise ValueError(f"softcap is {softcap}, but must be positive; None is no softcap")
        options["softcap"] = softcap
    if sink is not None:
        _refuse_types(sink=sink)
        options["sink"] = sink
    if not (cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None):
        options |= _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_mask is not None:
        options["block_mask"] = block_mask.number
        if block_mask.token_mask is not None and not causal and window == _UNLIMITED:
            options["left"], options["right"] = sides(False, block_mask.token_mask)
            options["top_left"] = True

    head_dim = None
    if q.is_cuda and q.shape[-1] % 8:
        if out is not None:
            raise Unsupported(
                f"out= on a GPU for head_dim {q.shape[-1]}, which is no multiple of 8"
            )
        head_dim = q.shape[-1]
        options.setdefault("scale", head_dim**-0.5)
        q, k, v = (pad(t, (0, -head_dim % 8)) for t in (q, k, v))

    lse = None
    try:
        if out is not None:
            if not isinstance(out, Tensor):
                _refuse_types(out=out)
            o, lse = out, _ops.empty_lse(q, cu_seqlens_q) if return_lse else None
            if _autograd.passes(q, k, v, o, sink) and not _autograd.is_seen():
                _autograd.note_write(o)
                _autograd.call_below(_OPS.attention_out.default, q, k, v, o, lse, **options)
            else:
                _ops.into(_OPS, q, k, v, o, lse, **options)
        elif type(q).__name__ == "DTensor":
            from . import _sharding

            o, lse = _sharding.attention(q, k, v, **options)
        elif _autograd.passes(q, k, v, sink):
            if return_lse:
                o, lse = _autograd.call_below(_OPS.attention.default, q, k, v, **options)
            else:
                o = _autograd.call_below(_OPS.attention_forward.default, q, k, v, **options)
        elif not _autograd.is_transformed():
            o, lse = _ops.Differentiable.apply(q, k, v, *(_ops.DEFAULTS | options).values())
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


def lowered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands in the element type of autocast, if it is on."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _refuse_types(q=q, k=k, v=v)
    lower = autocast_dtype(q)
    if lower is not None:
        q, k, v = (t.to(lower) if t.dtype == torch.float32 else t for t in (q, k, v))
    return q, k, v


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """What autocast, if it is on, makes of float32 on the device of q."""
    if _is_compiling() or _is_any_autocast_enabled():
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def _refuse_types(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")


def together(**given: object) -> None:
    """Raises where some of these arguments are given and others are not."""
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{', '.join(given)} come together, but {', '.join(missing)} is None")


def sides(causal: bool, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """The sides of the window as the operators have them, -1 for unlimited."""
    left, right = window
    for side in window:
        if side is not None and side < 0:
            raise ValueError(f"window is {window}: a side is a number of keys, or None")
    if causal:
        if right:
            raise ValueError(f"window is {window}, but causal attention sees no later keys")
        right = 0
    return -1 if left is None else left, -1 if right is None else right


def _packed(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> dict[str, Any]:
    """Options of the operators for a packed batch."""
    together(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    _refuse_types(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_q": max_seqlen_q,
        "max_k": max_seqlen_k,
    }
