"""Prompts over caches of 8 bits, which a GPU computes with the kernels for few queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close, reference
from torch import Tensor

from blockflash import attention_decode, quantize

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
WHERE = [
    ("cpu", torch.bfloat16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
]
HEADS, HEADS_K, PAGE = 8, 2, 64
QUERIES, KEYS = 1100, 1300
"""From 1024 queries of 8 heads on, caches of 16 bits have kernels for many queries on Hopper."""


def wide(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale[..., None]


@pytest.mark.parametrize("how", ["full", "lengths", "pages", "packed"])
@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("code", CODES)
def test_prompts(code: torch.dtype, device: str, dtype: torch.dtype, how: str) -> None:
    dim = 64 if device == "cpu" else 128
    pages = -(-KEYS // PAGE)
    capacity = KEYS if how == "full" else pages * PAGE
    q = torch.randn(1, QUERIES, HEADS, dim, dtype=dtype)
    (k, k_scale), (v, v_scale) = (
        quantize(torch.randn(1, capacity, HEADS_K, dim), code, per="token") for _ in range(2)
    )
    rows = (wide(*rows)[:, :KEYS] for rows in ((k, k_scale), (v, v_scale)))
    expected, expected_lse = reference(q, *rows, causal=True)
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    cache = [k, v]
    if how != "full":
        options["seqused_k"] = torch.tensor([KEYS], dtype=torch.int32)
    if how in ("pages", "packed"):
        order = torch.randperm(pages)
        options["block_table"] = order.argsort()[None].int()
        cache = [
            rows.view(torch.uint8).unflatten(1, (pages, PAGE))[0, order].view(code)
            for rows in cache
        ]
        for name in ("k_scale", "v_scale"):
            options[name] = options[name].unflatten(1, (pages, PAGE))[0, order]
    if how == "packed":
        q = q[0]
        options["cu_seqlens_q"] = torch.tensor([0, QUERIES], dtype=torch.int32)
    options = {name: option.to(device) for name, option in options.items()}
    if how == "packed":
        options["max_seqlen_q"] = QUERIES
    o, lse = attention_decode(
        q.to(device), *(rows.to(device) for rows in cache), causal=True, return_lse=True, **options
    )
    assert o.dtype == dtype
    if how == "packed":
        o, lse = o[None], lse[None]
    assert_close(o.cpu(), expected, dtype)
    assert_close(lse.cpu(), expected_lse, torch.float32 if device == "cpu" else dtype)
