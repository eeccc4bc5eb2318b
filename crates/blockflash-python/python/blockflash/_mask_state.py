"""What block masks of Python have besides their lists: token masks, and how they are pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .block_mask import BlockMask


def shared_token_mask(masks: Sequence[BlockMask]) -> tuple[int | None, int | None] | None:
    """The token mask of all masks that have one."""
    found = {mask.token_mask for mask in masks} - {None}
    if len(found) > 1:
        raise ValueError(f"the masks have different token masks: {sorted(map(str, found))}")
    return found.pop() if found else None


def restored(
    blocks: Tensor,
    seqlens: tuple[int, int],
    block: tuple[int, int],
    device: torch.device,
    token_mask: tuple[int | None, int | None] | None,
) -> BlockMask:
    """The mask of what a pickle holds."""
    from .block_mask import BlockMask

    mask = BlockMask.from_dense_bool(blocks.to(device), seqlens=seqlens, block=block)
    mask.token_mask = token_mask
    return mask


def packed(masks: list[BlockMask], device: torch.device) -> BlockMask:
    """The packed mask of what a pickle holds."""
    from .block_mask import BlockMask

    return BlockMask.packed(masks).to(device)
