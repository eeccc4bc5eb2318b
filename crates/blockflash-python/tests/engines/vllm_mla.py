"""The backend for latent rows as vLLM's common parts of MLA see it: selection, metadata, values.

A program of its own, run by `test_vllm.py`, like `vllm_layer.py`, which has the stand-ins for what
vLLM's layers import and do not use. It prints what it has done.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import torch
import vllm_layer  # noqa: F401  # installs the stand-ins
from reference import assert_close, reference
from test_mla_codes import numbers, stored
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import registry
from vllm.v1.attention.selector import AttentionSelectorConfig

from blockflash import Unsupported
from blockflash.vllm import MLA_NAME, register
from blockflash.vllm._mla import (
    BlockflashMLABackend,
    BlockflashMLADecodeMetadata,
    BlockflashMLAImpl,
    BlockflashMLAMetadataBuilder,
)
from blockflash.vllm._reasons import MORE_MLA

DIMS = {
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_head_dim": 192,
    "v_head_dim": 128,
}
SCALE = 192**-0.5


def reasons(capability: tuple[int, int] = (9, 0), **changes: Any) -> list[str]:
    """What vLLM's selector gets to hear."""
    config = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True}
    config = AttentionSelectorConfig(**(config | {"block_size": 64} | changes))
    return BlockflashMLABackend.validate_configuration(
        device_capability=DeviceCapability(*capability), **config._asdict()
    )


def selection() -> None:
    register()
    member = registry.AttentionBackendEnum[MLA_NAME]
    assert member.get_class() is BlockflashMLABackend and BlockflashMLABackend.is_mla()
    for capability in ((8, 0), (9, 0), (12, 0)):
        for changes in ({}, {"head_size": 512, "dtype": torch.float16}, {"block_size": 16}):
            assert reasons(capability, **changes) == []
        assert reasons(capability, kv_cache_dtype="fp8_ds_mla") == []
    for changes, said in (
        ({"head_size": 320}, "latent rows of 576 and of 512"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype auto or fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_ds_mla", "head_size": 512}, "rows of 512, expected"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "queries of torch.float16"),
        ({"kv_cache_dtype": "float16"}, "float16 beside queries of torch.bfloat16"),
        ({"use_mla": False}, "--attention-backend BLOCKFLASH"),
        ({"use_sparse": True}, "--attention-backend BLOCKFLASH_MLA_SPARSE"),
        ({"has_sink": True}, "TRITON_MLA"),
        ({"use_dcp": True}, "--decode-context-parallel-size 1"),
        ({"use_pcp": True}, "--prefill-context-parallel-size 1"),
        ({"block_size": 8}, "a multiple of 16"),
    ):
        found = reasons(**changes)
        assert len(found) == 1 and said in found[0], found
    (old,) = reasons((7, 5))
    assert "8.0 or newer" in old
    every = reasons(
        (7, 5), head_size=100, use_mla=False, has_sink=True, has_sliding_window=True,
        use_non_causal=True, use_per_head_quant_scales=True,
    )  # fmt: skip
    assert {reason.split(":")[0] for reason in every} <= set(MORE_MLA), every
    print("selection ok")


def metadata() -> Any:
    ints = {"dtype": torch.int32}
    starts = torch.tensor([0, 1, 4, 4], **ints)
    builder = object.__new__(BlockflashMLAMetadataBuilder)
    made = builder._build_decode(
        block_table_tensor=torch.tensor([[3, 0], [1, 2], [0, 0]], **ints),
        seq_lens_device=torch.tensor([5, 30, 0], **ints),
        max_seq_len=30,
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=4,
        max_query_len=3,
        dcp_tot_seq_lens_device=None,
    )
    assert isinstance(made, BlockflashMLADecodeMetadata)
    assert made.query_start_loc is starts and made.max_query_len == 3
    print("metadata ok")
    return made


def layer(**changes: Any) -> BlockflashMLAImpl:
    given = {
        "num_heads": 8, "head_size": 576, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER, "kv_sharing_target_layer_name": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "kv_b_proj": MagicMock(),
    }  # fmt: skip
    return BlockflashMLAImpl(**(given | DIMS | changes))


def values(step: Any, behind: int, parts: bool, codes: bool = False) -> None:
    impl = layer(head_size=512 + behind, qk_rope_head_dim=behind)
    assert not impl.supports_quant_query_input
    q = torch.randn(4, 8, 512 + behind) / 4
    cache = rows = torch.randn(4, 16, 512 + behind)
    if codes:
        cache = stored(rows.bfloat16())
        rows = numbers(cache)
    given = (q[..., :512], q[..., 512:]) if parts else q
    common = MagicMock(decode=step)
    for wants_lse in (False, True):
        impl.need_to_return_lse_for_decode = wants_lse
        o, lse = impl.forward_mqa(given, cache, common, None)
        assert (lse is None) is not wants_lse and o.shape == (4, 8, 512)
        for entry, (start, end) in enumerate(((0, 1), (1, 4))):
            length = int(step.seq_lens[entry])
            k = rows[step.block_table[entry].long()].flatten(0, 1)[None, :length, None]
            expected, expected_lse = reference(
                q[start:end][None], k, k[..., :512], causal=True, scale=SCALE
            )
            assert_close(o[start:end], expected[0], torch.float32)
            if lse is not None:
                assert lse.shape == (4, 8)
                assert_close(lse[start:end], expected_lse[0].T, torch.float32)
    print(f"values of rows of {512 + behind}{' of codes' if codes else ''} ok")


def refusals() -> None:
    for changes, said in (
        ({"logits_soft_cap": 30.0}, "logits_soft_cap is 30.0"),
        ({"sliding_window": 100}, "sliding_window is 100"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256, expected 512"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type"),
    ):
        try:
            layer(**changes)
        except Unsupported as error:
            assert said in str(error), error
        else:
            raise AssertionError(changes)
    print("refusals ok")


if __name__ == "__main__":
    config = VllmConfig(device_config=DeviceConfig("cpu"), cache_config=CacheConfig(block_size=16))
    with set_current_vllm_config(config):
        selection()
        step = metadata()
        values(step, 64, parts=True)
        values(step, 0, parts=False)
        values(step, 64, parts=True, codes=True)
        refusals()
