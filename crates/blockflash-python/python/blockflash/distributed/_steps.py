"""The steps of a rank, which the Rust crate plans: what is exchanged, and the calls of attention.

In a step a group attends the keys of one other group, of which only those come that some query
attends. Masks are bands between the rows of two groups; the crate cuts off what a band leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .. import _native
from ..block_mask import BlockMask


class Visit(NamedTuple):
    """A call of attention, aligned at the top left, of some rows of two groups."""

    queries: slice
    keys: slice  # of the rows that came, or of those of this group in the first step
    left: int  # -1 is unlimited
    right: int
    home: bool  # Whether the queries attend themselves: each query does in one visit.
    part: int  # Which part of the result it fills: no two visits fill the same rows of one.
    cu_seqlens: tuple[int, ...]  # Sequences that attend only themselves, if there are several.
    block_mask: BlockMask | None


class Step(NamedTuple):
    """What a rank does with the keys of another one, and what its keys are needed for then."""

    source: int
    received: int  # rows of the source
    visits: tuple[Visit, ...]
    target: int
    sent: tuple[slice, ...]  # of the rows of this group


Plan = tuple[Step, ...]
"""The steps of a rank, its own keys first."""


def planned(steps: Iterable[_native.PlanStep], device: torch.device | None = None) -> Plan:
    """Steps of the native module, with their block masks on a device."""

    def visit(call: _native.PlanCall) -> Visit:
        queries, keys, left, right, home, part, cu_seqlens, native = call
        mask = None if native is None else BlockMask(native, torch.device("cpu")).to(device)
        return Visit(
            slice(*queries), slice(*keys), left, right, home, part, tuple(cu_seqlens), mask
        )

    return tuple(
        Step(source, received, tuple(map(visit, calls)), target, tuple(slice(*s) for s in sent))
        for source, received, target, sent, calls in steps
    )


def parts_of(plan: Plan) -> int:
    """How many parts the visits fill, at least 1."""
    return max((1 + visit.part for step in plan for visit in step.visits), default=1)
