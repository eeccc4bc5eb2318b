"""Caches of latent rows of codes, against the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close, reference
from test_fakes import check as check_fake
from test_mla import CAPACITY, LENGTHS, PAGE, PAGES, SCALE, TABLE
from torch import Tensor

import blockflash
from blockflash import index_attention, mla_append, mla_decode

WHERE = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def stored(rows: Tensor) -> Tensor:
    """Rows `[.., 576]` of bfloat16 as 656 bytes."""
    values, behind = rows[..., :512].float().unflatten(-1, (4, 128)), rows[..., 512:]
    most = values.abs().amax(-1, keepdim=True)
    scales = torch.where(most == 0, 1.0, most / 448)
    codes = (values / scales).to(torch.float8_e4m3fn).flatten(-2)
    parts = (codes, scales.flatten(-2), behind.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def numbers(rows: Tensor) -> Tensor:
    """Rows of 656 bytes as 576 elements of float32."""
    codes, scales, behind = (part.contiguous() for part in rows.split([512, 16, 128], -1))
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    values = (values * scales.view(torch.float32)[..., None]).flatten(-2)
    return torch.cat([values, behind.view(torch.bfloat16).float()], -1)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_decode(kind: str, queries: int, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = (PAGES, PAGE) if kind == "paged" else (4, CAPACITY)
    cache = stored(torch.randn(*shape, 576).bfloat16())
    q = (torch.randn(4, queries, 16, 576) / 4).to(dtype)
    options: dict[str, Any] = {"seqlens": LENGTHS.to(device), "scale": SCALE}
    if kind == "paged":
        options["block_table"] = TABLE.to(device)
        cache[10] = cache[9, 5:] = 255
    else:
        for entry, length in enumerate(LENGTHS):
            cache[entry, length:] = 255
    on_device, parts = cache.to(device), (q[..., :512].to(device), q[..., 512:].to(device))
    for causal in (True, False):
        call = {**options, "causal": causal}
        o, lse = mla_decode(*parts, on_device, **call, return_lse=True)
        assert o.dtype == dtype and o.shape == (4, queries, 16, 512)
        out = torch.empty_like(o)
        mla_decode(q.to(device), None, on_device.unsqueeze(2), **call, out=out)
        assert torch.equal(out, o)
        for entry, length in enumerate(LENGTHS):
            rows = cache[entry]
            if kind == "paged":
                rows = cache[TABLE[entry].clamp(0, PAGES - 1)].flatten(0, 1)
            k, one = numbers(rows)[None, :length, None], slice(entry, entry + 1)
            given: dict[str, Any] = {"causal": causal, "scale": SCALE}
            expected, logs = reference(q[one], k, k[..., :512], **given)
            assert_close(o[one].cpu(), expected, dtype)
            assert_close(lse[one].cpu(), logs, torch.float32 if device == "cpu" else dtype)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("codes", [False, True])
def test_lists_of_slots_are_of_one_sequence(codes: bool, device: str, dtype: torch.dtype) -> None:
    """As engines give them whose lists name slots of the whole cache, not tokens of a sequence."""
    torch.manual_seed(0)
    cache = torch.randn(1, PAGES * PAGE, 1, 576).to(dtype)
    rows = cache
    if codes:
        cache = stored(rows.bfloat16())
        rows = numbers(cache)
    q = (torch.randn(1, 7, 16, 576) / 4).to(dtype)
    lists = torch.full((7, 40), -1, dtype=torch.int32)
    for i, row in enumerate(lists):
        # The first list is empty.
        row[torch.randperm(40)[: 6 * i]] = torch.randperm(PAGES * PAGE)[: 6 * i].int()
    on_device = cache.to(device)
    values = on_device if codes else on_device[..., :512]
    o, lse = index_attention(
        q.to(device), on_device, values, lists.to(device), 1, scale=SCALE, return_lse=True
    )
    assert o.dtype == dtype and o.shape == (1, 7, 16, 512)
    visible = torch.zeros(7, PAGES * PAGE + 1, dtype=torch.bool)
    visible.scatter_(1, lists.long().where(lists >= 0, PAGES * PAGE), True)
    visible = visible[None, None, :, :-1].expand(1, 16, -1, -1)
    expected, logs = reference(q, rows, rows[..., :512], scale=SCALE, visible=visible)
    assert expected[0, 0].eq(0).all()
    assert_close(o.cpu(), expected, dtype)
    assert_close(lse.cpu(), logs, torch.float32 if device == "cpu" else dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
def test_append(packed: bool, device: str) -> None:
    torch.manual_seed(0)
    new = torch.randn(4, 2, 576).bfloat16()
    new[0, 0, 128:256] = 0
    new[1, 1, :128] *= 1e20
    lengths = torch.tensor([37, 1, CAPACITY + 1, 3], dtype=torch.int32)
    before = torch.randint(0, 256, (PAGES, PAGE, 656), dtype=torch.uint8)
    expected = before.clone()
    for entry, length in enumerate(lengths):
        for i in range(2):
            position = int(length) - 2 + i
            if 0 <= position < CAPACITY:
                page, slot = divmod(position, PAGE)
                expected[TABLE[entry, page].clamp(0, PAGES - 1), slot] = stored(new[entry, i])
    options: dict[str, Any] = {"seqlens": lengths.to(device), "block_table": TABLE.to(device)}
    rows = new.to(device)
    if packed:
        rows = rows.flatten(0, 1)
        options["cu_seqlens"] = torch.arange(0, 9, 2, dtype=torch.int32, device=device)
    cache = before.to(device)
    mla_append(rows[..., :512], rows[..., 512:], cache, **options)
    assert torch.equal(cache.cpu(), expected)
    wide = torch.zeros(*rows.shape[:-1], 600, device=device, dtype=rows.dtype)
    wide[..., 1:577] = rows
    cache = before.to(device).unsqueeze(2)
    mla_append(wide[..., 1:513], wide[..., 513:577], cache, **options)
    assert torch.equal(cache.squeeze(2).cpu(), expected)


def test_what_is_wrong_is_named() -> None:
    cache = torch.zeros(2, 16, 656, dtype=torch.uint8)
    q, new = torch.randn(2, 1, 8, 576), torch.randn(2, 1, 576).bfloat16()
    call = {"scale": 0.3}
    for given, text in (
        ((q, None, cache[..., :640]), "cache has shape .2, 16, 640., expected .* 656 bytes"),
        ((q[..., :512], q[..., :32], cache), "have 512 and 32 elements, expected 576 together"),
        ((q[..., :500], q[..., :76], cache), "head_dim_v is 500, but rows of codes have 512"),
        ((q[..., :512], None, cache), "^q_nope has shape"),
        ((q.double(), None, cache), "^q_nope is float64|^q_nope is f64"),
    ):
        with pytest.raises(ValueError, match=text):
            mla_decode(*given, **call)
    for given, text in (
        ((new, None, cache), "k_rope is None, but rows of codes are made of both parts"),
        ((new[..., :512].half(), new[..., 512:].half(), cache), "^kv_latent is f16, expected bf16"),
        ((new[..., :256], new[..., 256:], cache), "^kv_latent has shape"),
        ((new[:1, :, :512], new[:1, :, 512:], cache), "^kv_latent has shape .1, 1, 1, 512."),
    ):
        with pytest.raises(ValueError, match=text):
            mla_append(*given)


def test_what_torch_sees() -> None:
    ops, used = torch.ops.blockflash, torch.tensor([16, 7], dtype=torch.int32)
    q, cache = torch.randn(2, 3, 8, 576), stored(torch.randn(2, 16, 1, 576).bfloat16())
    check_fake(lambda *t: ops.mla_decode(*t[:2], 512, t[2]), q, cache, used)
    new = torch.randn(2, 3, 576).bfloat16()
    parts = (new[..., :512], new[..., 512:])
    check_fake(lambda *t: ops.mla_append(*t[:3], None, t[3]), *parts, cache.clone(), used)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, latent: Tensor, rope: Tensor, cache: Tensor) -> Tensor:
        mla_append(latent, rope, cache, seqlens=used)
        return mla_decode(q, None, cache, seqlens=used, scale=0.3)

    one, two = cache.clone(), cache.clone()
    mla_append(*parts, one, seqlens=used)
    expected = mla_decode(q, None, one, seqlens=used, scale=0.3)
    assert torch.equal(compiled(q, *parts, two), expected) and torch.equal(one, two)


@pytest.mark.gpu
def test_a_gpu_takes_bfloat16_beside_codes() -> None:
    cache = torch.zeros(2, 16, 656, dtype=torch.uint8, device="cuda")
    q = torch.zeros(2, 1, 8, 576, device="cuda", dtype=torch.float16)
    with pytest.raises(blockflash.Unsupported, match="beside latent rows of codes it takes bf16"):
        mla_decode(q, None, cache, scale=0.3)
