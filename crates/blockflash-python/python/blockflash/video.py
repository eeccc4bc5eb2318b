"""Attention over the tokens of a video or an image, dense or within blocks that are tiles.

Tokens come in row-major order of a grid, `(frames, height, width)` of the latent after patching; an
image has one frame. `video_attention` brings them into the order of tiles, so that a block of the
mask holds tokens that are near each other, attends, and brings the result back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

import torch
from torch import Tensor

from ._arguments import lowered
from ._attention import attention
from .block_mask import BlockMask

Sizes = tuple[int, int, int]
_UNIT, _LARGEST = 64, 1024
_KEPT = 8
"""Grids whose orders and masks are kept: those of a few resolutions and devices."""


@dataclass(frozen=True)
class Dense:
    """Every token sees every token."""


@dataclass(frozen=True)
class SlidingTile:
    """A token sees the tiles around its own.

    Along each dimension these are `window` tiles; at the border of the grid they are moved inside,
    and where the grid has fewer, all are seen. A block of the mask is visited if one of its tokens
    sees one of its keys, and is attended as a whole. So where the tile does not divide the grid and
    blocks hold parts of several tiles, tokens see some keys more.

    Args:
        window: Tiles, along all dimensions or along each.
        tile: Tokens of a tile along frames, height and width. Their product is the size of a block,
            a multiple of 64 up to 1024.

    """

    window: int | Sizes
    tile: Sizes = (4, 4, 4)

    def __post_init__(self) -> None:
        window = (self.window,) * 3 if isinstance(self.window, int) else self.window
        object.__setattr__(self, "window", _sizes("window", window))
        object.__setattr__(self, "tile", _tile(self.tile))

    def block_mask(self, q: Tensor, k: Tensor, grid: Sizes) -> BlockMask:
        """The mask of tokens in the order of tiles; of q and k only the device counts."""
        return _sliding_mask(grid, self.tile, self.window, q.device)


@dataclass(frozen=True)
class TopK:
    """A block of queries sees its own block, and those with the best scores for a head.

    The score of a block of keys is mean query times mean key.

    Args:
        share: The chosen share of the blocks of keys, above 0 and at most 1; rounded up.
        tile: As in `SlidingTile`.

    """

    share: float
    tile: Sizes = (4, 4, 4)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}, but must be above 0 and at most 1")
        object.__setattr__(self, "tile", _tile(self.tile))

    def block_mask(self, q: Tensor, k: Tensor, grid: Sizes) -> BlockMask:
        """The mask of tokens in the order of tiles, `[B, S, H, D]`; on a GPU without the host."""
        block = prod(self.tile)
        # A product such as 0.07 * 100 may be a little above the number that is meant.
        count = ceil(self.share * ceil(prod(grid) / block) - 1e-9)
        return BlockMask.top_k_means(
            q, k, count, block=block, always=_diagonal(prod(grid), block, q.device)
        )


Kind = Dense | SlidingTile | TopK


@torch.compiler.disable(reason="block masks are made outside of compiled functions")
def video_attention(
    q: Tensor, k: Tensor, v: Tensor, grid: Sizes, kind: Kind, *, scale: float | None = None
) -> Tensor:
    """Attention of the tokens of a grid to each other.

    Orders and masks of the last few grids are kept, so under a CUDA graph the first call comes
    before the capture. A compiled model has a break of its graph here.

    Args:
        q: Queries, `[B, S, Hq, D]`, where `S = frames * height * width`, in row-major order.
        k: Keys, `[B, S, Hk, D]`.
        v: Values, `[B, S, Hk, Dv]`.
        grid: Tokens along frames, height and width.
        kind: `Dense`, `SlidingTile` or `TopK`.
        scale: As in `attention`.

    Returns:
        `[B, S, Hq, Dv]`, as `attention`.

    Raises:
        Unsupported: No kernel takes the call.
        ValueError: The grid has another number of tokens, or as in `attention`.

    """
    if not isinstance(kind, Dense | SlidingTile | TopK):
        raise TypeError(f"kind must be Dense, SlidingTile or TopK, not {type(kind).__name__}")
    grid = _sizes("grid", grid)
    q, k, v = lowered(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[1] != prod(grid):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, not [batch, {prod(grid)}, heads, "
                f"head_dim], the tokens of grid {grid}"
            )
    if isinstance(kind, Dense):
        return attention(q, k, v, scale=scale)
    there, back, _ = _order(grid, kind.tile, q.device)
    q, k, v = (tensor.index_select(1, there) for tensor in (q, k, v))
    o = attention(q, k, v, scale=scale, block_mask=kind.block_mask(q, k, grid))
    return o.index_select(1, back)


def _sizes(name: str, sizes: tuple[int, ...]) -> Sizes:
    """Three positive numbers."""
    sizes = tuple(sizes)
    if len(sizes) != 3 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"{name} is {sizes}, not three positive numbers: frames, height, width")
    return sizes


def _tile(sizes: tuple[int, ...]) -> Sizes:
    frames, height, width = _sizes("tile", sizes)
    tokens = frames * height * width
    if tokens % _UNIT or tokens > _LARGEST:
        raise ValueError(
            f"tile is {tuple(sizes)}, {tokens} tokens, not a multiple of {_UNIT} up to {_LARGEST}"
        )
    return frames, height, width


def _tiles(grid: Sizes, tile: Sizes) -> tuple[Tensor, Tensor]:
    """The rank of each token's tile, `[tokens]`, and the place of each tile, `[tiles, 3]`.

    Tiles are ranked in a serpentine, so that a block with parts of several tiles has neighbours.
    """
    axes = (torch.arange(size, device="cpu") // side for size, side in zip(grid, tile))
    frame, row, column = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
    _, rows, columns = (ceil(size / side) for size, side in zip(grid, tile))
    line = frame * rows + torch.where(frame % 2 == 1, rows - 1 - row, row)
    rank = line * columns + torch.where(line % 2 == 1, columns - 1 - column, column)
    places = rank.new_empty((int(rank.max()) + 1, 3))
    places[rank] = torch.stack((frame, row, column), 1)
    return rank, places


@lru_cache(_KEPT)
def _order(grid: Sizes, tile: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens in the order of tiles, where each token is in it, and the ranks of its tiles.

    The last one is on the CPU, the others are copied from there: such a copy is complete when it
    returns, so any stream may read it.
    """
    with torch.inference_mode(False):
        rank, _ = _tiles(grid, tile)
        order = rank.argsort(stable=True)
        return order.to(device), order.argsort().to(device), rank[order]


@lru_cache(_KEPT)
def _sliding_mask(grid: Sizes, tile: Sizes, window: Sizes, device: torch.device) -> BlockMask:
    block, tokens = prod(tile), prod(grid)
    with torch.inference_mode(False):
        _, places = _tiles(grid, tile)
        seen = places.new_ones((len(places), len(places)), dtype=torch.bool)
        for axis, (size, side, span) in enumerate(zip(grid, tile, window)):
            tiles = ceil(size / side)
            span = min(span, tiles)
            place = torch.arange(tiles, device="cpu")
            first = (place - span // 2).clamp(0, tiles - span)[:, None]
            along = (place >= first) & (place < first + span)
            of = places[:, axis]
            seen &= along[of][:, of]
        _, _, ranks = _order(grid, tile, torch.device("cpu"))
        # A block has consecutive tiles: sums up to its last one less those before its first one.
        starts = torch.arange(0, tokens, block, device="cpu")
        first, last = ranks[starts], ranks[(starts + block).clamp(max=tokens) - 1]
        for axis in (0, 1):
            sums = seen.cumsum(axis, dtype=torch.int32)
            before = sums.index_select(axis, first) - seen.index_select(axis, first).int()
            seen = sums.index_select(axis, last) > before
        return BlockMask.from_dense_bool(seen, seqlens=(tokens, tokens), block=block).to(device)


@lru_cache(_KEPT)
def _diagonal(tokens: int, block: int, device: torch.device) -> BlockMask:
    return BlockMask.window(0, 0, seqlens=(tokens, tokens), block=block).to(device)
