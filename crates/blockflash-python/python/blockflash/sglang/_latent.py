"""Models with multi-head latent attention (MLA): a cache of rows, and layers of two kinds.

SGLang computes most steps with absorbed projections, by a layer of one head of keys whose rows are
in pages. Prompts without a cached prefix have keys and values of every head, in a layer of their
own, and no pages.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from .._attention import attention
from ._names import REPLACES
from ._refusals import ELSE, refuse

DTYPES = ("torch.float16", "torch.bfloat16", "torch.float32")
"""The element types of rows."""


class Latent:
    """The cache of such a model."""

    def __init__(self, runner: Any, trees: bool) -> None:
        if os.environ.get(REPLACES):
            refuse(
                f"{REPLACES} is {os.environ[REPLACES]}, and SGLang gives backends of other names "
                f"steps of MLA that this one has not: unset it for this model, or {ELSE}"
            )
        if str(runner.kv_cache_dtype) not in DTYPES:
            refuse(
                f"kv_cache_dtype is {runner.kv_cache_dtype_str} beside latent rows (MLA): pass "
                "--kv-cache-dtype auto"
            )
        if trees and not runner.is_draft_worker:
            refuse(
                "trees of drafted tokens have no kernel beside latent rows (MLA): pass "
                "--speculative-eagle-topk 1, and not NGRAM"
            )
        pool = runner.token_to_kv_pool
        self.row: int = pool.kv_lora_rank + pool.qk_rope_head_dim

    def has(self, layer: Any) -> bool:
        """Whether the keys of a layer are rows of the cache."""
        return layer.tp_k_head_num == 1 and layer.head_dim == self.row

    def prompts(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, step: Any) -> Tensor:
        """Attention of prompts to themselves, `[tokens, heads * v_head_dim]`."""
        if step.cu_seqlens is None:
            refuse(f"layer {layer.layer_id} has keys that are not in the cache: {ELSE}")
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        o = attention(
            q,
            k,
            v,
            causal=True,
            scale=layer.scaling,
            cu_seqlens_q=step.cu_seqlens,
            cu_seqlens_k=step.cu_seqlens,
            max_seqlen_q=step.queries,
            max_seqlen_k=step.queries,
        )
        return o.flatten(1)
