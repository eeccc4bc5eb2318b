"""Bits of partial blocks: which pairs of queries and keys inside of a visited block are visible.

A tile of 64 x 64 pairs has 128 words of 32 bits, in the order in which the lanes of a kernel hold
scores: row `16 a + 8 b + c` and column `8 d + 2 e + f` is bit `16 b + 2 d + f` of word
`32 a + 4 c + e`. Blocks that are larger have their tiles row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
WORDS = 128
"""Words of a tile."""

_PAIRS = 1 << 20
"""How many pairs are evaluated at once."""

_ORDER = (0, 1, 3, 5, 2, 4, 6)
_BACK = (0, 1, 4, 2, 5, 3, 6)


def words_of(blocks: Tensor) -> Tensor:
    """Words, int32 `[tiles, 128]`, of blocks, bool `[blocks, block_q, block_k]`."""
    _, block_q, block_k = blocks.shape
    tiles = blocks.reshape(-1, block_q // TILE, TILE, block_k // TILE, TILE).transpose(2, 3)
    parts = tiles.reshape(-1, 4, 2, 8, 8, 4, 2).permute(_ORDER).reshape(-1, 4, 8)
    weights = (1 << torch.arange(8, device=blocks.device)).to(torch.uint8)
    packed = (parts.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32).view(-1, WORDS)


def blocks_of(words: Tensor, block: tuple[int, int]) -> Tensor:
    """Blocks, bool `[blocks, block_q, block_k]`, of their words."""
    tall, wide = (size // TILE for size in block)
    places = torch.arange(32, device=words.device)
    parts = (words[..., None] >> places & 1).bool().view(-1, 4, 8, 4, 2, 8, 2)
    tiles = parts.permute(_BACK).reshape(-1, tall, wide, TILE, TILE)
    return tiles.transpose(2, 3).reshape(-1, *block)


@dataclass(frozen=True)
class Lists:
    """A block mask as the native module takes it and gives it."""

    lists: tuple[Tensor, Tensor]
    """row_ptr, int32 `[batch, heads, rows + 1]`, and col_idx, int32 `[nnz]`"""
    bits: tuple[Tensor, Tensor] | None
    """The first tile of each block, int32 `[nnz]`, -1 for a full one, and the words of the tiles,
    int32 `[tiles, 128]`; None if all are full."""

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.lists[0].device

    def to(self, device: torch.device) -> Lists:
        """The same on a device."""
        row_ptr, col_idx = (t.to(device) for t in self.lists)
        bits = self.bits and tuple(t.to(device) for t in self.bits)
        return Lists((row_ptr, col_idx), bits)

    @classmethod
    def of(cls, visited: Tensor, first: Tensor, words: Sequence[Tensor]) -> Lists:
        """Of the visited blocks, bool `[batch, heads, rows, cols]`, and their first tiles."""
        ends = visited.sum(-1).flatten().cumsum(0).to(torch.int32)
        batch, heads, rows, _ = visited.shape
        starts = ends.view(batch * heads, rows).roll(1, 0)[:, -1:].contiguous()
        if len(starts):
            starts[0] = 0
        row_ptr = torch.cat([starts, ends.view(batch * heads, rows)], 1) if rows else starts
        columns = visited.nonzero()[:, 3].to(torch.int32)
        made = (row_ptr.view(batch, heads, -1), columns)
        if not words:
            return cls(made, None)
        return cls(made, (first[visited].to(torch.int32), torch.cat(list(words))))


class Evaluation:
    """The pairs that a function shows in some blocks of a mask, which it is asked for in pieces.

    The function gets indices of the batch entry, head, query and key, as a mask_mod of
    flex_attention does, and is transformed by `torch.vmap`.
    """

    def __init__(
        self,
        mask_mod: Callable[..., Tensor],
        seqlens: tuple[int, int],
        block: tuple[int, int],
    ) -> None:
        self._seqlens, self._block = seqlens, block
        over_keys = torch.vmap(mask_mod, (None, None, None, 0))
        over_queries = torch.vmap(over_keys, (None, None, 0, None))
        self._visible = torch.vmap(over_queries, (0, 0, 0, 0))

    def pieces(self, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Of blocks (batch, head, row, column), int `[blocks, 4]`, some at a time.

        Yields the blocks, their queries and keys, `[some, block_q]` and `[some, block_k]`, which
        pairs exist, and which are visible, `[some, block_q, block_k]`.
        """
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        (block_q, block_k), (seqlen_q, seqlen_k) = self._block, self._seqlens
        rows, cols = (torch.arange(size, device=blocks.device) for size in self._block)
        for some in blocks.split(max(_PAIRS // (block_q * block_k), 1)):
            batch, head, row, col = some.unbind(1)
            query, key = row[:, None] * block_q + rows, col[:, None] * block_k + cols
            exist = (query < seqlen_q)[:, :, None] & (key < seqlen_k)[:, None]
            # The function may look its indices up.
            inside = query.clamp(max=seqlen_q - 1), key.clamp(max=seqlen_k - 1)
            with TransformGetItemToIndex():
                visible = self._visible(batch, head, *inside).bool()
            yield some, query, key, exist, visible & exist

    def lists(self, blocks: Tensor, full: Tensor) -> Lists:
        """The mask whose blocks are full, bool `[batch, heads, rows, cols]`, or as evaluated."""
        collected = Collected(full)
        for some, _, _, exist, visible in self.pieces(blocks):
            collected.add(some, exist, visible)
        return collected.lists()


class Collected:
    """Blocks with their bits, piece by piece."""

    def __init__(self, full: Tensor) -> None:
        """Takes the blocks that are full, bool `[batch, heads, rows, cols]`."""
        self._visited = full.clone()
        self._first = torch.full(full.shape, -1, device=full.device)
        self._words: list[Tensor] = []
        self._tiles = 0

    def add(self, blocks: Tensor, exist: Tensor, visible: Tensor) -> None:
        """Adds blocks (batch, head, row, column): pairs that exist, and those that are visible."""
        shown = visible.flatten(1).any(1)
        partial = shown & (visible != exist).flatten(1).any(1)
        self._visited[blocks.unbind(1)] = shown
        words = words_of(visible[partial])
        if not len(words):
            return
        some = blocks[partial]
        each = len(words) // len(some)
        first = self._tiles + each * torch.arange(len(some), device=blocks.device)
        self._first[some.unbind(1)] = first
        self._words.append(words)
        self._tiles += len(words)

    def lists(self) -> Lists:
        """The lists of all blocks."""
        return Lists.of(self._visited, self._first, self._words)


def first_tiles(lists: Lists, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The first tile of each block, int32 `[batch, heads, rows, cols]`, and the words.

    -1 stands for a full block, and -2 for one that is not visited.
    """
    row_ptr, col_idx = lists.lists
    first = torch.full(shape, -2, dtype=torch.int32, device=lists.device)
    lengths = row_ptr.diff().flatten()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lists.device), lengths)
    full = torch.full_like(col_idx, -1)
    tiles, words = lists.bits or (full, full.new_empty((0, WORDS)))
    first.view(-1, shape[3])[rows, col_idx.long()] = tiles
    return first, words.to(lists.device)


def token_mask(
    lists: Lists, shape: tuple[int, ...], seqlens: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """Which pairs are visible, bool `[batch, heads, seqlen_q, seqlen_k]`."""
    first, words = first_tiles(lists, shape)
    (block_q, block_k), (batch, heads, rows, cols) = block, shape
    pairs = first.new_zeros((batch, heads, rows, block_q, cols, block_k), dtype=torch.bool)
    pairs = pairs.transpose(3, 4)
    pairs[first == -1] = True
    partial = (first >= 0).nonzero()
    each = block_q // TILE * (block_k // TILE)
    places = torch.arange(each, device=lists.device)
    for some in partial.split(max(_PAIRS // (block_q * block_k), 1)):
        tiles = first[some.unbind(1)][:, None] + places
        pairs[some.unbind(1)] = blocks_of(words[tiles.flatten().long()], block)
    whole = pairs.transpose(3, 4).reshape(batch, heads, rows * block_q, cols * block_k)
    return whole[:, :, : seqlens[0], : seqlens[1]].contiguous()


def window(
    sides: tuple[int | None, int | None], seqlens: tuple[int, int], device: torch.device
) -> Tensor:
    """The pairs of a window that is counted from the starts, bool `[seqlen_q, seqlen_k]`."""
    query, key = (torch.arange(length, device=device) for length in seqlens)
    distance = key - query[:, None]
    shown = torch.ones_like(distance, dtype=torch.bool)
    if sides[0] is not None:
        shown &= distance >= -sides[0]
    if sides[1] is not None:
        shown &= distance <= sides[1]
    return shown


def mask_mod(lists: Lists, shape: tuple[int, ...], block: tuple[int, int]) -> Callable[..., Tensor]:
    """A function for flex_attention that looks pairs up, of a mask of this many blocks."""
    batch, heads, _, _ = shape
    first, words = first_tiles(lists, shape)
    words = words if len(words) else words.new_zeros((1, WORDS))
    wide = block[1] // TILE

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether a query sees a key."""
        row, col = q // block[0], k // block[1]
        start = first[b * (batch > 1), h * (heads > 1), row, col]
        row, col = q % block[0], k % block[1]
        tile = start + row // TILE * wide + col // TILE
        row, col = row % TILE, col % TILE
        word = 32 * (row // 16) + 4 * (row % 8) + col % 8 // 2
        bit = 16 * (row % 16 // 8) + 2 * (col // 8) + col % 2
        seen = words[tile.clamp(min=0), word] >> bit & 1
        return (start == -1) | ((start >= 0) & (seen == 1))

    return visible
