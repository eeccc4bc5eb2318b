"""Attention to listed rows as vLLM's sparse MLA sees it: selection, metadata, values, a layer.

A program of its own, run by `test_vllm.py`, like `vllm_mla.py`. It prints what it has done.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import vllm_layer
from reference import assert_close, reference
from test_mla_codes import numbers, stored
from torch import Tensor
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import (
    MLAAttention,
    mla_attention,
    sparse_mla_attention,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.selector import AttentionSelectorConfig

import blockflash
from blockflash import Unsupported
from blockflash.vllm import SPARSE_MLA_NAME, register
from blockflash.vllm._reasons import MORE_SPARSE
from blockflash.vllm._sparse_mla import (
    BlockflashSparseMLABackend,
    BlockflashSparseMLAImpl,
    BlockflashSparseMLAMetadata,
    BlockflashSparseMLAMetadataBuilder,
)

DIMS = {"q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_head_dim": 192, "v_head_dim": 128}
HEADS, ROOM, PAGE, SCALE = 8, 24, 16, 192**-0.5
STEP = [(1, 30), (3, 45), (0, 0), (20, 20), (12, 40)]
"""Tokens of each request in the step, and all of it: decoded ones, one of padding, prompts."""
TOKENS = sum(count for count, _ in STEP)
DECODED = 4
INTS = {"dtype": torch.int32}


def reasons(capability: tuple[int, int] = (9, 0), **changes: Any) -> list[str]:
    """What vLLM's selector gets to hear."""
    config = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    config |= {"use_mla": True, "use_sparse": True, "block_size": 64}
    config = AttentionSelectorConfig(**(config | changes))
    return BlockflashSparseMLABackend.validate_configuration(
        device_capability=DeviceCapability(*capability), **config._asdict()
    )


def selection() -> None:
    member = registry.AttentionBackendEnum[SPARSE_MLA_NAME]
    found = member.get_class()
    assert found is BlockflashSparseMLABackend and found.is_mla() and found.is_sparse()
    for capability in ((8, 0), (9, 0), (12, 0)):
        for changes in ({}, {"head_size": 512, "dtype": torch.float16}, {"block_size": 16}):
            assert reasons(capability, **changes) == []
        assert reasons(capability, kv_cache_dtype="fp8_ds_mla") == []
    for changes, said in (
        ({"head_size": 320}, "latent rows of 576 and of 512"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype bfloat16 or fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_ds_mla", "head_size": 512}, "rows of 512, expected"),
        ({"use_mla": False}, "no lists of keys but of latent rows"),
        ({"use_sparse": False}, "--attention-backend BLOCKFLASH_MLA"),
        ({"has_sink": True}, "leave out --attention-backend"),
        ({"use_dcp": True}, "--decode-context-parallel-size 1"),
        ({"use_pcp": True}, "--prefill-context-parallel-size 1"),
        ({"use_batch_invariant": True}, "the order of its list"),
        ({"use_adaptive_verification": True}, "enable_adaptive_verification"),
    ):
        found = reasons(**changes)
        assert len(found) == 1 and said in found[0], found
    every = reasons(
        (7, 5), head_size=100, use_mla=False, use_sparse=False, has_sink=True,
        has_sliding_window=True, use_non_causal=True, use_per_head_quant_scales=True,
    )  # fmt: skip
    assert {reason.split(":")[0] for reason in every} <= set(MORE_SPARSE), every
    print("selection ok")


def common() -> CommonAttentionMetadata:
    """The step, whose requests have scattered pages."""
    starts = torch.tensor([0, *(count for count, _ in STEP)], **INTS).cumsum(0).int()
    lengths = torch.tensor([length for _, length in STEP], **INTS)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(STEP),
        num_actual_tokens=TOKENS,
        max_query_len=20,
        max_seq_len=45,
        block_table_tensor=torch.randperm(len(STEP) * 3).int().view(len(STEP), 3),
        slot_mapping=torch.arange(TOKENS),
    )


def metadata() -> BlockflashSparseMLAMetadata:
    config = MagicMock()
    config.model_config.hf_text_config = SimpleNamespace(index_topk=ROOM)
    config.scheduler_config = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8)
    config.parallel_config.decode_context_parallel_size = 1
    config.parallel_config.prefill_context_parallel_size = 1
    config.attention_config.hisparse_config = None
    config.speculative_config = None
    config.cache_config.block_size = config.parallel_config.cp_kv_cache_interleave_size = PAGE
    config.model_config.max_model_len = 64
    config.model_config.dtype = torch.float32
    # As a layer without a way of vLLM's own for prompts has it.
    layer = SimpleNamespace(prefill_backend=None)
    config.compilation_config.static_forward_context = {"layer": layer}
    of_model = SimpleNamespace(**DIMS, kv_lora_rank=512, qk_rope_head_dim=64)
    builder = BlockflashSparseMLAMetadataBuilder
    with (
        patch.object(sparse_mla_attention, "get_mla_dims", lambda _: of_model),
        patch.object(sparse_mla_attention, "_is_masked_mha_available", lambda *_: False),
    ):
        made = builder(SimpleNamespace(block_size=PAGE), ["layer"], config, torch.device("cpu"))
    given = common()
    step = made.build(0, given)
    assert isinstance(step, BlockflashSparseMLAMetadata)
    assert (step.num_decodes, step.num_decode_tokens) == (3, DECODED), step
    assert (step.decode_max_query_len, step.max_query_len) == (3, 20)
    assert step.seq_lens is given.seq_lens and step.block_table is given.block_table_tensor
    assert made.reorder_batch_threshold == 8
    print("metadata ok")
    return step


def listed() -> Tensor:
    """Lists of distinct tokens that each token sees, in any order, with -1 anywhere."""
    lists = torch.full((TOKENS + 5, ROOM), -1, **INTS)
    row = 0
    for count, length in STEP:
        for seen in range(length - count + 1, length + 1):
            # One token has an empty list.
            chosen = torch.randperm(seen)[: 0 if row == 7 else ROOM - 3]
            lists[row, torch.randperm(ROOM)[: len(chosen)]] = chosen.int()
            row += 1
    return lists


def layer(**changes: Any) -> BlockflashSparseMLAImpl:
    given = {
        "num_heads": HEADS, "head_size": 576, "scale": SCALE, "num_kv_heads": 1,
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
        "logits_soft_cap": None, "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "kv_b_proj": MagicMock(), "topk_indices_buffer": listed(),
    }  # fmt: skip
    return BlockflashSparseMLAImpl(**(given | DIMS | changes))


def expected(q: Tensor, rows: Tensor, step: Any, lists: Tensor) -> Tensor:
    """Sparse MLA by its definition, in float64."""
    found, row = [], 0
    for request, (count, length) in enumerate(STEP):
        k = rows[step.block_table[request].long()].flatten(0, 1)[None, :length, None]
        of_request = lists[row : row + count].long()
        visible = torch.zeros(count, length + 1, dtype=torch.bool)
        visible.scatter_(1, of_request.where(of_request >= 0, length), True)
        visible = visible[None, None, :, :length].expand(1, HEADS, -1, -1)
        of_request = q[None, row : row + count]
        o, _ = reference(of_request, k, k[..., :512], scale=SCALE, visible=visible)
        found.append(o[0])
        row += count
    return torch.cat(found)


def values(step: Any, behind: int, parts: bool, codes: bool = False) -> None:
    impl = layer(head_size=512 + behind, qk_rope_head_dim=behind)
    assert not impl.supports_quant_query_input
    q = torch.randn(TOKENS, HEADS, 512 + behind) / 4
    cache = rows = torch.randn(len(STEP) * 3, PAGE, 512 + behind)
    if codes:
        cache = stored(rows.bfloat16())
        rows = numbers(cache)
    wanted = expected(q, rows, step, impl.topk_indices_buffer)
    assert wanted[7].eq(0).all()
    before = blockflash.stats()["index_attention"].kernel
    # All tokens, then those that are decoded, as beside prompts that vLLM attends itself.
    for tokens in (TOKENS, DECODED):
        some = q[:tokens]
        given = (some[..., :512], some[..., 512:]) if parts else some
        o, lse = impl.forward_mqa(given, cache, step, None)
        assert lse is None
        assert_close(o, wanted[:tokens], torch.float32)
    assert blockflash.stats()["index_attention"].kernel == before + 2
    print(f"values of rows of {512 + behind}{' of codes' if codes else ''} ok")


def whole_layer(config: VllmConfig, step: Any) -> None:
    """Through vLLM's own layer, with its projections."""
    torch.set_default_dtype(torch.bfloat16)
    projection = torch.nn.Linear(512, HEADS * 256, bias=False)
    projection.quant_method = None
    lists = listed()
    # vLLM then has no way of its own for prompts.
    with patch.object(mla_attention, "get_mla_prefill_backend", side_effect=ValueError):
        made = MLAAttention(
            *(HEADS, SCALE, 128, 64, 128, 64, 512, projection),
            cache_config=config.cache_config,
            prefix="model.layers.0.self_attn.attn",
            use_sparse=True,
            indexer=SimpleNamespace(topk_indices_buffer=lists),
            topk_indices_buffer=lists,
        )
    assert isinstance(made.impl, BlockflashSparseMLAImpl) and made.impl.index_group is None
    made.impl.record_logical_topk_ready()
    weight = projection.weight.detach().T.view(512, HEADS, 256)
    up_k, up_v = weight.split([128, 128], dim=-1)
    made.W_UK_T, made.W_UV = up_k.permute(1, 2, 0), up_v.transpose(0, 1)
    q = torch.randn(TOKENS, HEADS, 192)
    cache = torch.randn(len(STEP) * 3, PAGE, 576)
    new = torch.empty(TOKENS, 512), torch.empty(TOKENS, 1, 64)
    output = torch.empty(TOKENS, HEADS * 128)
    made.forward_impl(q, *new, cache, step, output)
    absorbed = torch.einsum("thd,chd->thc", q[..., :128], up_k)
    absorbed = torch.cat([absorbed, q[..., 128:]], -1)
    o = torch.einsum("thc,chd->thd", expected(absorbed, cache, step, lists), up_v.double())
    assert_close(output.view(o.shape), o, torch.bfloat16)
    print("layer ok")


def refusals(config: VllmConfig) -> None:
    for changes, said in (
        ({"logits_soft_cap": 30.0}, "logits_soft_cap is 30.0"),
        ({"sliding_window": 100}, "sliding_window is 100"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256, expected 512"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type"),
        ({"topk_indices_buffer": None}, "topk_indices_buffer is None"),
        ({}, "hisparse_config is given"),
    ):
        try:
            with patch.object(config.attention_config, "hisparse_config", None if changes else 1):
                layer(**changes)
        except (Unsupported, ValueError) as error:
            assert said in str(error), error
        else:
            raise AssertionError(changes)
    print("refusals ok")


if __name__ == "__main__":
    register()
    config = VllmConfig(
        attention_config=AttentionConfig(backend=SPARSE_MLA_NAME),
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=PAGE),
    )
    sparse_mla_attention.get_tensor_model_parallel_world_size = lambda: 1
    sparse_mla_attention.PIN_MEMORY = False
    type(current_platform).get_attn_backend_cls = staticmethod(vllm_layer.select)
    torch.manual_seed(0)
    with set_current_vllm_config(config), torch.inference_mode():
        selection()
        step = metadata()
        values(step, 64, parts=True)
        values(step, 0, parts=False)
        values(step, 64, parts=True, codes=True)
        whole_layer(config, step)
        refusals(config)
