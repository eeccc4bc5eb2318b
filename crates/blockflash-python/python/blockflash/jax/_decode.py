"""Attention over a cache of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._checks import (
    CODES,
    TYPES,
    as_arrays,
    expect_dtype,
    expect_heads,
    expect_integers,
    expect_shape,
    of_scores,
)
from ._targets import call


def attention_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    seqused_k: jax.Array | None = None,
    block_table: jax.Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence to the keys and values in a cache.

    Query `i` of `Sq` of a sequence with `length` keys stands at key `length - Sq + i`. Lengths and
    table are read on the device: whatever they hold, nothing outside of the arrays is touched, but
    wrong ones give wrong rows. There is no gradient. `vmap` computes one entry after another.

    On a GPU the element types are float16 and bfloat16, the head dimension is a multiple of 8 up to
    256, and pages have a multiple of 16 slots. The CPU takes every call, also float32. A cache may
    have 8 bits, `float8_e4m3fn`, `float8_e5m2` or `int8`, beside q, k and v of the types above, on
    a GPU with a head dimension of a multiple of 16 and without bias, ALiBi and `tail_mask`.

    Args:
        q: Queries, `[B, Sq, Hq, D]`.
        k_cache: Keys, `[B, capacity, Hk, D]`, or `[pages, page_size, Hk, D]` with `block_table`;
            Hq is a multiple of Hk.
        v_cache: Values, in the shape of the keys but for their head dimension, which the output
            has.
        seqused_k: int32 `[B]`: how many keys each sequence has, new ones included. By default the
            cache is full.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        return_lse: Return `(o, lse)`: lse is float32 `[B, Hq, Sq]`.
        options: What happens to scores, as in `attention` (`causal`, `window`, `scale`, `bias`, …)
            but for `top_left`, where the capacity takes the place of `Sk`; `k_scale` and `v_scale`,
            float32, what the codes of a cache of 8 bits are multiplied with, `[1]`, `[B, Hk]` or
            `[pages, page_size, Hk]`, where each extent may also be 1; `tail_mask`, bool
            `[B | 1, Sq, tail]`, whether a query sees each of the last keys of its sequence;
            `rotary_cos` and `rotary_sin`, `[positions, rotary_dim / 2]`, by which queries and new
            keys are turned, neighbours together with `rotary_interleaved` and halves otherwise;
            `batch_invariant`: the bits of a sequence depend on no other sequence of the batch.

    """
    o, lse = _decode(q, k_cache, v_cache, None, None, seqused_k, block_table, **options)
    return (o, lse) if return_lse else o


def attention_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    seqused_k: jax.Array | None = None,
    block_table: jax.Array | None = None,
    scale_per_token: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Writes new keys and values into the cache and attends as `attention_decode`.

    Under `jit` the caches are changed in place where they are not used afterwards and are donated
    (`donate_argnames`); XLA copies them otherwise.

    Args:
        q: Queries, `[B, Sq, Hq, D]`.
        k: New keys, `[B, Sn, Hk, D]`, which become the last ones of `seqused_k`. Those beyond the
            capacity are dropped.
        v: New values, in the shape of `k` with the head dimension of `v_cache`.
        k_cache: As in `attention_decode`. No page may be in two places of the table.
        v_cache: As in `attention_decode`.
        seqused_k: int32 `[B]`, with the new keys.
        block_table: As in `attention_decode`.
        scale_per_token: Rows that become codes of 8 bits get scales of their own: the greatest
            magnitude of a row becomes the greatest code. `k_scale` and `v_scale` are arrays
            `[pages, page_size, Hk]` then, or `[B, capacity, Hk]`, that change as the caches do.
        return_lse: Return the lse, too.
        options: As in `attention_decode`.

    Returns:
        `(o, k_cache, v_cache)`, or `(o, lse, k_cache, v_cache)`; with `scale_per_token` then also
        `k_scale` and `v_scale`.

    """
    if k is None or v is None:
        raise TypeError("k or v is None, expected an array")
    options["scale_per_token"] = scale_per_token
    o, lse, *caches = _decode(q, k_cache, v_cache, k, v, seqused_k, block_table, **options)
    return (o, lse, *caches) if return_lse else (o, *caches)


def _decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqused_k: Any,
    block_table: Any,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale_per_token: bool = False,
    tail_mask: jax.Array | None = None,
    rotary_cos: jax.Array | None = None,
    rotary_sin: jax.Array | None = None,
    rotary_interleaved: bool = False,
    batch_invariant: bool = False,
    **options: Any,
) -> list[jax.Array]:
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    chosen = {}
    if scale_per_token:
        if k is None or k_scale is None or v_scale is None:
            raise ValueError("scale_per_token needs k and v, and k_scale and v_scale to change")
        chosen, scales = {"k_token_scale": k_scale, "v_token_scale": v_scale}, {}
    # Those that a call changes come behind q.
    operands = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **chosen, "k": k, "v": v}
    operands |= {"seqused_k": seqused_k, "block_table": block_table}
    operands |= {**scales, "tail_mask": tail_mask}
    operands |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    operands = dict(zip(operands, as_arrays(**operands), strict=True))
    q, k_cache, v_cache, k, v = (operands[n] for n in ("q", "k_cache", "v_cache", "k", "v"))
    expect_shape("q", q, (None,) * 4, "[B, Sq, Hq, D]")
    expect_dtype("q", q, *TYPES)
    batch, seqlen_q, heads_q, head_dim = q.shape
    means = "[B, capacity, Hk, D]" if block_table is None else "[pages, page_size, Hk, D]"
    entries = batch if block_table is None else None
    expect_shape("k_cache", k_cache, (entries, None, None, head_dim), means)
    expect_shape("v_cache", v_cache, (*k_cache.shape[:3], None), means)
    expect_dtype("k_cache", k_cache, *TYPES, *CODES)
    expect_dtype("v_cache", v_cache, k_cache.dtype)
    expect_heads(heads_q, k_cache.shape[2])
    if k is not None:
        expect_shape("k", k, (batch, None, *k_cache.shape[2:]), "[B, Sn, Hk, D]")
        expect_shape("v", v, (*k.shape[:3], v_cache.shape[3]), "[B, Sn, Hk, Dv]")
        expect_dtype("k", k, q.dtype)
        expect_dtype("v", v, q.dtype)
    expect_integers("seqused_k", operands["seqused_k"], (batch,), "[B]")
    expect_integers("block_table", operands["block_table"], (batch, None), "[B, max_pages]")
    capacity = k_cache.shape[1]
    if block_table is not None:
        capacity *= operands["block_table"].shape[1]
    if "top_left" in options:
        raise TypeError("top_left is given, but the last query stands at the last key")
    scores, attributes = of_scores((batch, heads_q, seqlen_q, capacity), **options)
    operands |= scores
    if operands["tail_mask"] is not None:
        expect_dtype("tail_mask", operands["tail_mask"], jnp.bool_)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin come together, but one is None")
    attributes |= {"interleaved": rotary_interleaved or None}
    attributes |= {"batch_invariant": batch_invariant or None}
    results = [((batch, seqlen_q, heads_q, v_cache.shape[3]), q.dtype)]
    results.append(((batch, heads_q, seqlen_q), jnp.float32))
    if k is None:
        return call("blockflash_attention_decode", results, operands, attributes)
    changed = [k_cache, v_cache]
    for name in chosen:
        expect_dtype("k_cache", k_cache, *CODES)
        expect_dtype(name.replace("token_", ""), operands[name], jnp.float32)
        means = "[pages, page_size, Hk], or of rows without pages"
        expect_shape(name.replace("token_", ""), operands[name], k_cache.shape[:3], means)
        changed.append(operands[name])
    results += [(array.shape, array.dtype) for array in changed]
    aliases = {1 + place: 2 + place for place in range(len(changed))}
    return call("blockflash_attention_decode", results, operands, attributes, aliases)
