"""What the functions check while JAX traces them: names, values and limits."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

TYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
"""Element types of queries, keys and values."""

CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
"""Element types of codes."""

Window = tuple[int | None, int | None]


def as_arrays(**given: Any) -> list[Any]:
    """The arguments as arrays of JAX; those that are `None` stay so."""
    return [None if value is None else _array(name, value) for name, value in given.items()]


def _array(name: str, value: Any) -> jax.Array:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name} is {type(value).__name__}, expected an array")
    return jnp.asarray(value)


def expect_shape(name: str, array: jax.Array, expected: tuple[int | None, ...], means: str) -> None:
    """Raises unless the sizes are those that are expected; `None` is any."""
    fits = array.ndim == len(expected) and all(
        size in (None, found) for found, size in zip(array.shape, expected, strict=True)
    )
    if not fits:
        sizes = ", ".join("_" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} has shape {array.shape}, expected {means} = ({sizes})")


def expect_dtype(name: str, array: jax.Array, *allowed: Any) -> None:
    if not any(array.dtype == one for one in allowed):
        names = ", ".join(jnp.dtype(one).name for one in allowed)
        raise TypeError(f"{name} has element type {array.dtype.name}, expected {names}")


def expect_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raises unless these are operands of attention, `[B, S, H, D]`."""
    expect_shape("q", q, (None, None, None, None), "[B, Sq, Hq, D]")
    batch, _, heads_q, head_dim = q.shape
    expect_shape("k", k, (batch, None, None, head_dim), "[B, Sk, Hk, D]")
    expect_shape("v", v, (*k.shape[:3], None), "[B, Sk, Hk, Dv]")
    expect_dtype("q", q, *TYPES, *CODES)
    expect_dtype("k", k, q.dtype)
    expect_dtype("v", v, q.dtype)
    expect_heads(heads_q, k.shape[2])
    for name, size in (("q", head_dim), ("v", v.shape[3])):
        if size < 1:
            raise ValueError(f"the head dimension of {name} is {size}, expected at least 1")


def expect_heads(heads_q: int, heads_k: int) -> None:
    if heads_k < 1 or heads_q < 1 or heads_q % heads_k:
        raise ValueError(
            f"q has {heads_q} heads, expected a positive multiple of the {heads_k} heads of k"
        )


def of_scores(
    pairs: tuple[int, int, int, int],
    *,
    causal: bool = False,
    window: Window = (None, None),
    top_left: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
) -> tuple[dict[str, jax.Array | None], dict[str, Any]]:
    """What happens to the scores of `[B, Hq, Sq, Sk]`, as operands and attributes of a target.

    What is at its default is `None`.
    """
    if len(window) != 2 or any(not _is_side(side) for side in window):
        raise ValueError(f"window is {window}, expected two numbers of keys from 0 on, or None")
    left, right = (None if side is None else int(side) for side in window)
    if causal:
        if right:
            raise ValueError(f"window is {window}, expected no later keys of causal attention")
        right = 0
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap}, expected a positive number, or None")
    attributes = {"left": left, "right": right, "top_left": top_left or None}
    floats = {"scale": scale, "softcap": softcap}
    attributes |= {name: None if n is None else float(n) for name, n in floats.items()}
    sink, bias, alibi_slopes = as_arrays(sink=sink, bias=bias, alibi_slopes=alibi_slopes)
    batch, heads_q = pairs[:2]
    if sink is not None:
        expect_shape("sink", sink, (heads_q,), "[Hq]")
        expect_dtype("sink", sink, jnp.float32)
    if alibi_slopes is not None:
        of_batch = alibi_slopes.ndim == 2
        expected = (batch, heads_q) if of_batch else (heads_q,)
        expect_shape("alibi_slopes", alibi_slopes, expected, "[B, Hq]" if of_batch else "[Hq]")
        expect_dtype("alibi_slopes", alibi_slopes, jnp.float32)
    return {"sink": sink, "bias": _of_pairs(bias, pairs), "alibi_slopes": alibi_slopes}, attributes


def _is_side(side: Any) -> bool:
    return side is None or (isinstance(side, Integral) and 0 <= side < 2**31)


def _of_pairs(bias: jax.Array | None, pairs: tuple[int, int, int, int]) -> jax.Array | None:
    """The bias with the dimensions batch, heads, queries and keys, each of all or 1."""
    if bias is None:
        return None
    expect_dtype("bias", bias, *TYPES)
    if bias.ndim > 4:
        raise ValueError(f"bias has shape {bias.shape}, expected at most 4 dimensions")
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if any(size not in (1, full) for size, full in zip(bias.shape, pairs, strict=True)):
        raise ValueError(f"bias has shape {bias.shape}, expected {pairs}, each or 1")
    return bias


def expect_integers(
    name: str, array: jax.Array | None, expected: tuple[int | None, ...], what: str
) -> None:
    if array is not None:
        expect_shape(name, array, expected, what)
        expect_dtype(name, array, jnp.int32)
