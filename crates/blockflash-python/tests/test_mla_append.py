"""New rows of caches of latent rows, against indexing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fakes import check as check_fake
from test_mla import CAPACITY, PAGE, PAGES, TABLE, WHERE
from torch import Tensor

import blockflash
from blockflash import mla_append, mla_decode

OPS = torch.ops.blockflash
# Of the last sequence, one new token is before the first key.
COUNTS, LENGTHS = (3, 0, 2, 4), torch.tensor([37, 0, CAPACITY + 1, 3], dtype=torch.int32)
STARTS = torch.tensor([0, *COUNTS]).cumsum(0).int()


def appended(cache: Tensor, new: Tensor, counts: tuple[int, ...], paged: bool) -> Tensor:
    """A copy of the cache with packed rows, by indexing."""
    cache, at = cache.clone(), 0
    for entry, count in enumerate(counts):
        for position in range(int(LENGTHS[entry]) - count, int(LENGTHS[entry])):
            if 0 <= position < CAPACITY:
                page, slot = divmod(position, PAGE) if paged else (0, position)
                place = TABLE[entry, page].clamp(0, PAGES - 1) if paged else entry
                cache[place, slot] = new[at]
            at += 1
    return cache


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("columns", [512, 576])
def test_append(columns: int, kind: str, packed: bool, device: str, dtype: torch.dtype) -> None:
    paged = kind == "paged"
    shape = (PAGES, PAGE, 576) if paged else (4, CAPACITY, 576)
    before = torch.randn(shape, device=device, dtype=dtype)
    counts = COUNTS if packed else (2,) * 4
    new = torch.randn(sum(counts), 576, device=device, dtype=dtype)
    options: dict[str, Any] = {"seqlens": LENGTHS.to(device)}
    if paged:
        options["block_table"] = TABLE.to(device)
    if packed:
        options["cu_seqlens"] = STARTS.to(device)
    expected = appended(before.cpu(), new.cpu(), counts, paged)
    rows = new if packed else new.view(4, 2, 576)
    parts = (rows[..., :columns], rows[..., columns:] if columns < 576 else None)
    for of_one_head in (False, True):
        cache = before.clone()
        mla_append(*parts, cache.unsqueeze(2) if of_one_head else cache, **options)
        assert torch.equal(cache.cpu(), expected)
    # Rows that no kernel reads in units of 16 bytes, and a cache between other columns.
    wide = torch.zeros(*rows.shape[:-1], 1160, device=device, dtype=dtype)
    wide[..., 1:577], wide[..., 578:1154] = rows, rows
    parts = (wide[..., 1 : columns + 1], wide[..., 578 + columns : 1154])
    within = torch.zeros(*shape[:-1], 640, device=device, dtype=dtype)
    within[..., 32:608] = before
    mla_append(parts[0], parts[1] if columns < 576 else None, within[..., 32:608], **options)
    assert torch.equal(within[..., 32:608].cpu(), expected)
    assert not within[..., :32].any() and not within[..., 608:].any()


def test_decoding_sees_what_was_appended() -> None:
    torch.manual_seed(0)
    q, rows = torch.randn(2, 5, 8, 36), torch.randn(2, 40, 36)
    cache, lengths = torch.zeros(2, 48, 36), torch.tensor([40, 40], dtype=torch.int32)
    mla_append(rows[:, :35], None, cache, seqlens=lengths - 5)
    mla_append(rows[:, 35:, :32], rows[:, 35:, 32:], cache, seqlens=lengths)
    call = {"scale": 0.3, "head_dim_v": 32}
    found = mla_decode(q, None, cache, seqlens=lengths, **call)
    assert torch.equal(found, mla_decode(q, None, rows, **call))


ROWS, CACHE = torch.randn(2, 3, 36), torch.randn(2, 40, 36)
USED = torch.tensor([20, 17], dtype=torch.int32)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "together": ((ROWS, ROWS, CACHE), {}, "kv_latent and k_rope have 36 and 36 elements, expected"),
    "parts": ((ROWS[..., :32], ROWS[:1, ..., 32:], CACHE), {}, "k_rope is torch.float32 .1, 3, 4."),
    "rank": ((ROWS[0], None, CACHE), {}, "kv_latent has shape .3, 36., expected .B, Sn, L."),
    "packed": ((ROWS, None, CACHE), {"cu_seqlens": USED}, "expected .Tn, L. with cu_seqlens"),
    "heads": ((ROWS, None, CACHE.view(2, 20, 2, 36)), {}, "cache has shape .2, 20, 2, 36."),
    "batch": ((ROWS[:1], None, CACHE), {}, "^kv_latent has shape .1, 3, 1, 36., expected .2"),
    "batch of parts": ((ROWS[:1, :, :32], ROWS[:1, :, 32:], CACHE), {}, "^k_rope has shape"),
    "width": ((ROWS[..., :30], None, CACHE), {}, "^kv_latent has shape"),
    "type": ((ROWS.half(), None, CACHE), {}, "^kv_latent is f16, expected f32"),
    "cache": ((ROWS, None, CACHE.int()), {}, "^cache is i32"),
    "stride": ((ROWS, None, torch.zeros(2, 36, 40).mT), {}, "^cache .*contiguous"),
    "lengths": ((ROWS, None, CACHE), {"seqlens": USED[:1]}, "^seqlens has shape"),
    "table": ((ROWS, None, CACHE), {"block_table": USED}, "^block_table has shape"),
    "offsets": ((ROWS[0], None, CACHE), {"cu_seqlens": USED.float()}, "^cu_seqlens is f32"),
    "later": ((ROWS[0], None, CACHE), {"cu_seqlens": USED[[1, 0, 1]] - 17}, "^cu_seqlens"),
    "overlap": ((CACHE[:, :3], None, CACHE), {}, "cache shares memory with kv_latent"),
    "twice": ((ROWS, None, CACHE[:1].expand(2, -1, -1)), {}, "^cache: "),
}


@pytest.mark.parametrize("how", ["called", "compiled"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, how: str) -> None:
    given, options, text = WRONG[name]
    call = torch.compile(mla_append, backend="aot_eager") if how == "compiled" else mla_append
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        call(*given, **options)
    with pytest.raises(TypeError, match="cache must be a torch.Tensor"):
        mla_append(ROWS, None, None)


@pytest.mark.parametrize("of", ["kv_latent", "k_rope", "cache"])
def test_a_gradient_raises(of: str) -> None:
    given = {"kv_latent": ROWS[..., :32].clone(), "k_rope": ROWS[..., 32:].clone()}
    given["cache"] = CACHE.clone()
    given[of].requires_grad_()
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        mla_append(**given)
    with torch.no_grad():
        mla_append(**given)


def test_what_torch_sees() -> None:
    cache, parts = CACHE.clone(), (ROWS[..., :32], ROWS[..., 32:])
    check_fake(lambda *t: OPS.mla_append(*t[:2], t[2], None, t[3]), *parts, cache.clone(), USED)
    saved = cache.clone().requires_grad_()
    squares, rows = saved.square().sum(), saved.detach()
    mla_append(*parts, rows, seqlens=USED)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    with torch.device("meta"):
        on_meta = [torch.empty(t.shape) for t in (*parts, cache)]
    assert mla_append(*on_meta) is None

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(cache: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        doubled = cache * 1
        mla_append(latent, rope, doubled, seqlens=USED)
        mla_append(latent * 2, rope, cache, None, USED)
        return doubled

    one, two = cache.clone(), cache.clone()
    mla_append(*parts, one, None, USED)
    mla_append(parts[0] * 2, parts[1], two, None, USED)
    assert torch.equal(compiled(cache, *parts), one) and torch.equal(cache, two)


def test_autocast_lowers_new_rows_to_the_type_of_the_cache() -> None:
    rows, cache = ROWS.clone(), CACHE.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        mla_append(rows, None, cache, seqlens=USED)
    assert torch.equal(cache[0, 17:20], rows[0].bfloat16())
    cache = CACHE.clone()
    with torch.autocast("cpu", torch.bfloat16):
        mla_append(rows, None, cache, seqlens=USED)
    assert torch.equal(cache[0, 17:20], rows[0])


@pytest.mark.gpu
def test_graphs_follow_lengths() -> None:
    cache = torch.zeros(2, 48, 576, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(2, 3, 576, device="cuda").bfloat16()
    lengths = USED.cuda()
    mla_append(rows, None, cache, seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_append(rows, None, cache, seqlens=lengths)
    for used in ([3, 48], [-1, 2**31 - 1], [50, 2]):
        lengths.copy_(torch.tensor(used))
        expected = cache.zero_().clone()
        mla_append(rows, None, expected, seqlens=lengths)
        graph.replay()
        assert torch.equal(cache, expected)
