"""Which rows of a sequence a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _native

Ranges = tuple[range, range]
"""Where two chunks are, the first one before the second one."""
Block = int | tuple[int, int]
"""Rows of a block, or its queries and keys."""


def place(group: Any) -> tuple[int, int]:
    """Number of this rank, and of ranks."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    return rank, dist.get_world_size(group)


def pair(block: Block) -> tuple[int, int]:
    """Queries and keys of a block."""
    block_q, block_k = (block, block) if isinstance(block, int) else block
    if min(block_q, block_k) < 1:
        raise ValueError(f"block is {block}, but a block has rows")
    return block_q, block_k


def cut(block: Block) -> int:
    """The rows of which chunks have a multiple, so that each has whole blocks."""
    return lcm(*pair(block))


def ranges(seqlen: int, world: int, rank: int, block: int = 1) -> Ranges:
    """The chunks of a rank, as the Rust crate has them: one from the front and one from the back.

    They are cut at multiples of `block` rows.
    """
    first, second = _native.shard_ranges(seqlen, world, rank, block)
    return range(*first), range(*second)


def count(chunks: Ranges) -> int:
    """Rows of both chunks."""
    return sum(map(len, chunks))


def picked(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """Some rows of a tensor `[B, rows, ...]`, one after the other."""
    return x[:, rows[0]] if len(rows) == 1 else torch.cat([x[:, :0], *(x[:, s] for s in rows)], 1)


def take(x: Tensor, chunks: Ranges, dim: int) -> Tensor:
    """The rows of both chunks, one after the other."""
    return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def in_order(parts: Sequence[Tensor], chunks: Sequence[Ranges], dim: int) -> Tensor:
    """The rows of consecutive ranks in the order of the sequence, given the chunks of each."""
    cut = [part.tensor_split([len(of[0])], dim) for part, of in zip(parts, chunks, strict=True)]
    return torch.cat([first for first, _ in cut] + [second for _, second in reversed(cut)], dim)
