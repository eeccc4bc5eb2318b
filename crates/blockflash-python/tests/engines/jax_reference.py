"""Attention by its definition in jax.numpy, and what tests of `blockflash.jax` share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Several devices of the host, among which work can be divided.
jax.config.update("jax_num_cpu_devices", 4)

ON_GPU = jax.default_backend() != "cpu"
DTYPES = (jnp.bfloat16, jnp.float16) if ON_GPU else (jnp.float32, jnp.bfloat16, jnp.float16)
DTYPE = DTYPES[0]
# Relative to the size of the values; the definition itself rounds to float32.
TOLERANCE = {jnp.float32: 1e-5, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}


def draw(seed: int, *shape: int, dtype: Any = None) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jnp.asarray(values).astype(dtype or DTYPE)


def qkv(
    batch: int = 2,
    seqlens: tuple[int, int] = (24, 40),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q = draw(1, batch, seqlens[0], heads[0], head_dim, dtype=dtype)
    k, v = (draw(seed, batch, seqlens[1], heads[1], head_dim, dtype=dtype) for seed in (2, 3))
    return q, k, v


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    top_left: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: jax.Array | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    visible: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`(o, lse)`; `visible` `[B | 1, Hq | 1, Sq, Sk]` restricts pairs, `lengths` `[B]` keys."""
    q, k, v = (rows.astype(jnp.float32) for rows in (q, k, v))
    k, v = (jnp.repeat(rows, q.shape[2] // k.shape[2], axis=2) for rows in (k, v))
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        full = jnp.full(q.shape[0], seqlen_k) if lengths is None else lengths
        ends = full[:, None, None, None]
        query, key = jnp.arange(seqlen_q)[:, None], jnp.arange(seqlen_k)
        if bias is not None:
            scores = scores + bias.astype(jnp.float32)
        position = query + (ends * 0 if top_left else ends - seqlen_q)
        if alibi_slopes is not None:
            distance = jnp.abs(query + ends - seqlen_q - key)
            scores = scores - alibi_slopes[..., None, None] * distance
        left, right = (window[0], 0) if causal else window
        shown = jnp.broadcast_to(key < ends, scores.shape)
        shown = shown if left is None else shown & (key >= position - left)
        shown = shown if right is None else shown & (key <= position + right)
        shown = shown if visible is None else shown & visible
        # No gradient is NaN where a row has no key.
        scores = jnp.where(shown, scores, -jnp.inf)
        logits = scores
        if sink is not None:
            extra = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:3], 1))
            logits = jnp.concatenate((scores, extra), axis=-1)
        any_key = jnp.isfinite(logits).any(-1, keepdims=True)
        safe = jnp.where(any_key, logits, 0)
        lse = jax.nn.logsumexp(safe, axis=-1)
        weights = jnp.where(any_key & shown, jnp.exp(safe[..., :seqlen_k] - lse[..., None]), 0)
        o = jnp.einsum("bhij,bjhd->bihd", weights, v)
    return o, jnp.where(any_key[..., 0], lse, -jnp.inf)


def assert_close(found: Any, expected: Any, dtype: Any = None) -> None:
    found, expected = (np.asarray(value, np.float32) for value in (found, expected))
    assert found.shape == expected.shape
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(np.isinf(found), infinite)
    expected = np.where(infinite, 0, expected)
    size = max(1.0, np.abs(expected).max(initial=0))
    error = np.abs(np.where(infinite, 0, found) - expected).max(initial=0)
    assert error <= TOLERANCE[dtype or DTYPE] * size, f"error {error:.2e}, values to {size:.2e}"
