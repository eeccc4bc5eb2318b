"""Inputs of block-sparse attention forward: each query sees the keys of the blocks that its block
of queries lists, and with a
causal mask those up to its own position."""

import math

import torch

import attention
from measure import relative


class Inputs(attention.Inputs):
    """q, k, v, and one pattern of blocks for all batch entries, in rows of head · query blocks
    + query block."""

    def __init__(self, case, device):
        super().__init__(case, device)
        self.block_q, self.block_kv = case["block_q"], case["block_kv"]
        self.q_blocks, self.kv_blocks = (
            -(-self.seqlen_q // self.block_q),
            -(-self.seqlen_kv // self.block_kv),
        )
        self.row_ptr, self.col_idx = self.pattern(case)
        rows = self.heads_q * self.q_blocks
        if self.row_ptr.numel() != rows + 1 or self.row_ptr[-1] != self.col_idx.numel():
            raise ValueError(f"row_ptr does not describe {rows} rows (heads x query blocks)")
        self.row_length = self.row_ptr.diff()
        self.row = torch.repeat_interleave(torch.arange(rows), self.row_length)  # of each block
        self.diagonal = self.seqlen_kv - self.seqlen_q  # query i stands at key i + diagonal

    def pattern(self, case):
        """int64 row_ptr and col_idx on the CPU: the .npy files of the case, else
        `blocks_per_row` drawn here."""
        if "col_idx" in case:
            import numpy

            return tuple(
                torch.from_numpy(numpy.load(case[name]).astype("int64"))
                for name in ("row_ptr", "col_idx")
            )
        rows, each = self.heads_q * self.q_blocks, case["blocks_per_row"]
        draw = torch.rand(
            rows, self.kv_blocks, generator=torch.Generator().manual_seed(case.get("seed", 0))
        )
        if self.causal:
            first = (
                torch.arange(rows) % self.q_blocks * self.block_q + self.seqlen_kv - self.seqlen_q
            )
            start, last = torch.arange(self.kv_blocks) * self.block_kv, first + self.block_q - 1
            draw += (
                start + self.block_kv - 1 > first[:, None]
            ).float()  # the diagonal before others
            draw[start > last[:, None]] = -1
        columns = draw.topk(each, dim=1).indices.sort(dim=1).values
        seen = draw.gather(1, columns) >= 0
        return torch.cat([torch.zeros(1, dtype=torch.int64), seen.sum(1).cumsum(0)]), columns[seen]

    def crossed(self):
        """Which listed blocks the causal diagonal cuts, bool in their order; the others are
        seen whole."""
        first_query = self.row % self.q_blocks * self.block_q
        last_key = (self.col_idx + 1) * self.block_kv - 1
        return (last_key > first_query + self.diagonal) & self.causal

    def blocks(self, chosen):
        """The chosen of the listed blocks: int32 lengths [heads, query blocks] and columns
        [heads, query blocks, key blocks],
        filled up with zeros."""
        row, rows = self.row[chosen], self.heads_q * self.q_blocks
        lengths = torch.bincount(row, minlength=rows)
        slot = torch.arange(row.numel()) - (lengths.cumsum(0) - lengths)[row]
        columns = torch.zeros(rows, self.kv_blocks, dtype=torch.int32, device=self.device)
        columns[row.to(self.device), slot.to(self.device)] = self.col_idx[chosen].to(
            self.device, torch.int32
        )
        lengths = lengths.to(self.device, torch.int32)
        return lengths.view(self.heads_q, -1), columns.view(self.heads_q, self.q_blocks, -1)

    def before(self):
        """A function that says whether a query sees a key within a block that the diagonal cuts."""
        diagonal = self.diagonal
        return lambda _batch, _head, query, key: key <= query + diagonal

    def visible(self):
        """A function that says whether a query sees a key, as FlexAttention asks for it."""
        table = torch.zeros(self.heads_q * self.q_blocks, self.kv_blocks, dtype=torch.bool)
        table[self.row, self.col_idx] = True
        table = table.view(self.heads_q, self.q_blocks, -1).to(self.device)
        block_q, block_kv = self.block_q, self.block_kv
        reach = self.diagonal if self.causal else self.seqlen_kv
        return lambda _batch, head, query, key: (
            table[head, query // block_q, key // block_kv] & (key <= query + reach)
        )

    def expected(self, b, h, q_block):
        """The queries of a block, and their f64 attention to the keys that it lists."""
        start = q_block * self.block_q
        rows = torch.arange(start, min(start + self.block_q, self.seqlen_q), device=self.device)
        first, last = self.row_ptr[
            h * self.q_blocks + q_block : h * self.q_blocks + q_block + 2
        ].tolist()
        if first == last:
            return rows, torch.zeros(
                rows.numel(), self.head_dim, dtype=torch.float64, device=self.device
            )
        keys = self.col_idx[first:last, None] * self.block_kv + torch.arange(self.block_kv)
        keys = keys.flatten()
        keys = keys[keys < self.seqlen_kv].to(self.device)
        hidden = keys[None] > rows[:, None] + self.diagonal if self.causal else None
        return rows, self.exact(b, h, rows, keys, hidden)

    def relative_error(self, out):
        """Largest over blocks of queries from the start, the middle and the end of two
        heads; NaN anywhere counts."""
        if torch.isnan(out).any():
            return math.nan
        worst = 0.0
        for b, h in self.samples():
            for q_block in {0, self.q_blocks // 2, self.q_blocks - 1}:
                rows, expected = self.expected(b, h, q_block)
                worst = max(worst, relative(out[b, rows, h], expected))
        return worst

    quick_error = relative_error
