"""`qv` of FlashAttention 3: queries of two parts over latent rows, whose parts are k and v."""

from __future__ import annotations

import torch
from torch import Tensor

from ._flash import InvalidCall
from ._native import Unsupported


@torch.compiler.disable(reason="whether k_cache and v_cache are parts of one row is read off them")
def joined(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, qv: Tensor, **others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Whole queries and whole rows: scores are `qv @ v.T + q @ k.T`.

    The first elements of a row are v, and those behind them k, so both caches are views of it.
    `others` are arguments that must be None.
    """
    for name, value in others.items():
        if value is not None:
            raise Unsupported(
                f"{name} is given beside qv: blockflash.mla_append writes new rows, and queries "
                "come turned by their positions"
            )
    for (name, tensor), (of, other) in (
        (("qv", qv), ("q", q)),
        (("v_cache", v_cache), ("k_cache", k_cache)),
    ):
        if tensor.shape[:-1] != other.shape[:-1] or tensor.dtype != other.dtype:
            raise InvalidCall(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {other.dtype} "
                f"{[*other.shape[:-1], tensor.shape[-1]]} as {of}"
            )
    if (q.shape[-1], qv.shape[-1]) != (k_cache.shape[-1], v_cache.shape[-1]):
        raise InvalidCall(
            f"q and qv have {q.shape[-1]} and {qv.shape[-1]} elements, expected "
            f"{k_cache.shape[-1]} and {v_cache.shape[-1]} as k_cache and v_cache"
        )
    width = v_cache.shape[-1]
    if not (
        torch._C._is_alias_of(k_cache, v_cache)
        and k_cache.storage_offset() == v_cache.storage_offset() + width
        and k_cache.stride() == v_cache.stride()
        and v_cache.stride(-1) == 1
    ):
        raise Unsupported(
            "qv: blockflash takes k_cache and v_cache only as views of one row, v_cache = "
            f"rows[..., :{width}] and k_cache = rows[..., {width}:]"
        )
    whole = (*v_cache.shape[:-1], width + k_cache.shape[-1])
    rows = v_cache.as_strided(whole, v_cache.stride(), v_cache.storage_offset())
    return torch.cat([qv, q], -1), rows
