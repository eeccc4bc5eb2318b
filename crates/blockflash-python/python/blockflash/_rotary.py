"""Rotary embedding by operations of torch, where no kernel of ours applies it."""

from __future__ import annotations

import torch
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Turns x `[..., heads, head_dim]` by its positions `[...]`.

    Tables are `[rows, rotary_dim / 2]`. What stands at no row of them is not turned.
    """
    inside = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
    places = positions.clamp(0, max(cos.shape[0] - 1, 0))
    cos, sin = cos[places].where(inside, 1), sin[places].where(inside, 0)
    return turn_by(x, cos, sin, interleaved)


def turn_by(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turns x `[..., heads, head_dim]` by a row `[..., rotary_dim / 2]` for each token.

    Only the first rotary_dim elements are turned. Computed in float32 or wider.
    """
    pair = -1 if interleaved else -2
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    shape = (rotary_dim // 2, 2) if interleaved else (2, rotary_dim // 2)
    a, b = turned.to(wide).unflatten(-1, shape).unbind(pair)
    c, s = (t.to(wide)[..., None, :] for t in (cos, sin))
    pairs = torch.stack((a * c - b * s, a * s + b * c), dim=pair)
    return torch.cat((pairs.flatten(-2).to(x.dtype), rest), dim=-1)


def positions_of(
    x: Tensor, starts: int | Tensor, cu_seqlens: Tensor | None, moving: bool = True
) -> Tensor:
    """Where the tokens of x stand, whose sequences start at `starts`, a number or `[batch]`.

    x is `[batch, seqlen, ...]` or packed `[total, ...]`. All tokens stand at the start if they are
    not `moving`.
    """
    if cu_seqlens is None:
        token = torch.arange(x.shape[1], device=x.device)[None] if moving else 0
        start = starts[:, None] if isinstance(starts, Tensor) else starts
        return torch.as_tensor(start + token, device=x.device).expand(x.shape[:2])
    sequence = sequence_of(x.shape[0], cu_seqlens).clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    start = starts[sequence] if isinstance(starts, Tensor) else starts
    if not moving:
        return torch.as_tensor(start, device=x.device).expand(x.shape[:1])
    return torch.arange(x.shape[0], device=x.device) - cu_seqlens[sequence] + start


def sequence_of(total: int, cu_seqlens: Tensor) -> Tensor:
    """The sequence of each row, one past the last for rows behind all sequences."""
    rows = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
