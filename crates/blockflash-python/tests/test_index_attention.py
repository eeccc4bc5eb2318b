"""Attention to listed blocks of keys, their scores and their choice, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decode import CAPACITY, DIM, HEADS, HEADS_K, LENGTHS, WHERE, cache_of, keys_of, randn
from torch import Tensor

import blockflash
from blockflash import attention, attention_decode, block_scores, index_attention, top_k

BATCH, QUERIES = len(LENGTHS), 3
GRANULARITIES = [1, 4, 16, 64]


def positions(entry: int) -> Tensor:
    """Where the queries of a sequence stand."""
    return LENGTHS[entry].long() - QUERIES + torch.arange(QUERIES)


def listed(row: Tensor, granularity: int, length: int) -> list[int]:
    """The keys of a list, those of repeated entries as often."""
    found = [e * granularity + i for e in row.tolist() if e >= 0 for i in range(granularity)]
    return [key for key in found if key < length]


def expected(
    q: Tensor, caches: tuple[Tensor, Tensor], table: Tensor | None, lists: Tensor, granularity: int
) -> tuple[Tensor, Tensor]:
    """`(o, lse)` of causal attention in float64."""
    o, lse = torch.zeros(q.shape).double(), torch.full((BATCH, HEADS, QUERIES), -torch.inf).double()
    groups = lists.shape[0]
    for entry, length in enumerate(LENGTHS.tolist()):
        k, v = (keys_of(cache, entry, length, table)[0].double() for cache in caches)
        for i, position in enumerate(positions(entry).tolist()):
            for head in range(HEADS):
                row = lists[head * groups // HEADS, entry * QUERIES + i]
                keys = [key for key in listed(row, granularity, length) if key <= position]
                if not keys:
                    continue
                head_k = head * HEADS_K // HEADS
                scores = k[keys, head_k] @ q[entry, i, head].cpu().double() / DIM**0.5
                o[entry, i, head] = scores.softmax(0) @ v[keys, head_k]
                lse[entry, head, i] = scores.logsumexp(0)
    return o, lse


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("groups", [1, HEADS_K, HEADS])
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_listed_blocks(
    kind: str, groups: int, granularity: int, device: str, dtype: torch.dtype
) -> None:
    k_cache, v_cache, options = cache_of(kind, device, dtype)
    q = randn(BATCH, QUERIES, HEADS, DIM, device=device, dtype=dtype)
    blocks = CAPACITY // granularity
    lists = torch.randint(-2, blocks + 2, (groups, BATCH * QUERIES, 5), dtype=torch.int32)
    options |= {"causal": True, "return_lse": True}
    o, lse = index_attention(q, k_cache, v_cache, lists.to(device), granularity, **options)
    wanted = expected(q, (k_cache, v_cache), options.get("block_table"), lists, granularity)
    error = 2e-2 if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(o.cpu().double(), wanted[0], atol=error, rtol=error)
    torch.testing.assert_close(lse.cpu().double(), wanted[1], atol=error, rtol=error)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_all_blocks_are_the_whole_cache(device: str, dtype: torch.dtype) -> None:
    k_cache, v_cache, options = cache_of("paged", device, dtype)
    q = randn(BATCH, QUERIES, HEADS, DIM, device=device, dtype=dtype)
    lists = torch.arange(CAPACITY // 16, dtype=torch.int32, device=device)
    lists = lists.expand(BATCH * QUERIES, -1).contiguous()
    given: dict[str, Any] = {"causal": True, "softcap": 3.0, **options}
    given["sink"] = torch.randn(HEADS, device=device)
    found = index_attention(q, k_cache, v_cache, lists, 16, **given)
    wanted = attention_decode(q, k_cache, v_cache, **given)
    error = 2e-2 if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(found, wanted, atol=error, rtol=error)


def packed() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Queries, keys and values of three sequences, and what describes them."""
    tensors = {
        "q": torch.randn(7, 4, 32), "k": torch.randn(60, 2, 32), "v": torch.randn(60, 2, 32)
    }  # fmt: skip
    of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 7], [0, 20, 21, 60]))
    given = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": 5, "max_seqlen_k": 39}
    return tensors, given


def test_packed_keys() -> None:
    tensors, given = packed()
    lists = torch.arange(10, dtype=torch.int32).expand(7, -1).contiguous()
    found = index_attention(*tensors.values(), lists, 4, causal=True, **given)
    torch.testing.assert_close(found, attention(*tensors.values(), causal=True, **given))


def scores_of(q: Tensor, k: Tensor, weights: Tensor, relu: bool) -> Tensor:
    """`[rows, keys]`: all heads of a group."""
    scores = torch.einsum("rhd,kd->rhk", q.double(), k.double()) * 0.5
    scores = scores.relu() if relu else scores
    return (scores * weights.double()[..., None]).sum(1)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize("relu", [False, True])
def test_scores_of_blocks(relu: bool, reduction: str, device: str, dtype: torch.dtype) -> None:
    k_cache, _, options = cache_of("paged", device, dtype)
    q = randn(BATCH, QUERIES, HEADS, DIM, device=device, dtype=dtype)
    weights = torch.rand(BATCH, QUERIES, HEADS, device=device)
    given: dict[str, Any] = {"relu": relu, "reduction": reduction, "scale": 0.5, "causal": True}
    found = block_scores(q, k_cache, 16, weights=weights, **given, **options).cpu()
    assert (found.shape, found.dtype) == ((HEADS_K, BATCH * QUERIES, CAPACITY // 16), torch.float32)
    wanted = torch.full(found.shape, -torch.inf).double()
    for entry, length in enumerate(LENGTHS.tolist()):
        keys = keys_of(k_cache, entry, length, options["block_table"])[0]
        for group in range(HEADS_K):
            heads = slice(group * HEADS // HEADS_K, (group + 1) * HEADS // HEADS_K)
            rows, of_rows = q[entry, :, heads].cpu(), weights[entry, :, heads].cpu()
            scores = scores_of(rows, keys[:, group], of_rows, relu)
            for i, position in enumerate(positions(entry).tolist()):
                for block in range(max(position, -1) // 16 + 1):
                    seen = scores[i, block * 16 : min(block * 16 + 16, position + 1)]
                    of_block = seen.amax() if reduction == "max" else seen.mean()
                    wanted[group, entry * QUERIES + i, block] = of_block
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_largest_scores(device: str) -> None:
    scores = torch.randn(2, BATCH * QUERIES, 12).round(decimals=1)
    scores[0, 0, 3], scores[1, 2, 1] = torch.nan, torch.inf
    lengths = LENGTHS.to(device)
    given: dict[str, Any] = {"seqused_k": lengths, "causal": True, "first": 1, "last": 1}
    lists = top_k(scores.to(device), 3, 8, capacity=90, **given).cpu()
    assert (lists.shape, lists.dtype) == ((2, BATCH * QUERIES, 3), torch.int32)
    for group in range(2):
        for entry in range(BATCH):
            for i, position in enumerate(positions(entry).tolist()):
                row = scores[group, entry * QUERIES + i]
                blocks = range(max(position, -1) // 8 + 1)
                forced = sorted({blocks[0], blocks[-1]}) if blocks else []
                others = [b for b in blocks if b not in forced and not row[b].isnan()]
                others.sort(key=lambda b: (-row[b].item(), b))
                chosen = sorted(forced + others[: 3 - len(forced)])
                wanted = chosen + [-1] * (3 - len(chosen))
                assert lists[group, entry * QUERIES + i].tolist() == wanted


def test_lists_of_packed_rows() -> None:
    tensors, given = packed()
    scores = block_scores(tensors["q"], tensors["k"], 4, causal=True, **given)
    assert scores.shape == (2, 7, 10)
    lists = top_k(scores, 4, 4, capacity=39, causal=True, last=1, **given)
    # Query 4 of sequence 0 stands at key 19, and query 1 of sequence 2 at key 38.
    assert lists[:, 4].amax(1).tolist() == [4, 4] and lists[:, 6].amax(1).tolist() == [9, 9]
    o = index_attention(*tensors.values(), lists, 4, causal=True, **given)
    assert o.shape == tensors["q"].shape and o.isfinite().all()


def test_compiled_and_traced() -> None:
    """A step of generation with an index under the compiler."""

    def step(q: Tensor, q_index: Tensor, k: Tensor, k_index: Tensor, used: Tensor) -> Tensor:
        scores = block_scores(q_index, k_index, 16, groups=1, relu=True, seqused_k=used)
        lists = top_k(scores, 2, 16, seqused_k=used, last=1)
        return index_attention(q, k, k, lists, 16, seqused_k=used, causal=True)

    q, q_index = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 8, 32)
    k, k_index = torch.randn(2, 64, 2, 16), torch.randn(2, 64, 1, 32)
    used = torch.tensor([60, 17], dtype=torch.int32)
    arguments = (q, q_index, k, k_index, used)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), step(*arguments))
    dynamic = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (2, 1):
        cut = tuple(t[:batch] for t in arguments)
        assert torch.equal(dynamic(*cut), step(*cut))
    ops = torch.ops.blockflash
    lists = torch.zeros(1, 2, 3, dtype=torch.int32)
    torch.library.opcheck(ops.index_attention.default, (q, k, k, lists, 16, 0, used))
    scores = (q_index, k_index, None, used, None, None, None, 16, 1, 0, 0, -1, 0)
    torch.library.opcheck(ops.block_scores.default, (*scores, False, True, 1.0))
    rows = (used, None, None, 16, 2, 64, 0, 0, -1, 0, 0, 1)
    torch.library.opcheck(ops.top_k.default, (torch.randn(1, 2, 4), 2, *rows))


def masked(tensors: list[Tensor], lists: Tensor, granularity: int) -> tuple[Tensor, Tensor]:
    """`(o, lse)` of causal attention with the logits of heads, for autograd in float64."""
    q, k, v, logits = (t.double() for t in tensors)
    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    block = torch.arange(keys) // granularity
    seen = (lists[..., None] == block).any(-2).unflatten(1, (q.shape[0], queries))
    seen = seen.repeat_interleave(heads // lists.shape[0], 0).transpose(0, 1)
    seen = seen & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = scores.masked_fill(~seen, -torch.inf)
    columns = logits[:, None, None].expand(heads, 1, 1).expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, columns], -1)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse[..., None]).exp()[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients(groups: int, with_lse: bool, device: str, dtype: torch.dtype) -> None:
    shapes = ((2, 20, 4, 64), (2, 64, 2, 64), (2, 64, 2, 64))
    given = [randn(*shape, device=device, dtype=dtype) for shape in shapes]
    given.append(torch.randn(4, device=device))
    lists = torch.stack([torch.randperm(4)[:2] for _ in range(groups * 40)]).int()
    lists = lists.view(groups, 40, 2)
    grads = torch.randn(2, 20, 4, 64).to(dtype), torch.randn(2, 4, 20)

    def gradients(tensors: list[Tensor], attend: Any) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        results = attend(leaves)[: 1 + with_lse]
        weights = [g.to(r.device, r.dtype) for g, r in zip(grads, results, strict=False)]
        return torch.autograd.grad(results, leaves, weights)

    def ours(leaves: list[Tensor]) -> Any:
        options: dict[str, Any] = {"causal": True, "sink": leaves[3], "return_lse": True}
        return index_attention(*leaves[:3], lists.to(device), 16, **options)

    wanted = gradients([t.cpu().double() for t in given], lambda x: masked(x, lists, 16))
    error = 4e-2 if dtype != torch.float32 else 1e-4
    for found, exact in zip(gradients(given, ours), wanted, strict=True):
        torch.testing.assert_close(found.cpu().double(), exact, atol=error, rtol=error)


def test_gradients_of_packed_and_compiled() -> None:
    tensors, given = packed()
    lists = torch.arange(10, dtype=torch.int32).expand(7, -1).contiguous()
    leaves = [t.requires_grad_() for t in tensors.values()]

    def step(*leaves: Tensor) -> Tensor:
        return index_attention(*leaves, lists, 4, causal=True, **given).square().sum()

    wanted = attention(*leaves, causal=True, **given).square().sum()
    expected = torch.autograd.grad(wanted, leaves)
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        for found, exact in zip(torch.autograd.grad(call(*leaves), leaves), expected, strict=True):
            torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


def test_gradients_are_not_lost() -> None:
    q, k = torch.randn(1, 2, 2, 16, requires_grad=True), torch.randn(1, 32, 1, 16)
    lists = torch.zeros(1, 2, 1, dtype=torch.int32)
    used = torch.tensor([20], dtype=torch.int32)
    with pytest.raises(blockflash.Unsupported, match="index_attention has no gradient"):
        index_attention(q, k, k, lists, 16, seqused_k=used)
    with pytest.raises(blockflash.Unsupported, match="block_scores has no gradient"):
        block_scores(q, k, 16)
    with torch.no_grad():
        assert index_attention(q, k, k, lists, 16).shape == q.shape
    weights = torch.randn(1, 2, 2, requires_grad=True)
    assert not top_k(weights, 1, 16).requires_grad


def test_errors() -> None:
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 64, 2, 16)
    lists = torch.zeros(1, 2, 3, dtype=torch.int32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lists": lists.long()}, "lists"),
        ({"lists": lists[:, :1]}, "lists"),
        ({"granularity": 0}, "granularity"),
        ({"granularity": -4}, "granularity"),
        ({"cu_seqlens_q": lists[0, 0]}, "max_seqlen_q is None"),
        ({"window": (-3, 0)}, "window"),
        ({"k": k[..., :8]}, "q has shape"),
    ]
    right = {"q": q, "k": k, "v": k, "lists": lists, "granularity": 16}
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            index_attention(**(right | changed))
    with pytest.raises(TypeError, match="mistake"):
        index_attention(**right, mistake=3)
    with pytest.raises(ValueError, match="reduction is 'least'"):
        block_scores(q, k, 16, reduction="least")
    with pytest.raises(ValueError, match="groups"):
        block_scores(q, k, 16, groups=3)
    with pytest.raises(ValueError, match="first and last are 2 and 1, expected at most 2 together"):
        top_k(torch.randn(2, 4), 2, 16, first=2, last=1)
    with pytest.raises(ValueError, match=r"weights has shape \[3, 2, 4\]"):
        block_scores(
            torch.randn(2, 3, 4, 8), torch.randn(2, 9, 1, 8), 4, weights=torch.ones(3, 2, 4)
        )
    with pytest.raises(ValueError, match="k is 0"):
        top_k(torch.randn(2, 4), 0, 16)
    with pytest.raises(ValueError, match="batch is None"):
        top_k(torch.randn(8, 4), 2, 16, causal=True)


def test_blocks_of_pooled_keys() -> None:
    """Scores of a mean of each block, which no mask fits: the choice has it."""
    q, k = torch.randn(2, 64, 4, 8), torch.randn(2, 64, 2, 8)
    means = k.unflatten(1, (4, 16)).mean(2)
    scores = block_scores(q, means, 1)
    lists = top_k(scores, 2, 16, batch=2, capacity=64, causal=True, last=1)
    for row in range(128):
        own = row % 64 // 16
        assert lists[:, row].amax(1).tolist() == [own, own]
