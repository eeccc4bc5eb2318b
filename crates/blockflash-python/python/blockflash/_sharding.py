"""Attention of torch's `DTensor`: which placements the operators take, and how they are called.

Operators that write (`attention_append`, `attention_out`) have no rule, so they raise: a write into
a tensor that torch has redistributed for the call would be lost.

Imported when the first one comes: torch's module takes long to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from . import _native, _ops

_OPS = torch.ops.blockflash
_BLOCK_MASK = list(_ops.DEFAULTS).index("block_mask") - 3
"""Its place among the arguments behind cu_seqlens_q and cu_seqlens_k."""


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The operator `attention`, `(o, lse)`; torch redistributes positional arguments alone."""
    return _OPS.attention.default(q, k, v, *(_ops.DEFAULTS | options).values())


class _Rule:
    """Placements of all tensors that go with one of q."""

    def __init__(self, q: Any, k: Any, sink: Any, cu_seqlens: Any, numbers: Sequence[Any]) -> None:
        # Arguments at the end that have their defaults are left out.
        block_mask = numbers[_BLOCK_MASK] if len(numbers) > _BLOCK_MASK else 0
        self.packed = cu_seqlens is not None
        self.has_sink = sink is not None
        self.kinds = ["whole"]
        batch, heads = (1, 1) if block_mask == 0 else _native.BlockMask.of(block_mask).shape[:2]
        if not self.packed and batch == 1:
            self.kinds.append("batch")
        if heads == 1 and _divides(k.shape[-2], q, k):
            self.kinds.append("heads")

    def rows(self, kind: str) -> Any:
        """Of q, k, v, o and their gradients."""
        return {"whole": Replicate(), "batch": Shard(0), "heads": Shard(1 if self.packed else 2)}[
            kind
        ]

    def lse(self, kind: str) -> Any:
        return Shard(0 if self.packed else 1) if kind == "heads" else self.rows(kind)

    def logits(self, kind: str) -> Any:
        """Of the sink."""
        return Shard(0) if kind == "heads" else Replicate()

    def options(self, kind: str) -> list[Any]:
        """Of sink, cu_seqlens_q and cu_seqlens_k, where they are given."""
        return [self.logits(kind)] * self.has_sink + [Replicate()] * (2 * self.packed)


def _divides(heads_k: int, *specs: Any) -> bool:
    """Whether each rank gets whole groups of heads, as the placements of q and k are now."""
    ranks = 1
    for spec in specs:
        count = 1
        for dim, placement in enumerate(spec.placements):
            if placement.is_shard() and placement.dim == len(spec.shape) - 2:
                count *= spec.mesh.size(dim)
        ranks = max(ranks, count)
    return ranks > 1 and heads_k % ranks == 0


@register_sharding(_OPS.attention.default)
def _forward(
    q: Any,
    k: Any,
    v: Any,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *numbers: Any,
) -> list[tuple[list[Any], list[Any]]]:
    rule = _Rule(q, k, sink, cu_seqlens_q, numbers)
    return [
        ([rule.rows(kind), rule.lse(kind)], [rule.rows(kind)] * 3 + rule.options(kind))
        for kind in rule.kinds
    ]


@register_sharding(_OPS.attention_backward.default)
def _backward(
    grad_o: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *numbers: Any,
) -> list[tuple[list[Any], list[Any]]]:
    rule = _Rule(q, k, sink, cu_seqlens_q, numbers)
    found = []
    for kind in rule.kinds:
        rows, lse_rows = rule.rows(kind), rule.lse(kind)
        # Each batch entry has a part of the gradient of the sink.
        of_sink = Partial() if kind == "batch" else rule.logits(kind)
        inputs = [rows, *[lse_rows] * (grad_lse is not None), *[rows] * 4, lse_rows]
        outputs = [rows] * 3 + [of_sink if rule.has_sink else Replicate()]
        found.append((outputs, inputs + rule.options(kind)))
    return found


def _whole(count: int) -> list[Any]:
    return [Replicate()] * count


@register_sharding(_OPS.attention_decode.default)
def _decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqused_k: Any = None,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sink: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    page_lists: Any = None,
    page_counts: Any = None,
    *numbers: Any,
) -> list[tuple[list[Any], list[Any]]]:
    packed = cu_seqlens_q is not None
    given = (
        seqused_k, block_table, cu_seqlens_q, cu_seqlens_k, sink, rotary_cos, rotary_sin,
        page_lists, page_counts,
    )  # fmt: skip
    count = sum(tensor is not None for tensor in given)
    found = [(_whole(2), _whole(3 + count))]
    if not packed:
        # Pages belong to no entry of the batch.
        cache = Shard(0) if block_table is None else Replicate()
        entries = (Shard(0), Shard(0), None, None, *_whole(3), Shard(0), Shard(0))
        found.append(([Shard(0)] * 2, [Shard(0), cache, cache, *_chosen(entries, given)]))
    if _divides(k_cache.shape[-2], q, k_cache):
        rows, lse = (Shard(1), Shard(0)) if packed else (Shard(2), Shard(1))
        heads = (*_whole(4), Shard(0), *_whole(2), Shard(1), Replicate())
        found.append(([rows, lse], [rows, Shard(2), Shard(2), *_chosen(heads, given)]))
    return found


def _chosen(placements: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The placements of the tensors that are given."""
    pairs = zip(placements, given, strict=True)
    return [placement for placement, tensor in pairs if tensor is not None]


@register_sharding(_OPS.attention_merge.default)
def _merge(parts_o: Any, parts_lse: Any) -> list[tuple[list[Any], list[Any]]]:
    # o is `[parts, rows, heads, D]`, and lse `[parts, heads, rows]`.
    return [
        (_whole(2), _whole(2)),
        ([Shard(0), Shard(1)], [Shard(1), Shard(2)]),
        ([Shard(1), Shard(0)], [Shard(2), Shard(1)]),
    ]
