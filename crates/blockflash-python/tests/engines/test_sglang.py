"""The interface of SGLang's backends: registration, refusals, and what a batch becomes."""

from __future__ import annotations

import argparse
import inspect
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomllib
import torch
from engine import needs
from sglang_engine import prepare

prepare()
needs("sglang", "sglang.srt.layers.attention.attention_registry")

from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import draft_utils  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleVerifyInput  # noqa: E402
from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402
from sglang_model import COLUMNS, PAGE, Model, configure, layer_of  # noqa: E402

from blockflash.sglang import TESTED, register  # noqa: E402
from blockflash.sglang._backend import BlockflashBackend  # noqa: E402
from blockflash.sglang._draft import BlockflashDraftBackend  # noqa: E402


def verify_input(mask: torch.Tensor | None, tokens: int, topk: int) -> EagleVerifyInput:
    rest = inspect.signature(EagleVerifyInput).parameters
    values = {name: None for name in rest if rest[name].default is inspect.Parameter.empty}
    values |= {"custom_mask": mask, "draft_token_num": tokens, "topk": topk}
    return EagleVerifyInput(**values)


def test_it_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GENERAL_PLUGINS_GROUP == "sglang.srt.plugins"
    for _ in range(2):
        register()
    assert choices.ATTENTION_BACKEND_CHOICES.count("blockflash") == 1
    assert choices.DRAFT_ATTENTION_BACKEND_CHOICES.count("blockflash") == 1
    configure(monkeypatch)
    backend = ATTENTION_BACKENDS["blockflash"](Model([20]).runner)
    assert isinstance(backend, BlockflashBackend) and isinstance(backend, AttentionBackend)


def test_the_command_line_takes_it() -> None:
    register()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    line = ["--model-path", "x", "--attention-backend", "blockflash", "--page-size", "64"]
    found = parser.parse_args([*line, "--speculative-draft-attention-backend", "blockflash"])
    assert found.attention_backend == found.speculative_draft_attention_backend == "blockflash"


DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
RESOLVED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"kv_cache_dtype": "fp8_e4m3"}, None),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, None),
    ({**DRAFTS, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, None),
    # What SGLang's own lists keep for others, as the guide says.
    ({**DRAFTS, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, "only supported"),
    ({"speculative_algorithm": "NGRAM"}, "only supported for the 'flashinfer' backend"),
    ({"enable_deterministic_inference": True}, "supported for deterministic inference"),
]


@pytest.mark.parametrize(("options", "reason"), RESOLVED)
def test_server_arguments(options: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    """SGLang's resolution of its arguments for a GPU and a small Llama."""
    register()
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    model |= {"num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    if "speculative_eagle_topk" in options:
        options = {**options, "speculative_draft_model_path": str(tmp_path)}
    arguments = ServerArgs(
        **options,
        model_path=str(tmp_path),
        attention_backend="blockflash",
        page_size=64,
        device="cuda",
        skip_tokenizer_init=True,
    )
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            arguments.resolve_once()
        return
    arguments.resolve_once()
    resolved = resolved_view(arguments)
    assert attention_backends_of(resolved) == ("blockflash", "blockflash")
    assert resolved.page_size == 64


def test_the_package_names_its_plugin() -> None:
    package = Path(__file__).parents[2]
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"][GENERAL_PLUGINS_GROUP].items()
    assert EntryPoint(name, value, GENERAL_PLUGINS_GROUP).load() is register
    pinned = tomllib.loads((package / "clients.toml").read_text())["sglang"]["packages"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={TESTED}"] == pinned[:1]


def test_other_versions_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    register()
    assert not caplog.records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockflash.sglang.version", lambda name: "0.6.0")
        register()
    assert "is for SGLang 0.5.23, but this is 0.6.0" in caplog.text


def test_it_takes_the_place_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, maker in ATTENTION_BACKENDS.items():
        monkeypatch.setitem(ATTENTION_BACKENDS, name, maker)
    register()
    assert ATTENTION_BACKENDS["fa3"] is not ATTENTION_BACKENDS["blockflash"]
    monkeypatch.setenv("BLOCKFLASH_SGLANG_REPLACES", "fa3")
    register()
    assert ATTENTION_BACKENDS["fa3"] is ATTENTION_BACKENDS["blockflash"]
    monkeypatch.setenv("BLOCKFLASH_SGLANG_REPLACES", "fa33")
    with pytest.raises(ValueError, match="BLOCKFLASH_SGLANG_REPLACES is fa33, not one of aiter"):
        register()


def test_drafts_are_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    HookRegistry.apply_hooks()
    configure(monkeypatch, 4, 1)
    runner = Model([20], is_draft_worker=True, algorithm="EAGLE").runner
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("fa3", "fa3"))
    runner.draft_attention_backend = "blockflash"
    factory = draft_utils.DraftBackendFactory(runner, 1, 3)
    create = factory._create_backend
    steps = create("decode_attention_backend", {}, "{backend_type}", stamps_children=True)
    assert isinstance(steps, BlockflashDraftBackend) and len(steps.attn_backends) == 2
    assert steps.attn_backends[0].decode_attention_backend_str == "blockflash"
    extension = create("prefill_attention_backend", {}, "{backend_type}")
    assert isinstance(extension, BlockflashBackend)
    monkeypatch.setenv("BLOCKFLASH_SGLANG_REPLACES", "fa3")
    runner.draft_attention_backend = "fa3"
    assert isinstance(create("x", {}, "{backend_type}"), BlockflashBackend)
    monkeypatch.delenv("BLOCKFLASH_SGLANG_REPLACES")
    with pytest.raises(ValueError, match="fa3"):
        runner.draft_attention_backend = None
        draft_utils.DraftBackendFactory(runner, 1, 3)._create_backend("x", {}, "{backend_type}")


def test_methods_take_what_the_interface_passes() -> None:
    for name, method in vars(BlockflashBackend).items():
        expected = getattr(AttentionBackend, name, None)
        if name.startswith("__") or not inspect.isfunction(expected):
            continue
        ours, theirs = (inspect.signature(f).parameters.values() for f in (method, expected))
        ours = [p for p in ours if p.name != "sinks"]
        if name not in {"update_verify_buffers_to_fill_after_draft", "forward_extend"}:
            assert [p.name for p in ours][: len(theirs)] == [
                p.name if p.kind is not p.VAR_KEYWORD else "options" for p in theirs
            ], name
        assert len(ours) == len(theirs), name
    steps = vars(BlockflashDraftBackend)
    for name in ("init_forward_metadata", "init_cuda_graph_state"):
        assert name in steps
    for name in ("init_forward_metadata_out_graph", "init_forward_metadata_in_graph"):
        assert name in steps


EAGLE = {"algorithm": "EAGLE"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 1}, "page_size is 1, not a multiple of 16: pass --page-size 64"),
    ({"config": {"is_encoder_decoder": True}}, "cross attention"),
    ({"config": {"is_local_attention_model": True}}, "within chunks"),
    ({"prefill_aware_swa": True}, "excepts the prompt"),
    ({"kv_cache_dtype": torch.int8, "kv_cache_dtype_str": "x"}, "kv_cache_dtype is x"),
    ({"kv_cache_dtype_str": "mxfp8"}, "kv_cache_dtype is mxfp8"),
    ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "--enable-unified-memory"),
    ({"algorithm": "DFLASH"}, "speculative_algorithm is DFLASH, not EAGLE"),
    ({"algorithm": "FROZEN_KV_MTP"}, "speculative_algorithm is FROZEN_KV_MTP"),
    ({**EAGLE, "sliding_window_size": 10}, "--speculative-eagle-topk 1"),
    ({**EAGLE, "kv_cache_dtype": torch.float8_e4m3fn, "device": "cuda"}, "cache of 8 bits"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_refusals(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 4, 2)
    changes = dict(changes)
    config = changes.pop("config", {})
    model = Model([20], **changes)
    vars(model.runner.model_config).update(config)
    with pytest.raises(ValueError, match=reason):
        BlockflashBackend(model.runner)


def test_refused_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, reason in (
        ({"diffusion": "X"}, "--dllm-algorithm"),
        ({"deterministic": True}, "leave out --enable-deterministic-inference"),
    ):
        configure(monkeypatch, **options)
        with pytest.raises(ValueError, match=reason):
            BlockflashBackend(Model([20]).runner)


@pytest.mark.parametrize(("name", "value"), [("attn_cp_size", 2), ("attn_dcp_size", 2)])
def test_shared_keys_are_refused(name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    configure(monkeypatch)
    parallel = SimpleNamespace(**{"attn_cp_size": 1, "attn_dcp_size": 1, name: value})
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    with pytest.raises(ValueError, match="2 ranks share the keys"):
        BlockflashBackend(Model([20]).runner)


def test_refused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch)
    model = Model([20])
    backend, batch = BlockflashBackend(model.runner), model.batch(ForwardMode.EXTEND, [20])
    q, k, v = model.step(layer_of(), [20])
    backend.init_forward_metadata(batch)
    grok = layer_of()
    grok.xai_temperature_len = 1024
    for layer, options, reason in (
        (layer_of(is_cross_attention=True), {}, "cross attention"),
        (layer_of(attn_type=AttentionType.DECODER_BIDIRECTIONAL), {}, "both directions"),
        (layer_of(logit_cap=5.0, logit_capping_method="x"), {}, "logit_capping_method is x"),
        (layer_of(pos_encoding_mode="ALIBI"), {}, "pos_encoding_mode is ALIBI"),
        (grok, {}, "xai_temperature"),
        (layer_of(), {"q_rope": q}, "the model passes q_rope"),
        (layer_of(), {"return_lse": True}, "the model passes return_lse"),
    ):
        with pytest.raises(ValueError, match=reason):
            backend.forward(q, k, v, layer, batch, **options)
    backend.forward(q, k, v, layer_of(), batch, q_descale=None, return_lse=False)


def test_refused_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 4, 1)
    model = Model([20], **EAGLE)
    backend = BlockflashBackend(model.runner)
    with pytest.raises(ValueError, match="DLLM_EXTEND"):
        backend.init_forward_metadata(model.batch(ForwardMode.DLLM_EXTEND, [20]))
    batch = model.batch(ForwardMode.EXTEND, [20])
    with pytest.raises(ValueError, match="--cuda-graph-backend-prefill breakable"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(model.batch(ForwardMode.DECODE, [1]))
    spec = verify_input(None, 4, 1)
    spec.ragged_verify_layout = object()
    with pytest.raises(ValueError, match="ragged"):
        batch = model.batch(ForwardMode.TARGET_VERIFY, [4], spec_info=spec)
        backend.init_forward_metadata(batch)


def test_a_batch_becomes_lengths_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 4, 1)
    model = Model([20, 33, 48], **EAGLE)
    backend = BlockflashBackend(model.runner)
    pages = model.table[model.rows, ::PAGE] // PAGE
    backend.init_forward_metadata(model.batch(ForwardMode.EXTEND, [20, 1, 7]))
    found = backend.forward_metadata
    assert found.cu_seqlens.tolist() == [0, 20, 21, 28] and found.queries == 20
    assert found.lengths.tolist() == [20, 33, 48] and found.lengths.dtype == torch.int32
    assert torch.equal(found.table, pages[:, :3]) and found.table.dtype == torch.int32
    assert found.window_table is None and found.tail_mask is None
    spec = verify_input(None, 4, 1)
    batch = model.batch(ForwardMode.TARGET_VERIFY, [4] * 3, spec_info=spec)
    backend.init_forward_metadata(batch)
    found = backend.forward_metadata
    assert (found.queries, found.cu_seqlens, found.tail_mask) == (4, None, None)
    assert found.lengths.tolist() == [20, 33, 48]
    # Without lengths on the host, tables are as wide as sequences can be.
    batch = model.batch(ForwardMode.DECODE, [1] * 3, seq_lens_cpu=None)
    backend.init_forward_metadata(batch)
    assert torch.equal(backend.forward_metadata.table, pages)
    assert backend.forward_metadata.table.shape == (3, COLUMNS)
    empty = model.batch(ForwardMode.IDLE, [1] * 3, batch_size=0)
    backend.init_forward_metadata(empty)
    q = torch.zeros(2, 128)
    assert backend.forward(q, None, None, layer_of(), empty).shape == (2, 128)


def test_new_tokens_of_a_replayed_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its views of a batch have numbers of tokens in several places, or none."""
    configure(monkeypatch, 4, 1)
    model = Model([20, 33, 48], is_draft_worker=True, **EAGLE)
    backend = BlockflashBackend(model.runner)
    backend.init_cuda_graph_state(3, 12)
    batch = model.batch(ForwardMode.DRAFT_EXTEND_V2, [4, 2, 3])
    view = SimpleNamespace(**vars(batch))
    view.extend_seq_lens = view.extend_seq_lens_cpu = None
    for spec, expected in (
        ({"extend_seq_lens_tensor": torch.tensor([1, 2, 4])}, [0, 1, 3, 7]),
        ({"num_tokens_per_req": 4}, [0, 4, 8, 12]),
    ):
        view.spec_info = SimpleNamespace(**spec)
        backend.init_forward_metadata_out_graph(view)
        assert backend.forward_metadata.cu_seqlens.tolist() == expected
    view.spec_info = None
    with pytest.raises(ValueError, match="how many new tokens"):
        backend.init_forward_metadata_out_graph(view)


def test_masks_are_read_where_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 4, 2)
    model = Model([20, 33], **EAGLE)
    backend = BlockflashBackend(model.runner)
    mask = backend.verify_mask
    assert mask.mode == TreeMaskMode.QLEN_ONLY and mask.is_read and mask.max_bs == 3
    backend.init_cuda_graph_state(8, 32)
    mask = backend.verify_mask
    assert mask.max_bs == 8 and mask.buffer.numel() == 8 * 16
    spec = verify_input(mask.buffer, 4, 2)
    batch = model.batch(ForwardMode.TARGET_VERIFY, [4] * 2, spec_info=spec)
    for in_capture in (True, False):
        backend.init_forward_metadata_out_graph(batch, in_capture)
        tail = backend.forward_metadata.tail_mask
        assert tail.data_ptr() == mask.buffer.data_ptr() and tail.shape == (2, 4, 4)
    backend.update_verify_buffers_to_fill_after_draft(spec, 2)
    assert BlockflashBackend(Model([20], algorithm="NGRAM").runner).verify_mask is None
    draft = Model([20], is_draft_worker=True, **EAGLE).runner
    assert BlockflashBackend(draft).verify_mask is None
