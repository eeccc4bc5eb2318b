"""What the backend offers, in the terms in which vLLM asks for it."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from vllm import __version__ as _vllm
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from . import NAME
from ._cache import CODES, PER_TOKEN_HEAD, with_scales
from ._impl import BlockflashImpl
from ._metadata import BlockflashMetadataBuilder
from ._reasons import explained

if not _vllm.startswith(("0.32.", "0.33.")):
    logging.getLogger(__name__).warning(
        "BLOCKFLASH is tested with vLLM 0.32 and 0.33; this is %s, and its interface may differ",
        _vllm,
    )

PLAIN = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def other_type(dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    """Why a cache of 16 bits does not go with queries of a type, or None."""
    if PLAIN.get(kv_cache_dtype or "", dtype) == dtype:
        return None
    return (
        f"kv_cache_dtype is {kv_cache_dtype} beside queries of {dtype}: give --kv-cache-dtype auto"
    )


class BlockflashBackend(AttentionBackend):
    """Attention of decoders over pages, on GPUs from Ampere on.

    Prompts, chunks of prompts and single tokens of a step are one call. Keys and values are written
    by vLLM's own operators before it.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [*PLAIN.values()]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *PLAIN, *CODES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Name the backend."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[BlockflashImpl]:
        """What computes a layer."""
        return BlockflashImpl

    @staticmethod
    def get_builder_cls() -> type[BlockflashMetadataBuilder]:
        """What makes the metadata of a step."""
        return BlockflashMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Kernels read 16 slots of a page at a time."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for the scales of each head and slot."""
        return with_scales(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Slots before heads (NHD) and heads before slots (HND); kernels take any strides."""
        layouts = KVCacheLayout
        return (layouts.LBNHC, layouts.LBHNC, layouts.BLNHC, layouts.BLHNC)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Kernels read rows in units of 16 bytes."""
        return 0 < head_size <= 512 and head_size % 8 == 0

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """From Ampere on."""
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        """A logit of each head in the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A window of each layer."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Steps whose tokens see all keys of their request, or a window to both sides."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales of each head, beside one of the layer."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the longest query of a step is what the host says."""
        return False

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
        other = other_type(dtype, kv_cache_dtype)
        if other is not None:
            return other
        if kv_cache_dtype in CODES and (head_size % 16 or head_size > 256):
            return (
                f"head_size is {head_size} with kv_cache_dtype {kv_cache_dtype}, and beside 8 bits "
                "it takes multiples of 16 up to 256: give --kv-cache-dtype auto"
            )
        if kv_cache_dtype in PER_TOKEN_HEAD and device_capability < DeviceCapability(8, 9):
            return (
                f"kv_cache_dtype is {kv_cache_dtype}, which vLLM's operator writes from compute "
                "capability 8.9 on: give --kv-cache-dtype fp8"
            )
        return None

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        """Why a configuration is refused, and what to do; nothing if it is taken."""
        return [explained(reason) for reason in super().validate_configuration(*args, **config)]
