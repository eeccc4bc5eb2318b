"""Packed batches: sequences of different lengths, one after another in the rows of the ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from ._rows import Ranges, rows_in
from ._visits import Visit, visits

Offsets = tuple[int, ...]
"""Sequence `i` has the rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`, or none."""


def checked(cu_seqlens: Any) -> Offsets:
    """Offsets as numbers, which start at 0 and never descend."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.is_cuda:
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, but the host has to know it")
        cu_seqlens = cu_seqlens.tolist()
    try:
        offsets = tuple(index(offset) for offset in cu_seqlens)
    except TypeError:
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}, but must be numbers of rows") from None
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens is {list(offsets[:1])}...: the first offset must be 0")
    for at, (before, offset) in enumerate(pairwise(offsets)):
        if offset < before:
            raise ValueError(
                f"cu_seqlens[{at + 1}] is {offset}: offsets must not descend, the one before is "
                f"{before}"
            )
    return offsets


def on_device(cu_seqlens: Offsets, like: Tensor) -> dict[str, Any]:
    """The options of a call whose queries and keys are the same rows. The host does not wait."""
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32, pin_memory=like.is_cuda)
    offsets = offsets.to(like.device, non_blocking=True)
    longest = max((end - start for start, end in pairwise(cu_seqlens)), default=0)
    return {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_q": longest, "max_k": longest,
    }  # fmt: skip


def packed_visits(
    queries: Ranges, keys: Ranges, window: tuple[int, int], cu_seqlens: Offsets
) -> list[Visit]:
    """The visits of queries to keys of the same sequence.

    Sequences that are within the group are one visit as long as they follow each other. A sequence
    of several groups has the visits that it would have alone.
    """
    if queries != keys:
        shared = _shared(queries, cu_seqlens)
        return [visit for each in shared for visit in visits(queries, keys, window, each)]
    found: list[Visit] = []
    lengths: list[int] = []  # Of the sequences of the last visit, if they are whole.
    for sequence in _sequences(queries, cu_seqlens):
        rows = rows_in(queries, sequence)
        if rows.stop - rows.start < len(sequence):
            found += visits(queries, keys, window, sequence)
            lengths = []
            continue
        lengths.append(len(sequence))
        if len(lengths) > 1:
            rows = slice(found.pop().queries.start, rows.stop)
        offsets = (0, *accumulate(lengths)) if len(lengths) > 1 else ()
        found.append(Visit(rows, rows, *window, home=True, cu_seqlens=offsets))
    return found


def _at(cu_seqlens: Offsets, position: int) -> int:
    """The sequence of a row of the batch."""
    return bisect_right(cu_seqlens, position) - 1


def _sequences(chunks: Ranges, cu_seqlens: Offsets) -> Iterator[range]:
    """The sequences of which there are rows, in their order."""
    done = 0
    for chunk in filter(len, chunks):
        first, last = (_at(cu_seqlens, row) for row in (chunk[0], chunk[-1]))
        for at in range(max(first, done), last + 1):
            if cu_seqlens[at] < cu_seqlens[at + 1]:
                yield range(cu_seqlens[at], cu_seqlens[at + 1])
        done = last + 1


def _shared(chunks: Ranges, cu_seqlens: Offsets) -> list[range]:
    """The sequences of which other groups may have rows, too: those at the ends of the chunks."""
    ends = {_at(cu_seqlens, row) for chunk in filter(len, chunks) for row in (chunk[0], chunk[-1])}
    return [range(cu_seqlens[at], cu_seqlens[at + 1]) for at in sorted(ends)]
