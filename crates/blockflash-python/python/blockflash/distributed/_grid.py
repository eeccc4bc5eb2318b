"""How attention is divided among ranks, and which ranks exchange what."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from ._packed import Offsets, packed_visits
from ._rows import Ranges, count, place, ranges
from ._visits import Visit, numbered, visits


class Scheme(NamedTuple):
    """Ranks over which heads are divided, times groups over which keys are divided.

    Consecutive ranks form groups of `heads` ranks, which exchange rows for heads. There are `keys`
    groups, and the keys and values of a group visit the queries of every other one.
    """

    heads: int
    keys: int

    def __str__(self) -> str:
        named = (("heads over", self.heads), ("keys over", self.keys))
        return ", ".join(f"{what} {n}" for what, n in named if n > 1) or "one rank"

    @staticmethod
    def of(scheme: Any, world: int, heads_k: int) -> Scheme:
        """The scheme that an argument means, for this many ranks and heads of keys."""
        most = gcd(world, heads_k)
        known = {"auto": (most, world // most), "heads": (world, 1), "keys": (1, world)}
        if isinstance(scheme, str):
            scheme = known.get(scheme, scheme)
        if not (isinstance(scheme, tuple) and len(scheme) == 2):
            raise ValueError(f"scheme is {scheme!r}, not 'auto', 'heads', 'keys' or a Scheme")
        heads, keys = scheme
        if heads < 1 or keys < 1 or heads * keys != world:
            raise ValueError(f"scheme is {heads} x {keys}, but there are {world} ranks")
        if heads_k % heads:
            raise ValueError(f"{heads_k} heads of keys cannot be divided among {heads} ranks")
        return Scheme(heads, keys)


class Step(NamedTuple):
    """What a group does with the keys of another one, and what its keys are needed for then."""

    source: int
    received: tuple[slice, ...]  # of the rows of the source
    visits: tuple[Visit, ...]  # to the keys that are received
    target: int
    sent: tuple[slice, ...]  # of the rows of this group


Plan = tuple[tuple[Step, ...], int]
"""The steps of a rank, its own keys first, and the number of parts that visits fill."""


class Grid(NamedTuple):
    """The place of this rank in a scheme.

    The first chunks of the ranks of a group are one range of the sequence, and so are their second
    chunks: a group is a rank of a larger kind.
    """

    process_group: Any
    scheme: Scheme
    seqlen: int
    cu_seqlens: Offsets | None = None
    block: int = 1  # The sequence is cut at multiples of this.
    plan: Plan | None = None  # That of a block mask.

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return place(self.process_group)[0]

    @property
    def group(self) -> int:
        """The group of this rank."""
        return self.rank // self.scheme.heads

    @property
    def member(self) -> int:
        """The place of this rank in its group."""
        return self.rank % self.scheme.heads

    def chunks(self) -> list[Ranges]:
        """The chunks of each rank of this group."""
        heads, keys = self.scheme
        first = self.group * heads
        return [
            ranges(self.seqlen, heads * keys, first + member, self.block) for member in range(heads)
        ]

    def steps(self, window: tuple[int, int]) -> Plan:
        """The steps of this rank."""
        if self.plan is not None:
            return self.plan
        keys, group = self.scheme.keys, self.group
        return _steps(self.seqlen, keys, group, window, self.cu_seqlens, self.block)

    def in_ring(self, group: int) -> int:
        """The rank of another group that has the heads of this one."""
        return group * self.scheme.heads + self.member


def _needed(
    chunks: Ranges, source: Ranges, window: tuple[int, int], cu_seqlens: Offsets | None
) -> tuple[tuple[slice, ...], list[Visit]]:
    """The keys of a source that a group needs, and the visits to them."""
    if cu_seqlens is None:
        found = visits(chunks, source, window)
    else:
        found = packed_visits(chunks, source, window, cu_seqlens)
    if chunks == source:
        return (slice(0, count(source)),) if found else (), found
    needed = _union(visit.keys for visit in found)

    def moved(keys: slice) -> slice:
        start = sum(max(0, min(rows.stop, keys.start) - rows.start) for rows in needed)
        return slice(start, start + keys.stop - keys.start)

    return needed, [visit._replace(keys=moved(visit.keys)) for visit in found]


def _union(found: Iterable[slice]) -> tuple[slice, ...]:
    """The same rows in ascending order, each once."""
    rows: list[slice] = []
    for each in sorted(found, key=lambda each: each.start):
        if rows and rows[-1].stop >= each.start:
            rows[-1] = slice(rows[-1].start, max(rows[-1].stop, each.stop))
        else:
            rows.append(each)
    return tuple(rows)


@lru_cache(maxsize=64)
def _steps(
    seqlen: int,
    groups: int,
    group: int,
    window: tuple[int, int],
    cu_seqlens: Offsets | None = None,
    block: int = 1,
) -> Plan:
    """The steps of a group. One in which no group needs keys is left out, on every rank."""
    chunks = [ranges(seqlen, groups, each, block) for each in range(groups)]

    def needed(group: int, t: int) -> tuple[tuple[slice, ...], list[Visit]]:
        return _needed(chunks[group], chunks[(group - t) % groups], window, cu_seqlens)

    steps = []
    for t in range(groups):
        if t == 0 or any(needed(each, t)[0] for each in range(groups)):
            target = (group + t) % groups
            received, found = needed(group, t)
            step = Step((group - t) % groups, received, tuple(found), target, needed(target, t)[0])
            steps.append(step)
    found, parts = numbered(step.visits for step in steps)
    return tuple(s._replace(visits=v) for s, v in zip(steps, found, strict=True)), parts
