"""Caches that no kernel takes as they are: attention to a copy in which each sequence is whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._decode import attention_decode
from ._rotary import positions_of, sequence_of


def is_needed(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None) -> bool:
    """Whether GPU kernels refuse the head dimension, or the number of slots of a page."""
    if not q.is_cuda:
        return False
    pages = table is not None and table.shape[1] > 1 and k_cache.shape[1] % 16 != 0
    return pages or q.shape[-1] % 8 != 0 or v_cache.shape[-1] % 8 != 0


def _padded(rows: Tensor) -> Tensor:
    """With zeros up to a head dimension of a multiple of 8."""
    missing = -rows.shape[-1] % 8
    return pad(rows, (0, missing)) if missing else rows


def _codes(rows: Tensor) -> Tensor:
    """Elements of 8 bits as integers, which torch can copy in every way."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None,
    v: Tensor | None,
    starts: Tensor | None,
    seqused_k: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
    scale: float | None,
    cu_seqlens_k: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attention_decode` to a copy of the cache, `(o, lse)`.

    The first `leftpad` slots of each sequence are left out. New keys and values, behind the first
    `starts` slots, then also go into the cache itself.
    """
    caches, head_dim = [_codes(cache) for cache in (k_cache, v_cache)], q.shape[-1]
    if block_table is None and leftpad is not None:
        # Each sequence is a page.
        block_table = torch.arange(k_cache.shape[0], device=q.device, dtype=torch.int32)[:, None]
    if block_table is not None:
        capacity = block_table.shape[1] * k_cache.shape[1]
        slots = torch.arange(capacity, device=q.device).expand(block_table.shape[0], -1)
        if leftpad is not None:
            full = torch.full_like(leftpad, capacity) if seqused_k is None else seqused_k
            seqused_k = (full - leftpad).clamp(min=0)
            slots = slots + leftpad[:, None]
        copies = [_read(cache, *_place(cache, block_table, slots)) for cache in caches]
    else:
        copies = list(caches)
    q, *copies = map(_padded, (q, *copies))
    copies = [
        copy.view(cache.dtype) for copy, cache in zip(copies, (k_cache, v_cache), strict=True)
    ]
    if k is not None:
        k, v = _padded(k), _padded(v)
    o, lse = attention_decode(
        q, *copies, k=k, v=v, seqused_k=seqused_k, cu_seqlens_k=cu_seqlens_k, return_lse=True,
        scale=head_dim**-0.5 if scale is None else scale, **options,
    )  # fmt: skip
    if k is not None:
        new = _New(k, starts, cu_seqlens_k, copies[0].shape[1])
        for cache, copy in zip(caches, copies, strict=True):
            new.store(cache, _codes(copy)[..., : cache.shape[-1]], block_table, leftpad)
    return o[..., : v_cache.shape[-1]], lse


class _New:
    """New tokens: which sequence each belongs to, and its slot there.

    A token that has no slot is replaced by the first one that has, so that writing it changes
    nothing. If none has a slot, what is in the cache is written.
    """

    def __init__(self, k: Tensor, starts: Tensor, cu_seqlens: Tensor | None, capacity: int) -> None:
        slots = positions_of(k, starts, cu_seqlens).flatten()
        if cu_seqlens is None:
            sequences = torch.arange(k.shape[0], device=k.device)
            sequences = sequences[:, None].expand(k.shape[:2]).flatten()
            stored = (slots >= 0) & (slots < capacity)
        else:
            sequences = sequence_of(k.shape[0], cu_seqlens)
            stored = (slots >= 0) & (slots < capacity) & (sequences < starts.shape[0])
        self.empty = slots.numel() == 0
        if not self.empty:
            token = torch.arange(slots.shape[0], device=k.device)
            token = token.where(stored, stored.int().argmax())
            self.any = stored.any()
            self.slots = slots[token].clamp(0, max(capacity - 1, 0))
            self.sequences = sequences[token].clamp(max=starts.shape[0] - 1)

    def store(
        self, cache: Tensor, copy: Tensor, table: Tensor | None, leftpad: Tensor | None
    ) -> None:
        """Copies what the new tokens became back into the cache."""
        if self.empty:
            return
        place = self.sequences, self.slots
        if table is not None:
            page, slot = _place(cache, table[self.sequences], self.slots[:, None])
            place = page[:, 0], slot[:, 0]
        slots = self.slots if leftpad is None else self.slots - leftpad[self.sequences]
        found = copy[self.sequences, slots.clamp(0, max(copy.shape[1] - 1, 0))]
        cache.index_put_(place, found.where(self.any, cache[place]))


def _place(cache: Tensor, table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Page and slot there of the slots of sequences, `[sequences, slots]`."""
    size = cache.shape[1]
    slots = slots.clamp(0, max(table.shape[1] * size - 1, 0))
    pages = table.gather(1, slots // max(size, 1)).clamp(0, max(cache.shape[0] - 1, 0))
    return pages, slots % max(size, 1)


def _read(cache: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    size = cache.shape[1]
    if cache.stride(0) != size * cache.stride(1):
        return cache[pages, slots]
    rows = (pages * size + slots).flatten()
    return cache.flatten(0, 1).index_select(0, rows).unflatten(0, pages.shape)
