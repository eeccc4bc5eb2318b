"""Steps of models with latent rows (MLA) over SGLang's cache, on the CPU, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import needs
from sglang_engine import prepare

prepare()
needs("sglang", "sglang.srt.layers.attention.attention_registry")

from reference import assert_close, reference  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang_model import HEADS, PAGE, PAGES, Model, configure  # noqa: E402
from test_sglang import verify_input  # noqa: E402

from blockflash.sglang._backend import BlockflashBackend  # noqa: E402
from blockflash.sglang._names import REPLACES  # noqa: E402

LENGTHS, NEW = [20, 33, 37, 1, 64], [20, 1, 7, 1, 3]
ROW, WIDTH, SCALE = 576, 512, 192**-0.5


@pytest.fixture(autouse=True)
def without_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache of rows asks for."""
    parallel = SimpleNamespace(dcp_enabled=False, attn_dcp_size=1)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: parallel)


class Rows(Model):
    """Sequences with rows of 576 elements in pages."""

    def __init__(self, dtype: torch.dtype = torch.float32, **others: Any) -> None:
        super().__init__(LENGTHS, dtype, use_mla_backend=True, **others)
        size = (PAGES * PAGE, PAGE, others.get("kv_cache_dtype", dtype), WIDTH, ROW - WIDTH)
        self.pool = MLATokenToKVPool(*size, 2, "cpu", False)
        self.runner.token_to_kv_pool = self.pool
        self.keys = [torch.randn(n, 1, ROW).to(dtype) for n in LENGTHS]
        self.values = [k[..., :WIDTH] for k in self.keys]

    def write(self, layer: RadixAttention, sequence: int, end: int) -> None:
        """Write the first rows of a sequence into the cache, as an earlier step did."""
        loc = self.slots(sequence, 0, end)
        self.pool.set_kv_buffer(layer, loc, self.keys[sequence][:end], None)

    def check_rows(self, o: torch.Tensor, q: torch.Tensor, new: list[int]) -> None:
        """Hold an output against float64."""
        for i, (found, queries) in enumerate(zip(o.split(new), q.split(new), strict=True)):
            k, queries = self.keys[i][None], queries.view(1, -1, HEADS, ROW)
            expected, _ = reference(queries, k, k[..., :WIDTH], causal=True, scale=SCALE)
            assert_close(found.view(1, -1, HEADS, WIDTH), expected, self.dtype)


def absorbed() -> RadixAttention:
    return RadixAttention(HEADS, ROW, SCALE, 1, 0, v_head_dim=WIDTH)


def run(
    model: Rows, layer: Any, mode: ForwardMode, new: list[int], *rows: Any, **batch: Any
) -> Any:
    """A step outside of a graph, by SGLang's own layer."""
    step = model.batch(mode, new, **batch)
    backend = BlockflashBackend(model.runner)
    backend.init_forward_metadata(step)
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=step):
        return layer(*rows[:3], step, save_kv_cache=rows[3])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "mode, new", [(ForwardMode.MIXED, NEW), (ForwardMode.DECODE, [1] * 5)], ids=["mixed", "decode"]
)
def test_absorbed_steps(
    dtype: torch.dtype, mode: ForwardMode, new: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch)
    model, layer = Rows(dtype), absorbed()
    for i, (length, count) in enumerate(zip(LENGTHS, new)):
        model.write(layer, i, length - count)
    q = torch.randn(sum(new), HEADS * ROW).to(dtype) / 2
    k = torch.cat([x[n - m :] for x, n, m in zip(model.keys, LENGTHS, new)])
    o = run(model, layer, mode, new, q, k, k[..., :WIDTH], True)
    assert o.shape == (sum(new), HEADS * WIDTH)
    model.check_rows(o, q, new)
    # The step has written its rows.
    rows = model.pool.get_key_buffer(0)
    for i, length in enumerate(LENGTHS):
        assert torch.equal(rows[model.slots(i, 0, length)], model.keys[i])


@torch.inference_mode()
def test_drafted_tokens_are_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 4, 1)
    model, layer, new = Rows(algorithm="EAGLE"), absorbed(), [4] * 5
    model.lengths = [20, 33, 37, 4, 64]
    model.keys[3] = torch.randn(4, 1, ROW)
    for i, length in enumerate(model.lengths):
        model.write(layer, i, length - 4)
    q = torch.randn(20, HEADS * ROW) / 2
    k = torch.cat([x[-4:] for x in model.keys])
    spec = verify_input(None, 4, 1)
    o = run(
        model, layer, ForwardMode.TARGET_VERIFY, new, q, k, k[..., :WIDTH], True, spec_info=spec
    )
    model.check_rows(o, q, new)


@torch.inference_mode()
def test_prompts_have_keys_of_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch)
    model, layer = Rows(), RadixAttention(HEADS, 192, SCALE, HEADS, 0, v_head_dim=128)
    q, k, v = (torch.randn(sum(LENGTHS), HEADS * d) for d in (192, 192, 128))
    o = run(model, layer, ForwardMode.EXTEND, LENGTHS, q, k, v, False)
    for found, *of in zip(*(t.split(LENGTHS) for t in (o, q, k, v)), strict=True):
        rows = [t.view(1, -1, HEADS, d) for t, d in zip(of, (192, 192, 128), strict=True)]
        expected, _ = reference(*rows, causal=True, scale=SCALE)
        assert_close(found.view(1, -1, HEADS, 128), expected, torch.float32)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch)
    with pytest.raises(ValueError, match="--kv-cache-dtype auto"):
        BlockflashBackend(Rows(kv_cache_dtype=torch.float8_e4m3fn).runner)
    configure(monkeypatch, 4, 2)
    with pytest.raises(ValueError, match="--speculative-eagle-topk 1"):
        BlockflashBackend(Rows(algorithm="EAGLE").runner)
    configure(monkeypatch)
    monkeypatch.setenv(REPLACES, "fa3")
    with pytest.raises(ValueError, match=f"{REPLACES} is fa3"):
        BlockflashBackend(Rows().runner)
