"""Block masks from all sources, and attention with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from reference import assert_close
from test_attention import operands
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

import blockflash
from blockflash import BlockMask, _native, block_sparse_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {"seqlens": (300, 300), "block": 64}


def dense(mask: BlockMask, causal: bool = False) -> Tensor:
    """The visited pairs, `[batch, heads, seqlen_q, seqlen_k]`."""
    pairs = mask.to_dense()
    for dim in (0, 1):
        size, length = mask.block[dim], mask.seqlens[dim]
        pairs = pairs.repeat_interleave(size, 2 + dim).narrow(2 + dim, 0, length)
    return pairs.tril() if causal else pairs


def check(
    mask: BlockMask, causal: bool = False, heads: tuple[int, int] = (4, 2), head_dim: int = 64
) -> None:
    """Hold attention with the mask against torch's with the same pairs."""
    device = mask.device.type
    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = [t.to(device, dtype) for t in operands(mask.seqlens, heads, head_dim)]
    found = block_sparse_attention(*inputs, mask, causal=causal)
    by_head = (t.double().transpose(1, 2) for t in inputs)
    pairs = dense(mask, causal)
    pairs = pairs.repeat_interleave(heads[0] // pairs.shape[1], 1)
    expected = scaled_dot_product_attention(*by_head, attn_mask=pairs, enable_gqa=True)
    # torch gives NaN to rows without keys; here they are 0.
    assert_close(found, expected.nan_to_num().transpose(1, 2), dtype)


def by_score(scores: Tensor, k: int, visible: Tensor) -> Tensor:
    """The k best visible blocks of each row, by definition."""
    candidates = scores.masked_fill(~visible, -torch.inf)
    order = candidates.sort(dim=-1, descending=True, stable=True).indices
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :k], True)
    return best & visible


def test_patterns() -> None:
    window = BlockMask.window(1, 0, **SIZES)
    rows = torch.arange(5)
    distance = rows[:, None] - rows
    assert torch.equal(window.to_dense()[0, 0], (distance >= 0) & (distance <= 1))
    assert torch.equal(BlockMask.causal(**SIZES).to_dense()[0, 0], distance >= 0)
    sink = BlockMask.sink(1, **SIZES)
    assert torch.equal((window | sink).to_dense(), window.to_dense() | sink.to_dense())
    assert torch.equal((window & sink).to_dense(), window.to_dense() & sink.to_dense())
    assert window.density == pytest.approx(9 / 25) and "block=(64, 64)" in repr(window)
    check(window | sink)
    check(window | sink, causal=True)
    wide = BlockMask.window(0, None, seqlens=(100, 500), block=(64, 128), top_left=True)
    assert torch.equal(wide.to_dense()[0, 0], torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_dense_bool(device: str, batch: int, heads: int) -> None:
    torch.manual_seed(0)
    blocks = torch.rand(batch, heads, 5, 5, device=device) < 0.4
    mask = BlockMask.from_dense_bool(blocks, **SIZES)
    assert mask.device == blocks.device and torch.equal(mask.to_dense(), blocks)
    check(mask)
    check(mask, causal=True)
    host = mask.to("cpu")
    assert torch.equal(host.to_dense(), blocks.cpu()) and host.to("cpu") is host
    check(host.to(device))
    for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(again.to_dense(), blocks) and again.device == mask.device


@pytest.mark.parametrize("device", DEVICES)
def test_top_k(device: str) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 5, 5, device=device)
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    mask = BlockMask.top_k(scores, 2, causal=True, check=True, **SIZES)
    assert torch.equal(mask.to_dense(), by_score(scores, 2, causal))
    check(mask, causal=True)
    sink = BlockMask.sink(1, **SIZES)
    both = BlockMask.top_k(scores, 2, causal=True, always=sink, **SIZES)
    assert torch.equal(both.to_dense(), by_score(scores, 2, causal) | sink.to_dense().to(device))
    every = BlockMask.top_k(scores, 99, **SIZES)
    assert every.density == 1 and BlockMask.top_k(scores, 0, **SIZES).density == 0
    scores[1, 2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        BlockMask.top_k(scores, 2, check=True, **SIZES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_top_k_means(device: str, head_dim: int) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, _ = (t.to(device, dtype) for t in operands((300, 300), (4, 2), head_dim))
    means = [
        torch.stack([part.float().mean(1) for part in t.split(64, 1)], 2) for t in (q, k)
    ]  # [B, H, blocks, D]
    scores = means[0] @ means[1].repeat_interleave(2, 1).mT
    mask = BlockMask.top_k_means(q, k, 2, block=64, causal=True)
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    assert torch.equal(mask.to_dense(), by_score(scores, 2, causal))
    check(mask, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_flex(device: str) -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= 70)

    for mask_mod, token_mask in ((causal, "causal"), (window, (70, 0))):
        flex = create_block_mask(mask_mod, None, None, 300, 300, device=device, BLOCK_SIZE=64)
        mask = BlockMask.from_flex(flex, token_mask=token_mask)
        assert torch.equal(mask.to_dense(), flex.to_dense().bool())
        back = mask.to_flex(mask_mod)
        assert torch.equal(back.to_dense(), flex.to_dense()) and back.BLOCK_SIZE == (64, 64)
        assert torch.equal(
            BlockMask.from_flex(back, token_mask=token_mask).to_dense(), mask.to_dense()
        )
        for wrong in ("full", (3, 0)):
            with pytest.raises(ValueError, match="mask_mod is not the token_mask"):
                BlockMask.from_flex(flex, token_mask=wrong)
            BlockMask.from_flex(flex, token_mask=wrong, check=False)
    check(mask, causal=True)
    plain = BlockMask.window(1, 1, **SIZES)
    assert torch.equal(
        BlockMask.from_flex(plain.to_flex(), token_mask="full").to_dense(), plain.to_dense()
    )


def by_flex(flex: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the pairs that flex_attention attends, full blocks included."""
    batch, heads, *_ = flex.kv_num_blocks.shape
    pairs = create_mask(flex.mask_mod, batch, heads, *flex.seq_lengths, device=q.device)
    made = (flex.seq_lengths, flex.BLOCK_SIZE)
    lists = [(flex.kv_num_blocks, flex.kv_indices)]
    if flex.full_kv_num_blocks is not None:
        lists.append((flex.full_kv_num_blocks, flex.full_kv_indices))
    partial, *full = (dense(BlockMask.from_kv_blocks(*t, seqlens=made[0], block=made[1]))
                      for t in lists)  # fmt: skip
    pairs = (pairs & partial) | full[0] if full else pairs & partial
    by_head = (t.double().transpose(1, 2) for t in (q, k, v))
    o = scaled_dot_product_attention(*by_head, attn_mask=pairs, enable_gqa=True)
    return o.nan_to_num().transpose(1, 2)


FLEX = {
    "full": (lambda b, h, q, k: q >= 0, (None, None)),
    "causal": (lambda b, h, q, k: q >= k, (None, 0)),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= 70), (70, 0)),
    "both sides": (lambda b, h, q, k: (q - k).abs() <= 20, (20, 20)),
    "later keys": (lambda b, h, q, k: k - q <= 33, (None, 33)),
    "earlier keys": (lambda b, h, q, k: q - k <= 33, (33, None)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlens", [(300, 300), (200, 330)])
@pytest.mark.parametrize("name", FLEX)
def test_token_mask_is_inferred(name: str, seqlens: tuple[int, int], device: str) -> None:
    mask_mod, window = FLEX[name]
    flex = create_block_mask(mask_mod, None, None, *seqlens, device=device, BLOCK_SIZE=64)
    mask = BlockMask.from_flex(flex)
    assert mask.token_mask == window
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (t.to(device, dtype) for t in operands(seqlens, (4, 2), 64))
    found, expected = block_sparse_attention(q, k, v, mask), by_flex(flex, q, k, v)
    assert_close(found, expected, dtype)
    # It stays with the mask, and a call that names a window overrules it.
    for again in (mask.to("cpu"), pickle.loads(pickle.dumps(mask)), mask & mask):
        assert again.token_mask == window
    local = block_sparse_attention(q, k, v, mask, window=(3, 0), top_left=True)
    assert (local - found).abs().max() > 0.1
    plain = BlockMask.from_dense_bool(mask.to_dense(), seqlens=seqlens, block=64)
    assert plain.token_mask is None and (plain & mask).token_mask == window


def test_full_blocks_of_flex() -> None:
    """Their pairs are attended whatever mask_mod says, so a window must not cut them."""
    causal = create_block_mask(FLEX["causal"][0], None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    full = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    full[..., 0, 3] = True
    lists = BlockMask.from_dense_bool(full, seqlens=(256, 256), block=64).to_flex()
    mixed = FlexMask.from_kv_blocks(
        causal.kv_num_blocks * 0, causal.kv_indices, lists.full_kv_num_blocks,
        lists.full_kv_indices, BLOCK_SIZE=64, mask_mod=FLEX["causal"][0], seq_lengths=(256, 256),
    )  # fmt: skip
    mask = BlockMask.from_flex(mixed)
    assert mask.token_mask == (None, None)
    q, k, v = operands((256, 256), (2, 2), 16)
    assert_close(block_sparse_attention(q, k, v, mask), by_flex(mixed, q, k, v), torch.float32)
    with pytest.raises(ValueError, match="mask_mod is not the token_mask at 12"):
        BlockMask.from_flex(mixed, token_mask="causal")
    partial_too = FlexMask.from_kv_blocks(
        causal.kv_num_blocks, causal.kv_indices, (lists.full_kv_num_blocks - 1).clamp(max=0) + 1,
        torch.full_like(lists.full_kv_indices, 3), BLOCK_SIZE=64, mask_mod=FLEX["causal"][0],
        seq_lengths=(256, 256),
    )  # fmt: skip
    partial_too.full_kv_num_blocks[..., 3] = 0
    query, key = pairs_of(256)
    pairs = (query // 64 == key // 64) & (query >= key)
    pairs[:192, 192:] = True
    mask = BlockMask.from_flex(partial_too)
    assert mask.has_bits and torch.equal(mask.to_token_mask()[0, 0], pairs)


def pairs_of(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)


def test_set_operations_of_different_token_masks() -> None:
    """Windows become bits where they are not those of both, or one of them has bits."""
    functions = [FLEX[name][0] for name in ("causal", "window")]
    functions.append(lambda b, h, q, k: (q + k) % 3 == 0)
    masks = [
        BlockMask.from_flex(create_block_mask(f, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=64))
        for f in functions
    ]
    for i, j in ((0, 1), (1, 0), (0, 2), (2, 1)):
        first, second = (functions[at](None, None, *pairs_of(256)) for at in (i, j))
        both, either = masks[i] & masks[j], masks[i] | masks[j]
        assert both.token_mask is None and either.token_mask is None
        assert torch.equal(both.to_token_mask()[0, 0], first & second)
        assert torch.equal(either.to_token_mask()[0, 0], first | second)
    assert (masks[0] | masks[0]).token_mask == (None, 0)


COUNTS = torch.tensor([[[1, 2]]], dtype=torch.int32)
COLUMNS = torch.tensor([[[[1, 9], [1, 0]]]], dtype=torch.int32)
SMALL = {"seqlens": (128, 128), "block": 64}
BLOCKS = torch.ones(1, 1, 2, 2, dtype=torch.bool)


def test_kv_blocks() -> None:
    mask = BlockMask.from_kv_blocks(COUNTS, COLUMNS, **SMALL)
    assert mask.to_dense().tolist() == [[[[False, True], [True, True]]]]
    full = BlockMask.from_kv_blocks(COUNTS - 1, COLUMNS, COUNTS * 0 + 1, COLUMNS * 0, **SMALL)
    assert full.to_dense().tolist() == [[[[True, False], [True, True]]]]


BAD_VALUES: dict[str, tuple[Any, str]] = {
    "block": (lambda: BlockMask.causal(seqlens=(100, 100), block=0), "multiple of 64"),
    "seqlens": (lambda: BlockMask.causal(seqlens=(-1, 100)), "seqlens"),
    "left": (lambda: BlockMask.window(-3, 0, **SMALL), "window is"),
    "sink": (lambda: BlockMask.sink(3, **SMALL), "3 sink columns"),
    "negative sink": (lambda: BlockMask.sink(-1, **SMALL), "count is -1"),
    "blocks type": (lambda: BlockMask.from_dense_bool(BLOCKS.int(), **SMALL), "not torch.bool"),
    "blocks rank": (lambda: BlockMask.from_dense_bool(BLOCKS[0], **SMALL), "batch, heads"),
    "blocks shape": (lambda: BlockMask.from_dense_bool(BLOCKS, seqlens=(300, 300)), "shape"),
    "scores type": (lambda: BlockMask.top_k(BLOCKS.half(), 1, **SMALL), "f16|float16"),
    "scores meta": (lambda: BlockMask.top_k(BLOCKS.float().to("meta"), 1, **SMALL), "memory|null"),
    "k": (lambda: BlockMask.top_k(BLOCKS.float(), -1, **SMALL), "k is -1"),
    "always": (
        lambda: BlockMask.top_k(
            BLOCKS.float(), 1, always=BlockMask.sink(1, seqlens=(64, 64), block=64), **SMALL
        ),
        "geometry",
    ),
    "means": (lambda: BlockMask.top_k_means(BLOCKS[0], BLOCKS[0], 1), "shapes"),
    "column": (lambda: BlockMask.from_kv_blocks(COUNTS + 1, COLUMNS + 8, **SMALL), "column that"),
    "count": (lambda: BlockMask.from_kv_blocks(COUNTS + 5, COLUMNS, **SMALL), "wrong length"),
    "twice": (
        lambda: BlockMask.from_kv_blocks(COUNTS, COLUMNS % 1, **SMALL), "column 0 comes twice"
    ),
    "shapes": (lambda: BlockMask.from_kv_blocks(COUNTS, COLUMNS[:, :, :1], **SMALL), "indices has"),
    "one full": (lambda: BlockMask.from_kv_blocks(COUNTS, COLUMNS, COUNTS, **SMALL), "together"),
    "union": (
        lambda: BlockMask.causal(**SMALL) | BlockMask.causal(**SIZES), "geometries differ"
    ),
    "lengths": (
        lambda: block_sparse_attention(*operands(), BlockMask.causal(**SMALL)), "block_mask"
    ),
    "heads": (
        lambda: block_sparse_attention(
            *operands((128, 128)), BlockMask.from_dense_bool(BLOCKS.expand(1, 3, 2, 2), **SMALL)
        ),
        "block_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values(name: str) -> None:
    call, sentence = BAD_VALUES[name]
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("block", [8, 96, (64, 65), 2048])
def test_blocks_that_no_kernel_takes(block: Any) -> None:
    with pytest.raises(blockflash.Unsupported, match="not a multiple of 64 from 64 to 1024"):
        BlockMask.causal(seqlens=(128, 128), block=block)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_views_that_negate(device: str) -> None:
    """Torch's negative bit, which native functions do not see."""
    scores = torch.randn(1, 2, 5, 5, device=device)
    options: dict[str, Any] = {"seqlens": (300, 300), "block": 64}
    negated = torch._neg_view(-scores)
    found, expected = (BlockMask.top_k(s, 2, **options).to_dense() for s in (negated, scores))
    assert torch.equal(found, expected)
    q, k = torch.randn(2, 1, 300, 2, 64, device=device, dtype=torch.bfloat16)
    found, expected = (
        BlockMask.top_k_means(x, k, 2, block=64).to_dense() for x in (torch._neg_view(-q), q)
    )
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="scores is a view of what it negates"):
        _native.BlockMask.from_scores(negated, (300, 300, 64, 64), (2, -1, -1, False, False), None)


def test_types() -> None:
    for bad in (None, BLOCKS, 3):
        with pytest.raises(TypeError, match="block_mask must be a BlockMask"):
            block_sparse_attention(*operands(), bad)


def test_compile() -> None:
    """Masks that come as arguments are not compiled anew."""
    torch.compiler.reset()
    compiled = torch.compile(block_sparse_attention, backend="aot_eager", fullgraph=True)
    inputs = operands((128, 128))
    for mask in (BlockMask.causal(**SMALL), *(BlockMask.sink(1, **SMALL) for _ in range(20))):
        assert torch.equal(compiled(*inputs, mask), block_sparse_attention(*inputs, mask))
    inputs = operands((128, 128), grad=True)
    for mask in (BlockMask.causal(**SMALL), *(BlockMask.sink(1, **SMALL) for _ in range(20))):
        both = (run(*inputs, mask).sum() for run in (compiled, block_sparse_attention))
        ours, expected = (torch.autograd.grad(o, inputs) for o in both)
        assert all(map(torch.equal, ours, expected))


@pytest.mark.gpu
def test_a_graph_keeps_its_mask() -> None:
    mask = BlockMask.causal(**SMALL).to("cuda")
    q, k, v = (t.cuda().half() for t in operands((128, 128), head_dim=64))
    expected = block_sparse_attention(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = block_sparse_attention(q, k, v, mask)
    del mask
    for _ in range(3):
        o.zero_()
        graph.replay()
        assert torch.equal(o, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_many_block_rows(causal: bool) -> None:
    """More than two block rows for each multiprocessor: on Hopper a CTA takes two of them."""
    torch.manual_seed(causal)
    scores = torch.randn(1, 16, 33, 33, device="cuda")
    mask = BlockMask.top_k(scores, 9, causal=causal, seqlens=(2100, 2100), block=64)
    check(mask, causal, heads=(16, 4), head_dim=128)
