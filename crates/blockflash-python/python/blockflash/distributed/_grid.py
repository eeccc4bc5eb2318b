"""How attention is divided among ranks, by the plans of the Rust crate."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from .. import _native
from ._packed import Offsets
from ._rows import Ranges, place, ranges
from ._steps import Plan, planned


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
    def member(self) -> int:
        """The place of this rank in its group."""
        return self.rank % self.scheme.heads

    def chunks(self) -> list[Ranges]:
        """The chunks of each rank of this group."""
        heads, keys = self.scheme
        first = self.rank - self.member
        return [
            ranges(self.seqlen, heads * keys, first + member, self.block) for member in range(heads)
        ]

    def pieces(self) -> list[tuple[slice, slice]]:
        """Where both chunks of each rank of this group are in the rows of the group."""
        heads, keys = self.scheme
        at = [self.seqlen, heads * keys, self.rank]
        pieces = _native.group_pieces(at, self.block, self.scheme)
        return [(slice(*first), slice(*second)) for first, second in pieces]

    def steps(self, window: tuple[int, int]) -> Plan:
        """The steps of this rank."""
        if self.plan is not None:
            return self.plan
        return _steps(self.seqlen, self.scheme, self.rank, window, self.cu_seqlens, self.block)


@lru_cache(maxsize=64)
def _steps(
    seqlen: int,
    scheme: Scheme,
    rank: int,
    window: tuple[int, int],
    cu_seqlens: Offsets | None = None,
    block: int = 1,
) -> Plan:
    """The steps of a rank. One in which no rank needs keys is left out, on every rank."""
    at = [seqlen, scheme.heads * scheme.keys, rank]
    return planned(_native.plan_steps(at, block, scheme, window, cu_seqlens))
