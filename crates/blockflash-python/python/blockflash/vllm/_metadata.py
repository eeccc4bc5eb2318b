"""What all layers of a step share: made once a step, from tensors that stay on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from .. import Unsupported
from ._reasons import ELSEWHERE, PREFIX, RSWA


@dataclass
class BlockflashMetadata(AttentionMetadata):
    """A step: requests in the order of their queries, of which those for padding have none."""

    num_actual_tokens: int
    """Tokens without those of padding."""
    max_query_len: int
    """At least the most tokens of a request, 1 or more."""
    max_seq_len: int
    """At least the most keys of a request. Other parts of vLLM read it; the backend does not."""
    query_start_loc: Tensor
    """int32 `[requests + 1]`."""
    seq_lens: Tensor
    """int32 `[requests]`, with the tokens of this step."""
    block_table: Tensor
    """int32 `[requests, pages]`."""
    slot_mapping: Tensor
    """int64 `[tokens]`, -1 for tokens that are not cached."""
    causal: bool
    """Whether a token sees no later ones."""


class BlockflashMetadataBuilder(AttentionMetadataBuilder[BlockflashMetadata]):
    """Makes the metadata of a step. It launches nothing and waits for nothing."""

    # Lengths, offsets and tables are read at each replay, but a graph keeps the longest query that
    # it was captured with. vLLM captures batches of equal lengths with theirs, and mixed batches
    # with any.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BlockflashMetadata:
        """Metadata of a step.

        Raises:
            Unsupported: The step needs what the kernels do not have.

        """
        common = common_attn_metadata
        if common_prefix_len:
            raise Unsupported(
                f"common_prefix_len is {common_prefix_len}: BLOCKFLASH has no cascade attention; "
                "turn it off (disable_cascade_attn)"
            )
        if isinstance(common.causal, Tensor):
            raise Unsupported(
                "causal is a tensor, with a value for each request, and BLOCKFLASH takes one for "
                f"the step: {ELSEWHERE}"
            )
        if common.mm_req_doc_ranges:
            raise Unsupported(f"mm_req_doc_ranges is given: {PREFIX}")
        if common.rswa_prefix_lens is not None:
            raise Unsupported(f"rswa_prefix_lens is given: {RSWA}")
        return BlockflashMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=max(common.max_query_len, 1),
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: BlockflashMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> BlockflashMetadata:
        """The same step with the pages of another group of layers."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)
