"""Makers of block masks whose blocks are visited as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _native
from ._arguments import block_sizes, natural, sides, together

if TYPE_CHECKING:
    from typing_extensions import Self

Window = tuple[int | None, int | None]
_UNLIMITED = (None, None)


class BlockMakers:
    """The class methods of `BlockMask` that say which blocks are visited."""

    def __init__(
        self,
        native: _native.BlockMask,
        device: torch.device,
        token_mask: Window | None = None,
    ) -> None:
        self._native = native
        self.token_mask = token_mask
        self.number: int = native.number
        self.device = device
        self.seqlens: tuple[int, int] = native.sizes[:2]
        self.block: tuple[int, int] = native.sizes[2:]
        self.shape: tuple[int, int, int, int] = native.shape

    @classmethod
    def from_dense_bool(
        cls, blocks: Tensor, *, seqlens: tuple[int, int], block: int | tuple[int, int] = 128
    ) -> Self:
        """The blocks that are true in a bool tensor `[batch, heads, rows, cols]`.

        Args:
            blocks: Or `[rows, cols]`, for all batch entries and heads.
            seqlens: Number of queries and of keys.
            block: Queries and keys of a block.

        """
        if blocks.dtype != torch.bool:
            raise ValueError(f"blocks are {blocks.dtype}, not torch.bool")
        blocks = (blocks if blocks.dim() != 2 else blocks[None, None]).contiguous()
        sizes, nnz = block_sizes(seqlens, block), int(blocks.sum())
        return cls(_native.BlockMask.from_bool(blocks.view(torch.uint8), sizes, nnz), blocks.device)

    @classmethod
    def from_lists(
        cls,
        row_ptr: Tensor,
        col_idx: Tensor,
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """From the arrays of the BSR format, which are copied and checked; waits for a GPU.

        Args:
            row_ptr: int32 `[batch, heads, rows + 1]`: the columns of row `r` of a head are
                `col_idx[row_ptr[r]]` to `col_idx[row_ptr[r + 1] - 1]`. A head starts where the one
                before ends.
            col_idx: int32 `[nnz]`, the block columns, ascending in each row.
            seqlens: Number of queries and of keys.
            block: Queries and keys of a block.

        """
        native = _native.BlockMask.from_lists(row_ptr, col_idx, block_sizes(seqlens, block))
        return cls(native, row_ptr.device)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
    ) -> Self:
        """From lists of block columns, as flex_attention has them.

        Args:
            kv_num_blocks: `[batch, heads, rows]`, how many columns each row has.
            kv_indices: `[batch, heads, rows, most]`, the columns of each row in any order.
            full_kv_num_blocks: The same for further columns, which flex_attention does not mask.
            full_kv_indices: The same for further columns.
            seqlens: Number of queries and of keys.
            block: Queries and keys of a block.

        """
        _, seqlen_k, _, block_k = block_sizes(seqlens, block)
        cols = -(-seqlen_k // block_k)
        lists = [(kv_num_blocks, kv_indices)]
        together(full_kv_num_blocks=full_kv_num_blocks, full_kv_indices=full_kv_indices)
        if full_kv_num_blocks is not None:
            lists.append((full_kv_num_blocks, full_kv_indices))
        visits = kv_num_blocks.new_zeros((*kv_num_blocks.shape, cols + 1), dtype=torch.int32)
        for counts, columns in lists:
            if counts.shape != kv_num_blocks.shape or columns.shape[:-1] != counts.shape:
                shapes = f"{tuple(counts.shape)} and indices has {tuple(columns.shape)}"
                raise ValueError(f"num_blocks has {shapes}, expected one dimension more")
            listed = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
            wrong = listed & ((columns < 0) | (columns >= cols))
            if bool(wrong.any() | (counts < 0).any() | (counts > columns.shape[-1]).any()):
                raise ValueError(
                    f"a list has a column that is not one of {cols}, or a wrong length"
                )
            # What is not listed counts in the column behind the last one.
            places = torch.where(listed, columns, cols).long()
            visits.scatter_add_(-1, places, torch.ones_like(places, dtype=torch.int32))
        twice = (visits[..., :cols] > 1).nonzero()
        if len(twice):
            raise ValueError(f"column {twice[0, -1]} comes twice in row {twice[0, -2]}")
        return cls.from_dense_bool(visits[..., :cols] > 0, seqlens=seqlens, block=block)

    @classmethod
    def window(
        cls,
        left: int | None,
        right: int | None,
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
        top_left: bool = False,
    ) -> Self:
        """The blocks of the diagonal, with this many block columns before and after; on the CPU.

        Args:
            left: Block columns before the diagonal; None is all.
            right: Block columns after the diagonal; None is all, 0 a causal mask.
            seqlens: Number of queries and of keys.
            block: Queries and keys of a block.
            top_left: Where the diagonal starts if the lengths differ, as in `attention`.

        """
        numbers = sides(False, (left, right))
        return cls._on_cpu(
            _native.BlockMask.window(block_sizes(seqlens, block), *numbers, top_left)
        )

    @classmethod
    def causal(
        cls,
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
        top_left: bool = False,
    ) -> Self:
        """The blocks that a causal mask does not hide; on the CPU."""
        return cls.window(None, 0, seqlens=seqlens, block=block, top_left=top_left)

    @classmethod
    def sink(
        cls, count: int, *, seqlens: tuple[int, int], block: int | tuple[int, int] = 128
    ) -> Self:
        """The first `count` block columns in every row; on the CPU."""
        return cls._on_cpu(
            _native.BlockMask.sink(block_sizes(seqlens, block), natural("count", count))
        )

    @classmethod
    def _on_cpu(cls, native: _native.BlockMask, token_mask: Window | None = None) -> Self:
        return cls(native, torch.device("cpu"), token_mask)

    @classmethod
    def top_k(
        cls,
        scores: Tensor,
        k: int,
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
        causal: bool = False,
        window: Window = _UNLIMITED,
        top_left: bool = False,
        always: BlockMakers | None = None,
        check: bool = False,
    ) -> Self:
        """The `k` blocks of each row with the largest scores; on a GPU without the host.

        Args:
            scores: float32 `[batch, heads, rows, cols]`.
            k: Blocks of each row; fewer where there are fewer candidates.
            seqlens: Number of queries and of keys.
            block: Queries and keys of a block.
            causal: Blocks that this token mask hides entirely are left out.
            window: The same.
            top_left: As in `attention`.
            always: Blocks that are visited besides.
            check: Wait for the GPU and raise ValueError if a score is NaN, as the CPU always does.
                Otherwise NaN is never chosen.

        """
        choice = (natural("k", k), *sides(causal, window), top_left, check)
        native = None if always is None else always._native
        made = _native.BlockMask.from_scores(
            scores.contiguous().resolve_neg(), block_sizes(seqlens, block), choice, native
        )
        return cls(made, scores.device)

    @classmethod
    def top_k_means(
        cls,
        q: Tensor,
        k: Tensor,
        count: int,
        *,
        block: int | tuple[int, int] = 128,
        causal: bool = False,
        window: Window = _UNLIMITED,
        top_left: bool = False,
        always: BlockMakers | None = None,
        check: bool = False,
    ) -> Self:
        """The `count` best blocks of each row by mean query times mean key of a block.

        Args:
            q: Queries, `[batch, seqlen_q, heads, head_dim]`.
            k: Keys, `[batch, seqlen_k, heads_k, head_dim]`.
            count: Blocks of each row; fewer where there are fewer candidates.
            block: Queries and keys of a block.
            causal: As in `top_k`.
            window: As in `top_k`.
            top_left: As in `top_k`.
            always: As in `top_k`.
            check: As in `top_k`.

        """
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(f"q and k have shapes {tuple(q.shape)} and {tuple(k.shape)}")
        sizes = block_sizes((q.shape[1], k.shape[1]), block)
        choice = (natural("count", count), *sides(causal, window), top_left, check)
        native = None if always is None else always._native
        q, k = (t.detach().resolve_neg() for t in (q, k))
        try:
            made = _native.BlockMask.from_means(q, k, sizes, choice, native)
        except _native.Misaligned:
            made = _native.BlockMask.from_means(q.clone(), k.clone(), sizes, choice, native)
        return cls(made, q.device)
