"""Attention to listed slots (DSA) in place of FlashMLA's, inside of SGLang's own backend `dsa`.

SGLang's backend of models with an indexer makes what the indexer reads, too, and models and options
ask for it by its name. So it stays, and two of its methods are wrapped by hooks: those that give
queries with lists of slots to FlashMLA. A list names slots of the whole cache, -1 where it has
ended: `index_attention` reads the cache as one sequence, to which all queries belong, without a
mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import Unsupported, _stats
from .._arguments import UNLIMITED, scores
from .._index import attend_to_rows
from .._mla import _BYTES
from .._schema import DECODE

_CLASS = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"


def register() -> None:
    """Wrap the methods of SGLang's class, once hooks are applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CLASS}._forward_flashmla_sparse", rows, HookType.AROUND)
    HookRegistry.register(f"{_CLASS}._forward_flashmla_kv", pages, HookType.AROUND)


def rows(
    original: Callable[..., Tensor],
    backend: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """Attention to rows of 16 bits: the cache, or the rows of a step, one after another.

    Args:
        original: SGLang's method, for what no kernel takes.
        backend: SGLang's backend.
        q_all: `[tokens, heads, row]`.
        kv_cache: `[slots, 1, row]`.
        v_head_dim: Columns of a row that are its value.
        page_table_1: int32 `[tokens, room]`: the slots of each token.
        sm_scale: Factor of the scores.
        topk_length: How many entries of each list are in use. Those behind them are -1, so it is
            not read.
        attn_sink: `[heads]`: logits in the denominator.

    Returns:
        `[tokens, heads, v_head_dim]`.

    """
    try:
        return _attend(q_all, kv_cache, page_table_1, v_head_dim, sm_scale, attn_sink)
    except Unsupported as error:
        _stats.fall_back("sglang", str(error))
    options = {"topk_length": topk_length, "attn_sink": attn_sink}
    return original(backend, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, **options)


def pages(
    original: Callable[..., Tensor],
    backend: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: Tensor,
) -> Tensor:
    """Attention to the cache, also of codes.

    SGLang's method makes codes of a whole cache of 16 bits at each call. Here it is read as it is.

    Args:
        original: SGLang's method, for what no kernel takes.
        backend: SGLang's backend.
        q_all: `[tokens, heads, row]`.
        kv_cache: `[slots, 1, row]`, of codes of 656 bytes.
        v_head_dim: Columns of a row that are its value.
        sm_scale: Factor of the scores.
        layer: Not read.
        metadata: Not read.
        page_table_1: int32 `[tokens, room]`: the slots of each token.

    Returns:
        `[tokens, 1, heads, v_head_dim]`.

    """
    cache = kv_cache
    try:
        if cache.element_size() == 1:
            if cache.shape[-1] != _BYTES:
                raise Unsupported(
                    f"rows of codes have {cache.shape[-1]} bytes, and kernels take {_BYTES}"
                )
            cache = cache.view(torch.uint8)
        return _attend(q_all, cache, page_table_1, v_head_dim, sm_scale, None).unsqueeze(1)
    except Unsupported as error:
        _stats.fall_back("sglang", str(error))
    return original(backend, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)


def _attend(
    q: Tensor, cache: Tensor, slots: Tensor, width: int, scale: float, logits: Tensor | None
) -> Tensor:
    options = scores(False, UNLIMITED, scale, None, None if logits is None else logits.float())
    cache = cache.view(1, -1, 1, cache.shape[-1])
    o = attend_to_rows(q[None], cache, width, slots[None], DECODE.leading(options))
    _stats.count("sglang")
    return o[0]
