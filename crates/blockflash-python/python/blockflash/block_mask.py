"""Which blocks of queries and keys attention visits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _bits, _native
from ._arguments import shared_token_mask, sides
from ._block_makers import Window
from ._pair_makers import PairMakers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask


class BlockMask(PairMakers):
    """The blocks of queries x keys that attention visits, for each batch entry and head.

    Pairs outside of all visited blocks are not attended. A visited block is full, or has bits that
    say which of its pairs are visible; besides, `causal` and `window` of the call decide. Block row
    `r` holds the queries `r * block_q` to `(r + 1) * block_q`, a block column likewise keys; the
    last may be shorter. Block sizes are multiples of 64 up to 1024. A mask has 1 or as many batch
    entries as q, and 1 or as many heads as k or q. Bits take 512 bytes for 64 x 64 pairs of a block
    that is not full.

    A mask of a packed batch is made by `packed` and goes with `cu_seqlens_q` and `cu_seqlens_k`. A
    mask that was read from flex_attention has a `token_mask`, a window that is counted from the
    starts of queries and keys: attention with it applies that, unless the call asks for `causal` or
    a `window` itself.

    Made by the class methods, on the device of their tensors (`window` and `sink` on the CPU), on
    the current stream there, and not while a CUDA graph is captured. Immutable.
    """

    @classmethod
    def from_flex(
        cls,
        mask: FlexMask,
        *,
        token_mask: str | Window | None = None,
        check: bool = True,
    ) -> BlockMask:
        """From a `BlockMask` of flex_attention.

        Its full blocks and its partial ones become visited blocks. What its `mask_mod` does inside
        of partial blocks becomes the mask's `token_mask` if it is a window, and bits otherwise.

        Args:
            mask: Its `mask_mod` is evaluated at all pairs of its partial blocks, some at a time, on
                its device.
            token_mask: What it is known to be: "full" (nothing is hidden), "causal", or the
                `window`, counted from the starts.
            check: Whether a `token_mask` that is given is compared with `mask_mod`.

        Raises:
            ValueError: They differ.

        """
        from . import _flex

        sizes = {"seqlens": tuple(mask.seq_lengths), "block": mask.BLOCK_SIZE}
        lists = (mask.kv_num_blocks, mask.kv_indices)
        partial = cls.from_kv_blocks(*lists, **sizes).to_dense()
        lists += (mask.full_kv_num_blocks, mask.full_kv_indices)
        made = cls.from_kv_blocks(*lists, **sizes)
        pairs = _flex.Pairs(mask.mask_mod, made.seqlens, made.block, partial, made.to_dense())
        if token_mask is not None:
            made.token_mask = pairs.known(token_mask, check)
            return made
        found = pairs.read()
        if isinstance(found, _bits.Lists):
            return cls._of_lists(found, (*made.seqlens, *made.block))
        made.token_mask = found
        return made

    def to_flex(self, mask_mod: Callable[..., Tensor] | None = None) -> FlexMask:
        """A `BlockMask` of flex_attention, where all blocks are partial if there is a mask_mod.

        Args:
            mask_mod: What flex_attention does inside of the blocks. By default it looks the bits
                up where there are some.

        """
        from . import _flex

        visited = self.to_dense()
        if mask_mod is not None or not self.has_bits:
            return _flex.written(visited, visited, self.seqlens, self.block, mask_mod)
        lists = self._lists().to(self.device)
        first, _ = _bits.first_tiles(lists, self.shape)
        mask_mod = _bits.mask_mod(lists, self.shape, self.block)
        return _flex.written(visited, first >= 0, self.seqlens, self.block, mask_mod)

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

    def __or__(self, other: BlockMask) -> BlockMask:
        """The blocks that either mask visits; computed on the CPU."""
        return self._combined(other, "union")

    def __and__(self, other: BlockMask) -> BlockMask:
        """The blocks that both masks visit; computed on the CPU."""
        return self._combined(other, "intersection")

    def complement(
        self, *, causal: bool = False, window: Window = (None, None), top_left: bool = False
    ) -> BlockMask:
        """The pairs that a token mask shows and this mask does not; computed on the CPU.

        Args:
            causal: As in `attention`.
            window: As in `attention`.
            top_left: As in `attention`.

        """
        native = self._with_bits_of_window().to("cpu")._native
        shown = (*sides(causal, window), top_left)
        return self._on_cpu(_native.mask_complement(native, shown)).to(self.device)

    def _combined(self, other: BlockMask, how: str) -> BlockMask:
        masks = [mask.to("cpu") for mask in (self, other)]
        windows = {mask.token_mask for mask in masks} - {None}
        if len(windows) > 1 or (windows and any(mask.has_bits for mask in masks)):
            masks = [mask._with_bits_of_window() for mask in masks]
        first, second = masks
        combined = getattr(first._native, how)(second._native)
        token_mask = shared_token_mask((first.token_mask, second.token_mask))
        return self._on_cpu(combined, token_mask).to(self.device)

    def _with_bits_of_window(self) -> BlockMask:
        """The same pairs without a `token_mask`."""
        if self.token_mask is None:
            return self
        left, right = self.token_mask

        def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = k == k if left is None else k >= q - left
            return seen if right is None else seen & (k <= q + right)

        visited = self.to_dense()
        evaluation = _bits.Evaluation(shown, self.seqlens, self.block)
        lists = evaluation.lists(visited.nonzero(), torch.zeros_like(visited))
        return self._of_lists(lists, (*self.seqlens, *self.block))

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
        blocks = torch.empty(self.shape, dtype=torch.uint8, device="cpu")
        self._native.write_bool(blocks)
        return blocks.view(torch.bool).to(self.device)

    def to_token_mask(self) -> Tensor:
        """The visible pairs, bool `[batch, heads, seqlen_q, seqlen_k]`; waits for a GPU.

        A `token_mask` is applied.
        """
        if self._native.is_packed:
            raise ValueError(
                "to_token_mask() of a packed mask: sequences() gives masks that have it"
            )
        pairs = _bits.token_mask(self._lists(), self.shape, self.seqlens, self.block)
        if self.token_mask is not None:
            pairs &= _bits.window(self.token_mask, self.seqlens, pairs.device)
        return pairs.to(self.device)

    @property
    def has_bits(self) -> bool:
        """Whether some visited blocks may hide pairs by themselves."""
        return self._native.counts[1] is not None

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
        sizes = (*self.seqlens, *self.block)
        return _restored, (self._lists(), sizes, self.device, self.token_mask)


def _restored(
    lists: _bits.Lists,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    token_mask: Window | None,
) -> BlockMask:
    """The mask of what a pickle holds."""
    mask = BlockMask._of_lists(lists, sizes).to(device)
    mask.token_mask = token_mask
    return mask


def _packed(masks: list[BlockMask], device: torch.device) -> BlockMask:
    """The packed mask of what a pickle holds."""
    return BlockMask.packed(masks).to(device)
