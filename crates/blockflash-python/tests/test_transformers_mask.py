"""Every mask that transformers can ask for, against the dense mask that it makes itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, masking_utils

import blockflash.transformers
from blockflash import _stats, _transformers_mask
from blockflash.transformers import Mask, block_attention, block_attention_mask

KEYS = 24
CONFIG = LlamaConfig(sliding_window=5, attention_chunk_size=8)
CONFIG._attn_implementation = "block_attention"


def _mask(*rows: str) -> Tensor:
    """A 2-D attention mask, rows of 0 and 1 that are repeated to the number of keys."""
    return torch.tensor([[int(c) for c in row for _ in range(KEYS // len(row))] for row in rows])


PADDINGS = {
    "none": None,
    "ones": _mask("1", "1"),
    "left": _mask("011", "111"),
    "right": _mask("110", "111"),
    "left everywhere": _mask("011", "001"),
    "both sides": _mask("0110", "1111"),
    "left and right": _mask("011", "110"),
    "holes": _mask("110101", "111111"),
    "empty row": _mask("000", "111"),
}
PATTERNS: dict[str, Callable] = {
    "causal": masking_utils.causal_mask_function,
    "full": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "wide window": masking_utils.sliding_window_causal_mask_function(100),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "two windows": masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(9),
        masking_utils.sliding_window_bidirectional_mask_function(4),
    ),
    "chunked": masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
    "or": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 3),
    "and": masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (q + k) % 3 > 0
    ),
    "its own": lambda b, h, q, k: (k <= q) & (k != 5),
}
# Number of queries, number of keys, position of the first query and of the first key.
LENGTHS = {
    "prefill": (KEYS, KEYS, 0, 0),
    "continued": (7, KEYS, KEYS - 7, 0),
    "decoding": (1, KEYS, KEYS - 1, 0),
    "sliding cache": (3, 11, KEYS - 3, KEYS - 11),
    "static cache": (9, KEYS, 0, 0),
    "static, one token": (1, KEYS, 0, 0),
    "static, later": (4, KEYS, 6, 0),
    "cross": (9, KEYS - 2, 0, 0),
}


@pytest.fixture(autouse=True)
def _no_warnings_yet() -> Iterator[None]:
    blockflash.reset_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check(arguments: dict[str, Any], causal: bool, **options: Any) -> Tensor | Mask | None:
    """Attention by the mask of ours against the dense mask, and the mask of ours.

    Every mask runs on our kernels.
    """
    blockflash.reset_stats()
    torch.manual_seed(0)
    q_length, kv_length = arguments["q_length"], arguments["kv_length"]
    query = torch.randn(2, 4, q_length, 8)
    key, value = torch.randn(2, 2, 2, kv_length, 8)
    ours = block_attention_mask(**arguments)
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense = masking_utils.sdpa_mask(**(arguments | skips))
    module = SimpleNamespace(is_causal=causal, num_key_value_groups=2)
    o, _ = block_attention(module, query, key, value, ours, **options)
    expected = _expected(query, key, value, dense, **options)
    # Rows without any key have no result that the others agree on; ours is finite.
    assert o.isfinite().all() or not isinstance(ours, Mask)
    seen = dense.any(3)[:, 0]
    torch.testing.assert_close(o[seen], expected[seen], rtol=1e-5, atol=1e-5)
    assert blockflash.stats()["transformers"] == _stats.Calls(1, {})
    return ours


def _expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dense: Tensor,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Attention in float64, `[B, S, H, D]`."""
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = query @ key.mT * query.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    if position_bias is not None:
        scores = scores + position_bias.double()
    scores = scores.masked_fill(~dense, -torch.inf)
    top = scores.amax(3, keepdim=True).clamp(-1e30)
    weights = (scores - top).exp()
    total = weights.sum(3, keepdim=True)
    if s_aux is not None:
        total = total + (s_aux.double()[:, None, None] - top).exp()
    return (weights / total @ value).transpose(1, 2).float()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks(pattern: str, padding: Tensor | None, lengths: tuple[int, int, int, int]) -> None:
    causal = pattern not in ("full", "both sides")
    arguments = {
        "batch_size": 2,
        "q_length": lengths[0],
        "kv_length": lengths[1],
        "q_offset": lengths[2],
        "kv_offset": lengths[3],
        "mask_function": PATTERNS[pattern],
        "attention_mask": None if padding is None else padding.bool(),
        "allow_is_causal_skip": causal and pattern not in ("or", "and", "its own"),
        "allow_is_bidirectional_skip": not causal,
    }
    _check(arguments, causal)
    _check(arguments, causal, softcap=2.0, s_aux=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    bias = torch.linspace(-2, 2, 4 * lengths[0] * lengths[1]).view(1, 4, lengths[0], -1)
    _check(arguments, causal, position_bias=bias)


# Number of queries, number of keys, position of the first query and of the first key.
STATIC = {
    "one token": (1, KEYS, torch.tensor(9), 0),
    "one token, full": (1, KEYS, torch.tensor(KEYS - 1), 0),
    "tokens": (4, KEYS, torch.tensor(6), 0),
    "sliding": (1, KEYS, 9, 0),
    "sliding, full": (1, 5, KEYS - 1, KEYS - 5),
}


@pytest.mark.parametrize("lengths", STATIC.values(), ids=STATIC)
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_static_caches(pattern: str, padding: Tensor | None, lengths: tuple[Any, ...]) -> None:
    """Queries that continue a static cache, which transformers asks dense masks for."""
    q_length, kv_length, q_offset, kv_offset = lengths
    end = int(q_offset) + q_length
    arguments = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": PATTERNS[pattern],
        # It ends with the last token.
        "attention_mask": None if padding is None else padding.bool()[:, :end],
        "allow_is_causal_skip": q_length > 1 and pattern not in ("or", "and", "its own"),
    }
    mask = _check(arguments, True)
    _check(arguments, True, softcap=2.0, s_aux=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    known = pattern in ("causal", "window", "wide window", "two windows")
    seen = arguments["attention_mask"]
    if known and (seen is None or seen[:, kv_offset:].all()):
        assert (
            isinstance(mask, Mask) and mask.options["seqused_k"].tolist() == [end - kv_offset] * 2
        )
    else:
        assert isinstance(mask, Tensor)
    if isinstance(q_offset, Tensor) and isinstance(mask, Mask):
        dense = mask.dense()
        q_offset += 1  # the cache does so when it is updated
        assert torch.equal(mask.dense(), dense)
        q_offset -= 1


def test_models_that_compute_with_masks() -> None:
    """They get tensors, also for one query."""
    for kind, expected in (("llama", Mask), ("falcon", Tensor), ("doge", Tensor)):
        config = SimpleNamespace(model_type=kind)
        mask = block_attention_mask(
            1, 1, 8, torch.tensor(3), allow_is_causal_skip=False, config=config
        )
        assert isinstance(mask, expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("create", ["causal", "sliding_window_causal"])
def test_packed(create: str, batch: int) -> None:
    """Sequences packed by `position_ids`, found by transformers and recognized by us."""
    positions = torch.cat([torch.arange(n) for n in (7, 1, 1, 10, 5)])[None]
    if batch == 2:
        positions = torch.cat([positions, positions.flip(1).argsort()])
    embeds = torch.empty(len(positions), KEYS, 0)
    function = getattr(masking_utils, f"create_{create}_mask")
    mask = function(CONFIG, embeds, None, None, position_ids=positions)
    assert isinstance(mask, Mask)
    q, k, v = torch.randn(3, batch, 4, KEYS, 8)
    o, _ = block_attention(SimpleNamespace(is_causal=True), q, k, v, mask)
    dense = mask.dense().expand(batch, 1, KEYS, KEYS)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(o.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="this version of transformers does not map positions",
)
def test_packed_and_inconsistent() -> None:
    """Positions that jump within a sequence are not taken for packed sequences."""
    segments = torch.tensor([[0] * 12 + [1] * 12])
    positions = torch.arange(KEYS)[None] * 2
    inner = masking_utils.sliding_window_causal_mask_function(5)
    function = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(segments),
        masking_utils.remap_positions_for_packed_sequence(inner, positions),
    )
    mask = block_attention_mask(1, KEYS, KEYS, mask_function=function, allow_is_causal_skip=False)
    assert isinstance(mask, Tensor)


def test_what_reaches_the_kernels() -> None:
    """Which masks are ours, so that none is handed to SDPA by mistake."""

    def kind(pattern: str, padding: str, lengths: str) -> type:
        q, k, q_offset, kv_offset = LENGTHS[lengths]
        mask = PADDINGS[padding]
        mask = None if mask is None else mask.bool()
        function = PATTERNS[pattern]
        full = pattern in ("full", "both sides")
        return type(
            block_attention_mask(2, q, k, q_offset, kv_offset, function, mask, not full, full)
        )

    nothing = type(None)
    for pattern in ("causal", "full", "wide window"):
        assert kind(pattern, "none", "prefill") is nothing
        assert kind(pattern, "ones", "decoding") is nothing
        for padding in ("left", "right", "left everywhere"):
            assert kind(pattern, padding, "prefill") is Mask
    for pattern in ("window", "both sides", "two windows"):
        for padding in ("none", "left", "right"):
            assert kind(pattern, padding, "prefill") is Mask
    assert kind("causal", "none", "static cache") is nothing
    assert kind("window", "none", "static cache") is Mask
    assert kind("causal", "none", "continued") is Mask
    assert kind("causal", "left", "decoding") is Mask
    assert kind("window", "left", "sliding cache") is Mask
    assert kind("full", "holes", "prefill") is Tensor
    for pattern in ("chunked", "or", "and", "its own"):
        assert kind(pattern, "left", "prefill") is Tensor


def test_no_warning_for_a_dense_mask() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for pattern in ("or", "its own", "chunked"):
                block_attention_mask(1, 8, 8, mask_function=PATTERNS[pattern])
            hole = torch.tensor([[True, False, True]])
            block_attention_mask(1, 3, 3, attention_mask=hole)
    texts = [str(warning.message) for warning in caught]
    assert not texts


def test_refusals() -> None:
    q = torch.randn(1, 2, 4, 8)
    module = SimpleNamespace(is_causal=True)
    for name in ("sinks", "indices", "cu_seq_lens_q"):
        with pytest.raises(blockflash.Unsupported, match=name):
            block_attention(module, q, q, q, None, **{name: torch.zeros(2)})
    with pytest.raises(blockflash.Unsupported, match="position_bias"):
        position_bias, double = torch.zeros(1, 2, 4, 4), q.double()
        block_attention(
            module, double, double, double, None, softcap=1.0, position_bias=position_bias
        )
    mask = Mask((1, 1, 4, 5), {}, lambda: None)
    with pytest.raises(ValueError, match="lengths"):
        block_attention(module, q, q, q, mask)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_masks_of_the_caller(kind: torch.dtype, heads: int) -> None:
    """Any mask of four dimensions, which is made a block mask of once for all layers."""
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 4, KEYS, 8)
    dense = torch.rand(2, heads, KEYS, KEYS) < 0.5
    dense[..., 0] = True
    mask = dense if kind == torch.bool else torch.where(dense, 0.0, torch.finfo(kind).min).to(kind)
    module = SimpleNamespace(is_causal=True)
    expected = _plain(q, k, v, dense)
    for _ in range(2):
        o, _ = block_attention(module, q, k, v, mask)
        torch.testing.assert_close(o.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
    assert blockflash.stats()["transformers"] == _stats.Calls(2, {})
    if kind == torch.bool:
        made = _transformers_mask._BLOCK_MASKS[mask]
        mask[..., 1] = True  # which is noticed
        o, _ = block_attention(module, q, k, v, mask)
        expected = _plain(q, k, v, dense)
        torch.testing.assert_close(o.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
        assert _transformers_mask._BLOCK_MASKS[mask][1] is not made[1]
        count = len(_transformers_mask._BLOCK_MASKS)
        del mask, dense
        assert len(_transformers_mask._BLOCK_MASKS) == count - 1


def _plain(q: Tensor, k: Tensor, v: Tensor, dense: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)


def test_image_ranges() -> None:
    """Tokens of an image see each other, as `block_sequence_ids` of transformers say."""
    if "block_sequence_ids" not in signature(masking_utils.create_causal_mask).parameters:
        pytest.skip("this version of transformers has no blocks in sequences")
    ids = torch.full((2, KEYS), -1)
    ids[0, 3:9], ids[1, 10:20] = 0, 1
    embeds = torch.empty(2, KEYS, 0)
    for create in ("causal", "sliding_window_causal"):
        function = getattr(masking_utils, f"create_{create}_mask")
        mask = function(CONFIG, embeds, None, None, block_sequence_ids=ids)
        assert isinstance(mask, Tensor) and mask[0, 0, 4, 8] and mask[1, 0, 10, 19]
        q, k, v = torch.randn(3, 2, 4, KEYS, 8)
        o, _ = block_attention(SimpleNamespace(is_causal=True), q, k, v, mask)
        torch.testing.assert_close(o.transpose(1, 2), _plain(q, k, v, mask), rtol=1e-5, atol=1e-5)
    assert blockflash.stats()["transformers"] == _stats.Calls(2, {})


def test_gradient_of_a_position_bias() -> None:
    q, k, v = torch.randn(3, 2, 4, KEYS, 8)
    bias = torch.randn(1, 4, KEYS, KEYS, requires_grad=True)
    module = SimpleNamespace(is_causal=False)
    mask = block_attention_mask(
        2, KEYS, KEYS, mask_function=PATTERNS["full"], attention_mask=PADDINGS["right"].bool(),
        allow_is_causal_skip=False, allow_is_bidirectional_skip=True,
    )  # fmt: skip
    assert isinstance(mask, Mask) and "cu_seqlens_q" in mask.options
    o, _ = block_attention(module, q, k, v, mask, position_bias=bias)
    dense = torch.where(PADDINGS["right"].bool()[:, None, None], bias, -torch.inf)
    expected = _plain(q, k, v, dense).transpose(1, 2)
    found, wanted = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (o, expected))
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert blockflash.stats()["transformers"] == _stats.Calls(1, {})


def test_a_mask_that_changes_in_inference_mode() -> None:
    """Nobody sees there that it does."""
    module = SimpleNamespace(is_causal=True)
    with torch.inference_mode():
        q, k, v = torch.randn(3, 2, 4, KEYS, 8)
        mask = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
        for _ in range(2):
            o, _ = block_attention(module, q, k, v, mask)
            expected = _plain(q, k, v, mask)
            torch.testing.assert_close(o.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
            mask[..., KEYS // 2 :] = True
    assert blockflash.stats()["transformers"] == _stats.Calls(2, {})


def test_dense_masks_in_graphs_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added to the scores by our kernels, as fake tensors show without a GPU."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    before = blockflash.stats()["transformers"].kernel
    with FakeTensorMode(), torch.no_grad():
        half = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = torch.empty(2, 4, 16, 64, **half), torch.empty(2, 2, KEYS, 64, **half)
        shown = torch.empty(2, 1, 16, KEYS, device="cuda", dtype=torch.bool)
        for mask in (shown, torch.empty_like(shown, dtype=torch.bfloat16)):
            o, _ = block_attention(torch.nn.Module(), q, k, k, mask)
            assert (o.shape, o.device.type) == ((2, 16, 4, 64), "cuda")
    assert blockflash.stats()["transformers"].kernel == before + 2
