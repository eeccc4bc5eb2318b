"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators.

As for torch's own attention, `causal` and windows are not taken off: 4 operations for each pair of
query and key, head and element of a head, and 10 in the backward pass. Of a block mask its share
of visited blocks counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _native


def _lengths(offsets: Tensor, most: int) -> Sequence[int]:
    """Of the sequences, which all have the most rows where nothing can be read."""
    if type(offsets) is not Tensor or offsets.is_meta:
        return [most] * (offsets.shape[0] - 1)
    return offsets.diff().tolist()


def _pairs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int,
    max_k: int,
    block_mask: int,
) -> float:
    """Pairs of queries and keys, over all heads, times the elements of a head."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        pairs = q.shape[0] * q.shape[1] * k.shape[1]
    else:
        lengths = _lengths(cu_seqlens_q, max_q), _lengths(cu_seqlens_k, max_k)
        pairs = sum(rows * keys for rows, keys in zip(*lengths, strict=True))
    return pairs * q.shape[-2] * q.shape[-1] * _share(block_mask)


def _share(block_mask: int) -> float:
    if block_mask == 0 or not isinstance(block_mask, int):
        return 1
    from .block_mask import BlockMask

    return BlockMask(_native.BlockMask.of(block_mask), torch.device("cpu")).to("cpu").density


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    *numbers: Any,
    block_mask: int = 0,
    out_val: Any = None,
    **rest: Any,
) -> int:
    # left, right, top_left, scale, softcap, block_mask
    block_mask = numbers[5] if len(numbers) > 5 else block_mask
    return int(4 * _pairs(q, k, cu_seqlens_q, cu_seqlens_k, max_q, max_k, block_mask))


def _out(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Any = None, *a: Any, **b: Any) -> int:
    return _forward(q, k, v, *a, **b)


def _backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *options: Any,
    **named: Any,
) -> int:
    return _forward(q, k, v, *options, **named) * 5 // 2


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *rest: Any,
    out_val: Any = None,
    **named: Any,
) -> int:
    """All slots of the cache count, since a mask of pages or lengths may change on the device."""
    slots = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    return 4 * q.numel() * slots


def _append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, *a: Any, **b: Any) -> int:
    return _decode(q, k_cache, v_cache, *a, **b)


_FORMULAS = {
    "attention": _forward,
    "attention_forward": _forward,
    "attention_out": _out,
    "attention_backward": _backward,
    "attention_decode": _decode,
    "attention_append": _append,
}


def register(namespace: str, *names: str) -> None:
    """Registers the formulas of these operators."""
    # torch's module complains if there is no triton, which concerns other operators.
    log = logging.getLogger("torch.utils.flop_counter")
    level = log.level
    log.setLevel(logging.ERROR)
    from torch.utils.flop_counter import register_flop_formula

    log.setLevel(level)
    for name in names:
        operator = getattr(getattr(torch.ops, namespace), name)
        register_flop_formula(operator, get_raw=True)(_FORMULAS[name])
