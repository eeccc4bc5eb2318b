"""Queries, keys and values of 8 bits: what attention takes beside them, and how they are made.

| operator | what it is |
|---|---|
| `quantize` | `(codes, scale, mean)`; what is not chosen or subtracted has no elements |

It has no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _autograd, _native
from ._arguments import natural, refuse_types, together
from ._fakes import register_fake
from ._native import Unsupported
from ._ops import CODES, OUT_DTYPES
from ._schema import SCHEMAS

_OPS = torch.ops.blockflash
_PER = ("tensor", "head", "token")


def options(
    q: Tensor, k: Tensor, v: Tensor, out_dtype: torch.dtype | None, **scales: Tensor | float | None
) -> dict[str, Any]:
    """Options of the operators for tensors of 8 bits, or for an output of another type than q."""
    found: dict[str, Any] = {}
    for name, scale in scales.items():
        if isinstance(scale, (int, float)):
            if not 0.0 < scale < math.inf:
                raise ValueError(f"{name} is {scale}, but must be finite and greater than 0")
            scale = q.new_full((1,), scale, dtype=torch.float32)
        if scale is not None:
            refuse_types(**{name: scale})
            found[name] = scale
    if out_dtype is not None and out_dtype != q.dtype:
        if out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype is {out_dtype}, but must be float16, bfloat16 or float32")
        found["out_dtype"] = OUT_DTYPES.index(out_dtype) + 1
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *_tensors(found))):
        raise Unsupported(
            "tensors of 8 bits, their scales and an out_dtype other than that of q have no "
            "gradient: detach them, or use torch.no_grad()"
        )
    return found


def _tensors(found: dict[str, Any]) -> list[Tensor]:
    return [value for value in found.values() if isinstance(value, Tensor)]


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    per: str = "head",
    scale: Tensor | float | None = None,
    subtract_mean: bool = False,
    rotate: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Codes of 8 bits and their scales, as `blockflash.attention` takes them.

    A row loses the mean of its sequence and head, is rotated, both in float32 and only if asked
    for, and is divided by its scale, rounded to nearest with ties to even, and saturated at ±448
    (`float8_e4m3fn`), ±57344 (`float8_e5m2`) or ±127 (`int8`). NaN stays NaN, and is 0 in int8. A
    scale that is chosen makes the greatest magnitude of its elements the greatest code; NaN does
    not count, and the scale of zeros is 1. A GPU needs a D of a multiple of 8 up to 256 and rows at
    multiples of 16 bytes, and sums the mean in float32; all else has the same bits as on the CPU.

    Args:
        x: float16, bfloat16 or float32 `[B, S, H, D]`, or packed `[T, H, D]` with `cu_seqlens`. Any
            strides but a contiguous last dimension.
        dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2` or `torch.int8`.
        per: What has a scale of its own: `"tensor"`, all of it, `[1]`; `"head"`, each sequence and
            head, `[B, H]`; `"token"`, each token and head, `[B, S, H]` or `[T, H]`, for caches.
        scale: The scales, in place of those that `per` chooses: a number, or float32 `[1]` or
            `[B, H]`, where an extent may also be 1.
        subtract_mean: Subtract the mean over the tokens of each sequence and head. Attention to
            keys without it has the same output, if scores are only scaled and masked, and an lse
            that is lower by `scale * q @ mean`.
        rotate: Multiply rows with the orthonormal Hadamard matrix, which spreads outliers and
            leaves the products of rows that are both rotated as they are. D is a power of 2.
        cu_seqlens: int32 `[B + 1]`: where the tokens of each sequence start.
        max_seqlen: The most tokens of a sequence, needed with `cu_seqlens`.

    Returns:
        `(codes, scale)`, or `(codes, scale, mean)` with `subtract_mean`; mean is float32
        `[B, H, D]`.

    Raises:
        Unsupported: A GPU has no kernel for D.
        ValueError: Shapes, types, devices or numbers are wrong.

    """
    refuse_types(x=x)
    together(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    if per not in _PER:
        raise ValueError(f"per is {per!r}, but must be 'tensor', 'head' or 'token'")
    if dtype not in CODES:
        raise ValueError(f"dtype is {dtype}, but must be float8_e4m3fn, float8_e5m2 or int8")
    if isinstance(scale, (int, float)):
        if not 0.0 < scale < math.inf:
            raise ValueError(f"scale is {scale}, but must be finite and greater than 0")
        scale = x.new_full((1,), scale, dtype=torch.float32)
    most = 0 if max_seqlen is None else natural("max_seqlen", max_seqlen)
    given = (CODES.index(dtype), _PER.index(per), subtract_mean, rotate, most)
    try:
        codes, chosen, mean = _OPS.quantize.default(x, scale, cu_seqlens, *given)
    except RuntimeError as error:
        raise _autograd.typed(error) from None
    scale = chosen if scale is None else scale
    return (codes, scale, mean) if subtract_mean else (codes, scale)


def _results(
    x: Tensor,
    scale: Tensor | None,
    cu_seqlens: Tensor | None,
    code: int,
    per: int,
    subtract_mean: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.dim() != (4 if cu_seqlens is None else 3):
        shape = "[B, S, H, D]" if cu_seqlens is None else "[T, H, D]"
        raise ValueError(f"x has shape {list(x.shape)}, not {shape}")
    heads, batch = x.shape[-2], x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = ((1,), (batch, heads), x.shape[:-1])
    # Dense results are written as a whole; packed rows of no sequence are 0.
    new = x.new_empty if cu_seqlens is None else x.new_zeros
    codes = new(x.shape, dtype=CODES[code])
    of_scale = shapes[per] if scale is None else (0,)
    of_mean = (batch, heads, x.shape[-1]) if subtract_mean else (0,)
    return codes, *(new(shape, dtype=torch.float32) for shape in (of_scale, of_mean))


def _quantize(
    x: Tensor,
    scale: Tensor | None,
    cu_seqlens: Tensor | None,
    code: int,
    per: int,
    subtract_mean: bool,
    rotate: bool,
    max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor]:
    results = _results(x, scale, cu_seqlens, code, per, subtract_mean)
    codes, chosen, mean = results
    written = (None if scale is not None else chosen, mean if subtract_mean else None)
    _native.quantize(x, codes, scale, *written, cu_seqlens, max_seqlen, _PER[per], rotate)
    return results


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    library.define("quantize" + SCHEMAS["quantize"])
    for key in ("CPU", "CUDA"):
        library.impl("quantize", _quantize, key)
    register_fake("blockflash::quantize", _results, lib=library)
    _autograd.register_gradient(library, "quantize")
    return library


_LIBRARY = _register()
