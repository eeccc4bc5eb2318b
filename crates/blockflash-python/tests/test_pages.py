"""The choice of the pages of a cache, against its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decode import DIM, HEADS, HEADS_K, PAGE, WHERE, check, randn
from torch import Tensor

import blockflash
from blockflash import attention_decode, choose_pages, summarize_pages


def scores_of(q: Tensor, pages: Tensor, length: int, statistics: int) -> Tensor:
    """`[heads_k, pages]` of a sequence with these pages, in their order."""
    rows = q.cpu().double().unflatten(1, (HEADS_K, HEADS // HEADS_K)).transpose(0, 1)
    columns = []
    for column, page in enumerate(pages.cpu()):
        keys = page[: length - column * PAGE].double()
        if statistics == 1:
            mean = keys.mean(0).to(pages.dtype).double()
            score = torch.einsum("hsgd,hd->hsg", rows, mean)
        else:
            lowest, highest = keys.amin(0), keys.amax(0)
            both = torch.stack([rows * x[:, None, None] for x in (lowest, highest)])
            score = both.amax(0).sum(-1)
        columns.append(score.amax((1, 2)))
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("statistics", [1, 2])
def test_first_and_last_page(statistics: int, device: str, dtype: torch.dtype) -> None:
    """They are always chosen; with room for all pages attention is that to the whole cache."""
    q = randn(4, 3, HEADS, DIM, device=device, dtype=dtype)
    k_cache, v_cache = randn(2, 12, PAGE, HEADS_K, DIM, device=device, dtype=dtype)
    table = torch.randperm(12).view(4, 3).int().to(device)
    cache = {"block_table": table, "seqused_k": torch.tensor([37, 0, 48, 5]).int().to(device)}
    summaries = torch.full((12, statistics, HEADS_K, DIM), torch.nan, device=device, dtype=dtype)
    summarize_pages(k_cache, summaries, **cache)
    lists, counts = choose_pages(q, k_cache, summaries, **cache, room=2)
    assert (lists.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert counts.tolist() == [2, 0, 2, 1]
    assert lists.tolist() == [[pages] * HEADS_K for pages in ([0, 2], [0, 0], [0, 2], [0, 0])]
    pages = choose_pages(q, k_cache, summaries, **cache, room=5)
    assert pages[1].tolist() == [3, 0, 3, 1]
    chosen = attention_decode(q, k_cache, v_cache, **cache, pages=pages, return_lse=True)
    check(q, k_cache, v_cache, *chosen, **cache)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("statistics", [1, 2])
def test_largest_scores(statistics: int, device: str, dtype: torch.dtype) -> None:
    """Of ten pages the five that the definition chooses, for each head of keys."""
    pages, room = 10, 5
    k_cache = randn(pages, PAGE, HEADS_K, DIM, device=device, dtype=dtype)
    q = randn(1, 2, HEADS, DIM, device=device, dtype=dtype)
    table = torch.randperm(pages)[None].int()
    lengths = torch.tensor([pages * PAGE - 3], dtype=torch.int32)
    cache = {"block_table": table.to(device), "seqused_k": lengths.to(device)}
    summaries = torch.empty(pages, statistics, HEADS_K, DIM, device=device, dtype=dtype)
    summarize_pages(k_cache, summaries, **cache)
    lists, counts = choose_pages(q, k_cache, summaries, **cache, room=room)
    assert counts.tolist() == [room]
    scores = scores_of(q[0], k_cache[table[0].to(device)], int(lengths), statistics)
    for head in range(HEADS_K):
        inner = scores[head, 1:-1].topk(room - 2).indices + 1
        assert lists[0, head].tolist() == sorted([0, pages - 1, *inner.tolist()])


def test_appended_tokens_refresh_their_pages() -> None:
    k_cache = torch.randn(4, PAGE, 2, 16)
    cache = {"block_table": torch.arange(4).int()[None], "seqused_k": torch.tensor([40]).int()}
    summaries = torch.zeros(4, 1, 2, 16)
    summarize_pages(k_cache, summaries, **cache)
    first = summaries.clone()
    k_cache.normal_()
    summarize_pages(k_cache, summaries, **cache, tokens=1)
    assert torch.equal(summaries[:2], first[:2]) and not torch.equal(summaries[2], first[2])
    torch.testing.assert_close(summaries[2, 0], k_cache[2, :8].mean(0))


def test_compiled_and_traced() -> None:
    """A step of generation under the compiler, with parameters that have gradients."""

    def step(q: Tensor, k_cache: Tensor, summaries: Tensor, table: Tensor) -> Tensor:
        summarize_pages(k_cache, summaries, block_table=table, tokens=1)
        pages = choose_pages(q, k_cache, summaries, block_table=table, room=3)
        return attention_decode(q.detach(), k_cache, k_cache, block_table=table, pages=pages)

    q, k_cache = torch.randn(1, 1, 4, 16, requires_grad=True), torch.randn(8, PAGE, 2, 16)
    table, summaries = torch.arange(8).int()[None], torch.zeros(8, 1, 2, 16)
    summarize_pages(k_cache, summaries, block_table=table)
    expected = step(q, k_cache, summaries, table)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k_cache, summaries, table), expected)
    version = summaries._version
    summarize_pages(k_cache, summaries, block_table=table)
    assert summaries._version > version
    arguments = (q.detach(), k_cache, summaries, table, None, None, 0, 3)
    torch.library.opcheck(torch.ops.blockflash.choose_pages.default, arguments)
    arguments = (k_cache, summaries, table, None, 5)
    torch.library.opcheck(torch.ops.blockflash.summarize_pages.default, arguments)


def test_errors() -> None:
    q, k_cache = torch.randn(2, 1, 4, 16), torch.randn(6, PAGE, 2, 16)
    table, summaries = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(6, 1, 2, 16)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"room": 1}, "lists"),
        ({"room": -1}, "room is -1, which is negative"),
        ({"summaries": torch.zeros(6, 3, 2, 16)}, "summaries"),
        ({"summaries": summaries.half()}, "summaries"),
        ({"block_table": table.long()}, "block_table"),
        ({"q": q[:1]}, "q has shape"),
        ({"cu_seqlens_q": table[0]}, "but max_seqlen_q is None"),
    ]
    right = {"q": q, "k_cache": k_cache, "summaries": summaries, "block_table": table, "room": 2}
    choose_pages(**right)
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            choose_pages(**right | options)
    with pytest.raises(ValueError, match="tokens is -1"):
        summarize_pages(k_cache, summaries, block_table=table, tokens=-1)
    with pytest.raises(ValueError, match="shares memory"):
        summarize_pages(k_cache, k_cache[:, :1], block_table=table)
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        summarize_pages(k_cache, summaries.requires_grad_(), block_table=table)
