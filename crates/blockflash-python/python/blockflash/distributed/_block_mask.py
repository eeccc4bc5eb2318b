"""Block masks whose rows are divided among ranks, by the plans of the Rust crate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _native
from .._attention import sides
from ..block_mask import BlockMask
from ._agree import agree
from ._exchange import exchange
from ._grid import Scheme
from ._plan import Density
from ._rows import Block, cut, pair, place
from ._steps import planned

_UNLIMITED = (None, None)


def shard_block_mask(whole: BlockMask, group: Any = None, block: Block | None = None) -> BlockMask:
    """The lists of the rows of this rank, from a mask of the whole sequence, on its device.

    Args:
        whole: As many queries as keys.
        group: The group; by default all processes.
        block: Where the sequence is cut, as in `shard`; by default between blocks of the mask.

    Raises:
        ValueError: Queries and keys differ, or the cuts are not between blocks.

    """
    rank, world = place(group)
    _refuse_types(whole=whole)
    at = [whole.seqlens[1], world, rank], pair(whole.block if block is None else block)
    lists = _native.shard_block_mask(whole.to("cpu")._native, at)
    return BlockMask(lists, torch.device("cpu")).to(whole.device)


class DistributedBlockMask:
    """A block mask of a sequence whose rows are divided among the ranks of a group.

    Every rank has the lists of its own queries: which blocks of the keys of the whole sequence they
    visit. The ranks tell each other what they need when the mask is made, with all of them at the
    same time. Then only blocks of keys that some list of a rank visits travel to it for `keys`, and
    their gradients back. It serves any number of calls of `attention`. Immutable.

    Args:
        lists: Blocks of the rows of this rank x the keys of the whole sequence, on the device where
            attention is computed: those of `shard_block_mask`, or chosen by this rank. They have 1
            head, as many as k or as many as q, and 1 or as many batch entries as q.
        group: The group; by default all processes.
        scheme: `keys`, `heads` or a `Scheme`, which is that of the calls. It divides the heads of
            the lists if there are several.
        causal: The token mask of the calls, which decides pair by pair inside of blocks. Blocks
            that it hides do not count as visited.
        window: The same; not where keys are divided.
        block: Where the sequence is cut, as in `shard`: a common multiple of the blocks of queries
            and of keys, which by default is the smallest one.

    Attributes:
        density: How much of the work of a dense call is left on this rank, for `plan`.

    Raises:
        Unsupported: A window where keys are divided.
        ValueError: The lists do not fit the rows, the scheme or the cuts, or the arguments differ
            between ranks. The same on every rank, as are all errors.

    """

    def __init__(
        self,
        lists: BlockMask,
        *,
        group: Any = None,
        scheme: str | tuple[int, int] = "keys",
        causal: bool = False,
        window: tuple[int | None, int | None] = _UNLIMITED,
        block: Block | None = None,
    ) -> None:
        rank, world = place(group)
        self.group = dist.group.WORLD if group is None else group
        made, arguments, rows, error = None, (), 0, None
        self.device, self.block = torch.device("cpu"), 1
        try:
            _refuse_types(lists=lists)
            self.device, (rows, self.seqlen) = lists.device, lists.seqlens
            block = pair(lists.block if block is None else block)
            self.batch, self.heads = lists.shape[:2]
            self.block, self.sides = cut(block), sides(causal, window)
            if scheme == "auto":
                raise ValueError("scheme is 'auto', but a block mask is made for one scheme")
            self.scheme = Scheme.of(scheme, world, world)
            made = _native.BlockMaskExchange(
                lists.to("cpu")._native,
                self.sides,
                ([self.seqlen, world, rank], block),
                self.scheme,
            )
            arguments = (
                f"{self.seqlen} keys in blocks of {lists.block}", f"cut at {self.block}",
                f"{self.batch} x {self.heads} lists", str(self.scheme), self.sides,
                self.device.type,
            )  # fmt: skip
        except Exception as refused:  # Raised by `agree`, on every rank.
            error = refused
        agree(group, arguments, rows, self.device, error, self.block)
        messages = _exchanged(made.messages(), self.device, group)
        number, density, found = made.finish(messages)
        self.arguments = (*arguments, f"lists {number:x}")
        self.density = Density(*density)
        self.plans = tuple(planned(steps, self.device) for steps in found)

    def check(
        self,
        q: Tensor,
        k: Tensor,
        group: Any,
        scheme: Scheme,
        seqlen: int | None,
        block: Block | None,
        options: dict[str, Any],
    ) -> None:
        """Raises ValueError for a call that the mask does not fit."""
        heads_q, heads_k = q.shape[2], k.shape[2]
        if group is not self.group:
            raise ValueError("block_mask was made for another process group than that of the call")
        for what, found, fitting in (
            ("scheme", str(self.scheme), [str(scheme)]),
            ("token mask", self.sides, [sides(options["causal"], options["window"])]),
            ("device", self.device, [q.device]),
            ("number of rows", self.seqlen, [self.seqlen if seqlen is None else seqlen]),
            ("block", self.block, [self.block if block is None else cut(block)]),
            ("number of heads", self.heads, [1, heads_k, heads_q]),
            ("number of batch entries", self.batch, [1, q.shape[0]]),
        ):
            if found not in fitting:
                wanted = " or ".join(map(str, dict.fromkeys(fitting)))
                raise ValueError(f"the {what} of block_mask is {found}, not {wanted}")

    def of_all_rows(self) -> BlockMask | None:
        """The mask of the heads of this rank, where it has all rows; None without any row."""
        (steps,) = self.plans
        return next((visit.block_mask for visit in steps[0].visits), None)

    def __repr__(self) -> str:
        pairs, keys = self.density
        return (
            f"DistributedBlockMask({self.scheme}, shape={(self.batch, self.heads)}, "
            f"seqlen={self.seqlen}, block={self.block}, pairs={pairs:.3}, keys={keys:.3})"
        )


def _refuse_types(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, BlockMask):
            raise TypeError(f"{name} must be a BlockMask, not {type(value).__name__}")


def _exchanged(messages: list[list[int]], device: torch.device, group: Any) -> list[list[int]]:
    """What came from each rank, by what each rank gets: first how long it is."""
    sent = [torch.tensor(message, dtype=torch.int32, device=device) for message in messages]
    lengths = [torch.tensor([len(x)], dtype=torch.int32, device=device) for x in sent]

    def come(each: list[Tensor], shapes: Sequence[Sequence[int]]) -> list[list[int]]:
        pairs = ({rank: [x] for rank, x in enumerate(values)} for values in (each, shapes))
        found = exchange(each[0], *pairs, group)()
        return [found[rank][0].tolist() for rank in range(len(each))]

    return come(sent, come(lengths, [(1,)] * len(sent)))
