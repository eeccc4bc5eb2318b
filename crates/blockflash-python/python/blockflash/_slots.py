"""Caches without a slot, in place of which kernels get one of sequences without keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_slots(k_cache: Tensor, options: dict[str, Any]) -> bool:
    given = (k_cache, options["block_table"], options["page_lists"])
    return all(t.numel() for t in given if t is not None)


def without_keys(k_cache: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A cache for kernels that need a slot, of sequences without keys, and the options with it."""
    table, slots = options["block_table"], 16
    batch = k_cache.shape[0] if table is None else table.shape[0]
    none = torch.zeros(batch, dtype=torch.int32, device=k_cache.device)
    empty = k_cache.new_zeros(batch if table is None else 1, slots, *k_cache.shape[2:])
    # Neither positions nor lists nor scales matter.
    unread = dict.fromkeys(
        ("rotary_cos", "rotary_sin", "page_lists", "page_counts", "k_scale", "v_scale")
    )
    table = None if table is None else none[:, None]
    return empty, options | {"seqused_k": none, "block_table": table, **unread}


def empty_values(empty: Tensor, v_cache: Tensor) -> Tensor:
    """The values of such a cache; of latent rows, they are the first columns of the keys."""
    width = v_cache.shape[-1]
    if width <= empty.shape[-1]:
        return empty[..., :width]
    return v_cache.new_zeros((*empty.shape[:-1], width))
