"""Every mask that transformers can ask for, against the dense mask that it makes itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, masking_utils

import blockflash.transformers
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
    """Attention by the mask of ours against the dense mask, and the mask of ours."""
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
    return ours


def _expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dense: Tensor,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention in float64, `[B, S, H, D]`."""
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = query @ key.mT * query.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
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


def test_one_warning_for_each_reason() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for pattern in ("or", "its own", "chunked"):
                block_attention_mask(1, 8, 8, mask_function=PATTERNS[pattern])
            hole = torch.tensor([[True, False, True]])
            block_attention_mask(1, 3, 3, attention_mask=hole)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2, texts
    assert "mask function of its own" in texts[0] and "padding between" in texts[1]


def test_refusals() -> None:
    q = torch.randn(1, 2, 4, 8)
    module = SimpleNamespace(is_causal=True)
    for name in ("sinks", "indices", "cu_seq_lens_q"):
        with pytest.raises(blockflash.Unsupported, match=name):
            block_attention(module, q, q, q, None, **{name: torch.zeros(2)})
    with pytest.raises(blockflash.Unsupported, match="position_bias"):
        block_attention(module, q, q, q, None, softcap=1.0, position_bias=torch.zeros(1, 2, 4, 4))
    mask = Mask((1, 1, 4, 5), {}, lambda: None)
    with pytest.raises(ValueError, match="lengths"):
        block_attention(module, q, q, q, mask)
