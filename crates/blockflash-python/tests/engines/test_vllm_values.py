"""Steps of several requests over pages, computed by the backend's layer, against float64.

Pages are written on the CPU, by stand-ins for vLLM's operators. On a GPU attention itself runs
there, over copies of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_writers as writers
from engine import needs
from reference import assert_close, reference
from torch import Tensor

needs("vllm", "vllm.config", "vllm.v1.attention.backend")

import vllm.v1.attention.ops.triton_reshape_and_cache_flash as triton  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

import blockflash  # noqa: E402
from blockflash.vllm._cache import CODES, PER_TOKEN_HEAD  # noqa: E402
from blockflash.vllm._impl import BlockflashImpl  # noqa: E402
from blockflash.vllm._metadata import BlockflashMetadata  # noqa: E402

PAGE, HEADS, HEADS_KV, PADDING = 16, 4, 2, 3
# Tokens of the step and keys with them: a prompt, a chunk, single tokens, and padding.
STEP = [(20, 20), (1, 33), (7, 37), (1, 1), (3, 64), (0, 0)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = SimpleNamespace(reshape_and_cache_flash=writers.per_tensor)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", namespace, raising=False)
    name = "triton_reshape_and_cache_flash_per_token_head_quant"
    monkeypatch.setattr(triton, name, writers.per_token_head)


@dataclass
class Case:
    """A layer and how its cache is."""

    dtype: torch.dtype = torch.bfloat16
    head_size: int = 64
    kind: str = "auto"
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: list[float] | None = None
    causal: bool = True
    scales: tuple[Tensor, Tensor] = field(
        default_factory=lambda: (torch.tensor(0.02), torch.tensor(0.03))
    )


class Layer:
    """A layer whose pages are filled, and what it computes."""

    def __init__(self, case: Case, step: list[tuple[int, int]] = STEP) -> None:
        self.case, self.step = case, step
        draw = torch.Generator().manual_seed(7)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(case.dtype)

        size, rows = case.head_size, sum(count for count, _ in step) + PADDING
        self.scale = 1.3 / math.sqrt(size)
        self.impl = BlockflashImpl(
            *(HEADS, size, self.scale, HEADS_KV, case.slopes, case.window, case.kind),
            *(case.softcap, "decoder", None),
            sinks=case.sinks,
        )
        self.layer = SimpleNamespace(_k_scale=case.scales[0], _v_scale=case.scales[1])
        self.q = random(rows, HEADS, size)
        self.k, self.v = ([random(n, HEADS_KV, size) for _, n in step] for _ in "kv")
        width = max(-(-keys // PAGE) for _, keys in step)
        pages = torch.randperm(width * len(step), generator=draw)
        self.table = pages.view(len(step), width).int()
        own = case.kind in PER_TOKEN_HEAD
        content = 2 * size + (16 if own else 0)
        kind = case.dtype if case.kind == "auto" else torch.uint8
        kind = torch.int8 if case.kind.startswith("int8") else kind
        logical, order = (2, len(pages), HEADS_KV, PAGE, content), case.layout.stride_order
        # What is never written is NaN.
        memory = torch.full([logical[i] for i in order], 127, dtype=torch.uint8).to(kind)
        if kind.is_floating_point:
            memory.fill_(torch.nan)
        self.hold(memory.permute([order.index(i) for i in range(5)]))
        self.fill()

    def hold(self, layers: Tensor) -> None:
        """Take the second of two layers, `[layers, pages, heads, slots, content]`."""
        self.layers, self.cache = layers, layers[1]

    def fill(self) -> None:
        """Write what earlier steps had, and then the tokens of this one with some of padding."""
        before, now = [], []
        for request, (count, keys) in enumerate(self.step):
            place = torch.arange(keys)
            slots = self.table[request].long()[place // PAGE] * PAGE + place % PAGE
            before.append(slots[: keys - count])
            now.append(slots[keys - count :])
        for name, slots in (("before", before), ("now", now)):
            parts = []
            for each in (self.k, self.v):
                rows = [
                    rows[: keys - count] if name == "before" else rows[keys - count :]
                    for rows, (count, keys) in zip(each, self.step)
                ]
                parts.append(torch.cat([*rows, torch.full((PADDING, *rows[0].shape[1:]), 9.0)]))
            padded = torch.cat([*slots, torch.full((2,), -1)])
            key, value = (part.to(self.case.dtype) for part in parts)
            self.impl.do_kv_cache_update(self.layer, key, value, self.cache, padded)

    def run(self, device: str = "cpu", **changes: Any) -> Tensor:
        """The output of all rows, on the CPU; NaN where nothing is written."""
        starts = [0]
        for count, _ in self.step:
            starts.append(starts[-1] + count)
        step = BlockflashMetadata(
            num_actual_tokens=starts[-1],
            max_query_len=max(count for count, _ in self.step),
            max_seq_len=max(keys for _, keys in self.step),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([keys for _, keys in self.step], dtype=torch.int32),
            block_table=self.table,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            causal=self.case.causal,
        )
        for name, value in changes.items():
            setattr(step, name, value)
        for name in ("query_start_loc", "seq_lens", "block_table"):
            setattr(step, name, getattr(step, name).to(device))
        for options in self.impl._options.values():
            options[:] = [o.to(device) if isinstance(o, Tensor) else o for o in options]
        scales = {name: scale.to(device) for name, scale in vars(self.layer).items()}
        layer, q = SimpleNamespace(**scales), self.q.to(device)
        cache = self.cache if device == "cpu" else self.layers.to(device)[1]
        assert cache.stride() == self.cache.stride()
        o = torch.full_like(q, torch.nan)
        assert self.impl.forward(layer, q, None, None, cache, step, o) is o
        return o.cpu()

    def stored(self, which: int, request: int) -> Tensor:
        """Keys (0) or values (1) of a request as the cache has them, after rounding."""
        rows = (self.k, self.v)[which][request].double()
        kind = self.case.kind
        if kind in PER_TOKEN_HEAD:
            greatest = writers.GREATEST[CODES[kind]]
            scale = (rows.float().abs().amax(-1, keepdim=True) / greatest).clamp(min=1e-6)
        elif kind in CODES:
            scale = self.case.scales[which].reshape(-1, 1)
        else:
            return rows
        return writers.codes(rows, scale, CODES[kind]).double() * scale.double()

    def check(self, o: Tensor) -> None:
        """Hold an output against float64, row by row of the requests."""
        start, case = 0, self.case
        reach = None if case.window is None else case.window - 1
        for request, (count, _) in enumerate(self.step):
            expected, _ = reference(
                self.q[None, start : start + count],
                self.stored(0, request)[None],
                self.stored(1, request)[None],
                causal=case.causal,
                window=(reach, None if case.causal else reach),
                scale=self.scale,
                softcap=case.softcap,
                sink=case.sinks,
                alibi_slopes=None if case.slopes is None else torch.tensor(case.slopes),
            )
            assert_close(o[None, start : start + count], expected, case.dtype)
            start += count
        assert o[start:].isnan().all(), "rows of padding are left as they are"


CASES = {
    "bf16": Case(),
    "f16": Case(torch.float16),
    "heads before slots": Case(layout=KVCacheLayout.LBHNC),
    "layers within pages": Case(layout=KVCacheLayout.BLNHC),
    "layers within pages, fp8, heads before slots": Case(kind="fp8", layout=KVCacheLayout.BLHNC),
    "head_size 72": Case(head_size=72),
    "head_size 256": Case(head_size=256),
    "window": Case(window=9),
    "window of one": Case(window=1),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "sinks of bf16 with a window": Case(
        sinks=torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.bfloat16), window=5
    ),
    "ALiBi": Case(slopes=[0.5, 0.25, 0.125, 0.0625]),
    "not causal": Case(causal=False),
    "not causal, window": Case(causal=False, window=9),
    "fp8": Case(kind="fp8"),
    "fp8, heads before slots": Case(kind="fp8_e4m3", layout=KVCacheLayout.LBHNC),
    "fp8_e5m2": Case(torch.float16, kind="fp8_e5m2"),
    "fp8, scales of heads": Case(
        kind="fp8", scales=(torch.tensor([0.01, 0.04]), torch.tensor([0.03, 0.02]))
    ),
    "fp8, sinks, window, softcap": Case(kind="fp8", sinks=torch.ones(HEADS), window=9, softcap=2.0),
    "fp8_per_token_head": Case(kind="fp8_per_token_head"),
    "int8_per_token_head": Case(kind="int8_per_token_head"),
    "int8_per_token_head, heads before slots": Case(
        torch.float16, kind="int8_per_token_head", layout=KVCacheLayout.LBHNC
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_prompts_chunks_and_tokens(name: str, device: str) -> None:
    layer = Layer(CASES[name])
    layer.check(layer.run(device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_single_tokens(device: str) -> None:
    layer = Layer(Case(), [(1, 33), (1, 1), (1, 64)])
    layer.check(layer.run(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_bits_do_not_depend_on_other_requests(name: str, device: str) -> None:
    whole = Layer(CASES[name])
    expected, start = whole.run(device), 0
    for request, (count, keys) in enumerate(STEP):
        one = Layer(CASES[name], [(count, keys)])
        one.q, one.table = whole.q[start : start + count], whole.table[request : request + 1]
        one.hold(whole.layers)
        if count:
            assert torch.equal(one.run(device), expected[start : start + count])
        start += count


@pytest.mark.parametrize("device", DEVICES)
def test_the_longest_query_may_be_overstated(device: str) -> None:
    layer = Layer(Case())
    layer.check(layer.run(device, max_query_len=64))


def test_queries_between_keys_and_values() -> None:
    layer = Layer(Case())
    wide = torch.randn(len(layer.q), 3, HEADS, 64).to(torch.bfloat16)
    wide[:, 1] = layer.q
    layer.q = wide[:, 1]
    layer.check(layer.run())


def test_sinks_are_taken_over_when_weights_are_loaded() -> None:
    sinks = torch.nn.Parameter(torch.full((HEADS,), torch.nan, dtype=torch.bfloat16), False)
    layer = Layer(Case(sinks=sinks))
    sinks.data.copy_(torch.tensor([0.5, -1.0, 3.0, 0.0]))
    layer.impl.process_weights_after_loading(torch.bfloat16)
    layer.check(layer.run())


def test_a_cache_that_vllm_replaces_is_seen() -> None:
    layer = Layer(Case(kind="fp8"))
    first = layer.run()
    layer.hold(layer.layers.clone())
    layer.cache[..., 64:] = 0
    rows = sum(count for count, _ in STEP)
    assert layer.run()[:rows].eq(0).all() and not first[:rows].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["window", "fp8", "int8_per_token_head"])
def test_a_step_passes_the_checks_of_lengths_and_tables(name: str, device: str) -> None:
    layer = Layer(CASES[name])
    blockflash.set_checks(True)
    try:
        with torch.inference_mode():  # As vLLM calls it.
            layer.check(layer.run(device))
    finally:
        blockflash.set_checks(False)


def test_calls_are_counted() -> None:
    layer, before = Layer(Case()), blockflash.stats()["attention_decode"].kernel
    layer.run()
    assert blockflash.stats()["attention_decode"].kernel == before + 1


def test_wrong_shapes_are_errors() -> None:
    layer = Layer(Case())
    with pytest.raises(ValueError, match=r"kv_cache has shape .* expected \[pages, heads, slots"):
        layer.impl._pages = None
        layer.hold(layer.layers[..., :64])
        layer.run()
    layer = Layer(Case())
    layer.q = layer.q[..., :32]
    with pytest.raises(ValueError):
        layer.run()
