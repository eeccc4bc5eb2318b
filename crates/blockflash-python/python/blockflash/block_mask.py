"""Which blocks of queries and keys attention visits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _native
from ._arguments import block_sizes, natural, shared_token_mask, sides, together

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

_Window = tuple[int | None, int | None]
_UNLIMITED = (None, None)


class BlockMask:
    """The blocks of queries x keys that attention visits, for each batch entry and head.

    Pairs outside of all visited blocks are not attended. Inside of a visited block, `causal` and
    `window` of the call decide. Block row `r` holds the queries `r * block_q` to
    `(r + 1) * block_q`, a block column likewise keys; the last may be shorter. Block sizes are
    multiples of 64 up to 1024. A mask has 1 or as many batch entries as q, and 1 or as many heads
    as k or q.

    A mask of a packed batch is made by `packed` and goes with `cu_seqlens_q` and `cu_seqlens_k`. A
    mask that was read from flex_attention has a `token_mask`, a window that is counted from the
    starts of queries and keys: attention with it applies that, unless the call asks for `causal` or
    a `window` itself.

    Made by the class methods, on the device of their tensors (`window` and `sink` on the CPU), on
    the current stream there, and not while a CUDA graph is captured. Immutable.
    """

    def __init__(
        self,
        native: _native.BlockMask,
        device: torch.device,
        token_mask: _Window | None = None,
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
    ) -> BlockMask:
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
    ) -> BlockMask:
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
    ) -> BlockMask:
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
        visits = torch.zeros((*kv_num_blocks.shape, cols + 1), dtype=torch.int32)
        visits = visits.to(kv_num_blocks.device)
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
    def from_flex(
        cls,
        mask: FlexMask,
        *,
        token_mask: str | _Window | None = None,
        check: bool = True,
    ) -> BlockMask:
        """From a `BlockMask` of flex_attention.

        Its blocks, partial and full ones, become the visited blocks. What its `mask_mod` does
        inside of partial blocks becomes the mask's `token_mask`, which must be a window: causal,
        of this many keys before and after a query, or none.

        Args:
            mask: It is evaluated at all pairs of its partial blocks.
            token_mask: What it is known to be: "full" (nothing is hidden), "causal", or the
                `window`, counted from the starts.
            check: Whether a `token_mask` that is given is compared with `mask_mod`.

        Raises:
            ValueError: They differ.
            Unsupported: `mask_mod` is no window.

        """
        from . import _flex

        sizes = {"seqlens": tuple(mask.seq_lengths), "block": mask.BLOCK_SIZE}
        lists = (mask.kv_num_blocks, mask.kv_indices)
        partial = cls.from_kv_blocks(*lists, **sizes).to_dense()
        lists += (mask.full_kv_num_blocks, mask.full_kv_indices)
        made = cls.from_kv_blocks(*lists, **sizes)
        pairs = _flex.Pairs(mask.mask_mod, made.seqlens, made.block, partial, made.to_dense())
        made.token_mask = pairs.token_mask(token_mask, check)
        return made

    def to_flex(self, mask_mod: Callable[..., Tensor] | None = None) -> FlexMask:
        """A `BlockMask` of flex_attention, where all blocks are partial if there is a mask_mod.

        Args:
            mask_mod: What flex_attention does inside of the blocks; nothing by default.

        """
        from . import _flex

        return _flex.written(self.to_dense(), self.seqlens, self.block, mask_mod)

    @classmethod
    def packed(cls, masks: Sequence[BlockMask]) -> BlockMask:
        """The mask of a packed batch, on the device of the first mask; copied by the CPU.

        Args:
            masks: One for each sequence, with its numbers of queries and keys, with 1 batch entry,
                and with 1 head or as many as the others. Their blocks have one size.

        """
        if not masks:
            raise ValueError("masks is empty: there is no sequence to pack")
        native = _native.BlockMask.packed([mask._native for mask in masks])
        return cls._on_cpu(native, shared_token_mask(mask.token_mask for mask in masks)).to(
            masks[0].device
        )

    def sequences(self) -> list[BlockMask]:
        """The masks of the sequences of a packed mask, on the CPU; none if it is not packed."""
        return [self._on_cpu(native, self.token_mask) for native in self._native.sequences()]

    @classmethod
    def window(
        cls,
        left: int | None,
        right: int | None,
        *,
        seqlens: tuple[int, int],
        block: int | tuple[int, int] = 128,
        top_left: bool = False,
    ) -> BlockMask:
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
    ) -> BlockMask:
        """The blocks that a causal mask does not hide; on the CPU."""
        return cls.window(None, 0, seqlens=seqlens, block=block, top_left=top_left)

    @classmethod
    def sink(
        cls, count: int, *, seqlens: tuple[int, int], block: int | tuple[int, int] = 128
    ) -> BlockMask:
        """The first `count` block columns in every row; on the CPU."""
        return cls._on_cpu(
            _native.BlockMask.sink(block_sizes(seqlens, block), natural("count", count))
        )

    @classmethod
    def _on_cpu(cls, native: _native.BlockMask, token_mask: _Window | None = None) -> BlockMask:
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
        window: _Window = _UNLIMITED,
        top_left: bool = False,
        always: BlockMask | None = None,
        check: bool = False,
    ) -> BlockMask:
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
        window: _Window = _UNLIMITED,
        top_left: bool = False,
        always: BlockMask | None = None,
        check: bool = False,
    ) -> BlockMask:
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

    def __or__(self, other: BlockMask) -> BlockMask:
        """The blocks that either mask visits; computed on the CPU."""
        return self._combined(other, "union")

    def __and__(self, other: BlockMask) -> BlockMask:
        """The blocks that both masks visit; computed on the CPU."""
        return self._combined(other, "intersection")

    def _combined(self, other: BlockMask, how: str) -> BlockMask:
        native, others = (mask.to("cpu")._native for mask in (self, other))
        combined = getattr(native, how)(others)
        token_mask = shared_token_mask((self.token_mask, other.token_mask))
        return self._on_cpu(combined, token_mask).to(self.device)

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on a device: itself, if it is there."""
        place = torch.empty(0, device=device)
        if place.device == self.device:
            return self
        return BlockMask(self._native.to_device_of(place), place.device, self.token_mask)

    def to_dense(self) -> Tensor:
        """The visited blocks, bool `[batch, heads, rows, cols]`; waits for a GPU."""
        if self._native.is_packed:
            raise ValueError("to_dense() of a packed mask: sequences() gives masks that have it")
        blocks = torch.empty(self.shape, dtype=torch.uint8)
        self._native.write_bool(blocks)
        return blocks.view(torch.bool).to(self.device)

    @property
    def density(self) -> float:
        """Visited blocks per block, 0 to 1; waits for a GPU."""
        masks = self.sequences() if self._native.is_packed else [self]
        blocks = torch.cat([mask.to_dense().flatten() for mask in masks])
        return blocks.float().mean().item() if blocks.numel() else 0.0

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, seqlens={self.seqlens}, block={self.block}, "
            f"device={str(self.device)!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self._native.is_packed:
            return _packed, (self.sequences(), self.device)
        dense = self.to_dense().cpu()
        return _restored, (dense, self.seqlens, self.block, self.device, self.token_mask)


def _restored(
    blocks: Tensor,
    seqlens: tuple[int, int],
    block: tuple[int, int],
    device: torch.device,
    token_mask: _Window | None,
) -> BlockMask:
    """The mask of what a pickle holds."""
    mask = BlockMask.from_dense_bool(blocks.to(device), seqlens=seqlens, block=block)
    mask.token_mask = token_mask
    return mask


def _packed(masks: list[BlockMask], device: torch.device) -> BlockMask:
    """The packed mask of what a pickle holds."""
    return BlockMask.packed(masks).to(device)
