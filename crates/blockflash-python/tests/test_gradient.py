"""Gradients of `blockflash.attention`, and that none is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import TOLERANCE, reference
from test_attention import DTYPES, LENGTHS, operands
from torch import Tensor

import blockflash


def assert_gradients(inputs: list[Tensor], o: Tensor, expected: Tensor) -> None:
    """Hold the gradients of o against those of the same value in float64."""
    weights = torch.randn(o.shape).to(o.dtype)
    found = torch.autograd.grad(o, inputs, weights)
    wanted = torch.autograd.grad(
        expected, inputs, weights.double(), retain_graph=True, materialize_grads=True
    )
    for gradient, exact in zip(found, wanted, strict=True):
        assert gradient.shape == exact.shape and gradient.dtype == o.dtype
        size = exact.abs().max().clamp(min=1) if exact.numel() else 1
        assert torch.allclose(gradient.double(), exact.double(), 0, 4 * TOLERANCE[o.dtype] * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 4), (4, 0)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "top_left": True}, {"scale": 0.4}]
)
def test_full_and_causal(
    dtype: torch.dtype, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    inputs = operands(lengths, heads=(6, 2), dtype=dtype, grad=True)
    o = blockflash.attention(*inputs, **options)
    assert_gradients(inputs, o, reference(*inputs, **options)[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "top_left": True}])
def test_packed(options: dict[str, Any]) -> None:
    starts = [torch.tensor(of, dtype=torch.int32) for of in ([0, 5, 5, 14], [0, 7, 9, 15])]
    inputs = [t.detach()[0].requires_grad_() for t in operands((14, 15), batch=1)]
    q, k, v = inputs
    o = blockflash.attention(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=9, max_seqlen_k=7,
        **options,
    )  # fmt: skip
    parts = []
    for i in range(3):
        rows, keys = (slice(*of[i : i + 2].tolist()) for of in starts)
        parts.append(reference(q[None, rows], k[None, keys], v[None, keys], **options)[0][0])
    assert_gradients(inputs, o, torch.cat(parts))


@pytest.mark.parametrize("which", range(3))
def test_one_input_requires_a_gradient(which: int) -> None:
    inputs = operands()
    inputs[which].requires_grad_()
    blockflash.attention(*inputs, causal=True).sum().backward()
    assert inputs[which].grad is not None


@pytest.mark.parametrize(
    "options",
    [
        {"window": (3, None)},
        {"window": (3, 0)},
        {"causal": True, "window": (3, None)},
        {"softcap": 2.0},
        {"sink": torch.zeros(4)},
        {"out": torch.empty(2, 17, 4, 16)},
    ],
)
def test_without_a_gradient(options: dict[str, Any]) -> None:
    with pytest.raises(blockflash.Unsupported, match="gradient"):
        blockflash.attention(*operands(grad=True), **options)
    with torch.no_grad():
        blockflash.attention(*operands(grad=True), **options)


def test_sink_requires_a_gradient() -> None:
    with pytest.raises(blockflash.Unsupported, match="sink"):
        blockflash.attention(*operands(), sink=torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_lse(options: dict[str, Any]) -> None:
    for heads in ((4, 4), (4, 2)):
        inputs = operands((7, 12), heads=heads, grad=True)
        o, lse = blockflash.attention(*inputs, return_lse=True, **options)
        expected_o, expected_lse = reference(*inputs, **options)
        assert_gradients(inputs, lse, expected_lse)
        o, lse = blockflash.attention(*inputs, return_lse=True, **options)
        weights = torch.randn(4)[:, None]
        both = o.sum((2, 3)) + (lse * weights).sum(1)
        expected = expected_o.sum((2, 3)) + (expected_lse * weights).sum(1)
        assert_gradients(inputs, both, expected)


def test_second_derivative() -> None:
    inputs = operands(grad=True)
    with pytest.raises(blockflash.Unsupported, match="once"):
        torch.autograd.grad(blockflash.attention(*inputs).sum(), inputs, create_graph=True)


def test_operators_without_autograd_lose_nothing() -> None:
    q, k, v = operands(grad=True)
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        torch.ops.blockflash_library.attention_forward(q, k, v)
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        torch.ops.blockflash_library.attention_out(q, k, v, torch.empty_like(q))
    # A native kernel cannot see who requires a gradient: torch warns that there is none.
    o = torch.ops.blockflash.attention_forward(q, k, v)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        o.sum().backward()
