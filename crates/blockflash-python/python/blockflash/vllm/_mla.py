"""Decoding over latent rows (MLA), as vLLM's layers call it. Prompts are vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from .. import Unsupported, _native, _stats
from .._arguments import UNLIMITED, scores
from .._mla import values_of
from .._schema import DECODE
from . import MLA_NAME
from ._backend import PLAIN, other_type
from ._reasons import ELSEWHERE_MLA, ENCODERS, MORE_MLA, explained

_WIDTH = 512
"""Elements of a row that are values."""
CODES = "fp8_ds_mla"
"""A cache of rows of codes, 656 bytes each."""


@dataclass
class BlockflashMLADecodeMetadata(MLACommonDecodeMetadata):
    """The requests of a step that are decoded: their tokens come first."""

    query_start_loc: Tensor
    """int32 `[requests + 1]`."""
    max_query_len: int
    """At least the most tokens of a request, 1 or more."""


@dataclass
class BlockflashMLAMetadata(MLACommonMetadata[BlockflashMLADecodeMetadata]):
    """A step."""


class BlockflashMLAMetadataBuilder(MLACommonMetadataBuilder[BlockflashMLAMetadata]):
    """Makes the metadata of a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 8
    """Requests with at most as many tokens are decoded, others are prompts."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, BlockflashMLAMetadata)

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> BlockflashMLADecodeMetadata:
        return BlockflashMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            # What was promised, not what this step has: a graph keeps it.
            max_query_len=max(max_query_len, 1),
        )


def refuse_options(
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_lora_rank: int | None,
    elsewhere: str,
) -> None:
    """Raises for options of a layer that kernels for latent rows do not have."""
    given = {
        "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
    }
    for name, value in given.items():
        if value:
            raise Unsupported(f"{name} is {value} beside latent rows: {elsewhere}")
    if attn_type != AttentionType.DECODER:
        raise Unsupported(f"attn_type is {attn_type}: {ENCODERS}")
    if kv_lora_rank != _WIDTH:
        raise Unsupported(f"kv_lora_rank is {kv_lora_rank}, expected {_WIDTH}: {elsewhere}")


class BlockflashMLAImpl(MLACommonImpl[BlockflashMLAMetadata]):
    """Decoding of a layer: one call for all requests that are decoded in a step."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
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
        **of_mla: Any,
    ) -> None:
        refuse_options(
            *(alibi_slopes, sliding_window, logits_soft_cap, attn_type),
            of_mla.get("kv_lora_rank"),
            ELSEWHERE_MLA,
        )
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
        self.supports_quant_query_input = False
        self._options = list(DECODE.ordered(scores(True, UNLIMITED, float(scale), None, None)))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: BlockflashMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the tokens that are decoded.

        Args:
            q: `[tokens, heads, row]`, or its columns of values and those behind them.
            kv_c_and_k_pe_cache: `[pages, slots, row]`, of codes uint8 `[pages, slots, 656]`.
            attn_metadata: The step.
            layer: Not read.

        Returns:
            `(o, lse)`: o `[tokens, heads, values]`, lse `[tokens, heads]` of natural logarithms, or
            None where nobody asked for it.

        Raises:
            Unsupported: No kernel takes the call.
            ValueError: Shapes or types are wrong.
            DeviceError: The driver failed.

        """
        step = attn_metadata.decode
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        rows, width = kv_c_and_k_pe_cache.unsqueeze(-2), self.kv_lora_rank
        tokens, heads = query.shape[:2]
        o, lse = query.new_empty(tokens, heads, width), None
        if self.need_to_return_lse_for_decode:
            lse = query.new_empty(heads, tokens, dtype=torch.float32)
        options = self._options.copy()
        given = {
            "seqused_k": step.seq_lens,
            "block_table": step.block_table,
            "cu_seqlens_q": step.query_start_loc,
            "max_q": step.max_query_len,
        }
        for name, value in given.items():
            options[DECODE.places[name]] = value
        allocate = partial(query.new_empty, dtype=torch.uint8)
        rest = (rows, values_of(rows, width), o, lse, allocate, None, None, *options)
        try:
            _native.attention_decode(query, *rest)
        except _native.Misaligned:
            query = query.clone(memory_format=torch.contiguous_format)
            _native.attention_decode(query, *rest)
        _stats.count("mla_decode")
        return o, None if lse is None else lse.transpose(0, 1)


class BlockflashMLABackend(MLACommonBackend):
    """Decoding of latent rows, on GPUs from Ampere on."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*PLAIN.values()]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *PLAIN, CODES]
    more_reasons: ClassVar[dict[str, str]] = MORE_MLA

    @staticmethod
    def get_name() -> str:
        """Name the backend."""
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[BlockflashMLAImpl]:
        """What computes a layer."""
        return BlockflashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[BlockflashMLAMetadataBuilder]:
        """What makes the metadata of a step."""
        return BlockflashMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Kernels read 16 slots of a page at a time."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Rows that have kernels: 512 values, and 64 elements behind them or none."""
        return [_WIDTH, _WIDTH + 64]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """From Ampere on."""
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why these do not go together, or None."""
        if kv_cache_dtype == CODES and (dtype != torch.bfloat16 or head_size != _WIDTH + 64):
            return (
                f"kv_cache_dtype is {CODES} beside queries of {dtype} and rows of {head_size}, "
                f"expected torch.bfloat16 and {_WIDTH + 64}: give --kv-cache-dtype auto"
            )
        return other_type(dtype, kv_cache_dtype)

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        """Why a configuration is refused, and what to do; nothing if it is taken."""
        reasons = super().validate_configuration(*args, **config)
        return [explained(reason, cls.more_reasons) for reason in reasons]
