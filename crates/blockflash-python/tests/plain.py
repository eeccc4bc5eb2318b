"""Plain attention in the type of its inputs, also on a GPU and for sequences of unequal lengths.

It is the "PyTorch implementation in the same type" of FlashAttention's rule for errors. Tests of
single options compare with `reference` instead, which is always f64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What softmax attention can be asked for, in flash-attn's terms."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    top_left: bool = False

    def visible(self, seqlens_q: Tensor, seqlens_k: Tensor, sq: int, sk: int) -> Tensor:
        """Which keys each query attends to, bool `[batch, sq, sk]`, for lengths `[batch]`."""
        device = seqlens_q.device
        row = torch.arange(sq, device=device)[None, :, None]
        key = torch.arange(sk, device=device)[None, None, :]
        lens_q, lens_k = seqlens_q[:, None, None], seqlens_k[:, None, None]
        position = row if self.top_left else row + lens_k - lens_q
        left, right = self.window
        visible = (row < lens_q) & (key < lens_k)
        if left >= 0:
            visible = visible & (key >= position - left)
        if self.causal or right >= 0:
            visible = visible & (key <= position + (0 if self.causal else right))
        return visible


def alibi(slopes: Tensor, seqlens_q: Tensor, seqlens_k: Tensor, sq: int, sk: int) -> Tensor:
    """What slopes `[batch, heads]` add to scores, `[batch, heads, sq, sk]`, for these lengths."""
    device = slopes.device
    row, key = (torch.arange(length, device=device) for length in (sq, sk))
    distance = row[:, None] + (seqlens_k - seqlens_q)[:, None, None] - key
    return -slopes[:, :, None, None] * distance.abs()[:, None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    softcap: float = 0.0,
    from_lse: bool = False,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O and lse in the type of q, `[B, Sq, H, D]` and `[B, H, Sq]`, every step rounded to it.

    `added` `[batch, heads, sq, sk]` is added to the scores.

    With `from_lse` it rounds where a backward pass has to: probabilities come from the rounded lse
    and from scores that are computed again, in another order.
    """
    group = q.size(2) // k.size(2)
    k, v = (tensor.repeat_interleave(group, dim=2) for tensor in (k, v))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scale = q.size(-1) ** -0.5

    def masked(scores: Tensor) -> Tensor:
        if softcap > 0.0:
            scores = (scores / softcap).tanh() * softcap
        if added is not None:
            scores = scores + added.to(scores.dtype)
        return scores.masked_fill(~visible[:, None], -torch.inf)

    scores = masked(q @ (k * scale).mT)
    lse = scores.logsumexp(-1)
    # A row without keys is 0, not NaN.
    empty = ~visible.any(-1)[:, None, :, None]
    if from_lse:
        again = masked((q @ k.mT) * scale)
        weights = (again - lse.masked_fill(empty[..., 0], 0.0)[..., None]).exp()
    else:
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v).transpose(1, 2), lse


def largest(difference: Tensor) -> Tensor:
    """The largest absolute element as a tensor without dimensions, NaN if there is one."""
    return difference.detach().double().abs().amax()
