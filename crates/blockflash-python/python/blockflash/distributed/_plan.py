"""What each scheme costs, by the planner of the Rust crate `blockflash-dist`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .. import _native
from ._grid import Scheme
from ._packed import checked


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Ranks and their measured rates, per rank."""

    ranks: int
    """Number of ranks."""
    ranks_per_host: int
    """Ranks of one host, which follow each other."""
    flops: float
    """FLOPs per second of attention in the pass, counting visited pairs of queries and keys."""
    copies: float
    """Bytes per second that are copied on the device, each byte read and written."""
    link: float
    """Bytes per second sent to another rank of the host."""
    network: float
    """Bytes per second sent to a rank of another host."""
    latency: float
    """Seconds that an exchange takes beyond its bytes."""


class Forecast(NamedTuple):
    """How long a scheme is expected to take, in seconds, and what it sends: on the slowest rank."""

    scheme: Scheme
    sent_bytes: float
    """Bytes that a rank sends."""
    compute: float
    """Attention, and the work in memory that one device would not have."""
    exchange: float
    """All exchanges one after another."""
    exposed: float
    """What no computation hides, and what the rest takes from the SMs of computation."""
    ideal: float
    """Attention on one device, divided by the number of ranks."""

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end."""
        return self.compute + self.exposed

    @property
    def scaling(self) -> float:
        """The time of one device, divided by the number of ranks times their time."""
        return self.ideal / self.total

    def __str__(self) -> str:
        compute, exchange, exposed = (f"{1e3 * seconds:.2f} ms" for seconds in self[2:5])
        return (
            f"{self.scheme}: compute {compute}, exchange {1e-6 * self.sent_bytes:.2f} MB in "
            f"{exchange} of which {exposed} are exposed, scaling {self.scaling:.2f}"
        )


class Density(NamedTuple):
    """How much of the work of a dense call is left under a block mask, 0 to 1 each."""

    pairs: float
    """Of the pairs of queries and keys that the token mask leaves, the visited ones."""
    keys: float
    """Of the keys of other ranks that a dense call needs, those that come."""


def plan(
    machine: Machine,
    *,
    seqlen: int,
    heads: int,
    heads_k: int,
    head_dim: int,
    batch: int = 1,
    element_bytes: int = 2,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    cu_seqlens: Sequence[int] | Tensor | None = None,
    density: tuple[float, float] | None = None,
    backward: bool = False,
) -> list[Forecast]:
    """Every scheme that fits, the fastest one first; of equally fast ones the one with more heads.

    Args:
        machine: The ranks and their rates.
        seqlen: Rows of the whole sequence.
        heads: Heads of queries.
        heads_k: Heads of keys and values.
        head_dim: Elements of a row of a head.
        batch: Batch entries.
        element_bytes: Bytes of an element.
        causal: A query attends the keys at its position and before.
        window: How many keys before and after its position a query attends; `None` for all.
        cu_seqlens: Where the sequences of a packed batch of `seqlen` rows begin and end; see
            `attention`.
        density: What a block mask leaves, as `DistributedBlockMask.density` has it.
        backward: The backward pass instead of the forward pass.

    Raises:
        ValueError: A size or a rate is not positive, a side of the window is negative, there are
            more than 16384 ranks, `cu_seqlens` is no packed batch of `seqlen` rows or comes with a
            density, or a density is not one of 0 to 1.

    """
    sizes = [batch, seqlen, heads, heads_k, head_dim, element_bytes]
    ranks = [machine.ranks, machine.ranks_per_host]
    rates = [machine.flops, machine.copies, machine.link, machine.network, machine.latency]
    left, right = window
    offsets = None if cu_seqlens is None else list(checked(cu_seqlens))
    if offsets is not None and (offsets[-1], batch) != (seqlen, 1):
        raise ValueError(
            f"cu_seqlens ends at {offsets[-1]} in {batch} batch entries, but a packed batch is one "
            f"of seqlen rows, which is {seqlen}"
        )
    sides = [left, 0 if causal else right]
    try:
        found = _native.forecasts(sizes, sides, backward, ranks, rates, offsets, density)
    except OverflowError:
        raise ValueError(
            f"sizes are {sizes} with window {window} on {machine}: sizes are at least 1, and sides "
            "of a window at least 0"
        ) from None
    return [Forecast(Scheme(*scheme), *seconds) for scheme, *seconds in found]
