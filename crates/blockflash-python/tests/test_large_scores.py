"""Finite scores of any size, up to just below the limit of float32.

From 1e10 on a fused multiply-add in the exponent differs from the rounded maximum by hundreds of
powers of two.
"""

from __future__ import annotations

import pytest
import torch
from reference import assert_close, reference

import blockflash

BF16, F16 = torch.bfloat16, torch.float16
WHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SIZES = pytest.mark.parametrize(
    ("dtype", "value", "rows"),
    # torch's own test of large values is the first one.
    [(BF16, 133120.0, 1), (BF16, 133120.0, 300), (F16, 60000.0, 77), (BF16, 2.0**58, 130)],
)


@WHERE
@SIZES
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256, 512])
def test_equal_rows(
    device: str, dtype: torch.dtype, value: float, rows: int, head_dim: int
) -> None:
    q = torch.full((1, rows, 2, head_dim), value, dtype=dtype, device=device)
    for causal in (False, True):
        torch.testing.assert_close(blockflash.attention(q, q, q, causal=causal), q)
    for queries in (1, 5, min(rows, 40)):
        o = blockflash.attention_decode(q[:, :queries], q, q)
        torch.testing.assert_close(o, q[:, :queries])


@WHERE
@pytest.mark.parametrize("factor", [30.0, 1000.0, 30000.0, 1e9])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
def test_one_key_has_all_the_weight(device: str, factor: float, head_dim: int) -> None:
    torch.manual_seed(int(factor))
    q, k, v = torch.randn(3, 1, 200, 2, head_dim, device=device, dtype=BF16)
    # Distinct small integers in two elements of the keys: scores are exact in float32, and far from
    # each other. The first half of the queries prefers the largest, the other the smallest.
    number = torch.randperm(200, device=device).to(BF16)[:, None]
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., :2], k[..., 0], k[..., 1] = factor, (number // 16 * 16) * 64, number % 16 * 64
    q[:, 100:] *= -1
    v, weights = (v * 4).round(), (torch.randn_like(v) * 4).round()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    o = blockflash.attention(*inputs, causal=True)
    expected, _ = reference(*inputs, causal=True)
    assert_close(o.detach().cpu(), expected.detach(), BF16)
    found = torch.autograd.grad(o, inputs, weights)
    wanted = torch.autograd.grad(expected, inputs, weights.cpu().double())
    assert_close(found[2].cpu(), wanted[2].cpu().double(), BF16)
    assert all(gradient.isfinite().all() for gradient in found)
    decoded = blockflash.attention_decode(q[:, -3:].detach(), k.detach(), v.detach(), causal=True)
    torch.testing.assert_close(decoded, o[:, -3:].detach())
