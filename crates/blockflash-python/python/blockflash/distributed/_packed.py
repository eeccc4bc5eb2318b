"""Packed batches: sequences of different lengths, one after another in the rows of the ranks."""

from __future__ import annotations

from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

Offsets = tuple[int, ...]
"""Sequence `i` has the rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`, or none."""


def checked(cu_seqlens: Any) -> Offsets:
    """Offsets as numbers, which start at 0 and never descend."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.is_cuda:
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, but the host has to know it")
        cu_seqlens = cu_seqlens.tolist()
    try:
        offsets = tuple(index(offset) for offset in cu_seqlens)
    except TypeError:
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}, but must be numbers of rows") from None
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens is {list(offsets[:1])}...: the first offset must be 0")
    for at, (before, offset) in enumerate(pairwise(offsets)):
        if offset < before:
            raise ValueError(
                f"cu_seqlens[{at + 1}] is {offset}: offsets must not descend, the one before is "
                f"{before}"
            )
    return offsets


def on_device(cu_seqlens: Offsets, like: Tensor) -> dict[str, Any]:
    """The options of a call whose queries and keys are the same rows. The host does not wait."""
    made = {"dtype": torch.int32, "device": "cpu", "pin_memory": like.is_cuda}
    offsets = torch.tensor(cu_seqlens, **made).to(like.device, non_blocking=True)
    longest = max((end - start for start, end in pairwise(cu_seqlens)), default=0)
    return {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_q": longest, "max_k": longest,
    }  # fmt: skip
