"""Attention in float64 by its definition, and the tolerance that results are held to."""

from __future__ import annotations

import torch
from torch import Tensor

# Twice the unit roundoff of the element type, times a factor for the sums; f32 sums inside.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    top_left: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    visible: Tensor | None = None,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """`(o, lse)` in float64 on the CPU, or on another device; differentiable.

    q is `[B, Sq, Hq, D]`, k and v are `[B, Sk, Hk, D]`. `visible` `[B, Hq, Sq, Sk]` restricts which
    keys the queries attend to, besides the other masks.
    """
    q, k, v = (t.to(device).double() for t in (q, k, v))
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    (_, seqlen_q, _, _), seqlen_k = q.shape, k.shape[1]
    query, key = (torch.arange(length, device=device) for length in (seqlen_q, seqlen_k))
    query = query[:, None]
    if bias is not None:
        scores = scores + bias.to(device).double()
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(device).double()[..., None, None]
        scores = scores - slopes * (query + seqlen_k - seqlen_q - key).abs()
    position = query + (0 if top_left else seqlen_k - seqlen_q)
    left, right = window
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        right = 0
    if left is not None:
        hidden |= key < position - left
    if right is not None:
        hidden |= key > position + right
    if visible is not None:
        hidden = hidden | ~visible.to(device)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        logits = sink.to(device).double()[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.logsumexp(torch.cat((scores, logits), dim=-1), dim=-1)
    else:
        lse = torch.logsumexp(scores, dim=-1)
    # A row without keys has the output 0.
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weights = torch.exp(scores - finite[..., None]).masked_fill(hidden | scores.isneginf(), 0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Hold a result against float64, relative to the size of its values."""
    assert found.shape == expected.shape
    if found.numel() == 0:
        return
    infinite = torch.isinf(expected)
    assert torch.equal(torch.isinf(found), infinite)
    error = (found.double() - expected).masked_fill(infinite, 0).abs().max()
    size = expected.masked_fill(infinite, 0).abs().max().clamp(min=1)
    assert error <= TOLERANCE[dtype] * size, f"error {error:.2e} at values up to {size:.2e}"
