"""The choice of the blocks of keys that queries attend to.

| operator | what it is |
|---|---|
| `block_scores` | scores of blocks of keys for each query |
| `top_k` | lists of the blocks with the largest scores |

They are operators of torch like those of `_ops`. Scores have no gradient: differentiating them
raises. Lists are places, not numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native
from ._arguments import UNLIMITED, lowered, refuse_types, sides
from ._index import allocate_like, both, call, register

_OPS = torch.ops.blockflash
_REDUCTIONS = ("max", "mean")


def block_scores(
    q: Tensor,
    k: Tensor,
    granularity: int,
    *,
    groups: int | None = None,
    weights: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNLIMITED,
    reduction: str = "max",
    relu: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Scores of blocks of keys for each query, by the heads of an index.

    The score of a block for a query and a group of heads is the maximum or the mean, over the keys
    of the block that the query sees, of the sum over the heads of the group of
    `weights * activation(scale * q @ k)`, in float32; -inf for a block without such a key, and NaN
    if one of the summands is. Nothing larger than the result is stored. Lengths and tables are read
    on the device at each call, as `index_attention` describes it.

    On a GPU the element types are float16 and bfloat16, the head dimension is a multiple of 8 up to
    256, `granularity` is 1, 4, 16, 64 or 128, and pages have a multiple of 16 slots. The CPU takes
    every call, also in float32. There is no gradient.

    Args:
        q: Queries of the index, `[B, Sq, H, D]`, or packed `[Tq, H, D]` with `cu_seqlens_q`.
        k: Its keys, as `index_attention` takes them, in Hk heads.
        granularity: Tokens of a block.
        groups: How many scores each query and block has: neighbouring heads are a group. A multiple
            of Hk that divides H; Hk by default.
        weights: float32 `[rows, H]`, or in the shape of q without D; 1 by default.
        seqused_k: As in `index_attention`.
        block_table: As in `index_attention`.
        cu_seqlens_q: As in `index_attention`.
        cu_seqlens_k: As in `index_attention`.
        max_seqlen_q: As in `index_attention`.
        max_seqlen_k: As in `index_attention`.
        causal: A query sees the keys up to its own.
        window: As in `index_attention`.
        reduction: `"max"` or `"mean"`.
        relu: Whether `scale * q @ k` becomes 0 where it is negative.
        scale: Factor of `q @ k`, positive.

    Returns:
        float32 `[groups, rows, blocks]`: rows are `Tq`, or `B * Sq`, sequence by sequence, and
        blocks those of the capacity.

    Raises:
        Unsupported: No kernel takes the call, or a gradient would be lost.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    refuse_types(q=q, k=k)
    q, k, _ = lowered(q, k, k)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {_REDUCTIONS}")
    both(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    both(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    if weights is not None:
        refuse_types(weights=weights)
        if weights.dim() > 2:
            if weights.shape != q.shape[:-1]:
                shapes = f"{list(weights.shape)}, expected {list(q.shape[:-1])}"
                raise ValueError(f"weights has shape {shapes}, or [rows, H]")
            weights = weights.flatten(0, -2)
    left, right = sides(causal, window)
    rows = (max_seqlen_q or 0, max_seqlen_k or 0, left, right)
    lengths = (seqused_k, cu_seqlens_q, cu_seqlens_k, block_table)
    numbers = (granularity, k.shape[-2] if groups is None else groups)
    return call(
        _OPS.block_scores.default, q, k, weights, *lengths, *numbers, *rows,
        reduction == "mean", relu, scale,
    )  # fmt: skip


def top_k(
    scores: Tensor,
    k: int,
    granularity: int,
    *,
    seqused_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch: int | None = None,
    capacity: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNLIMITED,
    first: int = 0,
    last: int = 0,
) -> Tensor:
    """The blocks with the largest scores for each query: `lists` of `index_attention`.

    A query chooses among the blocks that hold keys that it sees. Of these, the ones below `first`
    and the `last` ones are chosen whatever their scores are, and then those with the largest
    scores, of equal scores the lower ones, until the list is full; none whose score is -inf or NaN.
    The scores of other blocks are not read, and lengths are read on the device at each call. The
    result is the same in every run.

    On a GPU `k` is at most 2048, there are up to 2**20 blocks, and `granularity` is 1, 4, 16, 64 or
    128. The CPU takes every call.

    Args:
        scores: float32 `[groups, rows, blocks]`, such as those of `block_scores`, or
            `[rows, blocks]` for one group, with contiguous rows of blocks.
        k: Blocks of a list, at least `first + last`.
        granularity: Tokens of a block.
        seqused_k: int32 `[B]`: how many keys each sequence has. By default all have the capacity.
        cu_seqlens_q: int32 `[B + 1]`: sequence `i` has the rows `cu_seqlens_q[i]` to
            `cu_seqlens_q[i + 1]`.
        cu_seqlens_k: int32 `[B + 1]`: the offsets of packed keys, which tell the lengths.
        max_seqlen_q: The most queries of a sequence, needed with `cu_seqlens_q`.
        max_seqlen_k: The most keys of a sequence, needed with `cu_seqlens_k`.
        batch: How many sequences have equally many of the rows, by default those that lengths or
            offsets tell. Needed with `causal` or `window` where there are neither.
        capacity: The most keys of a sequence, if they do not fill the last block.
        causal: A query sees the keys up to its own.
        window: A query at key `p` sees the keys `p - window[0]` to `p + window[1]`; None is
            unlimited.
        first: Blocks at the start that are always chosen.
        last: Blocks up to that of the last key that a query sees that are always chosen.

    Returns:
        int32 `[groups, rows, k]`: blocks, ascending, and -1 behind the last one.

    Raises:
        Unsupported: No kernel takes the call.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    refuse_types(scores=scores)
    both(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    both(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    if min(first, last) < 0 or first + last > k:
        raise ValueError(f"first and last are {first} and {last}, expected at most {k} together")
    if scores.dim() == 2:
        scores = scores.unsqueeze(0)
    if batch is None:
        batch = _sequences(seqused_k, cu_seqlens_q, cu_seqlens_k, causal, window)
    if capacity is None:
        capacity = scores.shape[-1] * granularity
    left, right = sides(causal, window)
    rows = (max_seqlen_q or 0, max_seqlen_k or 0, left, right)
    lengths = (seqused_k, cu_seqlens_q, cu_seqlens_k)
    # Places have no gradient, and nothing is lost by that.
    return call(
        _OPS.top_k.default, scores.detach(), k, *lengths, granularity, batch, capacity, *rows,
        first, last,
    )  # fmt: skip


def _sequences(
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None],
) -> int:
    """How many sequences the rows are of, which a mask needs to know."""
    if seqused_k is not None:
        return seqused_k.shape[0]
    for offsets in (cu_seqlens_q, cu_seqlens_k):
        if offsets is not None:
            return offsets.shape[0] - 1
    if causal or window != UNLIMITED:
        raise ValueError("batch is None, expected how many sequences the rows of scores are of")
    return 1


def _scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    granularity: int,
    groups: int,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    mean: bool,
    relu: bool,
    scale: float,
) -> Tensor:
    found = _empty_scores(q, k, cu_seqlens_q, cu_seqlens_k, block_table, granularity, groups, max_k)
    rest = (
        found, weights, seqused_k, block_table, cu_seqlens_q, cu_seqlens_k, granularity, max_q,
        max_k, left, right, mean, relu, scale,
    )  # fmt: skip
    try:
        _native.block_scores(q, k, *rest)
    except _native.Misaligned:
        q = q.clone(memory_format=torch.contiguous_format)
        _native.block_scores(q, k, *rest)
    return found


def _empty_scores(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    granularity: int,
    groups: int,
    max_k: int,
) -> Tensor:
    if granularity < 1 or groups < 0 or max_k < 0:
        raise ValueError(
            f"granularity is {granularity}, groups are {groups}, and max_seqlen_k is {max_k}"
        )
    rows = q.shape[0] * q.shape[1] if cu_seqlens_q is None else q.shape[0]
    if cu_seqlens_k is not None:
        capacity = torch.sym_min(max_k, k.shape[0])
    elif block_table is not None:
        capacity = block_table.shape[1] * k.shape[1]
    else:
        capacity = k.shape[1]
    blocks = (capacity + granularity - 1) // granularity
    return q.new_empty((groups, rows, blocks), dtype=torch.float32)


def _fake_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    granularity: int,
    groups: int,
    max_q: int,
    max_k: int,
    *rest: Any,
) -> Tensor:
    return _empty_scores(q, k, cu_seqlens_q, cu_seqlens_k, block_table, granularity, groups, max_k)


def _top_k(scores: Tensor, k: int, *rest: Any) -> Tensor:
    chosen = _fake_top_k(scores, k, *rest)
    _native.top_k(scores, chosen, allocate_like(scores), k, *rest)
    return chosen


def _fake_top_k(scores: Tensor, k: int, *rest: Any) -> Tensor:
    if k < 0:
        raise ValueError(f"k is {k}")
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int32)


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    register(library, "block_scores", _scores, _fake_scores)
    register(library, "top_k", _top_k, _fake_top_k)
    return library


_LIBRARY = _register()
