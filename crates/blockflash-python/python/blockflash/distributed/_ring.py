"""Attention of the queries of a group to the keys of all groups.

In a step a group attends the keys of one other group, which come from the rank that holds them: of
them only those that some query attends. (In a ring they would be handed on from neighbour to
neighbour, which is the same number of bytes, but each step would wait for the one before.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _autograd, _decode, _ops
from ._exchange import exchange
from ._grid import Grid
from ._packed import on_device
from ._rows import picked
from ._steps import Step, Visit, parts_of

_OPS = torch.ops.blockflash
_HEAD_START = 1 << 24
"""Bytes that are cleared before attention: some 10 us, in which an exchange gets its place."""


class Options(NamedTuple):
    """The options of attention."""

    window: tuple[int, int]
    scores: dict[str, Any]

    def of(self, visit: Visit, sink: Tensor | None, like: Tensor) -> dict[str, Any]:
        """What the operators take."""
        sides = {"left": visit.left, "right": visit.right, "top_left": True}
        given = {**self.scores, **sides, "sink": sink if visit.home else None}
        if visit.block_mask is not None:
            given["block_mask"] = visit.block_mask.number
        return given | (on_device(visit.cu_seqlens, like) if visit.cu_seqlens else {})


def _rows(x: Tensor, rows: int) -> tuple[int, ...]:
    return (x.shape[0], rows, *x.shape[2:])


def _shaped(visit: Visit, *tensors: Tensor) -> list[Tensor]:
    """Operands as a visit takes them: sequences are packed without a batch, which has one entry."""
    return [x[0] for x in tensors] if visit.cu_seqlens else list(tensors)


class _Arrivals:
    """Keys and values on their way to this rank.

    Those of a step come while the step before it is computed, and their exchange begins with that
    step, on all ranks: it waits for what is on the current stream. Attention fills a GPU and leaves
    it at its end only, so an exchange gets its place on it a moment before.
    """

    def __init__(self, grid: Grid, steps: Sequence[Step], k: Tensor, v: Tensor) -> None:
        self.grid, self.steps, self.k, self.v = grid, steps, k, v
        self.wait: Any = None

    def begin(
        self, t: int, left: Step | None = None, gradients: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and values of step `t`, and the gradients that have come with them.

        Those of the next step begin to come. With them leave the gradients of a step, and those of
        the keys of this rank come for it.
        """
        grid, k = self.grid, self.k
        arrived = self.wait() if self.wait else ([k, self.v], [])
        sent: dict[int, list[Tensor]] = {}
        shapes: dict[int, list[tuple[int, ...]]] = {}
        keys = gone = None
        if t + 1 < len(self.steps):
            step = self.steps[t + 1]
            keys = step.source
            sent[step.target] = [picked(x, step.sent) for x in (k, self.v)]
            shapes[keys] = [_rows(x, step.received) for x in (k, self.v)]
        if left is not None:
            gone, rows = left.target, sum(each.stop - each.start for each in left.sent)
            sent.setdefault(left.source, []).extend(gradients)
            shapes.setdefault(gone, []).extend([_rows(k, rows)] * 2)
        self.wait = None
        if shapes:
            come = exchange(k, sent, shapes, grid.process_group)

            def wait() -> tuple[list[Tensor], list[Tensor]]:
                found = come()
                first = [] if keys is None else found[keys][:2]
                return first, [] if gone is None else found[gone][-2:]

            self.wait = wait
            if k.is_cuda:
                k.new_zeros(_HEAD_START // k.element_size())
        return arrived


class Ring(torch.autograd.Function):
    """The output for the queries of a group, of the heads of this rank."""

    @staticmethod
    def forward(
        ctx: Any, grid: Grid, options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> Tensor:
        """The parts, and their merge."""
        ctx.grid, ctx.options = grid, options
        steps = grid.steps(options.window)
        arrivals, parts = _Arrivals(grid, steps, k, v), parts_of(steps)
        batch, length, heads, _ = q.shape
        o = q.new_zeros((parts, *q.shape))
        lse = q.new_full((parts, batch, heads, length), -torch.inf, dtype=torch.float32)
        for t, step in enumerate(steps):
            (keys, values), _ = arrivals.begin(t)
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
                    raise _autograd.typed(error) from None
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
        steps = grid.steps(options.window)
        arrivals = _Arrivals(grid, steps, k, v)
        zeros = torch.zeros_like
        dq, dk, dv = (zeros(x, dtype=torch.float32) for x in (q, k, v))
        d_sink = None if sink is None else zeros(sink)
        leaving: list[Tensor] = []  # gradients of the keys of the step before

        def begin(t: int) -> list[Tensor]:
            left = steps[t - 1] if leaving else None
            (keys, found) = arrivals.begin(t, left, leaving)
            # They come a step after they have left.
            at = 0
            for rows in steps[t - 2].sent if found else ():
                start, at = at, at + rows.stop - rows.start
                for total, part in zip((dk, dv), found, strict=True):
                    total[:, rows] += part[:, start:at]
            return keys

        for t, step in enumerate(steps):
            keys, values = begin(t)
            own = step.source == grid.rank
            parts = (dk, dv) if own else [zeros(x, dtype=torch.float32) for x in (keys, values)]
            for visit in step.visits:
                seen, at = visit.queries, visit.keys
                grad_o, *operands = _shaped(
                    visit, grad[:, seen], q[:, seen], keys[:, at], values[:, at],
                    o[:, seen].contiguous(), lse[:, :, seen].contiguous(),
                )  # fmt: skip
                d_queries, d_keys, d_values, d_logits, _ = _OPS.attention_backward(
                    grad_o, None, *operands, False, **options.of(visit, sink, q)
                )
                dq[:, seen] += d_queries
                parts[0][:, at] += d_keys
                parts[1][:, at] += d_values
                if visit.home and d_sink is not None:
                    d_sink += d_logits
            leaving = [] if own else [x.to(k.dtype) for x in parts]
        begin(len(steps))
        leaving = []
        begin(len(steps) + 1)
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sink
