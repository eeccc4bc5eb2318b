"""Sequences in SGLang's own caches on the CPU, and the parts of a runner that a backend asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from reference import assert_close, reference
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

PAGE, COLUMNS, HEADS, HEADS_KV, DIM = 16, 8, 4, 2, 32
PAGES = 40


def configure(
    monkeypatch: Any,
    tokens: int | None = None,
    topk: int | None = None,
    diffusion: str | None = None,
    deterministic: bool = False,
) -> None:
    """What SGLang publishes of its options, as far as a backend asks for it."""
    modes = {
        "dllm": SimpleNamespace(dllm_algorithm=diffusion),
        "deterministic": SimpleNamespace(enable_deterministic_inference=deterministic),
    }
    spec = {"speculative_num_draft_tokens": tokens, "speculative_eagle_topk": topk}
    for name, values in (
        ("get_spec", spec),
        ("get_parallel", {"attn_cp_size": 1, "attn_dcp_size": 1}),
        ("get_exec", modes),
    ):
        monkeypatch.setattr(runtime_context, name, lambda values=values: SimpleNamespace(**values))


def layer_of(layer_id: int = 0, **options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, HEADS_KV, layer_id, **options)


class Model:
    """Sequences with keys and values in pages that are scattered over a pool.

    Layer 1 is in a pool of layers with a window, if there is one.
    """

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        windows: bool = False,
        algorithm: str | None = None,
        **others: Any,
    ) -> None:
        torch.manual_seed(0)
        self.dtype, self.lengths = dtype, lengths
        sizes = (PAGES * PAGE, PAGE, cache or dtype, HEADS_KV, DIM)
        if windows:
            size, *rest = sizes
            self.pool = SWAKVPool(size, size, *rest, [1], [0], "cpu")
            pages = torch.cat((torch.tensor([0]), 1 + torch.randperm(PAGES)))
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            self.pool.register_mapping(torch.cat((slots, torch.tensor([-1]))))
        else:
            self.pool = MHATokenToKVPool(*sizes, 2, "cpu", False)
        self.table = torch.zeros(len(lengths) + 2, COLUMNS * PAGE, dtype=torch.int32)
        self.rows = 1 + torch.randperm(len(lengths))
        self.free = (1 + torch.randperm(PAGES)).tolist()
        for row in self.rows.tolist():
            pages = torch.tensor([self.free.pop() for _ in range(5)])
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            self.table[row, : len(slots)] = slots.int()
        self.keys, self.values = (
            [torch.randn(n, HEADS_KV, DIM).to(dtype) for n in lengths] for _ in range(2)
        )
        rows = SimpleNamespace(req_to_token=self.table, size=len(lengths) + 1)
        self.runner = SimpleNamespace(
            model_config=SimpleNamespace(
                context_len=100,
                is_encoder_decoder=False,
                is_local_attention_model=False,
                hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
                hf_text_config=None,
            ),
            page_size=PAGE,
            use_mla_backend=False,
            kv_cache_dtype=cache or dtype,
            kv_cache_dtype_str="auto",
            kv_index_translator=SimpleNamespace(is_translating=False),
            spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
            is_draft_worker=False,
            sliding_window_size=None,
            device="cpu",
            req_to_token_pool=rows,
            token_to_kv_pool=self.pool,
        )
        vars(self.runner).update(others)

    def slots(self, sequence: int, begin: int, end: int) -> Tensor:
        """The slots of these keys of a sequence."""
        return self.table[self.rows[sequence], begin:end].long()

    def write(self, layer: RadixAttention, sequence: int, end: int) -> None:
        """Write the first keys of a sequence into the cache, as an earlier step did."""
        loc = self.slots(sequence, 0, end)
        if isinstance(self.pool, SWAKVPool):
            loc = KVWriteLoc(loc, self.pool.translate_loc_from_full_to_swa(loc))
        k, v = (x[sequence][:end].clone() for x in (self.keys, self.values))
        self.pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)

    def batch(self, mode: ForwardMode, new: list[int], **others: Any) -> ForwardBatch:
        """A step in which each sequence has these last tokens of it as new ones."""
        lengths = torch.tensor(self.lengths)
        counts = torch.tensor(new)
        drafted = counts if mode == ForwardMode.TARGET_VERIFY else 0
        slots = [self.slots(i, n - m, n) for i, (n, m) in enumerate(zip(self.lengths, new))]
        seq_lens = lengths - drafted
        return ForwardBatch(
            **{
                "forward_mode": mode,
                "batch_size": len(new),
                "input_ids": torch.zeros(sum(new), dtype=torch.long),
                "req_pool_indices": self.rows,
                "seq_lens": seq_lens,
                "seq_lens_cpu": seq_lens.clone(),
                "seq_lens_sum": int(seq_lens.sum()),
                "out_cache_loc": torch.cat(slots),
                "extend_seq_lens": counts.int(),
                "extend_seq_lens_cpu": new,
            }
            | others
        )

    def step(self, layer: RadixAttention, new: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """New queries, keys and values, packed, once the keys before them are in the cache."""
        for i, (length, count) in enumerate(zip(self.lengths, new)):
            self.write(layer, i, length - count)
        q = torch.randn(sum(new), HEADS * DIM).to(self.dtype)
        k, v = (
            torch.cat([x[n - m :] for x, n, m in zip(of, self.lengths, new)])
            for of in (self.keys, self.values)
        )
        return q, k, v

    def check(self, o: Tensor, q: Tensor, new: list[int], codes: Any = None, **scores: Any) -> None:
        """Hold an output against float64; `codes` makes of keys and values what the cache has."""
        masks = scores.pop("masks", None)
        rows = zip(o.split(new), q.split(new), strict=True)
        for i, (found, queries) in enumerate(rows):
            k, v = (x[i] if codes is None else codes(x[i]) for x in (self.keys, self.values))
            visible = None if masks is None else masks[i][None, None]
            queries = queries.view(1, -1, HEADS, DIM)
            expected, _ = reference(queries, k[None], v[None], visible=visible, **scores)
            assert_close(found.view(1, -1, HEADS, DIM), expected, self.dtype)
