"""Masks of flex_attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_mask

from ._attention import sides
from .block_mask import BlockMask

_NAMED = {"full": (None, None), "causal": (None, 0)}


def read(
    made: type[BlockMask],
    flex: FlexMask,
    token_mask: str | tuple[int | None, int | None],
    check: bool,
) -> BlockMask:
    """See `BlockMask.from_flex`."""
    if token_mask not in _NAMED and not isinstance(token_mask, tuple):
        raise ValueError(f"token_mask is {token_mask!r}, not 'full', 'causal' or a window")
    window = _NAMED.get(token_mask, token_mask)
    lists = (flex.kv_num_blocks, flex.kv_indices, flex.full_kv_num_blocks, flex.full_kv_indices)
    mask = made.from_kv_blocks(*lists, seqlens=tuple(flex.seq_lengths), block=flex.BLOCK_SIZE)
    left, right = sides(False, window)
    if check:
        _check(mask, flex, left, right)
    return mask


def _check(mask: BlockMask, flex: FlexMask, left: int, right: int) -> None:
    """Compares all pairs of visited blocks, with queries and keys counted from their starts."""
    (batch, heads, _, _), (seqlen_q, seqlen_k) = mask.shape, mask.seqlens
    device = flex.kv_num_blocks.device
    theirs = create_mask(flex.mask_mod, batch, heads, seqlen_q, seqlen_k, device=device)
    query = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_k, device=device)
    ours = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        ours &= key >= query - left
    if right >= 0:
        ours &= key <= query + right
    visited = mask.to_dense()
    for dim, size, length in ((2, mask.block[0], seqlen_q), (3, mask.block[1], seqlen_k)):
        visited = visited.repeat_interleave(size, dim).narrow(dim, 0, length)
    wrong = (visited & (ours != theirs)).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(
            f"mask_mod is not the token_mask at {len(wrong)} pairs, first at (batch, head, query, "
            f"key) {place}"
        )


def write(mask: BlockMask, mask_mod: Callable[..., Tensor] | None) -> FlexMask:
    """See `BlockMask.to_flex`."""
    visited = mask.to_dense()
    counts = visited.sum(-1, dtype=torch.int32)
    columns = visited.int().argsort(dim=-1, descending=True, stable=True).int()
    lists = (counts, columns)
    if mask_mod is None:
        lists = (torch.zeros_like(counts), columns, counts, columns)
    options = {"mask_mod": mask_mod, "seq_lengths": mask.seqlens}
    return FlexMask.from_kv_blocks(*lists, BLOCK_SIZE=mask.block, **options)
