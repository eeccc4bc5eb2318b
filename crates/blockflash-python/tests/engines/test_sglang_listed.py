"""Attention to listed slots inside of SGLang's backend `dsa`, on the CPU, against float64."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import needs
from sglang_engine import prepare

prepare()
needs("sglang", "sglang.srt.layers.attention.dsa_backend")

from reference import assert_close, reference  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.layers.attention import dsa_backend  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang_model import Model, configure  # noqa: E402
from test_mla_codes import numbers, stored  # noqa: E402
from torch import Tensor  # noqa: E402

import blockflash  # noqa: E402
from blockflash.sglang import _listed, register  # noqa: E402
from blockflash.sglang._backend import BlockflashBackend  # noqa: E402
from blockflash.sglang._names import LISTED, REPLACES  # noqa: E402

TOKENS, HEADS, SLOTS, ROOM, SCALE = 9, 4, 640, 48, 192**-0.5


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks of this test alone, once those of all tests are there."""
    register()
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    for name in ("_forward_flashmla_sparse", "_forward_flashmla_kv"):
        monkeypatch.setattr(DeepseekSparseAttnBackend, name, vars(DeepseekSparseAttnBackend)[name])
    yield
    blockflash.reset_stats()


def lists() -> Tensor:
    """Slots of each token, in any order, -1 anywhere; none of the third."""
    found = torch.full((TOKENS, ROOM), -1, dtype=torch.int32)
    for token in range(TOKENS):
        count = 0 if token == 2 else 5 + 5 * token
        found[token, torch.randperm(ROOM)[:count]] = torch.randperm(SLOTS)[:count].int()
    return found


def expected(q: Tensor, rows: Tensor, slots: Tensor, sink: Tensor | None = None) -> Tensor:
    visible = torch.zeros(TOKENS, SLOTS + 1, dtype=torch.bool)
    visible.scatter_(1, slots.long().where(slots >= 0, SLOTS), True)
    visible = visible[None, None, :, :SLOTS].expand(1, HEADS, -1, -1)
    k = rows[None]
    o, _ = reference(q[None], k, k[..., :512], scale=SCALE, visible=visible, sink=sink)
    return o[0]


def backend(implementation: str, cache: Tensor) -> Any:
    """SGLang's backend with what its steps of single tokens read."""
    _listed.register()
    HookRegistry.apply_hooks()
    made = object.__new__(DeepseekSparseAttnBackend)
    made.dsa_decode_impl, made.dsa_index_kpool = implementation, 1
    made.hisparse_coordinator, made.use_fused_topk = None, True
    made.dsa_topk_backend = SimpleNamespace(is_sgl_kernel=lambda: True)
    made.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: cache)
    made.forward_metadata = SimpleNamespace(dsa_cache_seqlens_int32=None)
    return made


@torch.inference_mode()
@pytest.mark.parametrize(
    ("implementation", "codes"),
    [("flashmla_sparse", False), ("flashmla_kv", False), ("flashmla_kv", True)],
)
def test_steps_of_single_tokens(
    implementation: str, codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows, slots = torch.randn(SLOTS, 1, 576).bfloat16(), lists()
    cache = stored(rows) if codes else rows
    made = backend(implementation, cache.view(torch.float8_e4m3fn) if codes else cache)
    monkeypatch.setattr(
        dsa_backend, "concat_mla_absorb_q_general", lambda *parts: torch.cat(parts, -1)
    )
    layer = SimpleNamespace(
        layer_id=0, is_cross_attention=False, tp_q_head_num=HEADS, head_dim=576, v_head_dim=512,
        scaling=SCALE,
    )  # fmt: skip
    q = (torch.randn(TOKENS, HEADS, 576) / 4).bfloat16()
    given = {"q_rope": q[..., 512:], "topk_indices": slots}
    o = made.forward_decode(q[..., :512], None, None, layer, None, **given)
    wanted = expected(q, numbers(cache) if codes else rows, slots)
    assert wanted[2].eq(0).all()
    assert_close(o.view(TOKENS, HEADS, 512), wanted, torch.bfloat16)
    assert blockflash.stats()["sglang"] == type(blockflash.stats()["sglang"])(1, {})


@torch.inference_mode()
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_of_a_step(sinks: bool) -> None:
    """As prompts beside a cache of codes have them, and with logits in the denominator."""
    torch.manual_seed(0)
    rows, slots = torch.randn(SLOTS, 1, 576), lists()
    q, sink = torch.randn(TOKENS, HEADS, 576) / 4, torch.randn(HEADS) if sinks else None
    made = backend("flashmla_sparse", rows)
    o = made._forward_flashmla_sparse(
        q_all=q, kv_cache=rows, page_table_1=slots, sm_scale=SCALE, v_head_dim=512,
        topk_length=torch.zeros(TOKENS, dtype=torch.int32), attn_sink=sink,
    )  # fmt: skip
    assert_close(o, expected(q, rows, slots, sink), torch.float32)


def test_what_no_kernel_takes_is_left_to_sglang() -> None:
    cache = torch.zeros(SLOTS, 1, 528, dtype=torch.uint8)
    q, slots, seen = torch.zeros(TOKENS, HEADS, 512), lists(), []
    arguments = {"q_all": q, "kv_cache": cache, "v_head_dim": 512, "sm_scale": SCALE}
    arguments |= {"layer": None, "metadata": None, "page_table_1": slots}
    with pytest.warns(UserWarning, match="rows of codes have 528 bytes, and kernels take 656"):
        _listed.pages(lambda *given: seen.append(given), "backend", **arguments)
    assert seen == [("backend", *arguments.values())]
    assert sum(blockflash.stats()["sglang"].fallback.values()) == 1
    with blockflash.strict(), pytest.raises(blockflash.Unsupported, match="strict mode"):
        _listed.pages(lambda *given: None, "backend", **arguments)


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [(_listed.rows, "_forward_flashmla_sparse"), (_listed.pages, "_forward_flashmla_kv")],
)
def test_methods_are_those_of_sglang(wrapper: Any, name: str) -> None:
    ours = [*inspect.signature(wrapper).parameters.values()][2:]
    theirs = [*inspect.signature(getattr(DeepseekSparseAttnBackend, name)).parameters.values()][1:]
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


def test_the_name_of_sglang_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ATTENTION_BACKENDS[LISTED[0]]
    # As in a process in which it was not called yet.
    monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", [])
    for name in ("add_attention_backend_choices", "add_draft_attention_backend_choices"):
        monkeypatch.setattr(choices, name, lambda _: None)
    monkeypatch.setenv(REPLACES, LISTED[0])
    register()
    assert ATTENTION_BACKENDS[LISTED[0]] is before
    assert len([name for name in HookRegistry._hooks if "_forward_flashmla_" in name]) == 2


def test_models_with_an_indexer_are_for_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch)
    runner = Model([20]).runner
    runner.model_config.hf_config = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"], index_topk=2048
    )
    with pytest.raises(ValueError, match=f"set {REPLACES}=dsa and pass --attention-backend dsa"):
        BlockflashBackend(runner)
