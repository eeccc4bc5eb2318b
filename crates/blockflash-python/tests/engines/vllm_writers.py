"""What vLLM's operators do that write keys and values into pages, in torch on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GREATEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
KINDS = _KINDS | {"fp8_e5m2": torch.float8_e5m2}


def codes(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """The codes of numbers by their scale, with saturation."""
    x = (x.float() / scale).clamp(-GREATEST[kind], GREATEST[kind])
    return (x.round() if kind == torch.int8 else x).to(kind)


def _put(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    places = (slots // cache.shape[1], slots % cache.shape[1])
    if rows.dtype.itemsize == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[places] = rows


def per_tensor(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """`reshape_and_cache_flash`: the slots decide how many rows of keys there are."""
    kept = slot_mapping >= 0
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = new[: len(slot_mapping)][kept]
        if kv_cache_dtype in KINDS:
            new = codes(new, scale.reshape(-1, 1), KINDS[kv_cache_dtype])
        _put(cache, new, slot_mapping[kept])


def per_token_head(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    kv_quant_mode: Any,
) -> None:
    """`triton_reshape_and_cache_flash_per_token_head_quant`: as many slots as rows."""
    assert len(key) == len(value) == len(slot_mapping) and kv_quant_mode.is_per_token_head
    kept = slot_mapping >= 0
    keys, values = (key, key_cache, k_scale_cache), (value, value_cache, v_scale_cache)
    for new, cache, scales in (keys, values):
        scale = new[kept].float().abs().amax(-1) / GREATEST[cache.dtype]
        scale = scale.clamp(min=1e-6)
        _put(scales, scale, slot_mapping[kept])
        _put(cache, codes(new[kept], scale[..., None], cache.dtype), slot_mapping[kept])
