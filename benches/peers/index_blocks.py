"""Competitors of attention by an index to blocks of keys and values: the kernels of vLLM and SGLang
for MiniMax-M3 (MSA) and for Qwen's QSA, and those of native sparse attention (NSA)."""

from typing import Any

import torch

import engines
from index_attention import IndexCall, Inputs


class Msa(IndexCall):
    """Block-sparse attention of MiniMax-M3: pages of a block, a list for each head of keys."""

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.latent or inputs.head_dim != inputs.head_dim_v:
            return "keys and values of one head_dim"
        if inputs.granularity != inputs.page_size or inputs.granularity != 128:
            return "pages and blocks of 128 keys"
        return None if inputs.groups == inputs.heads_kv else "a list for each head of keys"

    def rows(self, inputs: Inputs) -> None:
        """What a launch over a part of a prompt takes."""
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=inputs.device)
        self.starts = starts * inputs.seqlen_q
        self.before = inputs.lengths - inputs.seqlen_q
        self.decodes = inputs.seqlen_q <= 16


class VllmMsa(Msa):
    """vLLM's Triton kernels, which it takes on Hopper; a row of its cache is a key and a value."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("vllm.models.minimax_m3.common.ops.sparse_attn")

    def prepare(self, inputs: Inputs) -> None:
        self.rows(inputs)
        # [pages, heads, 128, keys and values]
        both = torch.cat([inputs.k, inputs.v], -1).transpose(1, 2)
        self.cache, self.engine = both.contiguous(), self.kernels()

    def run(self) -> None:
        inputs, q = self.inputs, self.inputs.q.flatten(0, 1)
        if self.decodes:
            self.engine.minimax_m3_sparse_attn_decode(
                q, self.cache, self.next(), inputs.table, inputs.lengths, inputs.heads_kv,
                inputs.scale, self.out, inputs.seqlen_q,
            )  # fmt: skip
        else:
            self.engine.minimax_m3_sparse_attn(
                q, self.cache, self.next(), inputs.table, self.starts, inputs.lengths,
                self.before, inputs.seqlen_q, inputs.heads_kv, inputs.scale, self.out,
            )  # fmt: skip


class SglangMsa(Msa):
    """SGLang's Triton kernels: a table of slots, one for each token."""

    @classmethod
    def kernels(cls) -> Any:
        name = "sglang.kernels.ops.attention.minimax_sparse."
        return [
            engines.load(f"{name}{part}.topk_sparse", f"{name}common.")
            for part in ("decode", "prefill")
        ]

    def prepare(self, inputs: Inputs) -> None:
        self.rows(inputs)
        self.k, self.v = (t.flatten(0, 1) for t in (inputs.k, inputs.v))
        offsets = torch.arange(inputs.page_size, dtype=torch.int32, device=inputs.device)
        slots = inputs.table[..., None] * inputs.page_size + offsets
        self.table = slots.flatten(1).contiguous()
        self.decode, self.prefill = self.kernels()
        sequence = torch.arange(inputs.batch, dtype=torch.int32, device=inputs.device)
        if self.decodes:
            # A query is a sequence of its own.
            self.slot_ids = sequence.repeat_interleave(inputs.seqlen_q)
            seen = (inputs.positions() + 1).int().repeat(inputs.batch)
            self.lengths = seen
        else:
            self.slot_ids, self.lengths = sequence, inputs.lengths
        self.run()

    def run(self) -> None:
        inputs, q = self.inputs, self.inputs.q.flatten(0, 1)
        if self.decodes:
            self.out = self.decode.flash_decode_with_gqa_share_sparse(
                q, None, self.k, self.v, self.table, self.lengths, self.slot_ids, 128, self.next(),
                inputs.scale, page_size=inputs.page_size,
            )  # fmt: skip
        else:
            self.out = self.prefill.flash_prefill_with_gqa_share_sparse(
                q, self.k, self.v, None, self.table, self.slot_ids, self.next(), 1, 128,
                self.starts, self.lengths, self.before, inputs.seqlen_q, inputs.scale,
                cu_seqblocks_q=self.starts, max_seqblock_q=inputs.seqlen_q,
            )  # fmt: skip


class Qsa(IndexCall):
    """Sparse attention of Qwen's QSA: keys by position, one list for all heads."""

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.latent or inputs.head_dim != inputs.head_dim_v:
            return "keys and values of one head_dim"
        return None if inputs.groups == 1 else "one list for all heads"


class VllmQsa(Qsa):
    """vLLM's Triton kernels. They multiply the output with the sigmoid of a gate, which is 1
    here."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("vllm.models.qwen4_exp.nvidia.ops.qsa")

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.dtype != torch.bfloat16:
            return "bf16 only"
        return super().refuses(inputs)

    def list(self, entries: torch.Tensor) -> torch.Tensor:
        tokens = self.inputs.tokens(entries)[0]
        # The positions, up to three of an open group, and how many there are.
        padded = torch.nn.functional.pad(tokens, (0, self.inputs.granularity), value=-1)
        padded[:, -1] = (tokens >= 0).sum(-1)
        return padded

    def prepare(self, inputs: Inputs) -> None:
        self.engine = self.kernels()
        both = torch.cat([inputs.k, inputs.v], -1).transpose(1, 2).contiguous()
        self.k, self.v = both.transpose(1, 2).split(inputs.head_dim, -1)
        sequence = torch.arange(inputs.batch, dtype=torch.int32, device=inputs.device)
        self.sequence = sequence.repeat_interleave(inputs.seqlen_q)
        self.gate = torch.full_like(self.out, 60)

    def run(self) -> None:
        self.engine.qsa_sparse_paged_attention(
            self.inputs.q.flatten(0, 1), self.k, self.v, self.next(), self.inputs.table,
            self.sequence, self.inputs.seqlen_q > 16, self.out, output_gate=self.gate,
        )  # fmt: skip


class SglangQsa(Qsa):
    """SGLang's Triton kernel over a cache, which it takes for parts of prompts."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("sglang.srt.layers.attention.qsa.sparse_attn")

    def list(self, entries: torch.Tensor) -> torch.Tensor:
        return self.inputs.tokens(entries)[0].contiguous()

    def prepare(self, inputs: Inputs) -> None:
        self.engine = self.kernels()
        self.k, self.v = (t.flatten(0, 1) for t in (inputs.k, inputs.v))
        offsets = torch.arange(inputs.page_size, dtype=torch.int32, device=inputs.device)
        slots = inputs.table[..., None] * inputs.page_size + offsets
        self.table = slots.flatten(1).contiguous()
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=inputs.device)
        self.starts = starts * inputs.seqlen_q
        self.run()

    def run(self) -> None:
        inputs = self.inputs
        self.out = self.engine.sparse_gqa_paged_prefill_triton(
            inputs.q.flatten(0, 1), self.k, self.v, self.table, self.next(), self.starts,
            inputs.lengths, inputs.scale, max_q=inputs.seqlen_q,
        )  # fmt: skip


class Nsa(IndexCall):
    """The selected branch of native sparse attention in Triton, by X. Lai: whole prompts, or one
    query of each sequence, over contiguous keys."""

    @classmethod
    def kernels(cls) -> Any:
        name = "native_sparse_attention.ops.triton.topk_sparse_attention"
        beside = "native_sparse_attention.ops.triton.utils"
        return [engines.load(name + part, beside) for part in ("", "_decode")]

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.latent or inputs.head_dim != inputs.head_dim_v:
            return "keys and values of one head_dim"
        if inputs.groups != inputs.heads_kv:
            return "a list for each head of keys"
        if inputs.seqlen_q not in (1, inputs.seqlen_kv):
            return "whole prompts, or one query of each sequence"
        return None

    def prepare(self, inputs: Inputs) -> None:
        self.prefill, self.decode = self.kernels()
        table = inputs.table.long()
        self.k, self.v = (t[table].flatten(1, 2) for t in (inputs.k, inputs.v))
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=inputs.device)
        self.starts = starts * inputs.seqlen_q
        self.run()

    def run(self) -> None:
        inputs, q = self.inputs, self.inputs.q.flatten(0, 1)
        if inputs.seqlen_q == 1:
            self.out = self.decode.topk_sparse_attention_decode(
                q, self.k, self.v, self.next(), inputs.granularity, inputs.lengths, inputs.scale
            )
            return
        k, v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        lengths = (self.starts, self.starts, inputs.seqlen_q, inputs.seqlen_q)
        self.out, _ = self.prefill._topk_sparse_attention_fwd(
            q, k, v, self.next(), inputs.granularity, *lengths, inputs.scale
        )


class Fla(IndexCall):
    """The selected branch of native sparse attention in flash-linear-attention, in Triton, over
    contiguous keys."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("fla.ops.nsa.parallel", "fla.ops.utils.op")

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.latent or inputs.head_dim != inputs.head_dim_v:
            return "keys and values of one head_dim"
        if inputs.groups != inputs.heads_kv or inputs.group < 16:
            return "a list for each head of keys, of at least 16 heads"
        return None

    def list(self, entries: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        # [batch, queries, heads of keys, entries]
        lists = entries.permute(1, 0, 2).unflatten(0, (inputs.batch, inputs.seqlen_q))
        return lists.contiguous()

    def prepare(self, inputs: Inputs) -> None:
        self.engine, table = self.kernels(), inputs.table.long()
        self.k, self.v = (t[table].flatten(1, 2) for t in (inputs.k, inputs.v))
        self.run()

    def run(self) -> None:
        inputs, lists = self.inputs, self.next()
        out, _ = self.engine.parallel_nsa_fwd(
            inputs.q, self.k, self.v, lists, inputs.entries, inputs.granularity, inputs.scale
        )
        self.out = out.flatten(0, 1)
