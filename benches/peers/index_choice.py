"""Competitors of choosing blocks of keys by an index: scores of all blocks that a query sees, and
the largest of them.

Queries of the index `[batch · seqlen_q, heads, head_dim]` are the last ones of their sequences, its
keys are pages `[pages, page_size, head_dim]` of one head. A score of a block is the largest of its
keys' scores: of each head, or, with weights, the weighted sum of all heads' scores where they are
positive."""

import math
from typing import Any

import torch

import engines
from measure import DTYPES, Call, needs_cuda, needs_triton

# Most copies of the keys.
MAX_COPIES = 64
# Queries that are compared.
SAMPLES = 5


class Inputs:
    """q and keys ~ N(0, 1), weights ~ |N(0, 1)|, the table of pages."""

    # Of scores that a choice falls short of, by the greatest score.
    tolerance = 1e-2

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        self.generator = torch.Generator(device=device).manual_seed(case.get("seed", 0))
        self.device, self.dtype = device, DTYPES[case["dtype"]]
        self.batch, self.seqlen_q = case["batch"], case["seqlen_q"]
        self.seqlen_kv, self.page_size = case["seqlen_kv"], case["page_size"]
        self.heads, self.head_dim = case["heads"], case["head_dim"]
        self.granularity, self.entries = case["granularity"], case["entries"]
        self.weighted = case.get("weighted", False)
        self.queries = self.batch * self.seqlen_q
        self.blocks = math.ceil(self.seqlen_kv / self.granularity)
        self.q = self.draw(self.queries, self.heads, self.head_dim)
        columns = self.seqlen_kv // self.page_size
        pages = self.batch * columns
        self.copies = [self.draw(pages, self.page_size, self.head_dim)]
        table = torch.randperm(pages, device=device, generator=self.generator)
        self.table = table.int().view(self.batch, columns)
        self.weights = None
        if self.weighted:
            shape = (self.queries, self.heads)
            self.weights = torch.randn(shape, device=device, generator=self.generator).abs()
        self.lengths = torch.full((self.batch,), self.seqlen_kv, dtype=torch.int32, device=device)
        positions = torch.arange(self.seqlen_kv - self.seqlen_q, self.seqlen_kv, device=device)
        # Keys that each query sees.
        self.seen = (positions + 1).int().repeat(self.batch)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=device)
        self.starts = starts * self.seqlen_q
        self.before = self.lengths - self.seqlen_q

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)

    def rotate(self, size: int) -> None:
        """Enough copies that together they have `size` bytes."""
        keys = self.copies[0]
        count = min(MAX_COPIES, math.ceil(size / (keys.numel() * keys.element_size())))
        while len(self.copies) < count:
            self.copies.append(keys.clone())

    def exact(self, query: int) -> torch.Tensor:
        """Scores of a query in f64, [groups, blocks]; -inf of blocks that it does not see."""
        table = self.table[query // self.seqlen_q].long()
        keys = self.copies[0][table].flatten(0, 1)[: int(self.seen[query])].double()
        scores = self.q[query].double() @ keys.T
        if self.weights is not None:
            scores = (scores.clamp(min=0) * self.weights[query, :, None].double()).sum(0)[None]
        padding = self.blocks * self.granularity - scores.shape[-1]
        scores = torch.nn.functional.pad(scores, (0, padding), value=-math.inf)
        return scores.unflatten(-1, (-1, self.granularity)).amax(-1)

    def samples(self) -> set[int]:
        count = min(SAMPLES, self.queries)
        return {round(i * (self.queries - 1) / max(1, count - 1)) for i in range(count)}

    def relative_error(self, chosen: torch.Tensor) -> float:
        """By how much chosen blocks [groups, queries, entries] fall short of the best, as a part
        of the greatest score; NaN if they are not as many different ones as there can be. A last
        block that was chosen whatever its score is left out."""
        worst = 0.0
        for query in self.samples():
            exact = self.exact(query)
            for group, scores in enumerate(exact):
                list_ = chosen[group, query]
                list_ = list_[list_ >= 0].long()
                visible = int((scores > -math.inf).sum())
                if len(list_.unique()) != len(list_) or len(list_) != min(self.entries, visible):
                    return math.nan
                if int(list_.max()) >= visible:
                    return math.nan
                best = scores.topk(len(list_)).values
                given = scores[list_].sort(descending=True).values
                # One place of the list may belong to the last block.
                short = (best - given)[: max(1, len(list_) - 1)] if len(list_) > 1 else best[:0]
                worst = max(worst, float(short.max() / best[0].abs()) if len(short) else 0.0)
        return worst


class ScoreCall(Call):
    """A call whose launches take the copies of the keys in turn."""

    Inputs = Inputs

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        needs_triton()
        cls.kernels()

    @classmethod
    def kernels(cls) -> Any:
        return None

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        self.inputs, self.turn = inputs, 0
        if reason := self.refuses(inputs):
            raise ValueError(reason)
        groups = 1 if inputs.weighted else inputs.heads
        shape = (groups, inputs.queries, inputs.entries)
        self.chosen = torch.full(shape, -1, dtype=torch.int32, device=inputs.device)
        self.engine = self.kernels()
        self.keys = [self.cache(keys) for keys in inputs.copies]
        self.prepare(inputs)
        self.run()

    def refuses(self, inputs: Inputs) -> str | None:
        return None

    def cache(self, keys: torch.Tensor) -> Any:
        """The keys as the engine keeps them."""
        return keys

    def prepare(self, inputs: Inputs) -> None:
        pass

    def next(self) -> Any:
        self.turn += 1
        return self.keys[self.turn % len(self.keys)]

    def output(self) -> torch.Tensor:
        return self.chosen

    def poison(self) -> None:
        self.chosen.fill_(-1)


class Msa(ScoreCall):
    """The indexer of MiniMax-M3: pages of a block, a choice for each head."""

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.weighted or inputs.granularity != 128 or inputs.page_size != 128:
            return "scores of heads, in pages and blocks of 128 keys"
        return None


class VllmMsa(Msa):
    """vLLM's Triton kernels for prompts: CTAs of 64 queries and a head."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("vllm.models.minimax_m3.common.ops.index_topk")

    def prepare(self, inputs: Inputs) -> None:
        # Of its tiles those that a row of scores fills.
        tuned = self.engine._topk_index_kernel.fn
        fits = [c for c in tuned.configs if c.kwargs["BLOCK_SIZE_K"] <= max(64, inputs.blocks)]
        tuned.configs = fits

    def scores(self, keys: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        return self.engine.minimax_m3_index_score(
            inputs.q, keys, inputs.table, inputs.starts, inputs.lengths, inputs.before,
            inputs.seqlen_q, inputs.seqlen_kv, inputs.heads,
        )  # fmt: skip

    def run(self) -> None:
        inputs = self.inputs
        self.engine.minimax_m3_index_topk(
            self.scores(self.next()), inputs.starts, inputs.before, inputs.seqlen_q,
            inputs.entries, 0, 1, out=self.chosen,
        )  # fmt: skip


class VllmMsaDecode(Msa):
    """vLLM's Triton kernels for decoding: all queries of a sequence and all heads are a tile, keys
    are split."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("vllm.models.minimax_m3.common.ops.index_topk")

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.seqlen_q > 8:
            return "at most 8 queries of a sequence"
        return super().refuses(inputs)

    def run(self) -> None:
        inputs = self.inputs
        self.engine.minimax_m3_index_decode(
            inputs.q, self.next(), inputs.table, inputs.lengths, inputs.seqlen_kv, inputs.entries,
            0, 1, inputs.heads, inputs.seqlen_q, inputs.seqlen_q, out=self.chosen,
        )  # fmt: skip


class SglangMsa(Msa):
    """SGLang's Triton kernels: a table of slots, one for each token."""

    part = "prefill"

    @classmethod
    def kernels(cls) -> Any:
        name = "sglang.kernels.ops.attention.minimax_sparse."
        return engines.load(f"{name}{cls.part}.flash_with_topk_idx", f"{name}common.")

    def cache(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.view(-1, 1, keys.shape[-1])

    def prepare(self, inputs: Inputs) -> None:
        offsets = torch.arange(inputs.page_size, dtype=torch.int32, device=inputs.device)
        self.table = (inputs.table[..., None] * inputs.page_size + offsets).flatten(1)
        self.sequence = torch.arange(inputs.batch, dtype=torch.int32, device=inputs.device)
        tuned = self.engine._topk_index_kernel.fn
        fits = [c for c in tuned.configs if c.kwargs["BLOCK_SIZE_K"] <= max(64, inputs.blocks)]
        tuned.configs = fits

    def run(self) -> None:
        inputs = self.inputs
        _, self.chosen = self.engine.flash_prefill_with_topk_index(
            inputs.q, self.next(), None, None, self.table, self.sequence, inputs.starts,
            inputs.lengths, inputs.before, inputs.seqlen_q, inputs.seqlen_kv, 1, 128,
            inputs.entries, 0, 1, disable_index_value=True, cu_seqblocks_q=inputs.starts,
            max_seqblock_q=inputs.seqlen_q, all_seqblock_q=inputs.queries, page_size=128,
        )  # fmt: skip


class SglangMsaDecode(SglangMsa):
    """SGLang's Triton kernels for decoding: a query is a sequence of its own."""

    part = "decode"

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.seqlen_q > 8:
            return "at most 8 queries of a sequence"
        return super().refuses(inputs)

    def prepare(self, inputs: Inputs) -> None:
        offsets = torch.arange(inputs.page_size, dtype=torch.int32, device=inputs.device)
        self.table = (inputs.table[..., None] * inputs.page_size + offsets).flatten(1)
        sequence = torch.arange(inputs.batch, dtype=torch.int32, device=inputs.device)
        self.sequence = sequence.repeat_interleave(inputs.seqlen_q)

    def run(self) -> None:
        inputs = self.inputs
        _, self.chosen, _ = self.engine.flash_decode_with_topk_idx(
            inputs.q, None, self.next(), None, self.table, inputs.seen, inputs.seqlen_kv,
            self.sequence, 128, inputs.entries, 0, 1, disable_index_value=True, page_size=128,
        )  # fmt: skip


class Dsa(ScoreCall):
    """The indexer of DeepSeek's DSA: single keys, a weighted sum over the heads. No engine has a
    top-k in Triton for it; torch's stands in."""

    def refuses(self, inputs: Inputs) -> str | None:
        if not inputs.weighted or inputs.granularity != 1:
            return "weighted scores of single keys"
        return None

    def choose(self, scores: torch.Tensor) -> None:
        """Of scores [queries, keys], of which a query sees a part."""
        self.chosen = scores.topk(self.inputs.entries, -1, sorted=False).indices[None].int()


class TorchDsa(Dsa):
    """torch: a product, the sum, and its top-k, over contiguous keys of one sequence."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)

    def cache(self, keys: torch.Tensor) -> torch.Tensor:
        return keys[self.inputs.table.long()].flatten(1, 2)

    def prepare(self, inputs: Inputs) -> None:
        keys = torch.arange(inputs.seqlen_kv, device=inputs.device)
        hidden = keys >= inputs.seen[:, None]
        self.hidden = hidden if inputs.seqlen_q > 1 else None

    def run(self) -> None:
        inputs = self.inputs
        q = inputs.q.view(inputs.batch, -1, inputs.head_dim)
        scores = torch.bmm(q, self.next().transpose(1, 2))
        weights = inputs.weights.to(inputs.dtype).view(inputs.queries, 1, inputs.heads)
        scores = scores.relu_().view(inputs.queries, inputs.heads, -1)
        scores = torch.bmm(weights, scores)[:, 0].float()
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -math.inf)
        self.choose(scores)


class VllmDsaCodes(Dsa):
    """vLLM's Triton kernel, over keys and queries in e4m3, as its cache of the index is: half the
    bytes of ours."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("vllm.v1.attention.ops.rocm_aiter_mla_sparse")

    def cache(self, keys: torch.Tensor) -> torch.Tensor:
        # A page has all of its codes, then a scale for each key.
        scale = keys.float().abs().amax(-1, keepdim=True) / 448
        codes = (keys.float() / scale).to(torch.float8_e4m3fn)
        parts = (codes.view(torch.uint8).flatten(1), scale.view(torch.uint8).flatten(1))
        page = torch.cat(parts, -1).contiguous()
        return page.view(len(keys), keys.shape[1], 1, keys.shape[2] + 4)

    def prepare(self, inputs: Inputs) -> None:
        scale = inputs.q.float().abs().amax(-1, keepdim=True) / 448
        shape = (inputs.batch, inputs.seqlen_q, inputs.heads, inputs.head_dim)
        self.q = (inputs.q.float() / scale).to(torch.float8_e4m3fn).view(shape)
        self.weights = inputs.weights * scale[..., 0]
        inputs.tolerance = 5e-2

    def scores(self) -> torch.Tensor:
        inputs = self.inputs
        return self.engine.rocm_fp8_paged_mqa_logits_triton(
            self.q, self.next(), self.weights, inputs.seen, inputs.table, inputs.seqlen_kv
        )

    def run(self) -> None:
        inputs, scores = self.inputs, self.scores()
        if inputs.seqlen_q > 1:
            keys = torch.arange(inputs.seqlen_kv, device=inputs.device)
            scores = scores.masked_fill(keys >= inputs.seen[:, None], -math.inf)
        self.choose(scores)
