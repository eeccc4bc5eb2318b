"""The pages of a layer as vLLM hands them over, and as the kernels take them.

vLLM's cache of a layer is `[pages, heads, slots, content]` in one of several orders in memory. The
content of a head and slot is its key, then its value. With scales of its own (`*_per_token_head`)
there are 16 bytes more: the scale of the key and of the value, f32, and 8 bytes that nobody uses,
so that rows begin at multiples of 16 bytes, in which kernels read them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

CODES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
"""The caches of 8 bits, by their `--kv-cache-dtype`, and their elements."""

PER_TOKEN_HEAD = ("fp8_per_token_head", "int8_per_token_head")
_SCALES = 16
"""The bytes of the scales of a head and slot, and of what follows."""


def with_scales(spec: Any) -> Any:
    """A spec of vLLM's for a cache, with room for scales of each head and slot if it has them."""
    own = spec.kv_quant_mode.is_per_token_head
    if not own or spec.state_content_bytes is not None:
        return spec
    content = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    return replace(spec, state_content_bytes=content + _SCALES)


class Pages(NamedTuple):
    """Views of the cache of a layer."""

    whole: Tensor
    """What they are views of."""
    given: tuple[Tensor, Tensor] | None
    """The scales of the layer, if the cache has them."""
    k: Tensor
    """Keys, `[pages, slots, heads, head_size]`."""
    v: Tensor
    """Values."""
    k_stored: Tensor
    """Keys in the type in which vLLM allocates them, for what writes them."""
    v_stored: Tensor
    """Values."""
    k_scale: Tensor | None
    """f32, as `attention_decode` takes it."""
    v_scale: Tensor | None
    """The same of values."""


def pages(
    whole: Tensor, head_size: int, kv_cache_dtype: str, given: tuple[Tensor, Tensor] | None
) -> Pages:
    """Views of a cache; `given` are the scales of keys and values, of one element or of one a head.

    Raises:
        ValueError: The shape is not that of a cache with this head size and type.

    """
    own = kv_cache_dtype in PER_TOKEN_HEAD
    rows = whole.transpose(1, 2) if whole.dim() == 4 else whole
    end = whole.shape[-1] - (_SCALES if own else 0)
    if whole.dim() != 4 or end <= head_size:
        raise ValueError(
            f"kv_cache has shape {list(whole.shape)}, expected [pages, heads, slots, content] with "
            f"more than {whole.shape[-1] - end + head_size} elements of content"
        )
    k_stored, v_stored = rows[..., :head_size], rows[..., head_size:end]
    codes = CODES.get(kv_cache_dtype)
    k, v = (t if codes is None else t.view(codes) for t in (k_stored, v_stored))
    k_scale = v_scale = None
    if own:
        scales = rows[..., end : end + 8].view(torch.float32)
        k_scale, v_scale = scales[..., 0], scales[..., 1]
        k_stored, v_stored = k, v
    elif given is not None:
        k_scale, v_scale = (t.view(1) if t.numel() == 1 else t.view(1, -1) for t in given)
    return Pages(whole, given, k, v, k_stored, v_stored, k_scale, v_scale)
