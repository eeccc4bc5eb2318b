"""Attention of torch's `DTensor`: which placements the operators take, and how they are called.

Operators that write, such as `attention_append`, have no rule, so they raise: a write into
a tensor that torch has redistributed for the call would be lost.

Imported when the first one comes: torch's module takes long to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from . import _native
from ._schema import ATTENTION, DECODE

_OPS = torch.ops.blockflash
_RULES: dict[str, Callable[..., Any]] = {}
"""Rules that are not registered yet, by the names of their operators."""


def place() -> None:
    """Registers the rules of the operators that are there; the modules that define them call it."""
    for name in [name for name in _RULES if hasattr(_OPS, name)]:
        register_sharding(getattr(_OPS, name).default)(_RULES.pop(name))


def _rule_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES[name] = rule
        return rule

    return keep


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The operator `attention`, `(o, lse)`; torch redistributes positional arguments alone."""
    place()
    return _OPS.attention.default(q, k, v, *ATTENTION.ordered(options))


class _Rule:
    """Placements of all tensors that go with one of q."""

    def __init__(self, q: Any, k: Any, options: Sequence[Any]) -> None:
        named = ATTENTION.named(options)
        self.packed = named["cu_seqlens_q"] is not None
        self.has_sink = named["sink"] is not None
        self._bias, self._slopes = named["bias"], named["alibi_slopes"]
        self._scales = {name: named[name] for name in ("q_scale", "k_scale", "v_scale")}
        self._given = [named[name] is not None for name in ATTENTION.tensors]
        self.kinds = ["whole"]
        mask = named["block_mask"]
        batch, heads = (1, 1) if mask == 0 else _native.BlockMask.of(mask).shape[:2]
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
        """Of the tensors among the options that are given."""
        found = {
            "sink": self.logits(kind), "cu_seqlens_q": Replicate(), "cu_seqlens_k": Replicate(),
            "bias": _of_pairs(self._bias, kind), "alibi_slopes": _of_slopes(self._slopes, kind),
        }  # fmt: skip
        found |= {name: _of_rows(scale, kind) for name, scale in self._scales.items()}
        return _chosen(found, ATTENTION.tensors, self._given)

    def of_bias(self, kind: str) -> Any:
        """Of the gradient of the bias: what serves all ranks has a part from each of them."""
        placed = _of_pairs(self._bias, kind)
        return Partial() if kind != "whole" and placed.is_replicate() else placed


def _of_pairs(bias: Any, kind: str) -> Any:
    """Of a bias, whose dimensions of extent 1 serve all."""
    dim = {"batch": 0, "heads": 1}.get(kind)
    return Replicate() if bias is None or dim is None or bias.shape[dim] == 1 else Shard(dim)


def _of_rows(scale: Any, kind: str) -> Any:
    """Of scales, `[1]` or `[batch, heads]`, whose dimensions of extent 1 serve all."""
    dim = {"batch": 0, "heads": 1}.get(kind)
    alone = scale is None or dim is None or len(scale.shape) < 2 or scale.shape[dim] == 1
    return Replicate() if alone else Shard(dim)


def _of_slopes(slopes: Any, kind: str) -> Any:
    """Of slopes, `[heads]` or `[batch, heads]`."""
    dims = 0 if slopes is None else len(slopes.shape)
    if kind == "heads" and dims:
        return Shard(dims - 1)
    return Shard(0) if kind == "batch" and dims == 2 else Replicate()


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


@_rule_of("attention")
def _forward(q: Any, k: Any, v: Any, *options: Any) -> list[tuple[list[Any], list[Any]]]:
    rule = _Rule(q, k, options)
    return [
        ([rule.rows(kind), rule.lse(kind)], [rule.rows(kind)] * 3 + rule.options(kind))
        for kind in rule.kinds
    ]


@_rule_of("attention_backward")
def _backward(
    grad_o: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    of_bias: bool = False,
    *options: Any,
) -> list[tuple[list[Any], list[Any]]]:
    rule = _Rule(q, k, options)
    found = []
    for kind in rule.kinds:
        rows, lse_rows = rule.rows(kind), rule.lse(kind)
        # Each batch entry has a part of the gradient of the sink.
        of_sink = Partial() if kind == "batch" else rule.logits(kind)
        inputs = [rows, *[lse_rows] * (grad_lse is not None), *[rows] * 4, lse_rows]
        outputs = [rows] * 3 + [of_sink if rule.has_sink else Replicate()]
        outputs.append(rule.of_bias(kind) if of_bias else Replicate())
        found.append((outputs, inputs + rule.options(kind)))
    return found


_WHOLE_OF_DECODE = (
    "seqused_k", "block_table", "cu_seqlens_q", "cu_seqlens_k", "sink", "rotary_cos", "rotary_sin",
    "page_lists", "page_counts", "bias", "alibi_slopes", "k_scale", "v_scale", "tail_mask",
)  # fmt: skip
"""Tensors that every rank may have as a whole: another option needs a rule of its own."""


def _whole(count: int) -> list[Any]:
    return [Replicate()] * count


@_rule_of("attention_decode")
def _of_decode(
    q: Any, k_cache: Any, v_cache: Any, *options: Any
) -> list[tuple[list[Any], list[Any]]]:
    named = DECODE.named(options)
    given = [named[name] is not None for name in DECODE.tensors]
    found = [(_whole(2), _whole(3 + sum(given)))]
    whole = dict.fromkeys(_WHOLE_OF_DECODE, Replicate())
    if named["cu_seqlens_q"] is None:
        # Pages belong to no entry of the batch.
        cache = Shard(0) if named["block_table"] is None else Replicate()
        entries = dict.fromkeys(("seqused_k", "block_table", "page_lists", "page_counts"), Shard(0))
        entries |= _added(named, "batch") | _of_scales(named, "batch")
        tail_mask = named["tail_mask"]
        if tail_mask is not None and tail_mask.shape[0] > 1:
            entries["tail_mask"] = Shard(0)
        options = _chosen(whole | entries, DECODE.tensors, given)
        found.append(([Shard(0)] * 2, [Shard(0), cache, cache, *options]))
    if _divides(k_cache.shape[-2], q, k_cache):
        packed = named["cu_seqlens_q"] is not None
        rows, lse = (Shard(1), Shard(0)) if packed else (Shard(2), Shard(1))
        by_head = {"sink": Shard(0), "page_lists": Shard(1)}
        by_head |= _added(named, "heads") | _of_scales(named, "heads")
        options = _chosen(whole | by_head, DECODE.tensors, given)
        found.append(([rows, lse], [rows, Shard(2), Shard(2), *options]))
    return found


@_rule_of("mla_decode")
def _of_latent(
    q: Any, cache: Any, head_dim_v: int, *options: Any
) -> list[tuple[list[Any], list[Any]]]:
    found = [(out, [q, *rest]) for out, [q, _, *rest] in _of_decode(q, cache, cache, *options)]
    if _divides(q.shape[-2], q):
        # All heads of queries share the rows.
        named = DECODE.named(options)
        given = [named[name] is not None for name in DECODE.tensors]
        packed = named["cu_seqlens_q"] is not None
        rows, lse = (Shard(1), Shard(0)) if packed else (Shard(2), Shard(1))
        by_head = dict.fromkeys(_WHOLE_OF_DECODE, Replicate()) | {"sink": Shard(0)}
        options = _chosen(by_head | _added(named, "heads"), DECODE.tensors, given)
        found.append(([rows, lse], [rows, Replicate(), *options]))
    return found


def _added(named: dict[str, Any], kind: str) -> dict[str, Any]:
    """Of what is added to scores."""
    bias, slopes = named["bias"], named["alibi_slopes"]
    return {"bias": _of_pairs(bias, kind), "alibi_slopes": _of_slopes(slopes, kind)}


def _of_scales(named: dict[str, Any], kind: str) -> dict[str, Any]:
    """Of scales, whose last dimension is that of heads, and the first one of sequences or pages."""

    def placed(scale: Any) -> Any:
        dims = 0 if scale is None else len(scale.shape)
        dim = dims - 1 if kind == "heads" else 0
        alone = kind == "batch" and dims == 3 and named["block_table"] is not None
        return Replicate() if dims < 2 or alone or scale.shape[dim] == 1 else Shard(dim)

    return {name: placed(named[name]) for name in ("k_scale", "v_scale")}


def _chosen(placements: dict[str, Any], names: Sequence[str], given: Sequence[bool]) -> list[Any]:
    """The placements of the tensors that are given."""
    return [placements[name] for name, is_given in zip(names, given, strict=True) if is_given]


@_rule_of("attention_merge")
def _merge(parts_o: Any, parts_lse: Any) -> list[tuple[list[Any], list[Any]]]:
    # o is `[parts, rows, heads, D]`, and lse `[parts, heads, rows]`.
    return [
        (_whole(2), _whole(2)),
        ([Shard(0), Shard(1)], [Shard(1), Shard(2)]),
        ([Shard(1), Shard(0)], [Shard(2), Shard(1)]),
    ]
