"""Attention of a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from .. import Unsupported, _native, _stats
from .._arguments import scores
from .._schema import DECODE
from ._cache import CODES, PER_TOKEN_HEAD, Pages, pages
from ._metadata import BlockflashMetadata
from ._reasons import ENCODERS

_SEQUSED_K, _BLOCK_TABLE, _CU_SEQLENS_Q, _K_SCALE, _V_SCALE, _MAX_Q = (
    DECODE.places[name]
    for name in (
        "seqused_k", "block_table", "cu_seqlens_q", "k_scale", "v_scale", "max_q",
    )
)  # fmt: skip


class BlockflashImpl(AttentionImpl[BlockflashMetadata]):
    """Attention of a layer: one call for all requests of a step."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise Unsupported(f"attn_type is {attn_type}: {ENCODERS}")
        if alibi_slopes is not None and kv_cache_dtype in CODES:
            raise Unsupported(
                f"ALiBi with kv_cache_dtype {kv_cache_dtype}: give --kv-cache-dtype auto"
            )
        if alibi_slopes is not None and head_size > 256:
            raise Unsupported(f"ALiBi with head_size {head_size}: kernels with it take up to 256")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks have shape {list(sinks.shape)}, expected [{num_heads}]")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.sinks = sinks
        self._has_scales = kv_cache_dtype in CODES and kv_cache_dtype not in PER_TOKEN_HEAD
        self._pages: Pages | None = None
        self.alibi_slopes = None
        if alibi_slopes is not None:
            # vLLM makes layers with the device of the model as the default one.
            made = {"dtype": torch.float32, "device": torch.get_default_device()}
            self.alibi_slopes = torch.tensor(alibi_slopes, **made)
        self._logits: Tensor | None = None
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take over the sinks, whose values are there only now."""
        if self.sinks is not None:
            new = self.sinks.detach().float()
            if self._logits is not None and self._logits.device == new.device:
                self._logits.copy_(new)  # Graphs keep the address.
                return
            self._logits = new
        # vLLM's window counts the token itself.
        left = None if self.sliding_window is None else self.sliding_window - 1
        self._options = {
            causal: list(
                DECODE.ordered(
                    scores(
                        *(causal, (left, None if causal else left), self.scale),
                        *(self.logits_soft_cap or None, self._logits, None, self.alibi_slopes),
                    )
                )
            )
            for causal in (True, False)
        }

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: BlockflashMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all tokens of a step to the pages, which have their keys and values already.

        Args:
            layer: What has `_k_scale` and `_v_scale`, f32 of one element or of one a head.
            query: `[tokens, heads, head_size]`; tokens of padding are at the end.
            key: Not read.
            value: Not read.
            kv_cache: `[pages, heads, slots, content]`.
            attn_metadata: The step; None while vLLM measures memory: the output is 0 then.
            output: `[tokens, heads, head_size of values]`, which is written, but for the rows of
                padding.
            output_scale: None: the output is not quantised.
            output_block_scale: None.

        Raises:
            Unsupported: No kernel takes the call.
            ValueError: Shapes or types are wrong.
            DeviceError: The driver failed.

        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported(
                "output_scale is given: BLOCKFLASH does not quantise its output; turn "
                "fuse_attn_quant off in the compilation config"
            )
        if attn_metadata is None:
            return output.zero_()
        cache = self._pages_of(layer, kv_cache)
        options = self._options[attn_metadata.causal].copy()
        options[_SEQUSED_K] = attn_metadata.seq_lens
        options[_BLOCK_TABLE] = attn_metadata.block_table
        options[_CU_SEQLENS_Q] = attn_metadata.query_start_loc
        options[_K_SCALE], options[_V_SCALE] = cache.k_scale, cache.v_scale
        options[_MAX_Q] = attn_metadata.max_query_len
        allocate = partial(query.new_empty, dtype=torch.uint8)
        call = _native.attention_decode
        try:
            call(query, cache.k, cache.v, output, None, allocate, None, None, *options)
        except _native.Misaligned:
            query = query.clone(memory_format=torch.contiguous_format)
            call(query, cache.k, cache.v, output, None, allocate, None, None, *options)
        _stats.count("attention_decode")
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values `[tokens, heads, head_size]` into their slots, by vLLM's operators.

        A slot of -1 is skipped. Those after the last slot of `slot_mapping` are padding. (An append
        of `attention_decode` finds slots by the length, and could not skip any.)
        """
        cache = self._pages_of(layer, kv_cache)
        if self.kv_cache_dtype in PER_TOKEN_HEAD:
            from vllm.v1.attention.ops import triton_reshape_and_cache_flash as triton

            tokens = slot_mapping.shape[0]
            triton.triton_reshape_and_cache_flash_per_token_head_quant(
                key[:tokens], value[:tokens], cache.k, cache.v, cache.k_scale, cache.v_scale,
                slot_mapping, kv_quant_mode=self.kv_quant_mode,
            )  # fmt: skip
        else:
            torch.ops._C_cache_ops.reshape_and_cache_flash(
                key, value, cache.k_stored, cache.v_stored, slot_mapping, self.kv_cache_dtype,
                layer._k_scale, layer._v_scale,
            )  # fmt: skip

    def _pages_of(self, layer: Any, kv_cache: Tensor) -> Pages:
        """Views of the cache: those of the last call, unless vLLM has replaced what they view."""
        cache = self._pages
        given = (layer._k_scale, layer._v_scale) if self._has_scales else None
        if cache is not None and cache.whole is kv_cache:
            same = given is None or (
                cache.given is not None
                and given[0] is cache.given[0]
                and given[1] is cache.given[1]
            )
            if same:
                return cache
        cache = self._pages = pages(kv_cache, self.head_size, self.kv_cache_dtype, given)
        return cache
