"""Makers of block masks from pairs of queries and keys, against dense masks by their definition."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from blockflash import BlockMask

BLOCKS = pytest.mark.parametrize("block", [64, 128, (64, 192), (128, 64)], ids=str)


def tokens(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)


def same(mask: BlockMask, pairs: Tensor) -> None:
    """The pairs, `[queries, keys]` or with batch entries and heads before, and no empty block."""
    pairs = pairs if pairs.dim() == 4 else pairs[None, None]
    assert torch.equal(mask.to_token_mask(), pairs)
    (block_q, block_k), (_, _, rows, cols) = mask.block, mask.shape
    pad = (0, cols * block_k - pairs.shape[3], 0, rows * block_q - pairs.shape[2])
    blocks = torch.nn.functional.pad(pairs, pad).unflatten(3, (cols, -1)).unflatten(2, (rows, -1))
    assert torch.equal(mask.to_dense(), blocks.any(5).any(3))


@BLOCKS
@pytest.mark.parametrize("shape", [(2, 3, 150, 333), (1, 1, 64, 64), (1, 2, 1, 400)], ids=str)
def test_token_masks(shape: tuple[int, ...], block: Any) -> None:
    torch.manual_seed(0)
    pairs = torch.rand(shape) < 0.3
    pairs[0, 0, :64, :128], pairs[..., :1, :], pairs[:, -1, 64:128] = True, False, False
    for given in (pairs, pairs.mT.contiguous().mT, pairs[:1, :1].expand(shape)):
        same(BlockMask.from_token_mask(given, block=block), given)
    same(BlockMask.from_token_mask(pairs[0, 0], block=block), pairs[0, 0])


@BLOCKS
def test_full_and_empty_blocks_have_no_bits(block: Any) -> None:
    pairs = torch.ones(200, 300, dtype=torch.bool)
    mask = BlockMask.from_token_mask(pairs, block=block)
    assert not mask.has_bits and mask.density == 1
    same(mask, pairs)
    mask = BlockMask.from_token_mask(~pairs, block=block)
    assert not mask.has_bits and mask.density == 0
    same(mask, ~pairs)


@BLOCKS
def test_copies(block: Any) -> None:
    """Pickles, as in `torch.save` and state dicts, and packed masks keep bits."""
    torch.manual_seed(1)
    pairs = torch.rand(2, 1, 150, 200) < 0.5
    mask, file = BlockMask.from_token_mask(pairs, block=block), io.BytesIO()
    torch.save(
        {"mask": mask, "packed": BlockMask.packed([mask_of(pairs, 0), mask_of(pairs, 1)])}, file
    )
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    same(saved["mask"], pairs)
    for i, entry in enumerate(saved["packed"].sequences()):
        same(entry, pairs[i, 0])
    with pytest.raises(ValueError, match="packed mask"):
        saved["packed"].to_token_mask()


def mask_of(pairs: Tensor, entry: int) -> BlockMask:
    return BlockMask.from_token_mask(pairs[entry, 0])


def test_intervals() -> None:
    torch.manual_seed(2)
    ends = torch.randint(-5, 310, (2, 3, 150, 2, 2), dtype=torch.int32)
    mask = BlockMask.from_intervals(ends, seqlen_k=300, block=64)
    _, key = tokens(150, 300)
    seen = (key >= ends[..., :1]) & (key < ends[..., 1:])
    same(mask, seen.any(3))


def test_documents() -> None:
    torch.manual_seed(3)
    ids = torch.randint(-1, 4, (2, 150), dtype=torch.int32)
    seen = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    same(BlockMask.documents(ids, block=64), seen[:, None])
    keys = torch.randint(-1, 4, (2, 90), dtype=torch.int32)
    seen = (ids[:, :, None] == keys[:, None]) & (keys >= 0)[:, None]
    same(BlockMask.documents(ids, keys, block=64), seen[:, None])


def test_trees() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, -1, 0, 2, 1, 4]], dtype=torch.int32)
    seen = torch.zeros(2, 1, 6, 100, dtype=torch.bool)
    seen[..., :94] = True
    for entry in range(2):
        for query in range(6):
            at = query
            while at >= 0:
                seen[entry, 0, query, 94 + at] = True
                at = int(parents[entry, at])
    same(BlockMask.tree(parents, seqlen_k=100), seen)


@pytest.mark.parametrize("top_left", [False, True])
def test_patterns(top_left: bool) -> None:
    sizes = {"seqlens": (150, 300), "block": 64, "top_left": top_left}
    query, key = tokens(150, 300)
    position = query if top_left else query + 150
    causal = key <= position
    same(BlockMask.prefix(170, **sizes), causal | (key < 170))
    both = torch.stack([causal | (key < n) for n in (5, 260)])[:, None]
    same(BlockMask.prefix([5, 260], **sizes), both)
    wide = (key >= position - 9) & (key <= position + 3)
    same(BlockMask.prefix(20, causal=False, window=(9, 3), **sizes), wide | (key < 20))
    same(BlockMask.streaming(4, 30, **sizes), causal & ((key < 4) | (key >= position - 30)))
    steps = (key - position) % 3 == 0
    dilated = steps & (key >= position - 3 * 20) & (key <= position + 3 * 5)
    same(BlockMask.dilated_window(3, 20, 5, **sizes), dilated)
    same(BlockMask.dilated_window(3, None, 0, **sizes), steps & causal)


def test_padding() -> None:
    ends = [(0, 300), (20, 250), (0, 0)]
    mask = BlockMask.key_padding(ends, seqlens=(70, 300), block=64)
    key = torch.arange(300)
    seen = torch.stack([((key >= start) & (key < end)).expand(70, 300) for start, end in ends])
    same(mask, seen[:, None])


@pytest.mark.parametrize("dilation", [1, 2])
def test_neighborhoods(dilation: int) -> None:
    mask = BlockMask.neighborhood([12, 15], (3, 5), dilation, block=64)
    pairs = mask.to_token_mask()[0, 0]
    assert (pairs.sum(1) == 15).all()  # as many keys at the border
    seen = pairs.view(12, 15, 12, 15)
    if dilation == 1:
        assert seen[6, 7].nonzero().amin(0).tolist() == [5, 5]
        assert seen[0, 14].nonzero().aminmax(dim=0).max.tolist() == [2, 14]
    one = BlockMask.neighborhood([180], 7, dilation, block=64)
    query, key = tokens(180, 180)
    inside = (query >= 3 * dilation) & (query < 180 - 3 * dilation)
    wanted = ((query - key).abs() <= 3 * dilation) & ((query - key) % dilation == 0)
    assert torch.equal((one.to_token_mask()[0, 0] & inside), wanted & inside)


def test_complements() -> None:
    torch.manual_seed(4)
    pairs, (query, key) = torch.rand(150, 150) < 0.5, tokens(150, 150)
    mask = BlockMask.from_token_mask(pairs, block=64)
    same(mask.complement(causal=True), (key <= query) & ~pairs)
    same(mask.complement(), ~pairs)
    same(mask.complement(window=(5, 2)), (key >= query - 5) & (key <= query + 2) & ~pairs)
    same(mask | mask.complement(), torch.ones_like(pairs))


SMALL = {"seqlens": (64, 64), "block": 64}
INT = torch.int32
WRONG: dict[str, tuple[Any, str]] = {
    "type of pairs": (lambda: BlockMask.from_token_mask(torch.ones(4, 4)), "torch.bool"),
    "shape of pairs": (
        lambda: BlockMask.from_token_mask(torch.ones(4, 4, 4, dtype=torch.bool)), "have shape"
    ),
    "block": (
        lambda: BlockMask.from_token_mask(torch.ones(4, 4, dtype=torch.bool), block=32),
        "multiple of 64",
    ),
    "intervals": (
        lambda: BlockMask.from_intervals(torch.zeros(1, 1, 4, 2, dtype=INT), seqlen_k=4),
        "intervals have shape",
    ),
    "type of intervals": (
        lambda: BlockMask.from_intervals(torch.zeros(1, 1, 4, 1, 2), seqlen_k=4), "f32"
    ),
    "documents": (lambda: BlockMask.documents(torch.zeros(4, dtype=INT)), "ids have shapes"),
    "tree": (
        lambda: BlockMask.tree(torch.tensor([[0, 0]], dtype=INT), seqlen_k=4), "parent"
    ),
    "keys of a tree": (
        lambda: BlockMask.tree(torch.tensor([[-1, 0]], dtype=INT), seqlen_k=1), "queries"
    ),
    "dilation": (lambda: BlockMask.dilated_window(0, 3, 0, **SMALL), "dilation"),
    "grid": (lambda: BlockMask.neighborhood([8, 8], [3]), "dimensions"),
    "count": (lambda: BlockMask.streaming(-1, 3, **SMALL), "count is -1"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_errors(what: str) -> None:
    call, text = WRONG[what]
    with pytest.raises(ValueError, match=text):
        call()
