"""Which queries of one group attend which keys of another one, as calls of attention.

A mask is a band: query `p` attends the keys `p - left` to `p + right`, in positions of the whole
sequence. Between a chunk of queries and a chunk of keys it is a band again, shifted by their
distance. Rows that a shifted band leaves out are cut off, so that its sides are not negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..block_mask import BlockMask
from ._rows import Ranges, rows_in

UNLIMITED = -1
"""A side without a limit."""


class Visit(NamedTuple):
    """A call of attention, aligned at the top left, of some rows of two groups."""

    queries: slice
    keys: slice
    left: int
    right: int
    home: bool  # Whether the queries attend themselves: each query does in one visit.
    part: int = 0  # Which part of the result it fills: no two visits fill the same rows of one.
    cu_seqlens: tuple[int, ...] = ()  # Sequences that attend only themselves, if there are several.
    block_mask: BlockMask | None = None

    @property
    def is_full(self) -> bool:
        """Whether every query attends every key."""
        return self.left == self.right == UNLIMITED


def visits(
    queries: Ranges, keys: Ranges, window: tuple[int, int], positions: range | None = None
) -> list[Visit]:
    """The visits of queries to keys, of all or of positions. Slices count the rows of a group."""
    if positions is None:
        positions = range(queries[1].stop + keys[1].stop)
    if queries == keys and window == (UNLIMITED, 0):
        # Both chunks in one call: the rows of a group are in the order of their positions.
        rows = rows_in(queries, positions)
        return [Visit(rows, rows, *window, home=True)] if rows.start < rows.stop else []
    found = []
    for q, q_at in _cut(queries, positions):
        beside = []
        for k, k_at in _cut(keys, positions):
            beside += _visit(q, q_at, k, k_at, window)
        found += _joined(beside, "queries", "keys")
    return _joined(found, "keys", "queries")


def _cut(chunks: Ranges, positions: range) -> Iterator[tuple[range, int]]:
    """What is in a range of the sequence of each chunk, and its first row in the group."""
    for chunk, at in zip(chunks, (0, len(chunks[0])), strict=True):
        start = max(chunk.start, positions.start)
        yield range(start, min(chunk.stop, positions.stop)), at + start - chunk.start


def _visit(q: range, q_at: int, k: range, k_at: int, window: tuple[int, int]) -> list[Visit]:
    """The visit of a chunk to a chunk, whose first rows are `q_at` and `k_at`; none or one."""
    left, right = window
    home = q == k
    keys = range(
        k.start if left == UNLIMITED else max(k.start, q.start - left),
        k.stop if right == UNLIMITED else min(k.stop, q.stop + right),
    )
    queries = range(
        q.start if right == UNLIMITED else max(q.start, keys.start - right),
        q.stop if left == UNLIMITED else min(q.stop, keys.stop + left),
    )
    if not (q and k and queries and keys):
        return []
    distance = queries.start - keys.start
    if left != UNLIMITED:
        left -= distance
        left = UNLIMITED if left >= len(queries) - 1 else left
    if right != UNLIMITED:
        right += distance
        right = UNLIMITED if right >= len(keys) - 1 else right
    return [
        Visit(
            slice(queries.start - q.start + q_at, queries.stop - q.start + q_at),
            slice(keys.start - k.start + k_at, keys.stop - k.start + k_at),
            left,
            right,
            home,
        )
    ]


def _joined(found: list[Visit], same: str, beside: str) -> list[Visit]:
    """Visits without a mask as one, where they have the same rows, and other rows side by side."""
    if len(found) != 2 or not (found[0].is_full and found[1].is_full):
        return found
    a, b = found
    rows, others = (getattr(a, beside), getattr(b, beside))
    if getattr(a, same) != getattr(b, same) or rows.stop != others.start:
        return found
    if beside == "queries" and a.home != b.home:
        return found
    joined = a._replace(home=a.home or b.home)
    return [joined._replace(**{beside: slice(rows.start, others.stop)})]


def numbered(steps: Iterable[tuple[Visit, ...]]) -> tuple[list[tuple[Visit, ...]], int]:
    """The visits of all steps with their parts, and the number of parts."""
    parts: list[list[slice]] = []  # The rows that are filled, of each part.

    def placed(visit: Visit) -> Visit:
        rows = visit.queries
        clear = (
            all(rows.stop <= other.start or other.stop <= rows.start for other in filled)
            for filled in parts
        )
        part = next((number for number, is_clear in enumerate(clear) if is_clear), len(parts))
        if part == len(parts):
            parts.append([])
        parts[part].append(rows)
        return visit._replace(part=part)

    return [tuple(placed(visit) for visit in step) for step in steps], len(parts)
