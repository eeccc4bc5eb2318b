"""Steps over SGLang's caches, computed by the backend on the CPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import needs
from sglang_engine import prepare

prepare()
needs("sglang", "sglang.srt.layers.attention.attention_registry")

from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402
from sglang.srt.speculative.ngram_info import NgramVerifyInput  # noqa: E402
from sglang_model import HEADS, PAGE, Model, configure, layer_of  # noqa: E402
from test_sglang import verify_input  # noqa: E402

from blockflash.sglang import _backend  # noqa: E402
from blockflash.sglang._backend import BlockflashBackend  # noqa: E402
from blockflash.sglang._draft import BlockflashDraftBackend  # noqa: E402

LENGTHS, NEW = [20, 33, 37, 1, 64], [20, 1, 7, 1, 3]


@torch.inference_mode()
def run(model: Model, layer: Any, mode: ForwardMode, new: list[int], **options: Any) -> Any:
    """A step outside of a graph, by SGLang's own layer: output and queries."""
    q, k, v = model.step(layer, new)
    batch = model.batch(mode, new, **options.pop("batch", {}))
    backend = options.pop("backend", None) or BlockflashBackend(model.runner)
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
        return layer(q, k, v, batch, **options), q


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_behind_prefixes_and_single_tokens(
    dtype: torch.dtype, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch)
    model = Model(LENGTHS, dtype, windows=windows)
    for layer in (layer_of(0), layer_of(1, sliding_window_size=10)):
        scores = {"window": (10, None)} if layer.layer_id else {}
        o, q = run(model, layer, ForwardMode.MIXED, NEW)
        model.check(o, q, NEW, causal=True, **scores)
        o, q = run(model, layer, ForwardMode.DECODE, [1] * 5)
        model.check(o, q, [1] * 5, causal=True, **scores)


def test_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, a softcap, a window, and attention of an encoder in both directions."""
    configure(monkeypatch)
    model, sinks = Model(LENGTHS), torch.randn(HEADS)
    layer = layer_of(logit_cap=5.0, sliding_window_size=12)
    for mode, new in ((ForwardMode.EXTEND, NEW), (ForwardMode.DECODE, [1] * 5)):
        o, q = run(model, layer, mode, new, sinks=sinks)
        model.check(o, q, new, causal=True, window=(12, None), softcap=5.0, sink=sinks)
    layer = layer_of(attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=12)
    o, q = run(model, layer, ForwardMode.EXTEND, LENGTHS)
    model.check(o, q, LENGTHS, window=(12, 12))


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_caches_of_8_bits(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch)
    model, layer = Model(LENGTHS, torch.bfloat16, cache), layer_of()
    for scale in (None, torch.tensor(0.25)):
        layer.k_scale = layer.v_scale = scale
        factor = 1.0 if scale is None else 0.25

        def codes(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return (x / factor).to(cache).float() * factor

        for mode, new in ((ForwardMode.EXTEND, NEW), (ForwardMode.DECODE, [1] * 5)):
            o, q = run(model, layer, mode, new)
            model.check(o, q, new, codes, causal=True)


def test_no_new_keys_and_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share the keys of another one, and rows behind those of the sequences."""
    configure(monkeypatch)
    model, layer, new = Model(LENGTHS), layer_of(), [1] * 5
    q, k, v = model.step(layer, new)
    batch, backend = model.batch(ForwardMode.DECODE, new), BlockflashBackend(model.runner)
    backend.init_forward_metadata(batch)
    backend.forward(q, k, v, layer, batch)
    o = backend.forward(torch.cat((q, q[:2])), None, None, layer, batch, save_kv_cache=False)
    model.check(o[:5], q, new, causal=True)
    assert not o[5:].any()


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()


def visible(model: Model, tree: torch.Tensor) -> list[torch.Tensor]:
    tokens = len(tree)
    return [torch.cat((torch.ones(tokens, n - tokens).bool(), tree), 1) for n in model.lengths]


@pytest.mark.parametrize("full", [False, True])
def test_trees_of_drafted_tokens(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of drafted tokens, as of EAGLE, and of all keys, as of NGRAM."""
    configure(monkeypatch, 4, 2)
    model, layer, new = (
        Model([20, 33, 48], algorithm="NGRAM" if full else "EAGLE"),
        layer_of(),
        [4] * 3,
    )
    masks = visible(model, TREE)
    if full:
        monkeypatch.setattr(_backend, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK)
        mask = torch.cat([mask.flatten() for mask in masks])
        spec = NgramVerifyInput(custom_mask=mask, draft_token_num=4)
        backend = BlockflashBackend(model.runner)
    else:
        backend = BlockflashBackend(model.runner)
        backend.verify_mask.buffer[: 3 * 16].view(3, 4, 4)[:] = TREE
        spec = verify_input(backend.verify_mask.buffer, 4, 2)
    options = {"batch": {"spec_info": spec}, "backend": backend}
    o, q = run(model, layer, ForwardMode.TARGET_VERIFY, new, **options)
    model.check(o, q, new, masks=masks)


def test_a_graph_follows_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a graph has captured get the numbers of later batches, padded ones too."""
    configure(monkeypatch, 4, 2)
    model, layer = Model([20, 33, 48], windows=True, algorithm="EAGLE"), layer_of(1)
    backend = BlockflashBackend(model.runner)
    backend.init_cuda_graph_state(4, 16)
    backend.verify_mask.buffer.view(-1, 4, 4)[:] = TREE
    spec = verify_input(backend.verify_mask.buffer, 4, 2)
    for mode, count, masks in (
        (ForwardMode.DECODE, 1, None),
        (ForwardMode.TARGET_VERIFY, 4, visible(model, TREE)),
    ):
        options = {"batch_size": 4, "spec_info": spec if count == 4 else None, "seq_lens_cpu": None}
        padding = {
            "req_pool_indices": torch.zeros(4, dtype=torch.long),
            "seq_lens": torch.ones(4, dtype=torch.long),
        }
        new = [count] * 3
        backend.init_forward_metadata_out_graph(model.batch(mode, new, **options | padding), True)
        captured = backend.forward_metadata
        q, k, v = model.step(layer, new)
        batch = model.batch(mode, new, **options)
        for name, values in padding.items():
            setattr(batch, name, torch.cat((getattr(batch, name), values[3:])))
        backend.init_forward_metadata_out_graph(batch)
        for name, value in vars(captured).items():
            if isinstance(value, torch.Tensor):
                assert value.data_ptr() == getattr(backend.forward_metadata, name).data_ptr()
        backend.forward_metadata = captured
        rows = torch.cat((q, q[:count]))
        slots = batch.out_cache_loc
        batch.out_cache_loc = torch.cat((slots, torch.zeros(count, dtype=torch.long)))
        o = backend.forward(
            rows, torch.cat((k, k[:count])), torch.cat((v, v[:count])), layer, batch
        )
        model.check(o[: 3 * count], q, new, masks=masks, causal=masks is None)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("topk", [1, 2])
def test_drafting(topk: int, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of chains and trees: a branch sees its sequence and its own tokens."""
    steps, committed = 4, [16, 21, 31]
    configure(monkeypatch, 5, topk)
    base = Model(committed, is_draft_worker=True, algorithm="EAGLE")
    layer, size = layer_of(), len(committed)
    # A model whose sequences are the branches, for keys, values and the reference.
    drafts = BlockflashDraftBackend(base.runner, topk, steps)
    drafted = torch.zeros(size, topk, steps, dtype=torch.long)
    for i, length in enumerate(committed):
        base.write(layer, i, length)
        whole = length // PAGE * PAGE
        for branch in range(topk):
            pages = torch.tensor([base.free.pop() for _ in range(2)])
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            if topk == 1:
                slots = base.slots(i, whole, whole + 2 * PAGE)
            tail = slots[: length - whole]
            base.pool.set_kv_buffer(layer, tail, base.keys[i][whole:], base.values[i][whole:])
            drafted[i, branch] = slots[length - whole : length - whole + steps]
    batch = base.batch(ForwardMode.DECODE, [1] * size, out_cache_loc=drafted.flatten())
    batch.spec_info = object()
    if graph:
        drafts.init_cuda_graph_state(size, size * topk)
        drafts.init_forward_metadata_out_graph(batch, in_capture=True)
        captured = [backend.forward_metadata for backend in drafts.attn_backends]
        drafts.init_forward_metadata_out_graph(batch)
        for backend, metadata in zip(drafts.attn_backends, captured):
            assert metadata.lengths.data_ptr() == backend.forward_metadata.lengths.data_ptr()
            backend.forward_metadata = metadata
    else:
        drafts.init_forward_metadata(batch)
    histories = (
        [x for x in base.keys for _ in range(topk)],
        [x for x in base.values for _ in range(topk)],
    )
    for step, backend in enumerate(drafts.attn_backends):
        batch.out_cache_loc = drafted[..., step].flatten()
        q, k, v = (torch.randn(size * topk, heads, 32) for heads in (HEADS, 2, 2))
        for of, new in zip(histories, (k, v)):
            of[:] = [torch.cat((x, row[None])) for x, row in zip(of, new)]
        o = backend.forward(q.flatten(1), k, v, layer, batch)
        base.keys, base.values = histories
        base.check(o, q, [1] * (size * topk), causal=True)


def test_extension_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafting model takes as many tokens of each sequence as were verified."""
    configure(monkeypatch, 4, 1)
    model = Model([20, 33, 48], is_draft_worker=True, algorithm="EAGLE")
    layer, new = layer_of(), [4] * 3
    o, q = run(model, layer, ForwardMode.DRAFT_EXTEND_V2, new)
    model.check(o, q, new, causal=True)
    backend = BlockflashBackend(model.runner)
    backend.init_cuda_graph_state(3, 12)
    q, k, v = model.step(layer, new)
    batch = model.batch(ForwardMode.DRAFT_EXTEND_V2, new)
    for capture in (True, False):
        backend.init_forward_metadata_out_graph(batch, capture)
    model.check(backend.forward(q, k, v, layer, batch), q, new, causal=True)
