"""Exchanges among the ranks of a group. Every one is an all-to-all, in which parts may be empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._grid import Grid
from ._rows import in_order

Tensors = Sequence[Tensor]
Shapes = Sequence[Sequence[int]]


def exchange(
    like: Tensor, sent: Mapping[int, Tensors], shapes: Mapping[int, Shapes], group: Any
) -> Callable[[], dict[int, list[Tensor]]]:
    """Starts to send tensors to ranks, and to receive tensors of these shapes from ranks.

    All have the element type and the device of `like`. The result waits, and gives what has come.
    """
    world = dist.get_world_size(group)
    tensors = [x for rank in sorted(sent) for x in sent[rank]]
    sends = [sum(x.numel() for x in sent.get(rank, ())) for rank in range(world)]
    sizes = {rank: [prod(shape) for shape in each] for rank, each in shapes.items()}
    receives = [sum(sizes.get(rank, ())) for rank in range(world)]
    out, buffer = like.new_empty(sum(sends)), like.new_empty(sum(receives))
    for place, x in zip(out.split([x.numel() for x in tensors]), tensors, strict=True):
        place.view(x.shape).copy_(x)
    work = dist.all_to_all_single(buffer, out, receives, sends, group, async_op=True)

    def wait() -> dict[int, list[Tensor]]:
        nonlocal out
        work.wait()
        out = None  # Until here the memory was in use.
        found, at = {}, 0
        for rank in sorted(shapes):
            pieces = buffer[at : at + receives[rank]].split(sizes[rank])
            found[rank] = [p.view(*s) for p, s in zip(pieces, shapes[rank], strict=True)]
            at += receives[rank]
        return found

    return wait


class Exchange(torch.autograd.Function):
    """Rows of this rank, of all heads, for heads of this rank, of all rows of its group; or back.

    The tensors, `[B, rows, heads, D]`, travel in one message.
    """

    @staticmethod
    def forward(ctx: Any, grid: Grid, back: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors after the exchange."""
        ctx.grid, ctx.back = grid, back
        return _scatter(grid, tensors) if back else _gather(grid, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The exchange in the other direction."""
        return None, None, *Exchange.apply(ctx.grid, not ctx.back, *grads)


def _gather(grid: Grid, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    chunks, first = grid.chunks(), grid.rank - grid.member
    sent, shapes = {}, {}
    for member, rows in enumerate(chunks):
        sent[first + member], shapes[first + member] = [], []
        for x in tensors:
            heads = x.shape[2] // len(chunks)
            sent[first + member].append(x.narrow(2, member * heads, heads))
            shapes[first + member].append((x.shape[0], sum(map(len, rows)), heads, x.shape[3]))
    found = exchange(tensors[0], sent, shapes, grid.process_group)()
    each = zip(*(found[first + member] for member in range(len(chunks))), strict=True)
    return tuple(in_order(parts, chunks, 1) for parts in each)


def _scatter(grid: Grid, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    chunks, first = grid.chunks(), grid.rank - grid.member
    sent, shapes = {}, {}
    for member, pieces in enumerate(grid.pieces()):
        sent[first + member] = [x[:, rows] for x in tensors for rows in pieces]
        own = [len(chunk) for chunk in chunks[grid.member]]
        shapes[first + member] = [(x.shape[0], rows, *x.shape[2:]) for x in tensors for rows in own]
    found = exchange(tensors[0], sent, shapes, grid.process_group)()
    each = zip(*(found[first + member] for member in range(len(chunks))), strict=True)
    heads = [torch.cat(parts, 2) for parts in each]
    return tuple(torch.cat(pair, 1) for pair in zip(heads[::2], heads[1::2], strict=True))
