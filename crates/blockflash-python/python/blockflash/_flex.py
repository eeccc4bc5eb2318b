"""Masks of flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from ._arguments import sides
from ._native import Unsupported

_Window = tuple[int | None, int | None]

_NAMED: dict[str, _Window] = {"full": (None, None), "causal": (None, 0)}

_PAIRS = 1 << 20
"""How many pairs are evaluated at once."""


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
        self._mask_mod, self._seqlens, self._block = mask_mod, seqlens, block
        self._partial = partial.nonzero()
        self._full = (visited & ~partial).nonzero()

    def token_mask(self, known: str | _Window | None, check: bool) -> _Window:
        """The window that hides the same pairs: see `BlockMask.from_flex`."""
        if not (known is None or known in _NAMED or isinstance(known, tuple)):
            raise ValueError(f"token_mask is {known!r}, not 'full', 'causal' or a window")
        if known is None:
            return self.window()
        window = _NAMED.get(known, known)
        sides(False, window)
        wrong, first = self.differences(window) if check else (0, None)
        if wrong:
            raise ValueError(
                f"mask_mod is not the token_mask at {wrong} pairs, first at (batch, head, query, "
                f"key) {first}"
            )
        return window

    def _each(self, blocks: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Indices (batch, head, query, key) of all pairs of these blocks, some at a time."""
        (block_q, block_k), device = self._block, blocks.device
        rows = torch.arange(block_q, device=device)[:, None].expand(-1, block_k).flatten()
        cols = torch.arange(block_k, device=device).repeat(block_q)
        for some in blocks.split(max(_PAIRS // (block_q * block_k), 1)):
            batch, head, row, col = (some[:, i, None] for i in range(4))
            query, key = row * block_q + rows, col * block_k + cols
            exist = (query < self._seqlens[0]) & (key < self._seqlens[1])
            yield tuple(t.expand_as(exist)[exist] for t in (batch, head, query, key))

    def _attended(self, pairs: tuple[Tensor, ...]) -> Tensor:
        if not len(pairs[0]):
            return pairs[0].bool()
        return torch.vmap(self._mask_mod)(*pairs).bool()

    def window(self) -> _Window:
        """The window that hides the same pairs, counted from the starts.

        A window is decided by the distances of keys from queries that are attended, and hidden.
        """
        seqlen_q, seqlen_k = self._seqlens
        # For each distance, counted from the lowest one, whether some pair is attended or hidden.
        zero = max(seqlen_q - 1, 0)
        shown, hidden = torch.zeros(
            2, seqlen_q + seqlen_k + 1, dtype=torch.bool, device=self._partial.device
        )
        for pairs in self._each(self._partial):
            distance, attended = pairs[3] - pairs[2] + zero, self._attended(pairs)
            shown[distance[attended]] = True
            hidden[distance[~attended]] = True
        first, last = self._distances()
        steps = torch.zeros(len(shown), dtype=torch.long, device=shown.device)
        steps.index_add_(0, first + zero, torch.ones_like(first))
        steps.index_add_(0, last + zero + 1, -torch.ones_like(last))
        shown |= steps.cumsum(0) > 0
        at_shown, at_hidden = (t.nonzero().flatten() - zero for t in (shown, hidden))
        if not len(at_hidden):
            return None, None
        lowest, highest = (int(t) for t in at_shown.aminmax()) if len(at_shown) else (0, -1)
        left = max(-lowest, 0) if bool((at_hidden < lowest).any()) else None
        right = max(highest, 0) if bool((at_hidden > highest).any()) else None
        inside = at_hidden >= (lowest if left is None else -left)
        inside &= at_hidden <= (highest if right is None else right)
        if bool(inside.any()):
            _, place = self.differences((left, right))
            raise Unsupported(
                f"mask_mod hides the pair (batch, head, query, key) {place}, which no window does "
                "that attends the others. What can be expressed inside of partial blocks is 'full' "
                "(nothing is hidden), 'causal', or a window of this many keys before and after a "
                "query, the same for all batch entries and heads, besides any choice of whole "
                "blocks. Documents in one sequence are packed sequences (cu_seqlens, with "
                "BlockMask.packed). For all else use flex_attention"
            )
        return left, right

    def differences(self, window: _Window) -> tuple[int, tuple[int, ...] | None]:
        """How many pairs a window treats otherwise, and the first one."""
        left, right = window
        first, last = self._distances()
        cut = torch.zeros_like(first, dtype=torch.bool)
        if left is not None:
            cut |= first < -left
        if right is not None:
            cut |= last > right
        count, place = 0, None
        for blocks, attend in ((self._partial, self._attended), (self._full[cut], None)):
            for pairs in self._each(blocks):
                distance = pairs[3] - pairs[2]
                ours = torch.ones_like(distance, dtype=torch.bool)
                if left is not None:
                    ours &= distance >= -left
                if right is not None:
                    ours &= distance <= right
                wrong = (ours != attend(pairs)) if attend is not None else ~ours
                if place is None and bool(wrong.any()):
                    at = int(wrong.int().argmax())
                    place = tuple(int(t[at]) for t in pairs)
                count += int(wrong.sum())
        return count, place

    def _distances(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest distance of a key from a query in each full block."""
        (block_q, block_k), (seqlen_q, seqlen_k) = self._block, self._seqlens
        query, key = self._full[:, 2] * block_q, self._full[:, 3] * block_k
        first = key - (query + block_q - 1).clamp(max=seqlen_q - 1)
        return first, (key + block_k - 1).clamp(max=seqlen_k - 1) - query


def written(
    visited: Tensor,
    seqlens: tuple[int, int],
    block: tuple[int, int],
    mask_mod: Callable[..., Tensor] | None,
) -> FlexMask:
    """See `BlockMask.to_flex`."""
    counts = visited.sum(-1, dtype=torch.int32)
    columns = visited.int().argsort(dim=-1, descending=True, stable=True).int()
    lists = (counts, columns)
    if mask_mod is None:
        lists = (torch.zeros_like(counts), columns, counts, columns)
    options = {"mask_mod": mask_mod, "seq_lengths": seqlens}
    return FlexMask.from_kv_blocks(*lists, BLOCK_SIZE=block, **options)
