"""Attention to the latent rows that an indexer lists for each token (sparse MLA, DSA).

vLLM's indexer writes into a buffer which tokens of its request each token attends to, as positions
in the request, filled up with -1. These are lists of `index_attention` as they are: pages are found
by the table of the request, so nothing converts positions to slots, as vLLM's own backends do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from .. import Unsupported
from .._arguments import UNLIMITED, scores
from .._index import attend_to_rows
from .._schema import DECODE
from . import SPARSE_MLA_NAME
from ._mla import BlockflashMLABackend, refuse_options
from ._reasons import ELSEWHERE_SPARSE, MORE_SPARSE


@dataclass(kw_only=True)
class BlockflashSparseMLAMetadata(SparseMLACommonMetadata):
    """A step: requests in the order of their tokens, decoded ones first."""


class BlockflashSparseMLAMetadataBuilder(
    SparseMLACommonMetadataBuilder[BlockflashSparseMLAMetadata]
):
    """Makes the metadata of a step."""

    metadata_cls = BlockflashSparseMLAMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Longer ones are prompts, which vLLM attends without lists while these would name all keys.
        self._init_reorder_batch_threshold(8, supports_spec_as_decode=True)

    def _build_req_id_per_token(self, common_attn_metadata: CommonAttentionMetadata) -> Tensor:
        """Not filled: it serves to convert positions to slots."""
        return self.req_id_per_token_buffer[: common_attn_metadata.num_actual_tokens]


class BlockflashSparseMLAImpl(SparseMLACommonImpl[BlockflashSparseMLAMetadata]):
    """Attention of a layer by lists: one call for all tokens that vLLM does not attend itself."""

    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: Tensor | None = None,
        indexer: Any = None,
        index_group_builder: Any = None,
        **of_mla: Any,
    ) -> None:
        refuse_options(
            *(alibi_slopes, sliding_window, logits_soft_cap, attn_type),
            of_mla.get("kv_lora_rank"),
            ELSEWHERE_SPARSE,
        )
        if get_current_vllm_config().attention_config.hisparse_config is not None:
            raise Unsupported(
                "hisparse_config is given: BLOCKFLASH_MLA_SPARSE reads rows where vLLM's table of "
                f"pages has them, on the device: leave it out, or {ELSEWHERE_SPARSE}"
            )
        # Without a buffer vLLM's class makes no group of layers that converts lists to slots.
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **of_mla,
        )
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        if self.topk_indices_buffer is None:
            raise ValueError("topk_indices_buffer is None, and there is no indexer that has one")
        # Lists name what a token sees, so there is no mask.
        self._options = list(DECODE.ordered(scores(False, UNLIMITED, self.scale, None, None)))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: BlockflashSparseMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Attention of the tokens of a step, or of those that are decoded, by their lists.

        Args:
            q: `[tokens, heads, row]`, or its columns of values and those behind them.
            kv_c_and_k_pe_cache: `[pages, slots, row]`, of codes uint8 `[pages, slots, 656]`.
            attn_metadata: The step.
            layer: Not read.

        Returns:
            The output `[tokens, heads, values]`, and None for its log-sum-exp.

        Raises:
            Unsupported: No kernel takes the call.
            ValueError: Shapes or types are wrong.
            DeviceError: The driver failed.

        """
        step = attn_metadata
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens, requests, longest = len(query), step.num_reqs, step.max_query_len
        if tokens <= step.num_decode_tokens:
            requests, longest = step.num_decodes, step.decode_max_query_len
        options = self._options.copy()
        given = {
            "seqused_k": step.seq_lens[:requests],
            "block_table": step.block_table[:requests],
            "cu_seqlens_q": step.query_start_loc[: requests + 1],
            "max_q": max(longest, 1),
        }
        for name, value in given.items():
            options[DECODE.places[name]] = value
        lists = self.topk_indices_buffer[:tokens].unsqueeze(0)
        rows = kv_c_and_k_pe_cache.unsqueeze(-2)
        return attend_to_rows(query, rows, self.kv_lora_rank, lists, options), None


class BlockflashSparseMLABackend(BlockflashMLABackend):
    """Attention to the latent rows that an indexer lists, on GPUs from Ampere on."""

    more_reasons: ClassVar[dict[str, str]] = MORE_SPARSE

    @staticmethod
    def get_name() -> str:
        """Name the backend."""
        return SPARSE_MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[BlockflashSparseMLAImpl]:
        """What computes a layer."""
        return BlockflashSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[BlockflashSparseMLAMetadataBuilder]:
        """What makes the metadata of a step."""
        return BlockflashSparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Lists of each token, always."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the longest query of a step is what the host says."""
        return False
