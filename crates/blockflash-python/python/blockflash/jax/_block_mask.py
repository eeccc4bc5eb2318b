"""Which blocks of queries and keys attention visits."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ._checks import as_arrays, expect_dtype, expect_shape


@partial(jax.tree_util.register_dataclass, data_fields=("blocks",), meta_fields=("block",))
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """The visited blocks of queries and keys, an array that JAX may trace, map and shard.

    On a GPU the blocks are multiples of 64 x 64; the CPU takes any. A row without a visited block
    gets the output 0.
    """

    blocks: Any
    """bool `[B | 1, Hq | 1, ceil(Sq / block[0]), ceil(Sk / block[1])]`."""

    block: int | tuple[int, int]
    """Queries and keys of a block, or one number of both. Static."""

    def sizes(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        block = (self.block,) * 2 if isinstance(self.block, int) else tuple(self.block)
        if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
            raise ValueError(f"block is {self.block}, expected one or two positive numbers")
        return block

    def operand(self, pairs: tuple[int, int, int, int]) -> jax.Array:
        """The blocks, for attention of these batch entries, heads, queries and keys."""
        (blocks,) = as_arrays(blocks=self.blocks)
        expect_dtype("blocks", blocks, jnp.bool_)
        batch, heads, *seqlens = pairs
        rows, cols = (
            -(-seqlen // size) for seqlen, size in zip(seqlens, self.sizes(), strict=True)
        )
        expect_shape("blocks", blocks, (None, None, rows, cols), "[B | 1, Hq | 1, rows, cols]")
        if blocks.shape[0] not in (1, batch) or blocks.shape[1] not in (1, heads):
            raise ValueError(
                f"blocks has shape {blocks.shape}, expected 1 or {batch} batch entries and 1 or "
                f"{heads} heads"
            )
        return blocks
