"""The attention of a drafting model in the steps in which it drafts a chain or a tree of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backend import BlockflashBackend
from ._metadata import GraphBuffers, Metadata, branches


class BlockflashDraftBackend:
    """A backend for each step but the last one, which share the table of pages.

    In step `i` each of the `topk` branches of a sequence has `i + 1` keys more than the sequence.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        steps = range(speculative_num_steps - 1)
        self.attn_backends = [BlockflashBackend(runner) for _ in steps]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None
        self._lengths: Tensor | None = None
        self._graphs: GraphBuffers | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the steps outside of a graph."""
        lengths, table, window_table = self._metadata(forward_batch)
        for step, backend in enumerate(self.attn_backends):
            backend.forward_metadata = Metadata(lengths + (step + 1), table, window_table, 1)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        tables, batch = self.attn_backends[0].tables, max_bs * self.topk
        self._graphs = GraphBuffers(tables, batch, 0)
        self._lengths = torch.ones(
            len(self.attn_backends), batch, dtype=torch.int32, device=tables.starts.device
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture of the steps, or a replay."""
        if self._graphs is None or self._lengths is None:
            raise RuntimeError("init_cuda_graph_state comes before the first capture")
        lengths, table, window_table = self._metadata(forward_batch)
        shared = Metadata(lengths, table, window_table, 1)
        static = self._graphs.of(shared)
        static.fill(shared)
        for step, backend in enumerate(self.attn_backends):
            of_step = self._lengths[step, : lengths.shape[0]]
            torch.add(lengths, step + 1, out=of_step)
            backend.forward_metadata = Metadata(of_step, static.table, static.window_table, 1)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is prepared in the graph."""

    def _metadata(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lengths before the first step, and tables of pages, of all branches."""
        size, tables = batch.batch_size, self.attn_backends[0].tables
        seq_lens = batch.seq_lens[:size]
        slots = tables.slots(batch.req_pool_indices[:size], None)
        if self.topk > 1:
            count = size * self.topk * self.speculative_num_steps
            drafted = batch.out_cache_loc[:count].view(size, self.topk, -1)
            slots = branches(slots, seq_lens, drafted, tables.page)
            seq_lens = seq_lens.repeat_interleave(self.topk)
        return seq_lens.int(), *tables.of_slots(slots)
