"""Sequences whose rows are divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import agree
from ._rows import Block, cut, in_order, place, ranges, take


def shard(x: Tensor, group: Any = None, dim: int = 1, block: Block = 1) -> Tensor:
    """The rows of this rank, of a tensor that has all rows of the sequence along `dim`.

    There may be any number of rows: chunks differ by one row at most, and with fewer rows than
    chunks some ranks have none. With `block`, or the queries and keys of a block, the sequence is
    cut between blocks only, as a block mask needs it: chunks differ by one block at most, which is
    the common multiple of both. All layers of a model have the same rows if one has a block mask.
    """
    rank, world = place(group)
    return take(x, ranges(x.shape[dim], world, rank, cut(block)), dim)


def unshard(x: Tensor, group: Any = None, dim: int = 1, block: Block = 1) -> Tensor:
    """All rows of the sequence, on every rank, by the rows of each. It has no gradient.

    Raises:
        ValueError: The ranks do not have the rows that `shard` gives them, or their tensors differ
            otherwise. The same on every rank.

    """
    _, world = place(group)
    others = list(x.shape)
    rows, others[dim] = others[dim], -1
    every = cut(block)
    arguments = (others, str(x.dtype), x.device.type, dim, every)
    counts = agree(group, arguments, rows, x.device, block=every)
    # Messages of one length: parts are filled up to the longest one.
    padded = x.new_zeros([max(counts) if size == -1 else size for size in others])
    padded.narrow(dim, 0, rows).copy_(x.detach())
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group)
    chunks = [ranges(sum(counts), world, rank, every) for rank in range(world)]
    parts = [part.narrow(dim, 0, n) for part, n in zip(parts, counts, strict=True)]
    return in_order(parts, chunks, dim)


def positions(seqlen: int, group: Any = None, device: Any = None, block: Block = 1) -> Tensor:
    """Where the rows of this rank stand in a sequence of `seqlen` rows, for rotary embeddings."""
    return shard(torch.arange(seqlen, device=device), group, 0, block)
