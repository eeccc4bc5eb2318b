"""The backend, which is imported where vLLM-Omni asks for it."""

from __future__ import annotations

from torch import Tensor
from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

from .. import _stats
from .._native import Unsupported
from ..sdpa import scaled_dot_product_attention


class BlockflashBackend(SDPABackend):
    """What vLLM-Omni's registry knows."""

    supported_platforms = ("cuda",)

    @staticmethod
    def get_name() -> str:
        """The name in logs."""
        return "BLOCKFLASH"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The class that attends."""
        return BlockflashImpl


class BlockflashImpl(SDPAImpl):
    """Attention of one layer."""

    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """Attention of `[B, S, H, D]` tensors, with fewer heads of keys or not.

        `attn_mask` is `[B, Sk]`, true for the keys that are seen, or what SDPA takes.
        """
        mask = None if attn_metadata is None else attn_metadata.attn_mask
        if mask is not None and mask.shape == (key.shape[0], key.shape[1]):
            mask = mask.bool()[:, None, None]
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        options = {"is_causal": self.causal, "scale": self.softmax_scale, "enable_gqa": True}
        try:
            o = scaled_dot_product_attention(q, k, v, mask, **options)
        except (Unsupported, ValueError) as error:
            _stats.fall_back("vllm_omni", str(error))
            return super().forward_cuda(query, key, value, attn_metadata)
        _stats.count("vllm_omni")
        return o.transpose(1, 2)
