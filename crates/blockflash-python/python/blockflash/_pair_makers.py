"""Makers of block masks that show some pairs of a visited block and hide others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _bits, _native
from ._arguments import block_sizes, natural, sides
from ._block_makers import BlockMakers, Window

if TYPE_CHECKING:
    from typing_extensions import Self


class PairMakers(BlockMakers):
    """The class methods of `BlockMask` that say which pairs are visible."""

    @classmethod
    def from_token_mask(cls, pairs: Tensor, *, block: int | tuple[int, int] = 128) -> Self:
        """The pairs that are true in a bool tensor; waits for a GPU.

        Args:
            pairs: `[batch, heads, seqlen_q, seqlen_k]` of any strides, where batch and heads may be
                1 for all; or `[seqlen_q, seqlen_k]`.
            block: Queries and keys of a block.

        """
        if pairs.dtype != torch.bool:
            raise ValueError(f"pairs are {pairs.dtype}, not torch.bool")
        pairs = pairs if pairs.dim() != 2 else pairs[None, None]
        if pairs.dim() != 4:
            raise ValueError(
                f"pairs have shape {list(pairs.shape)}, not [batch, heads, seqlen_q, seqlen_k]"
            )
        batch, heads, *seqlens = pairs.shape
        sizes = {"seqlens": tuple(seqlens), "batch": batch, "heads": heads, "block": block}

        def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return pairs[b, h, q, k]

        return cls.from_mask_mod(shown, **sizes, device=pairs.device)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[..., Tensor],
        *,
        seqlens: tuple[int, int],
        batch: int = 1,
        heads: int = 1,
        block: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The pairs that a function shows, which is asked for all of them, some at a time.

        `from_flex` asks in partial blocks alone. Waits for a GPU.

        Args:
            mask_mod: As of flex_attention: from indices of the batch entry, head, query and key to
                whether the query sees the key. It is transformed by `torch.vmap`.
            seqlens: Number of queries and of keys.
            batch: Batch entries; 1 is for all.
            heads: Heads; 1 is for all.
            block: Queries and keys of a block.
            device: Where the function finds its tensors, and where the mask will be.

        """
        sizes = block_sizes(seqlens, block)
        groups = natural("batch", batch), natural("heads", heads)
        if any(size % _bits.TILE for size in sizes[2:]):
            raise ValueError(f"block is {sizes[2:]}, not a multiple of {_bits.TILE} both ways")
        rows, cols = (-(-length // size) for length, size in zip(sizes[:2], sizes[2:], strict=True))
        full = torch.zeros((*groups, rows, cols), dtype=torch.bool, device=device)
        evaluation = _bits.Evaluation(mask_mod, sizes[:2], sizes[2:])
        return cls._of_lists(evaluation.lists((~full).nonzero(), full), sizes)

    @classmethod
    def from_intervals(
        cls, intervals: Tensor, *, seqlen_k: int, block: int | tuple[int, int] = 128
    ) -> Self:
        """The keys that each query sees, as one or a few runs; made on the CPU.

        Documents, prefixes, images, padding and chunks are such masks. Work and memory grow with
        the visible blocks, not with all pairs.

        Args:
            intervals: int32 `[batch, heads, seqlen_q, runs, 2]`, where batch and heads may be 1 for
                all: from the first key of a run to the one behind the last. A run may be empty, and
                what is beyond the keys does not count.
            seqlen_k: Number of keys.
            block: Queries and keys of a block.

        """
        if intervals.dim() != 5 or intervals.shape[4] != 2:
            raise ValueError(
                f"intervals have shape {list(intervals.shape)}, not "
                "[batch, heads, seqlen_q, runs, 2]"
            )
        sizes = block_sizes((intervals.shape[2], seqlen_k), block)
        return cls._made(_native.mask_of_intervals(intervals.flatten(3), sizes), intervals.device)

    @classmethod
    def documents(
        cls, ids_q: Tensor, ids_k: Tensor | None = None, *, block: int | tuple[int, int] = 128
    ) -> Self:
        """Documents in one sequence: a query sees the keys with its id; made on the CPU.

        Args:
            ids_q: int32 `[batch, seqlen_q]`, in any order. Tokens with a negative id are padding.
            ids_k: int32 `[batch, seqlen_k]`; as `ids_q` by default.
            block: Queries and keys of a block.

        """
        ids_k = ids_q if ids_k is None else ids_k
        if ids_q.dim() != 2 or ids_k.dim() != 2:
            shapes = f"{list(ids_q.shape)} and {list(ids_k.shape)}"
            raise ValueError(f"ids have shapes {shapes}, not [batch, seqlen]")
        sizes = block_sizes((ids_q.shape[1], ids_k.shape[1]), block)
        return cls._made(_native.mask_of_documents(ids_q, ids_k, sizes), ids_q.device)

    @classmethod
    def tree(cls, parents: Tensor, *, seqlen_k: int, block: int | tuple[int, int] = 64) -> Self:
        """Trees of speculative decoding; made on the CPU.

        The last keys are those of the queries. A query sees all keys before them, its own one, and
        those of its ancestors.

        Args:
            parents: int32 `[batch, seqlen_q]`: the parent of each query, an earlier one of the same
                entry, or -1 for a root.
            seqlen_k: Number of keys.
            block: Queries and keys of a block.

        """
        if parents.dim() != 2:
            raise ValueError(f"parents have shape {list(parents.shape)}, not [batch, seqlen_q]")
        sizes = block_sizes((parents.shape[1], seqlen_k), block)
        return cls._made(_native.mask_of_tree(parents, sizes), parents.device)

    @classmethod
    def prefix(
        cls,
        lengths: int | Sequence[int],
        *,
        seqlens: tuple[int, int],
        causal: bool = True,
        window: Window = (None, None),
        top_left: bool = False,
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """The first keys for all queries, besides a token mask; on the CPU.

        Args:
            lengths: How many keys, of all batch entries or of each.
            seqlens: Number of queries and of keys.
            causal: As in `attention`; the mask of a prefix language model by default.
            window: As in `attention`.
            top_left: As in `attention`.
            block: Queries and keys of a block.

        """
        lengths = [lengths] if isinstance(lengths, int) else list(lengths)
        shown = (*sides(causal, window), top_left)
        return cls._made(_native.mask_of_prefixes(lengths, shown, block_sizes(seqlens, block)))

    @classmethod
    def streaming(
        cls,
        count: int,
        left: int,
        *,
        seqlens: tuple[int, int],
        top_left: bool = False,
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """A causal window, and the first `count` keys; on the CPU.

        Args:
            count: Keys that every query sees which is not before them.
            left: Keys before its own that a query sees.
            seqlens: Number of queries and of keys.
            top_left: As in `attention`.
            block: Queries and keys of a block.

        """
        shown = (*sides(True, (left, None)), top_left)
        sizes = block_sizes(seqlens, block)
        return cls._made(_native.mask_of_streaming(natural("count", count), shown, sizes))

    @classmethod
    def key_padding(
        cls,
        keys: Sequence[tuple[int, int]],
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """For each batch entry the keys that are no padding; on the CPU.

        Args:
            keys: The first key of each entry, and the one behind the last.
            seqlens: Number of queries and of keys.
            block: Queries and keys of a block.

        """
        return cls._made(_native.mask_of_padding(list(keys), block_sizes(seqlens, block)))

    @classmethod
    def dilated_window(
        cls,
        dilation: int,
        left: int | None,
        right: int | None,
        *,
        seqlens: tuple[int, int],
        top_left: bool = False,
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """A window of every `dilation`-th key from a query's own on; on the CPU.

        Args:
            dilation: 1 is all keys.
            left: How many keys before its own a query sees; None is all.
            right: How many behind it.
            seqlens: Number of queries and of keys.
            top_left: As in `attention`.
            block: Queries and keys of a block.

        """
        shown = (*sides(False, (left, right)), top_left)
        sizes = block_sizes(seqlens, block)
        return cls._made(_native.mask_of_dilated_window(dilation, shown, sizes))

    @classmethod
    def neighborhood(
        cls,
        grid: Sequence[int],
        window: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        *,
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """Neighbourhood attention on a grid of tokens in row-major order; on the CPU.

        Along each dimension a query sees `window` positions, `dilation` apart, around its own. At
        the border they are moved inside.

        Args:
            grid: Sizes of the grid, in one or more dimensions.
            window: Positions, of all dimensions or of each.
            dilation: The same for the distance of positions.
            block: Queries and keys of a block.

        """
        tokens = prod(grid)
        window, dilation = (
            [sizes] * len(grid) if isinstance(sizes, int) else list(sizes)
            for sizes in (window, dilation)
        )
        sizes = block_sizes((tokens, tokens), block)
        return cls._made(_native.mask_of_neighborhood(list(grid), window, dilation, sizes))

    @classmethod
    def _made(cls, native: _native.BlockMask, device: torch.device | None = None) -> Self:
        mask = cls(native, torch.device("cpu"))
        return mask if device is None else mask.to(device)

    @classmethod
    def _of_lists(cls, lists: _bits.Lists, sizes: tuple[int, int, int, int]) -> Self:
        return cls(_native.BlockMask.from_lists(*lists.lists, sizes, lists.bits), lists.device)

    def _lists(self) -> _bits.Lists:
        """The lists and the bits, on the CPU."""
        batch, heads, rows, _ = self.shape
        nnz, tiles = self._native.counts
        new = partial(torch.empty, dtype=torch.int32, device="cpu")
        lists = new((batch, heads, rows + 1)), new(nnz)
        bits = None
        if tiles is not None:
            bits = new(nnz), new((tiles, _bits.WORDS))
        self._native.write_lists(*lists, bits)
        return _bits.Lists(lists, bits)
