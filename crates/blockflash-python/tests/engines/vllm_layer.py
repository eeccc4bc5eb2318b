"""A layer of vLLM with its forward context drives the backend: selection, pages, values.

vLLM's module of layers imports servers, parsers and tokenizers that no layer uses; those that are
not there are replaced. It is a program of its own, run by `test_vllm.py`, so that no other test
sees the stand-ins, nor the platform whose selector is replaced. It prints what it has done.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

UNUSED = (
    "cachetools cloudpickle cpuinfo einops fastapi llguidance mistral_common opentelemetry "
    "partial_json_parser prometheus_client pybase64 uvloop xgrammar"
).split()


class StandIn(MagicMock):
    """A module that has everything."""

    __path__: list[str] = []
    __version__ = "0"


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that layers do not use, behind all other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A stand-in for one of these names."""
        known = name.split(".")[0] in UNUSED
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> Any:
        """A module that has everything."""
        return StandIn()

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


sys.meta_path.append(StandIns())

import torch  # noqa: E402
import vllm_writers as writers  # noqa: E402
from test_vllm_values import CASES, PADDING, STEP, Case, Layer  # noqa: E402
from vllm.config import (  # noqa: E402
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

from blockflash.vllm import register  # noqa: E402


def select(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    """As the platform of NVIDIA GPUs selects a backend that is named."""
    found = backend.get_class()
    on = DeviceCapability(9, 0)
    config = attn_selector_config._asdict()
    assert not found.validate_configuration(device_capability=on, **config)
    return ".".join(found.full_cls_name())


def check(case: Case) -> None:
    """A step through vLLM's layer, whose tokens the layer itself writes into pages."""
    filled = Layer(case)
    config = VllmConfig(
        attention_config=AttentionConfig(backend="BLOCKFLASH"),
        cache_config=CacheConfig(block_size=16, cache_dtype=case.kind),
        device_config=DeviceConfig(device="cpu"),
    )
    with set_current_vllm_config(config), torch.inference_mode():
        layer = Attention(
            *(4, case.head_size, filled.scale, 2),
            cache_config=config.cache_config,
            logits_soft_cap=case.softcap,
            per_layer_sliding_window=case.window,
            prefix="model.layers.0.self_attn.attn",
            sinks=case.sinks,
        )
        layer.process_weights_after_loading(case.dtype)
        layer._k_scale.copy_(case.scales[0])
        layer._v_scale.copy_(case.scales[1])
        spec = layer.get_kv_cache_spec(config)
        made = layer.attn_backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
        ints = {"dtype": torch.int32}
        starts = torch.tensor([0, *(count for count, _ in STEP)], **ints).cumsum(0).int()
        places = [torch.arange(keys - count, keys) for count, keys in STEP]
        slots = torch.cat(
            [row.long()[p // 16] * 16 + p % 16 for row, p in zip(filled.table, places)]
        )
        step = made.build(
            common_prefix_len=0,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.tensor([keys for _, keys in STEP], **ints),
                num_reqs=len(STEP),
                num_actual_tokens=len(slots),
                max_query_len=20,
                max_seq_len=64,
                block_table_tensor=filled.table,
                slot_mapping=slots,
            ),
        )
        rows = filled.cache.transpose(1, 2)
        before = rows[slots // 16, slots % 16]
        rows[slots // 16, slots % 16] = torch.zeros((), dtype=rows.dtype)
        new = [
            torch.cat([*(rows[p] for rows, p in zip(each, places)), each[0][:PADDING]]).flatten(1)
            for each in (filled.k, filled.v)
        ]
        layer.kv_cache, name = filled.cache, layer.layer_name
        with set_forward_context(
            {name: step}, config, num_tokens=len(filled.q), slot_mapping={name: slots}
        ):
            o = layer(filled.q.flatten(1), *new).view_as(filled.q)
        assert torch.equal(rows[slots // 16, slots % 16], before)
        o[len(slots) :] = torch.nan  # vLLM leaves them as they are, too.
        filled.check(o)


def main() -> None:
    """Check layers with and without 8 bits."""
    register()
    type(current_platform).get_attn_backend_cls = staticmethod(select)
    torch.ops._C_cache_ops = SimpleNamespace(reshape_and_cache_flash=writers.per_tensor)
    torch.set_default_dtype(torch.bfloat16)
    for name in ("bf16", "sinks of bf16 with a window", "softcap", "fp8"):
        check(CASES[name])
        print(name, "ok")


if __name__ == "__main__":
    main()
