"""Attention over caches of 8 bits, which is that to what codes times their scales are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close
from torch import Tensor

import blockflash
from blockflash import attention_decode, flash_attn_interface

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
GREATEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
BATCH, HEADS, HEADS_K, DIM, PAGE, PAGES = 3, 4, 2, 32, 16, 9
LENGTHS = torch.tensor([30, 0, 41], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 8], [0, 1, 5], [4, 6, 3]], dtype=torch.int32)
CAPACITY = PAGE * TABLE.shape[1]
HALF = [pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.bfloat16, torch.float16)]


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


@pytest.mark.parametrize("scale", SHAPES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), *HALF])
@pytest.mark.parametrize("code", CODES)
def test_appends_on_every_device(
    code: torch.dtype, device: str, dtype: torch.dtype, paged: bool, scale: str
) -> None:
    """The codes of the CPU, and its results with queries of float32."""
    cache, how = Cache(code, paged, scale), {"causal": True, "return_lse": True}
    options = cache.options | {"seqused_k": LENGTHS + 2}
    rows = torch.randn(BATCH, 2, HEADS + 2 * HEADS_K, DIM).to(dtype)
    q, k, v = rows.split([HEADS, HEADS_K, HEADS_K], 2)
    there = {name: option.to(device) for name, option in options.items()}
    codes = [codes.to(device, copy=True) for codes in cache.codes]
    new = {"k": k.to(device), "v": v.to(device)}
    o, lse = attention_decode(q.to(device), *codes, **new, **there, **how)
    new = {"k": k.float(), "v": v.float()}
    expected, expected_lse = attention_decode(q.float(), *cache.codes, **new, **options, **how)
    assert o.dtype == dtype
    assert_close(o.cpu(), expected, dtype)
    assert_close(lse.cpu(), expected_lse, torch.float32 if device == "cpu" else dtype)
    for found, right in zip(codes, cache.codes, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), right.view(torch.uint8))


def slots(lengths: Tensor, tokens: int, paged: bool) -> list[tuple[int, int, int, int]]:
    """Sequence, token, page and slot of the last tokens of each sequence."""
    found = []
    for entry, length in enumerate(lengths.tolist()):
        for token in range(tokens):
            at = length - tokens + token
            page, slot = (int(TABLE[entry, at // PAGE]), at % PAGE) if paged else (entry, at)
            found.append((entry, token, page, slot))
    return found


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("code", CODES)
def test_appends_choose_scales(code: torch.dtype, dtype: torch.dtype, paged: bool) -> None:
    cache = Cache(code, paged, "rows")
    options = cache.options | {"seqused_k": LENGTHS + 2, "causal": True, "return_lse": True}
    q = torch.randn(BATCH, 2, HEADS, DIM, dtype=dtype)
    k, v = torch.randn(2, BATCH, 2, HEADS_K, DIM, dtype=dtype)
    k[0, 0, 0] = 0.0
    v[2, 1] *= 1000
    old_codes = [codes.clone() for codes in cache.codes]
    scales = [options["k_scale"], options["v_scale"]]
    old_scales = [scale.clone() for scale in scales]
    o, lse = attention_decode(q, *cache.codes, k=k, v=v, scale_per_token=True, **options)
    again, lse_again = attention_decode(q, *cache.codes, **options)
    assert torch.equal(o, again)
    assert torch.equal(lse, lse_again)
    # Half of the last place of a code, or of the smallest step.
    relative, step = {
        torch.float8_e4m3fn: (1 / 16, 1 / 512),
        torch.float8_e5m2: (1 / 8, 1 / 65536),
        torch.int8: (0.0, 1.0),
    }[code]
    for new, codes, old, scale, old_scale in zip(
        (k, v), cache.codes, old_codes, scales, old_scales
    ):
        for entry, token, page, slot in slots(options["seqused_k"], 2, paged):
            row = new[entry, token].float()
            expected = row.abs().amax(-1) / GREATEST[code]
            expected = torch.where(expected == 0, 1.0, expected)
            assert torch.equal(scale[page, slot], expected)
            found = codes[page, slot]
            as_bytes = coded(row / expected[:, None], code).view(torch.uint8)
            assert torch.equal(found.view(torch.uint8), as_bytes)
            error = (found.float() * expected[:, None] - row).abs()
            bound = (row.abs() * relative).maximum(expected[:, None] * step / 2)
            assert (error <= bound * 1.0001).all()
            old[page, slot], old_scale[page, slot] = found, scale[page, slot]
        assert torch.equal(codes.view(torch.uint8), old.view(torch.uint8)), "nothing else changes"
        assert torch.equal(scale, old_scale), "nothing else changes"


@pytest.mark.parametrize("strided", [False, True])
def test_packed_rows_turn_before_they_have_scales(strided: bool) -> None:
    """As in a cache of float32, to which the same rows are appended."""
    code = torch.float8_e4m3fn
    cache = Cache(code, True, "rows")
    if strided:
        for name in ("k_scale", "v_scale"):
            rows = torch.empty(PAGES, HEADS_K, PAGE).copy_(cache.options[name].transpose(1, 2))
            cache.options[name] = rows.transpose(1, 2)
    offsets = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    q, k, v = (torch.randn(6, heads, DIM) for heads in (HEADS, HEADS_K, HEADS_K))
    angles = torch.rand(CAPACITY, DIM // 2)
    how: dict[str, Any] = {
        "cu_seqlens_q": offsets, "max_seqlen_q": 3, "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(), "causal": True,
    }  # fmt: skip
    used = {"seqused_k": LENGTHS + offsets.diff()}
    wide = [rows.clone() for rows in cache.wide]
    attention_decode(q, *wide, k=k, v=v, **cache.described() | used, **how)
    o = attention_decode(
        q, *cache.codes, k=k, v=v, scale_per_token=True, **cache.options | used, **how
    )
    for name, codes, rows in zip(("k_scale", "v_scale"), cache.codes, wide):
        scale = cache.options[name]
        for entry, length in enumerate(used["seqused_k"].tolist()):
            for at in range(int(LENGTHS[entry]), length):
                page, slot = int(TABLE[entry, at // PAGE]), at % PAGE
                expected = rows[page, slot].abs().amax(-1) / GREATEST[code]
                assert torch.equal(scale[page, slot], expected)
                divided = rows[page, slot] / expected[:, None]
                assert torch.equal(codes[page, slot].float(), coded(divided, code).float())
        rows.copy_(codes.float() * scale[..., None])
    expected = attention_decode(q, *wide, **cache.described() | used, **how)
    assert torch.equal(o, expected)


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


@pytest.mark.parametrize("code", CODES)
def test_compiled_appends_choose_scales(code: torch.dtype) -> None:
    cache, other = (Cache(code, True, "rows") for _ in range(2))
    q, used = torch.randn(BATCH, 1, HEADS, DIM), LENGTHS + 1
    k, v = torch.randn(2, BATCH, 1, HEADS_K, DIM)

    def step(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor) -> Any:
        o = attention_decode(
            q, k_cache, v_cache, k=k, v=v, seqused_k=used, block_table=TABLE,
            k_scale=k_scale, v_scale=v_scale, scale_per_token=True,
        )  # fmt: skip
        return o, k_scale * 2  # which is read behind the write

    given = [*cache.codes, cache.options["k_scale"], cache.options["v_scale"]]
    same = [t.clone() for t in given]
    o, doubled = torch.compile(step, backend="aot_eager", fullgraph=True)(*given)
    expected, expected_doubled = step(*same)
    assert torch.equal(o, expected)
    assert torch.equal(doubled, expected_doubled)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(given, same))


@pytest.mark.parametrize("inference", [False, True])
def test_autograd_notices_what_an_append_writes(inference: bool) -> None:
    cache = Cache(torch.int8, True, "rows")
    q, new = torch.randn(BATCH, 1, HEADS, DIM), torch.randn(BATCH, 1, HEADS_K, DIM)
    scales = (cache.options["k_scale"], cache.options["v_scale"])
    operator = torch.ops.blockflash.attention_append_scales
    for call in (
        lambda: operator(q, *cache.codes, *scales, new, new, LENGTHS, TABLE),
        lambda: attention_decode(q, *cache.codes, k=new, v=new, scale_per_token=True,
                                 **cache.options),
    ):  # fmt: skip
        before = [t._version for t in (*cache.codes, *scales)]
        with torch.inference_mode(inference):
            call()
        assert all(t._version > old for t, old in zip((*cache.codes, *scales), before))
    q.requires_grad_()
    with pytest.raises(blockflash.Unsupported, match="gradient"):
        attention_decode(q, *cache.codes, k=new, v=new, scale_per_token=True, **cache.options)


def test_wrong_scales_to_write() -> None:
    cache = Cache(torch.float8_e4m3fn, True, "rows")
    q, new = torch.randn(BATCH, 1, HEADS, DIM), torch.randn(BATCH, 1, HEADS_K, DIM)
    k_scale, v_scale = (cache.options[name] for name in ("k_scale", "v_scale"))
    kept = [t.clone() for t in (*cache.codes, k_scale, v_scale)]

    def fails(text: str, *codes: Tensor, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            attention_decode(
                q, *codes, **cache.described(), scale_per_token=True,
                **{"k": new, "v": new, "k_scale": k_scale, "v_scale": v_scale} | options,
            )  # fmt: skip

    fails("scale_per_token needs", *cache.codes, k=None, v=None)
    fails("scale_per_token needs", *cache.codes, v_scale=None)
    fails(r"k_scale has shape \[1\]", *cache.codes, k_scale=torch.ones(1))
    fails(r"v_scale has shape \[9, 1, 2\]", *cache.codes, v_scale=torch.ones(PAGES, 1, HEADS_K))
    fails("k_scale is f16", *cache.codes, k_scale=k_scale.half())
    fails("overlap|share", *cache.codes, v_scale=k_scale)
    fails("k_scale is given", *(codes.float() for codes in cache.codes))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(kept, (*cache.codes, k_scale, v_scale))
    )
    operator = torch.ops.blockflash.attention_append_scales
    with pytest.raises(ValueError, match="k_scale is given, expected None"):
        operator(
            q, *cache.codes, k_scale, v_scale, new, new, LENGTHS, TABLE, *[None] * 9, k_scale * 1
        )


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
    fails("v_cache is f32", q, k_cache, v_cache.float())
    fails("k_scale is given", q, k_cache.float(), v_cache.float(), k_scale=torch.ones(1))
    fails("float8_e4m3fnuz|float|8", q, *(c.to(torch.float8_e4m3fnuz) for c in cache.codes))
    new = torch.zeros(BATCH, 1, HEADS_K, DIM).to(torch.float8_e4m3fn)
    fails("^k is e4m3", q, k_cache, v_cache, k=new, v=new)
    with pytest.raises(blockflash.Unsupported, match="q_descale"):
        flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, q_descale=torch.ones(1))


@pytest.mark.gpu
@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("code", CODES)
def test_quantize_on_a_gpu(code: torch.dtype, per: str) -> None:
    """The same codes and scales as on the CPU, also in a graph and with heads before tokens."""
    offsets = torch.tensor([0, 3, 3, 170], dtype=torch.int32)
    dense, packed = {"rotate": True}, {"cu_seqlens": offsets, "max_seqlen": 170}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        cases: list[tuple[Any, dict[str, Any]]] = [((2, 300, 3, 64), dense), ((171, 5, 72), packed)]
        for shape, options in cases:
            x = torch.randn(shape, dtype=dtype)
            x[..., 3, 0, 5] = float("nan")
            on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in options.items()}
            codes, scale = blockflash.quantize(x, code, per=per, **options)
            turned = x.transpose(-3, -2).contiguous().cuda().transpose(-3, -2)
            for rows in (x.cuda(), turned):
                found, of_found = blockflash.quantize(rows, code, per=per, **on_gpu)
                assert found.is_cuda
                assert torch.equal(found.cpu().view(torch.uint8), codes.view(torch.uint8))
                assert torch.equal(of_found.cpu(), scale)

    x, graph = torch.randn(2, 300, 3, 64, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = blockflash.quantize(x, code, per=per, subtract_mean=True)
    for _ in range(3):
        x.normal_(1.0)
        graph.replay()
        codes, scale, mean = blockflash.quantize(x, code, per=per, subtract_mean=True)
        assert torch.equal(captured[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(captured[1], scale)
        assert torch.equal(captured[2], mean)
        torch.testing.assert_close(mean, x.mean(1), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_what_a_gpu_does_not_quantize() -> None:
    with pytest.raises(blockflash.Unsupported, match="head_dim 20 is not a multiple of 8"):
        blockflash.quantize(torch.ones(1, 2, 1, 20, device="cuda"))
