"""What codes of 8 bits need besides themselves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._checks import CODES, as_arrays, expect_dtype

OUTPUTS = {1: jnp.float16, 2: jnp.bfloat16, 3: jnp.float32}
"""Element types of an output beside codes, by their numbers in the targets."""


def of_codes(
    q: jax.Array, k: jax.Array, scales: dict[str, Any], out_dtype: Any
) -> tuple[dict[str, jax.Array | None], int | None]:
    """The scales of operands `[B, S, H, D]`, and the number of the output's type if it is given."""
    given = dict(zip(scales, as_arrays(**scales), strict=True))
    if q.dtype not in CODES:
        named = [name for name, scale in given.items() if scale is not None]
        named += ["out_dtype"] if out_dtype is not None else []
        if named:
            raise ValueError(f"{named[0]} is given, but q is {q.dtype}, expected codes of 8 bits")
        return given, None
    batch = q.shape[0]
    for name, scale in given.items():
        if scale is None:
            continue
        expect_dtype(name, scale, jnp.float32)
        heads = {1, k.shape[2]} | ({q.shape[2]} if name == "q_scale" else set())
        fits = scale.ndim == 2 and scale.shape[0] in (1, batch) and scale.shape[1] in heads
        if scale.shape != (1,) and not fits:
            raise ValueError(
                f"{name} has shape {scale.shape}, expected (1,) or [B, H] of 1 or {batch} batch "
                f"entries and {' or '.join(map(str, sorted(heads)))} heads"
            )
    if out_dtype is None:
        return given, None
    for number, dtype in OUTPUTS.items():
        if jnp.dtype(out_dtype) == dtype:
            return given, number
    raise TypeError(f"out_dtype is {out_dtype}, expected float16, bfloat16 or float32")
