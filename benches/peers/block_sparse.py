"""Inputs of block-sparse attention forward: each query sees the keys of the blocks that its block of queries lists."""
import math

import torch

import attention
from measure import relative


class Inputs(attention.Inputs):
    """q, k, v, and one pattern of blocks for all batch entries, in rows of head · query blocks + query block."""

    def __init__(self, case, device):
        if case["mask"] != "full":
            raise ValueError(f"mask {case['mask']!r}: rivals know whole blocks only (mask full)")
        super().__init__(case, device)
        self.block_q, self.block_kv = case["block_q"], case["block_kv"]
        self.q_blocks, self.kv_blocks = -(-self.seqlen_q // self.block_q), -(-self.seqlen_kv // self.block_kv)
        self.row_ptr, self.col_idx = self.pattern(case)
        rows = self.heads_q * self.q_blocks
        if self.row_ptr.numel() != rows + 1 or self.row_ptr[-1] != self.col_idx.numel():
            raise ValueError(f"row_ptr does not describe {rows} rows (heads x query blocks)")
        self.row_length = self.row_ptr.diff()
        self.row = torch.repeat_interleave(torch.arange(rows), self.row_length)  # of each block

    def pattern(self, case):
        """int64 row_ptr and col_idx on the CPU: the .npy files of the case, else `blocks_per_row` drawn here."""
        if "col_idx" in case:
            import numpy

            return tuple(torch.from_numpy(numpy.load(case[name]).astype("int64")) for name in ("row_ptr", "col_idx"))
        rows, each = self.heads_q * self.q_blocks, case["blocks_per_row"]
        draw = torch.rand(rows, self.kv_blocks, generator=torch.Generator().manual_seed(case.get("seed", 0)))
        return torch.arange(rows + 1) * each, draw.topk(each, dim=1).indices.sort(dim=1).values.flatten()

    def blocks(self):
        """int32 lengths [heads, query blocks] and columns [heads, query blocks, key blocks], filled up with zeros."""
        slot = torch.arange(self.col_idx.numel()) - self.row_ptr[self.row]
        columns = torch.zeros(self.heads_q * self.q_blocks, self.kv_blocks, dtype=torch.int32, device=self.device)
        columns[self.row.to(self.device), slot.to(self.device)] = self.col_idx.to(self.device, torch.int32)
        lengths = self.row_length.to(self.device, torch.int32)
        return lengths.view(self.heads_q, -1), columns.view(self.heads_q, self.q_blocks, -1)

    def visible(self):
        """A function that says whether the block of a query lists the block of a key, as FlexAttention asks for it."""
        table = torch.zeros(self.heads_q * self.q_blocks, self.kv_blocks, dtype=torch.bool)
        table[self.row, self.col_idx] = True
        table = table.view(self.heads_q, self.q_blocks, -1).to(self.device)
        block_q, block_kv = self.block_q, self.block_kv
        return lambda _batch, head, query, key: table[head, query // block_q, key // block_kv]

    def expected(self, b, h, q_block):
        """The queries of a block, and their f64 attention to the keys that it lists."""
        start = q_block * self.block_q
        rows = torch.arange(start, min(start + self.block_q, self.seqlen_q), device=self.device)
        first, last = self.row_ptr[h * self.q_blocks + q_block : h * self.q_blocks + q_block + 2].tolist()
        if first == last:
            return rows, torch.zeros(rows.numel(), self.head_dim, dtype=torch.float64, device=self.device)
        keys = self.col_idx[first:last, None] * self.block_kv + torch.arange(self.block_kv)
        keys = keys.flatten()
        return rows, self.exact(b, h, rows, keys[keys < self.seqlen_kv].to(self.device))

    def relative_error(self, out):
        """Largest over blocks of queries from the start, the middle and the end of two heads; NaN anywhere counts."""
        if torch.isnan(out).any():
            return math.nan
        worst = 0.0
        for b, h in self.samples():
            for q_block in {0, self.q_blocks // 2, self.q_blocks - 1}:
                rows, expected = self.expected(b, h, q_block)
                worst = max(worst, relative(out[b, rows, h], expected))
        return worst

    quick_error = relative_error
