"""What `flash_attn_with_kvcache` does besides the kernel: copies of caches, turned by torch.

The CPU takes every cache as it is, so tests here have it copy as a GPU must.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference import assert_close, reference
from test_decode import turned
from torch import Tensor

import blockflash
from blockflash import _flash_gather
from blockflash import flash_attn as fa2
from blockflash import flash_attn_interface as fa3

BATCH, HEADS, HEADS_K = 3, 4, 2
HALF = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)
WHERE = pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), HALF])


class Case:
    """A call at random, and what it is to return and to write."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype) -> None:
        choose, place = random.Random(seed).choice, {"device": device, "dtype": dtype}
        torch.manual_seed(seed)
        self.dim, self.page = choose([16, 20, 13]), choose([None, 1, 4, 16, 24])
        self.packed = choose([False, True])
        size = 48 if self.page is None else self.page
        counts = torch.randint(1, 6, (2, BATCH)).tolist()
        if not self.packed:
            counts = [[n[0]] * BATCH for n in counts]
        if choose([False, True]):
            counts[1] = counts[0]
        self.queries, self.new = counts
        self.lengths = torch.randint(0, 40, (BATCH,))
        self.leftpad = torch.minimum(torch.randint(0, 9, (BATCH,)), self.lengths)
        if choose([False, True]):
            self.leftpad.zero_()
        self.chosen = torch.randperm(5)[:BATCH] if choose([False, True]) else None
        entries = BATCH if self.chosen is None else 5
        pages = 48 // size
        table = torch.randperm(entries * pages).view(entries, pages)
        self.cache = torch.randn(2, entries * pages, size, HEADS_K, self.dim, **place)
        if choose([False, True]):  # keys and values of a page together
            self.cache = self.cache.transpose(0, 1).contiguous().transpose(0, 1)
        if self.page is None:
            table = torch.arange(entries)[:, None]
        self.rows = table if self.chosen is None else table[self.chosen]
        self.q = torch.randn(sum(self.queries), HEADS, self.dim, **place)
        self.k, self.v = torch.randn(2, sum(self.new), HEADS_K, self.dim, **place)
        self.causal = choose([False, True])
        self.tables: list[Tensor] = []
        self.starts, self.interleaved = self.lengths, choose([False, True])
        on_device = {"device": device, "dtype": torch.int32}
        self.call: dict[str, Any] = {
            "cache_seqlens": self.lengths.to(**on_device),
            "causal": self.causal,
            "rotary_interleaved": self.interleaved,
        }
        if self.page is not None:
            self.call["page_table"] = table.to(**on_device)
        if self.chosen is not None:
            self.call["cache_batch_idx"] = self.chosen.to(**on_device)
        if self.leftpad.any():
            self.call["cache_leftpad"] = self.leftpad.to(**on_device)
        if choose([False, True]):
            angles = torch.rand(48, 4) * 6
            self.tables = [t.to(device, dtype) for t in (angles.cos(), angles.sin())]
            self.call |= dict(zip(("rotary_cos", "rotary_sin"), self.tables, strict=True))
            if choose([False, True]):
                self.starts = torch.randint(0, 9, (BATCH,))
                self.call["rotary_seqlens"] = self.starts.to(**on_device)
        if self.packed:
            for name, of in (("cu_seqlens_q", self.queries), ("cu_seqlens_k_new", self.new)):
                self.call[name] = torch.tensor([0, *of]).cumsum(0).to(**on_device)
            self.call["max_seqlen_q"] = max(self.queries)

    def _turned(self, x: Tensor, sequence: int, still: bool) -> Tensor:
        if not self.tables:
            return x[None]
        first = int(self.starts[sequence])
        if still:
            return torch.cat([turned(t[None, None], *self.tables, first, self.interleaved)
                              for t in x], 1).to(x)  # fmt: skip
        return turned(x[None], *self.tables, first, self.interleaved).to(x)

    def _run(self) -> tuple[Tensor, Tensor]:
        shapes = [
            t if self.packed else t.unflatten(0, (BATCH, -1)) for t in (self.q, self.k, self.v)
        ]
        q, k, v = shapes
        self.written = self.cache.clone()
        o, lse = fa3.flash_attn_with_kvcache(
            q, *self.cache, k, v, **self.call, return_softmax_lse=True
        )
        if not self.packed:
            o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return o, lse

    def check(self) -> None:
        """Hold the results and the cache against float64."""
        o, lse = self._run()
        dtype = self.q.dtype
        at_q, at_new = 0, 0
        for i, (n, new) in enumerate(zip(self.queries, self.new, strict=True)):
            rows = slice(at_q, at_q + n)
            q = self._turned(self.q[rows], i, still=not self.causal)
            places = torch.arange(48)
            page = self.rows[i][places // self.cache.shape[2]]
            slot = places % self.cache.shape[2]
            length, tokens = int(self.lengths[i]), slice(at_new, at_new + new)
            fresh = [self._turned(self.k[tokens], i, still=False)[0], self.v[tokens]]
            keys = []
            for cache, each in zip(self.written, fresh, strict=True):
                cache[page[length : length + new], slot[length : length + new]] = each
                keys.append(cache[page, slot][None, int(self.leftpad[i]) : length + new])
            expected = reference(q, *keys, causal=self.causal)
            assert_close(o[rows][None].cpu(), expected[0], dtype)
            f32 = torch.float32 if self.q.is_cpu else dtype
            assert_close(lse[None, :, rows].cpu(), expected[1], f32)
            at_q, at_new = at_q + n, at_new + new
        torch.testing.assert_close(self.cache, self.written, rtol=2e-2, atol=1e-5)


@WHERE
@pytest.mark.parametrize("seed", range(40))
def test_any_cache(
    seed: int, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu" and seed % 4:
        monkeypatch.setattr(_flash_gather, "is_needed", lambda *_: True)
    Case(seed, device, dtype).check()


@WHERE
@pytest.mark.parametrize("page", [1, 8])
def test_varlen_with_small_pages(
    page: int, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(_flash_gather, "is_needed", lambda *_: True)
    place = {"device": device, "dtype": dtype}
    k, v = torch.randn(2, 64 // page, page, HEADS_K, 16, **place)
    table = torch.randperm(48 // page, dtype=torch.int32).view(2, -1).to(device)
    cu_q, cu_k = (
        torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 3, 4], [0, 20, 29])
    )
    q = torch.randn(4, HEADS, 16, **place)
    found = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 20, causal=True, block_table=table)
    packed = [
        torch.cat([t[row.long()].flatten(0, 1)[:n] for row, n in zip(table, (20, 9), strict=True)])
        for t in (k, v)
    ]
    expected = fa2.flash_attn_varlen_func(q, *packed, cu_q, cu_k, 3, 20, causal=True)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2 if q.is_cuda else 1e-5)


@WHERE
def test_keys_without_a_slot(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New keys behind the capacity are lost and overwrite nothing."""
    if device == "cpu":
        monkeypatch.setattr(_flash_gather, "is_needed", lambda *_: True)
    place = {"device": device, "dtype": dtype}
    cache = torch.randn(2, 12, 4, HEADS_K, 16, **place)
    before = cache.clone()
    q, k, v = (torch.randn(2, 3, heads, 16, **place) for heads in (HEADS, HEADS_K, HEADS_K))
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    lengths = torch.tensor([12, 10], dtype=torch.int32, device=device)
    fa3.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, page_table=table)
    before[0, 5, 2:], before[1, 5, 2:] = k[1, :2], v[1, :2]
    assert torch.equal(cache, before)
    lengths = torch.tensor([12, 99], dtype=torch.int32, device=device)
    fa3.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, page_table=table)
    assert torch.equal(cache, before)
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        fa3.flash_attn_with_kvcache(
            q.requires_grad_(), *cache, k, v, cache_seqlens=lengths, page_table=table
        )
    assert torch.equal(cache, before)


def test_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and what is stored are the same in a graph, which has no break."""
    monkeypatch.setattr(_flash_gather, "is_needed", lambda *_: True)
    q, k, v = (torch.randn(2, 3, heads, 16) for heads in (HEADS, HEADS_K, HEADS_K))
    cos, sin = torch.randn(2, 12, 8)
    table, lengths = torch.arange(6).int().view(2, 3), torch.tensor([5, 2], dtype=torch.int32)
    caches = torch.randn(2, 6, 4, HEADS_K, 16)

    def call(cache: Tensor, leftpad: Tensor | None) -> Tensor:
        return fa3.flash_attn_with_kvcache(
            q, cache[0], cache[1], k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            page_table=table, cache_leftpad=leftpad,
        )  # fmt: skip

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for leftpad in (None, torch.tensor([1, 0], dtype=torch.int32)):
        ours, theirs = caches.clone(), caches.clone()
        torch.testing.assert_close(compiled(ours, leftpad), call(theirs, leftpad))
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, caches)


def test_offsets_of_new_keys_without_new_keys() -> None:
    """SGLang passes `cu_seqlens_k_new` always; FlashAttention 3 ignores it without k."""
    q, cache = torch.randn(3, HEADS, 16), torch.randn(2, 40, 1, HEADS_K, 16)
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 3], [0, 7, 19]))
    options = {"page_table": torch.arange(40).int().view(2, 20), "cu_seqlens_q": cu_q}
    options |= {"max_seqlen_q": 2, "cache_seqlens": cu_k.diff(), "causal": True}
    expected = fa3.flash_attn_with_kvcache(q, *cache, **options)
    found = fa3.flash_attn_with_kvcache(q, *cache, **options, cu_seqlens_k_new=cu_k)
    assert torch.equal(found, expected)


def test_larger_cache() -> None:
    """flash-attn 2 takes the first entries of a cache for more sequences."""
    q, cache = torch.randn(2, 1, HEADS, 16), torch.randn(2, 5, 32, HEADS_K, 16)
    found = fa2.flash_attn_with_kvcache(q, *cache, cache_seqlens=9)
    assert torch.equal(found, fa2.flash_attn_with_kvcache(q, *cache[:, :2], cache_seqlens=9))
    with pytest.raises(ValueError, match="shape"):
        fa3.flash_attn_with_kvcache(q, *cache, cache_seqlens=9)
