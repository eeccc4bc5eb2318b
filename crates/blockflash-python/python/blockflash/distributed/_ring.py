"""Attention of the queries of a group to the keys of all groups.

In a step a group attends the keys of one other group, which come from the rank that holds them: of
them only those that some query attends. (In a ring they would be handed on from neighbour to
neighbour, which is the same number of bytes, but each step would wait for the one before.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _decode, _ops
from ._exchange import exchange
from ._grid import Grid, Step
from ._packed import on_device
from ._rows import picked
from ._visits import Visit

_OPS = torch.ops.blockflash
_AHEAD = 2
"""Steps whose keys are under way while a step is computed."""


class Options(NamedTuple):
    """The options of attention."""

    window: tuple[int, int]
    scale: float
    softcap: float | None

    def of(self, visit: Visit, sink: Tensor | None, like: Tensor) -> dict[str, Any]:
        """What the operators take."""
        given = {"left": visit.left, "right": visit.right, "top_left": True, "scale": self.scale}
        given |= {"softcap": self.softcap or 0.0, "sink": sink if visit.home else None}
        if visit.block_mask is not None:
            given["block_mask"] = visit.block_mask.number
        return given | (on_device(visit.cu_seqlens, like) if visit.cu_seqlens else {})


def _rows(x: Tensor, rows: Sequence[slice]) -> tuple[int, ...]:
    return (x.shape[0], sum(each.stop - each.start for each in rows), *x.shape[2:])


def _shaped(visit: Visit, *tensors: Tensor) -> list[Tensor]:
    """Operands as a visit takes them: sequences are packed without a batch, which has one entry."""
    return [x[0] for x in tensors] if visit.cu_seqlens else list(tensors)


def _arrivals(grid: Grid, options: Options, k: Tensor, v: Tensor) -> Iterator[Any]:
    """The steps, with the keys and values of each.

    The first exchanges are queued at once, later ones before the attention beside which they run.
    Attention fills a GPU and leaves it at its end only. What a caller clears after this call, and
    before its attention, is the time in which the first exchanges get their place on a GPU.
    """
    steps, _ = grid.steps(options.window)

    def start(step: Step) -> Any:
        source, target = grid.in_ring(step.source), grid.in_ring(step.target)
        sent = {target: [picked(x, step.sent) for x in (k, v)]}
        shapes = {source: [_rows(x, step.received) for x in (k, v)]}
        return source, exchange(k, sent, shapes, grid.process_group)

    first = 1 + _AHEAD
    under_way = deque(start(step) for step in steps[1:first])

    def each() -> Iterator[Any]:
        yield steps[0], k, v
        for t, step in enumerate(steps[1:]):
            under_way.extend(start(later) for later in steps[first + t : first + t + 1])
            source, wait = under_way.popleft()
            yield step, *wait()[source]

    return each()


class Ring(torch.autograd.Function):
    """The output for the queries of a group, of the heads of this rank."""

    @staticmethod
    def forward(
        ctx: Any, grid: Grid, options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> Tensor:
        """The parts, and their merge."""
        ctx.grid, ctx.options = grid, options
        arrivals = _arrivals(grid, options, k, v)
        parts = max(1, grid.steps(options.window)[1])
        batch, length, heads, _ = q.shape
        o = q.new_zeros((parts, *q.shape))
        lse = q.new_full((parts, batch, heads, length), -torch.inf, dtype=torch.float32)
        for step, keys, values in arrivals:
            for visit in step.visits:
                seen, part = visit.queries, visit.part
                operands = _shaped(
                    visit, q[:, seen], keys[:, visit.keys], values[:, visit.keys], o[part, :, seen]
                )
                chosen = options.of(visit, sink, q)
                logs = _ops.empty_lse(operands[0], chosen.get("cu_seqlens_q"))
                try:
                    _OPS.attention_out.default(*operands, logs, **chosen)
                except RuntimeError as error:
                    raise _ops.typed(error) from None
                lse[part, :, :, seen] = logs
        o, lse = _decode.attention_merge(o, lse)
        ctx.save_for_backward(q, k, v, sink, o, lse)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients of parts, which are added in f32 in the order of the steps."""
        q, k, v, sink, o, lse = ctx.saved_tensors
        grid, options = ctx.grid, ctx.options
        arrivals = _arrivals(grid, options, k, v)
        zeros = torch.zeros_like
        dq, dk, dv = (zeros(x, dtype=torch.float32) for x in (q, k, v))
        d_sink = None if sink is None else zeros(sink)
        returning: deque[Any] = deque()

        def collect(left: int) -> None:
            while len(returning) > left:
                step, wait = returning.popleft()
                found = wait()[grid.in_ring(step.target)]
                for total, part in zip((dk, dv), found, strict=True):
                    at = 0
                    for rows in step.sent:
                        start, at = at, at + rows.stop - rows.start
                        total[:, rows] += part[:, start:at]

        for step, keys, values in arrivals:
            own = step.source == grid.group
            parts = (dk, dv) if own else [zeros(x, dtype=torch.float32) for x in (keys, values)]
            for visit in step.visits:
                seen, at = visit.queries, visit.keys
                grad_o, *operands = _shaped(
                    visit, grad[:, seen], q[:, seen], keys[:, at], values[:, at],
                    o[:, seen].contiguous(), lse[:, :, seen].contiguous(),
                )  # fmt: skip
                d_queries, d_keys, d_values, d_logits = _OPS.attention_backward(
                    grad_o, None, *operands, **options.of(visit, sink, q)
                )
                dq[:, seen] += d_queries
                parts[0][:, at] += d_keys
                parts[1][:, at] += d_values
                if visit.home and d_sink is not None:
                    d_sink += d_logits
            if not own:
                back = _send_back(grid, step, k, [x.to(k.dtype) for x in parts])
                returning.append((step, back))
                collect(_AHEAD)
        collect(0)
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sink


def _send_back(grid: Grid, step: Step, k: Tensor, parts: list[Tensor]) -> Any:
    """Starts the way of gradients to the group that holds the keys."""
    source, target = grid.in_ring(step.source), grid.in_ring(step.target)
    shapes = {target: [_rows(k, step.sent)] * 2}
    return exchange(k, {source: parts}, shapes, grid.process_group)
