"""`flash_attn_with_kvcache` and paged sequences of flash-attn, by `blockflash.attention_decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _stats
from ._decode import attention_decode
from ._flash import contiguous_rows
from ._native import Unsupported


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    rotary: tuple[Tensor | None, Tensor | None],
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    table: Tensor | None,
    causal: bool,
    window_size: Sequence[int],
    return_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    **scores: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache` of both versions; `scores` are `softmax_scale` and `softcap`."""
    if (k is None) != (v is None):
        raise ValueError("k and v come together or not at all")
    if cu_seqlens_k_new is not None and (k is None or k.dim() != 3):
        raise ValueError("cu_seqlens_k_new is for packed k and v, [total, heads_k, head_dim]")
    if k is None and (rotary[0] is not None or rotary[1] is not None):
        raise ValueError("rotary_cos and rotary_sin are for calls with k and v only")
    if k is not None:
        if cache_seqlens is None:
            raise ValueError("k and v are appended behind cache_seqlens, which is needed")
        if k.dim() == 3 and cu_seqlens_k_new is None:
            raise ValueError("packed k and v need cu_seqlens_k_new")
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        if rotary[0] is not None:
            _check_positions(q, k, causal, window_size, cu_seqlens_q, cu_seqlens_k_new)
        cache_seqlens = cache_seqlens + new
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_batch_idx is not None:
        if table is not None:
            raise ValueError("cache_batch_idx is for caches without a table of pages")
        # Each sequence of the cache is a page.
        table = cache_batch_idx[:, None]
    return _attend(
        q,
        k_cache,
        v_cache,
        k=None if k is None else contiguous_rows(k),
        v=None if v is None else contiguous_rows(v),
        seqused_k=cache_seqlens,
        block_table=table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        window_size=window_size,
        rotary_cos=rotary[0],
        rotary_sin=rotary[1],
        rotary_interleaved=rotary_interleaved,
        return_lse=return_lse,
        **scores,
    )


def check_pages(
    cache_seqlens: int | Tensor | None, k: Tensor | None, k_cache: Tensor, table: Tensor | None
) -> None:
    """Raises for a sequence that is longer than its pages, as flash-attn 2 does.

    The host waits for the lengths, so not while a graph is captured or the call is traced.
    """
    if table is None or cache_seqlens is None or table.dim() != 2 or k_cache.dim() != 4:
        return
    if not isinstance(cache_seqlens, int):
        traced = torch.compiler.is_compiling() or type(cache_seqlens) is not Tensor
        captured = k_cache.is_cuda and torch.cuda.is_current_stream_capturing()
        if traced or captured or cache_seqlens.numel() == 0:
            return
        cache_seqlens = int(cache_seqlens.max())
    longest = cache_seqlens + (0 if k is None else k.shape[1])
    room = table.shape[1] * k_cache.shape[1]
    if longest > room:
        raise ValueError(
            f"block_table: a sequence has {longest} keys, with new ones, but room for {room}: "
            f"{table.shape[1]} pages of {k_cache.shape[1]}"
        )


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed queries whose keys are in pages, `[pages, page_size, heads_k, head_dim]`."""
    return _attend(
        q,
        k,
        v,
        seqused_k=cu_seqlens_k.diff(),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        **options,
    )


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`blockflash.attention_decode` with flash-attn's conventions."""
    if q.size(-1) != v_cache.size(-1):
        raise Unsupported(
            f"head_dim of v is {v_cache.size(-1)}, of q {q.size(-1)}; they must agree"
        )
    left, right = (None if size == -1 else size for size in map(int, window_size))
    result = attention_decode(
        contiguous_rows(q),
        k_cache,
        v_cache,
        causal=causal,
        window=(left, None if causal else right),
        scale=softmax_scale,
        softcap=softcap if softcap != 0.0 else None,
        **options,
    )
    _stats.count("flash_attn")
    return result


def _check_positions(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> None:
    """flash-attn turns query i by position `cache_seqlens + i`; ours ends with the last key."""
    if cu_seqlens_q is not cu_seqlens_k_new or (cu_seqlens_q is None and q.shape[1] != k.shape[1]):
        raise Unsupported("rotary_cos: as many queries as new keys are needed, in the same order")
    one = cu_seqlens_q is None and q.shape[1] == 1
    if not (one or causal or tuple(window_size) != (-1, -1)):
        raise Unsupported(
            "rotary_cos: without causal and window_size flash-attn turns all queries by one "
            "position, which blockflash does for one query only"
        )
