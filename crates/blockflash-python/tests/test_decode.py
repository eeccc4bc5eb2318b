"""Attention over a cache and the merge of parts, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close, reference
from torch import Tensor

import blockflash
from blockflash import attention_decode, attention_merge

HALF = [pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.bfloat16, torch.float16)]
WHERE = [("cpu", torch.float32), ("cpu", torch.bfloat16), *HALF]
HEADS, HEADS_K, DIM, PAGE, PAGES = 6, 2, 64, 16, 12
LENGTHS = torch.tensor([37, 0, 64, 5], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 9, -1], [-5, 99, 0, 1], [4, 11, 0, 3], [6, -1, 99, 5]]).int()
CAPACITY = PAGE * TABLE.shape[1]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (9, 0), "scale": 0.3},
    "both sides": {"window": (20, 1)},
    "scores": {"causal": True, "softcap": 3.0, "sink": torch.randn(HEADS)},
}


def randn(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def cache_of(kind: str, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and the arguments that describe them; NaN in slots that nobody may read."""
    options: dict[str, Any] = {"seqused_k": LENGTHS.to(device)}
    if kind == "paged":
        cache = randn(2, PAGES, PAGE, HEADS_K, DIM, device=device, dtype=dtype)
        options["block_table"] = TABLE.to(device)
        cache[:, 10] = torch.nan
        cache[:, 9, 5:] = torch.nan
    else:  # heads before slots, as transformers has them
        cache = randn(2, 4, HEADS_K, CAPACITY, DIM, device=device, dtype=dtype).transpose(2, 3)
        for entry, length in enumerate(LENGTHS):
            cache[:, entry, length:] = torch.nan
    return *cache, options


def keys_of(cache: Tensor, entry: int, length: int, table: Tensor | None) -> Tensor:
    """The keys or values of a sequence, `[1, length, heads, head_dim]`."""
    if table is None:
        return cache[entry, :length][None].cpu()
    pages = table[entry].cpu().clamp(0, PAGES - 1)
    return cache.cpu()[pages].flatten(0, 1)[None, :length]


def check(q: Tensor, k_cache: Tensor, v_cache: Tensor, o: Tensor, lse: Tensor, **call: Any) -> None:
    """Each sequence against float64, where `call` are the arguments of `attention_decode`."""
    table, lengths = call.pop("block_table", None), call.pop("seqused_k").cpu().tolist()
    for entry, length in enumerate(lengths):
        k, v = (keys_of(cache, entry, length, table) for cache in (k_cache, v_cache))
        one = slice(entry, entry + 1)
        expected_o, expected_lse = reference(q[one], k, v, **call)
        assert_close(o[one].cpu(), expected_o, q.dtype)
        assert_close(lse[one].cpu(), expected_lse, torch.float32 if q.is_cpu else q.dtype)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("seqlen", [1, 5])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode(
    options: dict[str, Any], kind: str, seqlen: int, device: str, dtype: torch.dtype
) -> None:
    q = randn(4, seqlen, HEADS, DIM, device=device, dtype=dtype)
    k_cache, v_cache, cache = cache_of(kind, device, dtype)
    sink = options.get("sink")
    options = options | ({} if sink is None else {"sink": sink.to(device)})
    o, lse = attention_decode(q, k_cache, v_cache, **cache, **options, return_lse=True)
    check(q, k_cache, v_cache, o, lse, **cache, **options)
    assert torch.equal(attention_decode(q, k_cache, v_cache, **cache, **options), o)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("heads", [6, 32])
def test_batch_invariant(heads: int, device: str, dtype: torch.dtype) -> None:
    """A full cache: a sequence alone and in a batch has the same bits."""
    q = randn(16, 1, heads, DIM, device=device, dtype=dtype)
    k_cache, v_cache = randn(2, 16, 1000, HEADS_K, DIM, device=device, dtype=dtype)
    whole = attention_decode(q, k_cache, v_cache, batch_invariant=True)
    for i in (0, 7, 15):
        one = (t[i : i + 1] for t in (q, k_cache, v_cache))
        assert torch.equal(attention_decode(*one, batch_invariant=True), whole[i : i + 1])
    o, lse = attention_decode(q, k_cache, v_cache, return_lse=True)
    lengths = torch.full((16,), 1000)
    check(q, k_cache, v_cache, o, lse, seqused_k=lengths)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_packed_queries(device: str, dtype: torch.dtype) -> None:
    """Numbers of queries that differ, and two rows of no sequence."""
    k_cache, v_cache, cache = cache_of("paged", device, dtype)
    counts = (1, 0, 9, 3)
    q = randn(sum(counts) + 2, HEADS, DIM, device=device, dtype=dtype)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    packed = {"cu_seqlens_q": offsets.to(device), "max_seqlen_q": 9}
    o, lse = attention_decode(q, k_cache, v_cache, **cache, **packed, causal=True, return_lse=True)
    for entry, rows in enumerate(map(slice, offsets[:-1], offsets[1:])):
        one = {"seqused_k": LENGTHS[entry : entry + 1], "block_table": TABLE[entry : entry + 1]}
        found = (o[rows][None], lse[None, :, rows])
        check(q[rows][None], k_cache, v_cache, *found, **one, causal=True)
    assert not o[sum(counts) :].any() and not lse[:, sum(counts) :].any()


def turned(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> Tensor:
    """Rotary embedding of `[1, tokens, heads, head_dim]` at positions from `first` on."""
    positions = torch.arange(first, first + x.shape[1]).clamp(0, cos.shape[0] - 1)
    c, s = (t.cpu().double()[positions][None, :, None] for t in (cos, sin))
    half, x = c.shape[-1], x.cpu().double().clone()
    pairs = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = pairs if interleaved else (slice(0, half), slice(half, 2 * half))
    left, right = x[..., a].clone(), x[..., b].clone()
    x[..., a], x[..., b] = left * c - right * s, left * s + right * c
    return x


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("rotary", [None, "halves", "interleaved"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_append(kind: str, rotary: str | None, device: str, dtype: torch.dtype) -> None:
    """New keys go to the end of the sequences, in place and nowhere else."""
    new = 3
    k_cache, v_cache, cache = cache_of(kind, device, dtype)
    q = randn(4, new, HEADS, DIM, device=device, dtype=dtype)
    k, v = randn(2, 4, new, HEADS_K, DIM, device=device, dtype=dtype)
    lengths = torch.tensor([37, 3, CAPACITY, 5], dtype=torch.int32)
    table = torch.tensor([[7, 2, 9, 8], [10, 1, 1, 1], [4, 11, 0, 3], [6, 6, 6, 6]]).int()
    cache["seqused_k"] = lengths.to(device)
    if kind == "paged":
        cache["block_table"] = table.to(device)
    options: dict[str, Any] = {}
    if rotary is not None:
        angles = torch.rand(CAPACITY, DIM // 4) * 6
        cos, sin = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        interleaved = rotary == "interleaved"
        options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    tensors = (k_cache.clone(), v_cache.clone())
    for entry, length in enumerate(lengths.tolist()):
        for t, rows in zip(tensors, (k, v), strict=True):
            row = rows[entry][None].cpu().double()
            if rotary is not None and rows is k:
                row = turned(row, cos, sin, length - new, interleaved)
            for i, at in enumerate(range(length - new, length)):
                place = (entry, at) if kind != "paged" else (table[entry, at // PAGE], at % PAGE)
                t[place] = row[0, i].to(t)
    o, lse = attention_decode(
        q, k_cache, v_cache, k=k, v=v, **cache, **options, causal=True, return_lse=True
    )
    for ours, expected in zip((k_cache, v_cache), tensors, strict=True):
        rounding = 0 if rotary is None else 2e-2 if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=rounding, atol=rounding)
    if rotary is not None:
        rows = (turned(q[i : i + 1], cos, sin, n - new, interleaved) for i, n in enumerate(lengths))
        q = torch.cat(list(rows)).to(dtype)
    check(q.to(device), k_cache, v_cache, o, lse, **cache, causal=True)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_listed_pages(device: str, dtype: torch.dtype) -> None:
    """Only pages of the lists are visited, other ones for each head of keys."""
    q = randn(4, 1, HEADS, DIM, device=device, dtype=dtype)
    k_cache, v_cache, cache = cache_of("paged", device, dtype)
    lists = torch.tensor([[[0, 2], [1, 2]], [[0, 1], [0, 1]], [[1, 3], [0, 1]], [[0, 9], [0, 9]]])
    counts = torch.tensor([2, 2, 2, 1], dtype=torch.int32)
    pages = (lists.int().to(device), counts.to(device))
    o, lse = attention_decode(q, k_cache, v_cache, **cache, pages=pages, return_lse=True)
    group = HEADS // HEADS_K
    for entry, length in enumerate(LENGTHS.tolist()):
        k, v = (keys_of(cache, entry, length, TABLE) for cache in (k_cache, v_cache))
        column = torch.arange(length) // PAGE
        listed = lists[entry, :, : counts[entry]]
        visible = (column[None, :, None] == listed[:, None]).any(-1)
        visible = visible.repeat_interleave(group, 0)[None, :, None]
        one = slice(entry, entry + 1)
        expected_o, expected_lse = reference(q[one], k, v, visible=visible)
        assert_close(o[one].cpu(), expected_o, dtype)
        assert_close(lse[one].cpu(), expected_lse, torch.float32 if device == "cpu" else dtype)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("packed", [False, True])
def test_merge(packed: bool, device: str, dtype: torch.dtype) -> None:
    """Attention to all keys from parts of them, one of which is empty."""
    q = randn(2, 3, HEADS, DIM, device=device, dtype=dtype)
    k, v = randn(2, 2, 50, HEADS_K, DIM, device=device, dtype=dtype)
    cuts = ((0, 20), (20, 20), (20, 50))
    parts = [blockflash.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in cuts]
    o, lse = map(list, zip(*parts, strict=True))
    expected_o, expected_lse = reference(q, k, v)
    if packed:
        o = torch.stack(o).flatten(1, 2)
        lse = torch.stack(lse).transpose(1, 2).flatten(2)
        expected_o, expected_lse = expected_o.flatten(0, 1), expected_lse.transpose(0, 1).flatten(1)
    found_o, found_lse = attention_merge(o, lse)
    assert_close(found_o.cpu(), expected_o, dtype)
    assert_close(found_lse.cpu(), expected_lse, torch.float32 if device == "cpu" else dtype)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("kind", ["slots", "pages", "rows"])
def test_keys_and_values_in_one_buffer(kind: str, device: str, dtype: torch.dtype) -> None:
    """An append writes elements of both, and no element is of both."""
    shape = {
        "slots": (4, CAPACITY, 2, HEADS_K, DIM),
        "pages": (PAGES, 2, PAGE, HEADS_K, DIM),
        "rows": (PAGES, PAGE, HEADS_K, 2 * DIM),
    }[kind]
    buffer = randn(*shape, device=device, dtype=dtype)
    k_cache, v_cache = buffer.chunk(2, -1) if kind == "rows" else buffer.unbind(shape.index(2))
    options: dict[str, Any] = {"seqused_k": torch.tensor([37, 0, 64, 5]).int().to(device)}
    if kind != "slots":
        table = torch.arange(PAGES).view(3, 4).repeat(2, 1)[:4].int()
        options["block_table"] = table.to(device)
    q = randn(4, 1, HEADS, DIM, device=device, dtype=dtype)
    k, v = randn(2, 4, 1, HEADS_K, DIM, device=device, dtype=dtype)
    copies = k_cache.clone(), v_cache.clone()
    expected = attention_decode(q, *copies, k=k, v=v, **options)
    assert torch.equal(attention_decode(q, k_cache, v_cache, k=k, v=v, **options), expected)
    assert torch.equal(k_cache, copies[0]) and torch.equal(v_cache, copies[1])
    with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
        attention_decode(q[:3], k_cache[:3], k_cache[1:4], k=k[:3], v=v[:3])


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_no_slots(device: str, dtype: torch.dtype) -> None:
    """No key is seen, and what is appended has no room."""
    q = randn(2, 1, HEADS, DIM, device=device, dtype=dtype)
    new = randn(2, 1, HEADS_K, DIM, device=device, dtype=dtype)
    used = torch.ones(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    caches: list[tuple[Tensor, dict[str, Any]]] = [
        (new[:, :0], {}),
        (new[:0].repeat(1, PAGE, 1, 1), {"block_table": table}),
        (new.repeat(1, PAGE, 1, 1), {"block_table": table[:, :0]}),
    ]
    for cache, options in caches:
        for tokens in ({}, {"k": new, "v": new, "seqused_k": used}):
            caches_of_call = cache.clone(), cache.clone()
            o, lse = attention_decode(q, *caches_of_call, **tokens, **options, return_lse=True)
            assert not o.any() and lse.isneginf().all()


@pytest.mark.parametrize(
    ("device", "lower"),
    [("cpu", torch.bfloat16), pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)],
)
def test_autocast(device: str, lower: torch.dtype) -> None:
    """As in `attention`; a cache that is written keeps its type, which the others then have."""
    q, k, v = randn(3, 2, 32, 2, DIM, device=device, dtype=torch.float32)
    low = [t.to(lower) for t in (q, k, v)]
    expected = attention_decode(*low, causal=True)
    with torch.autocast(device, dtype=lower):
        assert torch.equal(attention_decode(q, k, v, causal=True), expected)
        caches = torch.zeros_like(low[1]), torch.zeros_like(low[2])
        used = torch.full((2,), 32, dtype=torch.int32, device=device)
        o = attention_decode(q, *caches, k=k, v=v, seqused_k=used, causal=True)
    assert torch.equal(o, expected) and torch.equal(caches[0], low[1])


def test_views_that_negate() -> None:
    q, k_cache, v_cache, k, v, used = operands()
    for at in range(5):
        tensors = [t.clone() for t in (q, k_cache, v_cache, k, v)]
        negated = [torch._neg_view(-t) if i == at else t for i, t in enumerate(tensors)]
        if at in (1, 2):
            with pytest.raises(ValueError, match=f"{'kv'[at - 1]}_cache is written.*resolve_neg"):
                step(*negated, used)
        else:
            expected = step(q, k_cache.clone(), v_cache.clone(), k, v, used)
            assert torch.equal(step(*negated, used), expected)
    negated = [torch._neg_view(-t) for t in (q, k_cache, v_cache)]
    expected = attention_decode(q, k_cache, v_cache)
    assert torch.equal(attention_decode(*negated), expected)


def test_errors() -> None:
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    new = torch.randn(2, 1, 2, 16)
    table = torch.zeros(2, 2, dtype=torch.int32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"seqused_k": lengths.long()}, "seqused_k.* int64"),
        ({"seqused_k": lengths[:1]}, r"seqused_k\b"),
        ({"k": new}, "k, v come together, but v is None"),
        ({"k": new[..., :8], "v": new[..., :8]}, "^k has shape"),
        ({"cu_seqlens_q": lengths}, "but max_seqlen_q is None"),
        ({"cu_seqlens_k": lengths}, "cu_seqlens_k"),
        ({"rotary_cos": torch.ones(32, 8)}, "rotary_sin"),
        ({"rotary_cos": torch.ones(9, 8), "rotary_sin": torch.ones(9, 8)}, "at least 32"),
        ({"pages": (table[:, None].repeat(1, 2, 1), lengths)}, "without a block table"),
        ({"softcap": 0.0}, "softcap"),
        ({"window": (-1, 0)}, "window"),
        ({"causal": True, "window": (None, 3)}, "causal"),
        ({"block_table": table.float()}, "block_table"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            attention_decode(q, cache, cache.clone(), **options)
    with pytest.raises(ValueError, match="shares memory"):
        attention_decode(q, cache, cache, k=new, v=new, seqused_k=lengths)
    with pytest.raises(ValueError, match="k_cache"):
        attention_decode(q, cache.double(), cache.double())
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        attention_decode(q.requires_grad_(), cache, cache)
    with pytest.raises(ValueError, match=r"o has shape \[2, 3\]"):
        attention_merge(torch.zeros(2, 3), torch.zeros(2, 3))


def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
    """A step of generation: lengths, append, attention."""
    return attention_decode(q, k_cache, v_cache, k=k, v=v, seqused_k=used + 1, causal=True)


def operands() -> tuple[Tensor, ...]:
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 32, 2, 16)
    return q, *cache, *torch.randn(2, 2, 1, 2, 16), torch.tensor([3, 20], dtype=torch.int32)


def test_schemas() -> None:
    q, k_cache, v_cache, k, v, used = operands()
    ops = torch.ops.blockflash
    torch.library.opcheck(ops.attention_decode, (q, k_cache, v_cache, used))
    torch.library.opcheck(ops.attention_append, (q, k_cache, v_cache, k, v, used))
    parts = (torch.randn(3, 5, 4, 16), torch.randn(3, 4, 5))
    torch.library.opcheck(ops.attention_merge, parts)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    """A compiled step writes into the cache, too."""
    torch.compiler.reset()
    q, k_cache, v_cache, *new = operands()
    caches = (k_cache.clone(), v_cache.clone())
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(3):
        found = compiled(q, *caches, *new)
        assert torch.equal(found, step(q, k_cache, v_cache, *new))
        assert torch.equal(caches[0], k_cache) and torch.equal(caches[1], v_cache)
        new[2] += 1


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [256, 8192])
def test_graph_follows_lengths(capacity: int) -> None:
    """One captured call serves all lengths, bit for bit as eager calls, on two streams at once."""
    dtype, calls = torch.bfloat16, []
    for _ in range(2):
        q = torch.randn(3, 1, 8, 128, device="cuda", dtype=dtype)
        k_cache, v_cache = torch.randn(2, 3, capacity, 2, 128, device="cuda", dtype=dtype)
        used = torch.full((3,), 17, device="cuda", dtype=torch.int32)
        attention_decode(q, k_cache, v_cache, seqused_k=used)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            # The results of one call are overwritten if the next one takes its workspace too early.
            found = [attention_decode(q * i, k_cache, v_cache, seqused_k=used) for i in (1, 2, 3)]
        calls.append((q, k_cache, v_cache, used, graph, stream, found))
    torch.cuda.synchronize()
    for lengths in ([1, 17, capacity], [0, capacity // 2, 3], [capacity, 5, 64]):
        for *_, used, graph, stream, _found in calls:
            used.copy_(torch.tensor(lengths))
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(20):
                    graph.replay()
        torch.cuda.synchronize()
        for q, k_cache, v_cache, used, _graph, _stream, found in calls:
            for i, o in enumerate(found, 1):
                expected = attention_decode(q * i, k_cache, v_cache, seqused_k=used)
                assert torch.equal(o, expected)


@pytest.mark.gpu
def test_compiled_with_graphs() -> None:
    """`mode="reduce-overhead"`, where torch manages the memory of graphs."""
    torch.compiler.reset()
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 2, 4096, 2, 64, device="cuda", dtype=torch.bfloat16)

    def two(q: Tensor, used: Tensor) -> Tensor:
        first = attention_decode(q, k_cache, v_cache, seqused_k=used)
        return attention_decode(first + q, k_cache, v_cache, seqused_k=used)

    compiled = torch.compile(two, mode="reduce-overhead", fullgraph=True)
    for length in (5, 800, 4096, 7, 3000):
        used = torch.full((2,), length, device="cuda", dtype=torch.int32)
        torch.testing.assert_close(compiled(q, used).clone(), two(q, used), rtol=0, atol=2e-2)
