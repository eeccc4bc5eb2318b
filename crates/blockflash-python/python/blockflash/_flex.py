"""Masks of flex_attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from . import _bits
from ._arguments import sides

_Window = tuple[int | None, int | None]

_NAMED: dict[str, _Window] = {"full": (None, None), "causal": (None, 0)}


class Pairs:
    """Which pairs of queries and keys a mask of flex_attention attends in its blocks.

    Its mask_mod is evaluated in partial blocks alone: in full ones, it does not count.
    """

    def __init__(
        self,
        mask_mod: Callable[..., Tensor],
        seqlens: tuple[int, int],
        block: tuple[int, int],
        partial: Tensor,
        visited: Tensor,
    ) -> None:
        """Takes the visited blocks, bool `[batch, heads, rows, cols]`, and which are partial."""
        self._evaluation = _bits.Evaluation(mask_mod, seqlens, block)
        self._seqlens, self._block = seqlens, block
        self._partial = partial.nonzero()
        self._full = visited & ~partial

    def read(self) -> _Window | _bits.Lists:
        """The window, counted from the starts, that hides the same pairs, else lists with bits.

        A window is decided by the distances of keys from queries that are attended, and hidden.
        """
        seqlen_q, seqlen_k = self._seqlens
        zero = max(seqlen_q - 1, 0)
        # For each distance, counted from the lowest one, whether some pair is attended or hidden.
        shown, hidden = torch.zeros(
            2, seqlen_q + seqlen_k + 1, dtype=torch.bool, device=self._partial.device
        )
        collected = _bits.Collected(self._full)
        for blocks, query, key, exist, visible in self._evaluation.pieces(self._partial):
            distance = key[:, None] - query[:, :, None] + zero
            shown[distance[visible]] = True
            hidden[distance[exist & ~visible]] = True
            collected.add(blocks, exist, visible)
        first, last = self._distances()
        steps = torch.zeros(len(shown), dtype=torch.long, device=shown.device)
        steps.index_add_(0, first + zero, torch.ones_like(first))
        steps.index_add_(0, last + zero + 1, -torch.ones_like(last))
        shown |= steps.cumsum(0) > 0
        window = _window(*(t.nonzero().flatten() - zero for t in (shown, hidden)))
        return collected.lists() if window is None else window

    def known(self, token_mask: str | _Window, check: bool) -> _Window:
        """The window that a mask is known to be: see `BlockMask.from_flex`."""
        if not (token_mask in _NAMED or isinstance(token_mask, tuple)):
            raise ValueError(f"token_mask is {token_mask!r}, not 'full', 'causal' or a window")
        window = _NAMED.get(token_mask, token_mask)
        sides(False, window)
        wrong, first = self._differences(window) if check else (0, None)
        if wrong:
            raise ValueError(
                f"mask_mod is not the token_mask at {wrong} pairs, first at (batch, head, query, "
                f"key) {first}"
            )
        return window

    def _differences(self, window: _Window) -> tuple[int, tuple[int, ...] | None]:
        """How many pairs a window treats otherwise, and the first one."""
        left, right = window
        first, last = self._distances()
        cut = torch.zeros_like(first, dtype=torch.bool)
        if left is not None:
            cut |= first < -left
        if right is not None:
            cut |= last > right
        count, place = 0, None
        full = _bits.Evaluation(lambda b, h, q, k: q >= 0, self._seqlens, self._block)
        cut_blocks = self._full.nonzero()[cut]
        for evaluation, blocks in ((self._evaluation, self._partial), (full, cut_blocks)):
            for some, query, key, exist, visible in evaluation.pieces(blocks):
                distance = key[:, None] - query[:, :, None]
                ours = exist
                if left is not None:
                    ours = ours & (distance >= -left)
                if right is not None:
                    ours = ours & (distance <= right)
                wrong = ours != visible
                if place is None and bool(wrong.any()):
                    block, i, j = (int(t) for t in wrong.nonzero()[0])
                    batch, head = (int(t) for t in some[block, :2])
                    place = (batch, head, int(query[block, i]), int(key[block, j]))
                count += int(wrong.sum())
        return count, place

    def _distances(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest distance of a key from a query in each full block."""
        (block_q, block_k), (seqlen_q, seqlen_k) = self._block, self._seqlens
        _, _, row, col = self._full.nonzero().unbind(1)
        query, key = row * block_q, col * block_k
        first = key - (query + block_q - 1).clamp(max=seqlen_q - 1)
        return first, (key + block_k - 1).clamp(max=seqlen_k - 1) - query


def _window(shown: Tensor, hidden: Tensor) -> _Window | None:
    """The window that shows these distances and hides those, if there is one."""
    if not len(hidden):
        return None, None
    lowest, highest = (int(t) for t in shown.aminmax()) if len(shown) else (0, -1)
    left = max(-lowest, 0) if bool((hidden < lowest).any()) else None
    right = max(highest, 0) if bool((hidden > highest).any()) else None
    inside = hidden >= (lowest if left is None else -left)
    inside &= hidden <= (highest if right is None else right)
    return None if bool(inside.any()) else (left, right)


def written(
    visited: Tensor,
    partial: Tensor,
    seqlens: tuple[int, int],
    block: tuple[int, int],
    mask_mod: Callable[..., Tensor] | None,
) -> FlexMask:
    """A mask of flex_attention of these visited blocks, where mask_mod decides in partial ones."""
    if mask_mod is None:
        partial = torch.zeros_like(visited)
    lists = [*_listed(partial), *_listed(visited & ~partial)]
    options = {"mask_mod": mask_mod, "seq_lengths": seqlens}
    return FlexMask.from_kv_blocks(*lists, BLOCK_SIZE=block, **options)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns each row has, and which."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.int()
