"""What a batch of SGLang is to the kernels: lengths, pages, queries of each sequence, masks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class Metadata:
    """A batch of B sequences, for all layers."""

    lengths: Tensor
    """int32 `[B]`: keys of each sequence, with those of this step."""
    table: Tensor
    """int32 `[B, columns]`: the pages of each sequence."""
    window_table: Tensor | None
    """The same in the pool of layers with a window, where they have one of their own."""
    queries: int
    """Queries of each sequence, or the most of one where they are packed."""
    cu_seqlens: Tensor | None = None
    """int32 `[B + 1]`, where sequences have different numbers of queries."""
    tail_mask: Tensor | None = None
    """bool `[B, queries, queries]`: which drafted tokens see which, in trees."""

    def fill(self, other: Metadata) -> None:
        """Write the numbers of another batch, of as many sequences, into these tensors."""
        for field in fields(self):
            to, source = getattr(self, field.name), getattr(other, field.name)
            if isinstance(to, Tensor) and to.data_ptr() != source.data_ptr():
                to.copy_(source)


class PageTables:
    """Tables of pages from SGLang's table of slots, on the device."""

    def __init__(self, req_to_token: Tensor, page: int, pool: Any) -> None:
        self.page = page
        # The slots in which pages begin: slots of a page follow each other.
        self.starts = req_to_token[:, ::page]
        mapped = getattr(pool, "layers_mapping", None)
        self.window_pool = pool if mapped and any(w for _, w in mapped.values()) else None

    @property
    def columns(self) -> int:
        """Pages of the longest sequence that SGLang can hold."""
        return self.starts.shape[1]

    def slots(self, rows: Tensor, longest: int | None) -> Tensor:
        """The first slots of the pages of these requests, as many as the longest one has."""
        columns = self.columns if longest is None else -(-longest // self.page)
        return self.starts[:, : max(columns, 1)].index_select(0, rows)

    def of_slots(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tables of the pages that begin in these slots, of all layers and of windows."""
        table = (slots // self.page).int()
        if self.window_pool is None:
            return table, None
        # Pages that left the window have no slot there any more, and nobody reads them.
        slots = self.window_pool.translate_loc_from_full_to_swa(slots)
        return table, (slots // self.page).clamp_(min=0).int()

    def in_window_pool(self, layer: Any) -> bool:
        """Whether the keys of a layer are in the pool of layers with a window."""
        return self.window_pool is not None and self.window_pool.layers_mapping[layer.layer_id][1]


class GraphBuffers:
    """The tensors that captured graphs read, of at most `batch` sequences."""

    def __init__(self, tables: PageTables, batch: int, tree: int) -> None:
        device = tables.starts.device
        integers = {"dtype": torch.int32, "device": device}
        self.lengths = torch.ones(batch, **integers)
        self.table = torch.zeros(batch, tables.columns, **integers)
        self.window_table = None if tables.window_pool is None else torch.zeros_like(self.table)
        self.cu_seqlens = torch.zeros(batch + 1, **integers)
        self.tree = torch.ones(batch, tree, tree, dtype=torch.bool, device=device)

    def of(self, fresh: Metadata) -> Metadata:
        """The part of the buffers that a batch like `fresh` has: the same one for each replay.

        A mask of trees that SGLang keeps in place stays where it is.
        """
        batch, tree = fresh.lengths.shape[0], fresh.tail_mask
        window, packed = self.window_table, fresh.cu_seqlens is not None
        return Metadata(
            self.lengths[:batch],
            self.table[:batch],
            None if window is None else window[:batch],
            fresh.queries,
            self.cu_seqlens[: batch + 1] if packed else None,
            self.tree[:batch] if tree is not None and self.tree.numel() else tree,
        )


def branches(slots: Tensor, seq_lens: Tensor, drafted: Tensor, page: int) -> Tensor:
    """The first slots of the pages of each branch of a tree that is being drafted.

    Branches share the whole pages of a sequence, `slots` `[B, columns]`. The keys behind them are
    in pages of each branch, where SGLang puts a copy of the begun page and the drafted tokens, in
    the slots `drafted` `[B, branches, steps]`.
    """
    batch, count, steps = drafted.shape
    ends = page * torch.arange(1, slots.shape[1] + 1, device=slots.device)
    # The first drafted token in each column.
    step = (ends - page - seq_lens[:, None]).clamp_(0, steps - 1)
    own = drafted.gather(2, step[:, None].expand(batch, count, -1))
    shared = (ends <= seq_lens[:, None])[:, None]
    return torch.where(shared, slots[:, None], own - own % page).flatten(0, 1)


def trees(mask: Tensor, seq_lens: Tensor, tokens: int) -> Tensor:
    """Which drafted tokens see which, bool `[B, tokens, tokens]`, of a mask of all their keys.

    `mask` has the booleans `[tokens, seq_len + tokens]` of each sequence, one after another. Where
    it ends early, as for the padding of a graph, something in it is taken.
    """
    lengths = seq_lens + tokens
    begins = (lengths.cumsum(0) - lengths) * tokens + seq_lens
    token = torch.arange(tokens, device=mask.device)
    at = begins[:, None, None] + lengths[:, None, None] * token[:, None] + token
    return mask[at.clamp_(max=mask.numel() - 1)]


def offsets(counts: Tensor) -> Tensor:
    """Where each of these numbers of rows begins, and where the last ones end: int32 `[B + 1]`."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
