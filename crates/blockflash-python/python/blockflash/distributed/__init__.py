"""Attention over sequences that are divided among the processes of a `torch.distributed` group.

A sequence is cut into two chunks per rank. Rank `i` of `n` holds the chunks `i` and `2n - 1 - i`,
one after the other, so every rank has the same work under a causal mask: `shard`, `unshard` and
`positions` know this order. Chunks differ by one row at most, so any length can be divided.

Two schemes, which `Scheme` combines:

- over heads, rows travel for heads and back, all to all (Ulysses), so each rank has some heads of
  all rows. The number of ranks divides the heads of keys.
- over keys, keys and values visit the queries of all ranks while these compute (ring attention),
  and the partial results are merged by their log-sum-exp.

With a `DistributedBlockMask` each rank has the lists of the blocks that its own queries visit, and
only keys that some list of a rank visits travel to it. The sequence is cut between blocks then.

With `cu_seqlens` the rows are a packed batch, whose sequences the chunks may cut anywhere.

All are exact, and repeats are equal bit for bit: partial results and gradients are summed in a
fixed order. `plan` says for given rates which scheme is the fastest.
"""

from ._block_mask import DistributedBlockMask, shard_block_mask
from ._call import attention
from ._context import context_parallel
from ._grid import Scheme
from ._plan import Density, Forecast, Machine, plan
from ._shard import positions, shard, unshard

__all__ = [
    "Density",
    "DistributedBlockMask",
    "Forecast",
    "Machine",
    "Scheme",
    "attention",
    "context_parallel",
    "plan",
    "positions",
    "shard",
    "shard_block_mask",
    "unshard",
]
