"""The comparison of arguments that makes a mistake the same error on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from .._native import DeviceError, Unsupported
from ._rows import count, ranges

_KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, Unsupported, DeviceError)}


def agree(
    group: Any,
    arguments: tuple[Any, ...],
    rows: int,
    device: torch.device,
    error: Exception | None = None,
    block: int = 1,
) -> list[int]:
    """The rows of each rank, if all have the same arguments, no error, and the rows of `shard`.

    The first thing that is wrong raises the same exception on every rank.
    """
    world = dist.get_world_size(group)
    everyone: list[Any] = [None] * world
    wrong = None if error is None else (type(error).__name__, str(error))
    # NCCL takes what it sends from the current GPU, which may not be the one of the tensors.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(everyone, (arguments, rows, wrong), group)
    for rank, (_, _, wrong) in enumerate(everyone):
        if wrong is not None:
            kind, text = wrong
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank}: {text}") from error
    for rank, (theirs, _, _) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise ValueError(f"rank {rank} has {theirs}, but rank 0 has {everyone[0][0]}")
    counts = [rows for _, rows, _ in everyone]
    seqlen = sum(counts)
    for rank, rows in enumerate(counts):
        expected = count(ranges(seqlen, world, rank, block))
        if rows != expected:
            raise ValueError(
                f"the ranks hold {counts} rows, but of {seqlen} rank {rank} holds {expected}"
            )
    return counts
