"""Attention over caches of 8 bits, which is that to what codes times their scales are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blockflash
from blockflash import attention_decode, flash_attn_interface

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
GREATEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
BATCH, HEADS, HEADS_K, DIM, PAGE, PAGES = 3, 4, 2, 32, 16, 9
LENGTHS = torch.tensor([30, 0, 41], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 8], [0, 1, 5], [4, 6, 3]], dtype=torch.int32)
CAPACITY = PAGE * TABLE.shape[1]


def coded(rows: Tensor, code: torch.dtype) -> Tensor:
    """Rounded to nearest even and saturated; NaN of integers is 0."""
    if code == torch.int8:
        return rows.nan_to_num(0.0, 1e9, -1e9).round().clamp(-127, 127).to(code)
    return rows.clamp(-GREATEST[code], GREATEST[code]).to(code)


class Cache:
    """Keys and values of 8 bits, contiguous or in pages, with scales of some shape."""

    def __init__(self, code: torch.dtype, paged: bool, scale: str) -> None:
        pages, size = (PAGES, PAGE) if paged else (BATCH, CAPACITY)
        shape = {
            "none": None, "one": (1,), "heads": (BATCH, HEADS_K), "sequences": (BATCH, 1),
            "rows": (pages, size, HEADS_K), "pages": (pages, 1, HEADS_K),
        }[scale]  # fmt: skip
        self.options: dict[str, Any] = {"seqused_k": LENGTHS}
        if paged:
            self.options["block_table"] = TABLE
        # For pages, what belongs to a sequence is found by the table.
        entries = TABLE.new_empty(PAGES) if paged else torch.arange(BATCH)
        if paged:
            entries[TABLE.flatten().long()] = torch.arange(BATCH).repeat_interleave(3).int()
        unit = 40.0 if code == torch.int8 else 1.0
        self.codes, self.wide = [], []
        for name in ("k_scale", "v_scale"):
            codes = coded(torch.randn(pages, size, HEADS_K, DIM) * unit, code)
            wide = codes.float()
            if shape is not None:
                self.options[name] = torch.rand(shape) / unit + 0.1 / unit
                scales = self.options[name]
                scales = scales[entries.long(), None] if len(shape) == 2 else scales
                wide = wide * (scales if len(shape) == 1 else scales[..., None])
            self.codes.append(codes)
            self.wide.append(wide)

    def described(self) -> dict[str, Any]:
        """The options without scales."""
        return {k: v for k, v in self.options.items() if not k.endswith("scale")}


SHAPES = ["none", "one", "heads", "sequences", "rows", "pages"]


@pytest.mark.parametrize("scale", SHAPES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("code", CODES)
def test_codes_times_scales(code: torch.dtype, dtype: torch.dtype, paged: bool, scale: str) -> None:
    cache = Cache(code, paged, scale)
    q = torch.randn(BATCH, 3, HEADS, DIM, dtype=dtype)
    how = {"causal": True, "return_lse": True}
    o, lse = attention_decode(q, *cache.codes, **cache.options, **how)
    expected, expected_lse = attention_decode(q.float(), *cache.wide, **cache.described(), **how)
    assert o.dtype == dtype
    assert torch.equal(o, expected.to(dtype))
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("scale", SHAPES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_new_keys_become_codes(code: torch.dtype, paged: bool, scale: str) -> None:
    cache = Cache(code, paged, scale)
    q = torch.randn(BATCH, 2, HEADS, DIM, dtype=torch.bfloat16)
    k, v = torch.randn(2, BATCH, 2, HEADS_K, DIM, dtype=torch.bfloat16)
    k[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    before = [codes.clone() for codes in cache.codes]
    used = {"seqused_k": (LENGTHS + 2).clamp(max=CAPACITY)}
    options = cache.options | used
    o = attention_decode(q, *cache.codes, k=k, v=v, **options)
    again = attention_decode(q, *cache.codes, **options)
    assert torch.equal(o.isnan(), again.isnan())
    assert torch.equal(o.nan_to_num(), again.nan_to_num())
    for name, new, codes, old in zip(("k_scale", "v_scale"), (k, v), cache.codes, before):
        for entry, length in enumerate(LENGTHS.tolist()):
            for token in range(2):
                position = length + token
                page, slot = (
                    (int(TABLE[entry, position // PAGE]), position % PAGE)
                    if paged
                    else (entry, position)
                )
                scales = cache.options.get(name, torch.ones(1))
                if scales.dim() == 2:
                    at = scales[entry]
                elif scales.dim() == 3:
                    at = scales[page, slot if scales.shape[1] > 1 else 0]
                else:
                    at = scales
                expected = coded(new[entry, token].float() / at[:, None], code)
                assert torch.equal(codes[page, slot].view(torch.uint8) & 0x7F,
                                   expected.view(torch.uint8) & 0x7F)  # fmt: skip
                old[page, slot] = codes[page, slot]
        assert torch.equal(codes.view(torch.uint8), old.view(torch.uint8)), "nothing else changes"


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_descales_of_flash_attn_3(code: torch.dtype, paged: bool, leftpad: bool) -> None:
    cache = Cache(code, paged, "heads")
    scales = {f"{name}_descale": cache.options[f"{name}_scale"] for name in "kv"}
    q = torch.randn(BATCH, 2, HEADS, DIM, dtype=torch.bfloat16)
    k, v = torch.randn(2, BATCH, 2, HEADS_K, DIM, dtype=torch.bfloat16)
    call: dict[str, Any] = {"cache_seqlens": LENGTHS, "causal": True}
    if paged:
        call["page_table"] = TABLE
    if leftpad:
        call["cache_leftpad"] = torch.tensor([3, 0, 5], dtype=torch.int32)
    function = flash_attn_interface.flash_attn_with_kvcache
    found = function(q, *cache.codes, **call, **scales)
    expected = function(q.float(), *cache.wide, **call)
    assert torch.equal(found, expected.to(q.dtype))
    # With new keys, the cache holds their codes afterwards.
    found = function(q, *cache.codes, k, v, **call, **scales)
    after = call | {"cache_seqlens": LENGTHS + 2}
    assert torch.equal(found, function(q, *cache.codes, **after, **scales))


@pytest.mark.parametrize("code", CODES)
def test_compiled(code: torch.dtype) -> None:
    cache = Cache(code, True, "heads")
    q = torch.randn(BATCH, 1, HEADS, DIM, dtype=torch.bfloat16)
    expected = attention_decode(q, *cache.codes, **cache.options)
    compiled = torch.compile(attention_decode, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, *cache.codes, **cache.options), expected)


def test_wrong_codes_and_scales() -> None:
    cache = Cache(torch.float8_e4m3fn, True, "heads")
    q = torch.randn(BATCH, 1, HEADS, DIM)
    k_cache, v_cache = cache.codes
    described = cache.described()

    def fails(text: str, *given: Tensor, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            attention_decode(*given, **described, **options)

    fails(r"k_scale has shape \[5\]", q, k_cache, v_cache, k_scale=torch.ones(5))
    fails("v_scale is f16", q, k_cache, v_cache, v_scale=torch.ones(1).half())
    fails("q is e4m3", q.to(torch.float8_e4m3fn), k_cache, v_cache)
    fails("cache.v is f32", q, k_cache, v_cache.float())
    fails("k_scale is given", q, k_cache.float(), v_cache.float(), k_scale=torch.ones(1))
    fails("float8_e4m3fnuz|float|8", q, *(c.to(torch.float8_e4m3fnuz) for c in cache.codes))
    new = torch.zeros(BATCH, 1, HEADS_K, DIM).to(torch.float8_e4m3fn)
    fails("new.k is e4m3", q, k_cache, v_cache, k=new, v=new)
    with pytest.raises(blockflash.Unsupported, match="q_descale"):
        flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, q_descale=torch.ones(1))
