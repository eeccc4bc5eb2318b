"""`blockflash.scaled_dot_product_attention` has torch's meaning, and says what it does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sdpa import LENGTHS, assert_close, qkv, with_gradients
from torch.nn.functional import scaled_dot_product_attention as torchs

import blockflash
from blockflash import scaled_dot_product_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_function(lengths: Any, heads: Any, causal: bool) -> None:
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1], "scale": 0.3}
    inputs = qkv(lengths, heads)
    ours = with_gradients(lambda *x: scaled_dot_product_attention(*x, **options), inputs)
    assert_close(ours, with_gradients(lambda *x: torchs(*x, **options), inputs))


def test_function_of_other_layouts() -> None:
    q, k, v = qkv()
    for inputs in (
        (q[0], k[0], v[0]),
        (q.mT.contiguous().mT, k[..., ::2].repeat(1, 1, 1, 2), v),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        (q.bfloat16(), k.bfloat16(), v.bfloat16()),
    ):
        tolerance = 2e-2 if inputs[0].dtype == torch.bfloat16 else 1e-5
        ours = scaled_dot_product_attention(*inputs, is_causal=True)
        assert_close([ours], [torchs(*inputs, is_causal=True)], tolerance)


def test_function_compiles() -> None:
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    inputs = qkv()
    assert_close(with_gradients(compiled, inputs), with_gradients(torchs, inputs))


def test_function_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        o = scaled_dot_product_attention(*qkv())
    assert o.dtype == torch.bfloat16


def test_no_keys() -> None:
    q, k, v = qkv((5, 0))
    assert torch.equal(scaled_dot_product_attention(q, k, v), torch.zeros_like(q))
    assert torch.equal(torchs(q, k, v), torch.zeros_like(q))


X = torch.ones(2, 4, 5, 16)
REFUSED = {
    "dropout": (X, X, X, {"dropout_p": 0.1}),
    "dimensions": (X[0, 0], X[0, 0], X[0, 0], {}),
    "all must have 3 or all 4": (X, X[0], X[0], {}),
    r"batches of \[1, 2\]": (X, X[:1], X[:1], {}),
    "4, 1, 1 heads": (X, X[:, :1], X[:, :1], {}),
    "1, 4, 4 heads": (X[:, :1], X, X, {}),
    "4, 2, 4 heads": (X, X[:, :2], X, {"enable_gqa": True}),
}


@pytest.mark.parametrize("match", REFUSED)
def test_refusals(match: str) -> None:
    """What torch computes by a backend that blockflash does not have."""
    *inputs, options = REFUSED[match]
    torchs(*inputs, **options)
    with pytest.raises(blockflash.Unsupported, match=match):
        scaled_dot_product_attention(*inputs, **options)


WRONG = {
    "exclude each other": (X, X, X, {"attn_mask": X, "is_causal": True}),
    "4, 2, 2 heads": (X, X[:, :2], X[:, :2], {}),
    "4 query heads are not a multiple of 3": (X, X[:, :3], X[:, :3], {"enable_gqa": True}),
    "key is bf16": (X, X.bfloat16(), X, {}),
    "attn_mask has shape": (X, X, X, {"attn_mask": X[..., :4]}),
    r"key has shape \[2, 5, 4, 8\]": (X, X[..., :8], X, {}),
}


@pytest.mark.parametrize("match", WRONG)
def test_wrong_arguments(match: str) -> None:
    """What torch refuses, too."""
    *inputs, options = WRONG[match]
    with pytest.raises(RuntimeError):
        torchs(*inputs, **options)
    with pytest.raises(ValueError, match=match):
        scaled_dot_product_attention(*inputs, **options)
