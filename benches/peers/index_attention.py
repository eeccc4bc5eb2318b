"""What competitors of attention by an index share. Each query has a list of blocks of keys, for all
heads or for those that share a head of keys, and sees these blocks up to its own position.

Queries are the last ones of their sequences, `[batch, seqlen_q, heads, head_dim]`. Keys and values
are pages `[pages, page_size, heads, head_dim]` in random order, lists i32
`[groups, batch · seqlen_q, entries]`, with -1 behind the last block of a query that sees fewer."""

import math
from typing import Any

import torch

from measure import DTYPES, TOLERANCE, Call, needs_cuda, needs_triton, relative

# Most lists that launches take in turn.
MAX_COPIES = 64
# Queries that are compared.
SAMPLES = 6


class Inputs:
    """q, k, v ~ N(0, 1), the table of pages and the lists. With `latent`, the values are the first
    `head_dim_v` elements of the keys."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        self.generator = torch.Generator(device=device).manual_seed(case.get("seed", 0))
        self.device, self.dtype = device, DTYPES[case["dtype"]]
        self.batch, self.seqlen_q = case["batch"], case["seqlen_q"]
        self.seqlen_kv = case["seqlen_kv"]
        self.page_size = case.get("page_size") or self.seqlen_kv
        self.heads_q, self.heads_kv = case["num_heads_q"], case["num_heads_kv"]
        self.head_dim, self.latent = case["head_dim"], case.get("latent", False)
        self.head_dim_v = case.get("head_dim_v") or self.head_dim
        self.groups, self.entries = case["groups"], case["entries"]
        self.granularity, self.near = case["granularity"], case.get("lists") == "near"
        self.group = self.heads_q // self.heads_kv
        self.scale, self.tolerance = 1 / math.sqrt(self.head_dim), TOLERANCE[case["dtype"]]
        self.queries = self.batch * self.seqlen_q
        self.q = self.draw(self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        columns = self.seqlen_kv // self.page_size
        pages = self.batch * columns
        self.k = self.draw(pages, self.page_size, self.heads_kv, self.head_dim)
        if self.latent:
            self.v = self.k[..., : self.head_dim_v]
        else:
            self.v = self.draw(pages, self.page_size, self.heads_kv, self.head_dim_v)
        table = torch.randperm(pages, device=device, generator=self.generator)
        self.table = table.int().view(self.batch, columns)
        self.lengths = torch.full((self.batch,), self.seqlen_kv, dtype=torch.int32, device=device)
        self.copies = [self.lists()]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)

    def positions(self) -> torch.Tensor:
        """Of the queries of a sequence."""
        first = self.seqlen_kv - self.seqlen_q
        return torch.arange(first, self.seqlen_kv, device=self.device)

    def lists(self) -> torch.Tensor:
        """The last block that a query sees and others at random, in their order; with `near`,
        those of neighbouring queries are mostly the same."""
        blocks = math.ceil(self.seqlen_kv / self.granularity)
        made = torch.empty(
            self.groups, self.batch, self.seqlen_q, self.entries, dtype=torch.int32,
            device=self.device,
        )  # fmt: skip
        own = self.positions() // self.granularity
        columns = torch.arange(blocks, device=self.device)
        # As many queries at a time as have scores of a quarter of a GiB.
        rows = max(1, (1 << 26) // (blocks * self.groups))
        for entry in range(self.batch):
            for start in range(0, self.seqlen_q, rows):
                last = own[start : start + rows, None]
                shape = (self.groups, len(last), blocks)
                scores = torch.rand(shape, device=self.device, generator=self.generator)
                if self.near:
                    runs = math.ceil(len(last) / 64)
                    shape = (self.groups, runs, blocks)
                    shared = torch.rand(shape, device=self.device, generator=self.generator)
                    scores = 0.2 * scores + shared.repeat_interleave(64, 1)[:, : len(last)]
                scores = scores.masked_fill(columns == last, 2).masked_fill(columns > last, -1)
                best = scores.topk(min(self.entries, blocks), -1)
                chosen = best.indices.masked_fill(best.values < 0, blocks).sort(-1).values
                chosen = chosen.masked_fill(chosen == blocks, -1).int()
                made[:, entry, start : start + rows, : chosen.shape[-1]] = chosen
                made[:, entry, start : start + rows, chosen.shape[-1] :] = -1
        return made.flatten(1, 2)

    def rotate(self, size: int) -> None:
        """As many lists as lead to keys and values of `size` bytes, if they are different."""
        row = self.head_dim if self.latent else self.head_dim + self.head_dim_v
        keys = min(self.queries * self.entries * self.granularity, self.batch * self.seqlen_kv)
        read = keys * self.heads_kv * row * self.q.element_size()
        for _ in range(min(MAX_COPIES, math.ceil(size / read)) - len(self.copies)):
            self.copies.append(self.lists())

    def tokens(self, entries: torch.Tensor) -> torch.Tensor:
        """Positions of keys, [groups, queries, entries · granularity], those that are visible in
        front in the order of the list, then -1."""
        offsets = torch.arange(self.granularity, device=self.device, dtype=torch.int32)
        tokens = (entries[..., None] * self.granularity + offsets).flatten(2)
        last = self.positions().int().repeat(self.batch)[:, None]
        seen = (entries >= 0).repeat_interleave(self.granularity, -1) & (tokens <= last)
        tokens = tokens.masked_fill(~seen, -1)
        if bool((seen[..., :-1] >= seen[..., 1:]).all()):
            return tokens
        return tokens.gather(-1, (~seen).int().sort(-1, stable=True).indices)

    def slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of all pages, of positions [groups, queries, keys]; -1 stays."""
        sequence = torch.arange(self.queries, device=self.device) // self.seqlen_q
        at = tokens.clamp(min=0).long()
        page = self.table[sequence[:, None], at // self.page_size]
        return torch.where(tokens < 0, -1, page * self.page_size + at % self.page_size).int()

    def relative_error(self, out: torch.Tensor, entries: torch.Tensor) -> float:
        """Of all heads of some queries, the first and the last among them, in f64; NaN anywhere
        in the output counts."""
        out = out.reshape(self.queries, self.heads_q, self.head_dim_v)
        if torch.isnan(out).any():
            return math.nan
        k, v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        worst = 0.0
        count = min(SAMPLES, self.queries)
        for query in {round(i * (self.queries - 1) / max(1, count - 1)) for i in range(count)}:
            one = entries[:, query : query + 1]
            last = self.positions()[query % self.seqlen_q]
            offsets = torch.arange(self.granularity, device=self.device)
            # A unit is the query heads that share a list and a head of keys.
            units = max(self.groups, self.heads_kv)
            group = self.heads_q // units
            for unit in range(units):
                listed = one[unit * self.groups // units, 0]
                listed = listed[listed >= 0].long()
                keys = (listed[:, None] * self.granularity + offsets).flatten()
                keys = keys[keys <= last]
                page = self.table[query // self.seqlen_q, keys // self.page_size].long()
                slot = page * self.page_size + keys % self.page_size
                head = unit * self.heads_kv // units
                members = slice(unit * group, (unit + 1) * group)
                q = self.q.flatten(0, 1)[query, members].double()
                scores = q @ k[slot, head].double().T * self.scale
                exact = torch.softmax(scores, -1) @ v[slot, head].double()
                worst = max(worst, relative(out[query, members], exact))
        return worst


class IndexCall(Call):
    """A call whose launches take the lists in turn."""

    Inputs = Inputs

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        needs_triton()
        cls.kernels()

    @classmethod
    def kernels(cls) -> Any:
        """The module of the engine."""
        raise NotImplementedError

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        self.inputs, self.turn = inputs, 0
        if reason := self.refuses(inputs):
            raise ValueError(reason)
        self.out = inputs.q.new_empty(inputs.queries, inputs.heads_q, inputs.head_dim_v)
        self.lists = [self.list(entries) for entries in inputs.copies]
        self.prepare(inputs)

    def refuses(self, inputs: Inputs) -> str | None:
        return None

    def list(self, entries: torch.Tensor) -> Any:
        """A list as the engine keeps it."""
        return entries

    def prepare(self, inputs: Inputs) -> None:
        pass

    def next(self) -> Any:
        self.turn += 1
        return self.lists[self.turn % len(self.lists)]

    def output(self) -> torch.Tensor:
        return self.out

    def relative_error(self, inputs: Inputs) -> float:
        entries = inputs.copies[self.turn % len(inputs.copies)]
        return inputs.relative_error(self.output(), entries)
