"""Attention, and its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._native import Unsupported
from ._block_mask import BlockMask
from ._checks import CODES, Window, as_arrays, expect_qkv, of_scores
from ._codes import OUTPUTS, of_codes
from ._targets import alike, call

Numbers = tuple[tuple[str, Any], ...]
"""Attributes of the targets; they are static."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: Window = (None, None),
    top_left: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: jax.Array | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    block_mask: BlockMask | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention, `softmax(mask(q @ k.T * scale)) @ v` for each head.

    Query `i` stands at key `p = i + Sk - Sq` (the last query at the last key), or at `p = i` with
    `top_left`. A query that attends no key gets the output 0 and the log-sum-exp -inf.

    float16 and bfloat16, and on the CPU float32. A head dimension that is no multiple of 8 is
    padded; on a GPU it is at most 256, and 248 if lse has a gradient. There are gradients of q, k,
    v, sink, bias and lse.

    q, k and v may also be codes of 8 bits, all of the same type: `float8_e4m3fn` on the CPU and on
    Hopper, `float8_e5m2` and `int8` on the CPU. They have no gradient.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or `[Sq, Hq, D]` where k and v have no batch either.
        k: Keys, `[B, Sk, Hk, D]`; Hq is a multiple of Hk (GQA, MQA).
        v: Values, in the shape of k but for their head dimension, which the output has.
        causal: A query attends the keys `j <= p`.
        window: A query attends the keys `p - window[0] <= j <= p + window[1]`; None is unlimited.
        top_left: Where the diagonal of `causal` and `window` starts if `Sq != Sk`.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default. Static, as `softcap` is.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sink: float32 `[Hq]`, a logit per head that joins the denominator of the softmax.
        bias: float16, bfloat16 or float32, broadcast to `[B, Hq, Sq, Sk]`: added to the scores
            behind the scale and the softcap. A pair of -inf is not attended.
        alibi_slopes: float32 `[Hq]` or `[B, Hq]`: `-slope * |i + Sk - Sq - j|` is added to the
            score of query `i` and key `j`. They have no gradient.
        block_mask: Which blocks of queries and keys are visited at all.
        q_scale: Only for q, k and v of 8 bits: what the codes of q are multiplied with, 1 by
            default. float32 `[1]` or `[B, H]`, where an extent may also be 1; H is Hq or Hk.
        k_scale: The same of k, with Hk heads.
        v_scale: The same of v.
        out_dtype: Only for q, k and v of 8 bits: the element type of the output, bfloat16 by
            default, float16, or on the CPU float32.
        return_lse: Return `(o, lse)`: lse is float32 `[B, Hq, Sq]`, the natural logarithm of the
            sum of the exponentials of each row's scores.

    Raises:
        TypeError: An argument is no array, or of another element type.
        ValueError: Shapes or numbers are wrong.
        Unsupported: The gradient of alibi_slopes or of operands of 8 bits is asked for.

    """
    q, k, v = as_arrays(q=q, k=k, v=v)
    has_batch = q.ndim != 3
    if not has_batch:
        q, k, v = q[None], k[None], v[None]
    expect_qkv(q, k, v)
    (batch, seqlen_q, heads_q, head_dim), seqlen_k = q.shape, k.shape[1]
    pairs = (batch, heads_q, seqlen_q, seqlen_k)
    given, numbers = of_scores(
        pairs,
        causal=causal,
        window=window,
        top_left=top_left,
        scale=scale,
        softcap=softcap,
        sink=sink,
        bias=bias,
        alibi_slopes=alibi_slopes,
    )
    blocks = None
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            found = type(block_mask).__name__
            raise TypeError(f"block_mask is {found}, expected blockflash.jax.BlockMask")
        blocks = block_mask.operand(pairs)
        numbers["block_q"], numbers["block_k"] = block_mask.sizes()
    if numbers["scale"] is None:
        numbers["scale"] = head_dim**-0.5
    columns = v.shape[3]
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    scales, numbers["out_dtype"] = of_codes(q, k, scales, out_dtype)
    multiple = 16 if q.dtype in CODES else 8
    q, k, v = (_padded(rows, -rows.shape[3] % multiple) for rows in (q, k, v))
    given = alike({"q": q, "k": k, "v": v} | given | {"blocks": blocks} | scales)
    scales = {name: given.pop(name) for name in scales}
    o, lse = _attend(tuple(numbers.items()), *given.values(), scales)
    o = o[..., :columns]
    if not has_batch:
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o


def block_sparse_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: BlockMask, **options: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention that visits the blocks of a mask only; options as those of `attention`."""
    return attention(q, k, v, block_mask=mask, **options)


def _padded(rows: jax.Array, columns: int) -> jax.Array:
    """The rows with further columns of zeros."""
    return jnp.pad(rows, ((0, 0),) * 3 + ((0, columns),)) if columns else rows


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    numbers: Numbers,
    q: Any,
    k: Any,
    v: Any,
    sink: Any,
    bias: Any,
    alibi: Any,
    blocks: Any,
    scales: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """`(o, lse)`, where head dimensions are multiples of 8 and all arrays vary alike."""
    operands = {"q": q, "k": k, "v": v, "sink": sink, "bias": bias}
    operands |= {"alibi_slopes": alibi, "blocks": blocks} | scales
    batch, seqlen, heads, _ = q.shape
    o_dtype = OUTPUTS[dict(numbers)["out_dtype"] or 2] if q.dtype in CODES else q.dtype
    results = [((*q.shape[:3], v.shape[3]), o_dtype), ((batch, heads, seqlen), jnp.float32)]
    o, lse = call("blockflash_attention", results, operands, dict(numbers))
    return o, lse


def _forward(numbers: Numbers, *primals: Any) -> tuple[Any, Any]:
    *primals, scales = primals
    q, k, v, sink, bias, alibi, blocks = primals
    if q.value.dtype in CODES:
        raise Unsupported(f"attention of {q.value.dtype} has no gradient: differentiate 16 bits")
    if alibi is not None and alibi.perturbed:
        raise Unsupported("alibi_slopes have no gradient: use jax.lax.stop_gradient, or a bias")
    values = [None if primal is None else primal.value for primal in primals]
    o, lse = _attend(numbers, *values, scales)
    # What is known while tracing stays so as a part of the structure.
    of_bias = () if bias is not None and bias.perturbed else None
    return (o, lse), (*values, o, lse, of_bias)


def _backward(numbers: Numbers, kept: Any, grads: Any) -> tuple[Any, ...]:
    *values, o, lse, of_bias = kept
    q, k, v, sink, bias, alibi, blocks = values
    d_o, d_lse = grads
    zero = isinstance(d_o, SymbolicZero)
    d_o = jnp.zeros(o.shape, o.dtype) if zero else d_o
    columns = 0
    if not isinstance(d_lse, SymbolicZero):
        columns = 8
        q, k, v = (_padded(rows, columns) for rows in (q, k, v))
        o, d_o = _with_columns(o, d_o, jnp.where(jnp.isneginf(lse), 0, d_lse), columns)
    operands = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, "sink": sink}
    operands |= {"bias": bias, "alibi_slopes": alibi, "blocks": blocks}
    results = [(rows.shape, rows.dtype) for rows in (q, k, v)]
    attributes = dict(numbers)
    if sink is not None:
        results.append((sink.shape, jnp.float32))
    if of_bias is not None:
        results.append((bias.shape, bias.dtype))
        attributes["bias_gradient"] = True
    found = call("blockflash_attention_backward", results, operands, attributes)
    dq, dk, dv = (rows[..., : rows.shape[3] - columns] for rows in found[:3])
    d_sink = None if sink is None else found[3]
    d_bias = None if of_bias is None else found[-1]
    return dq, dk, dv, d_sink, d_bias, None, None, None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _with_columns(
    o: jax.Array, d_o: jax.Array, d_lse: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Brings in the gradient of lse, by further columns of `(o, d_o)`.

    The gradient of a score is `p * (d_o @ v.T - sum(d_o * o) + d_lse)`, of which the backward pass
    computes all but the last term. In columns where v is 0 and the products of d_o and o add up to
    -d_lse, the sum contains it. Three columns hold its leading bits, the next ones and the last
    ones: all 24 of float32, however few the element type has.
    """
    rest = -jnp.swapaxes(d_lse, 1, 2)
    parts, units = [], []
    for unit in (1.0, 2.0**-10, 2.0**-20):
        part = (rest / unit).astype(o.dtype)
        rest = rest - part.astype(jnp.float32) * unit
        parts.append(part)
        units.append(jnp.full_like(part, unit))
    more = columns - len(parts)
    o, d_o = (
        _padded(jnp.concatenate((rows, jnp.stack(extra, axis=-1)), axis=-1), more)
        for rows, extra in ((o, parts), (d_o, units))
    )
    return o, d_o
