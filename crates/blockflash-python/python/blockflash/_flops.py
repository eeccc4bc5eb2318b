"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators.

As for torch's own attention, `causal` and windows are not taken off: 2 operations for each pair of
query and key, head and element of a key and a value, and in the backward pass 6 and 4. Of a block
mask its share of visited blocks counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import _native
from ._schema import ATTENTION, DECODE
from .block_mask import BlockMask


def _lengths(offsets: Tensor, most: int) -> Sequence[int]:
    """Of the sequences, which all have the most rows where nothing can be read."""
    if type(offsets) is not Tensor or offsets.is_meta:
        return [most] * (offsets.shape[0] - 1)
    return offsets.diff().tolist()


def _pairs(q: Tensor, k: Tensor, options: dict[str, Any]) -> float:
    """Pairs of queries and keys, over all heads."""
    offsets = options["cu_seqlens_q"], options["cu_seqlens_k"]
    if offsets[0] is None or offsets[1] is None:
        pairs = q.shape[0] * q.shape[1] * k.shape[1]
    else:
        lengths = map(_lengths, offsets, (options["max_q"], options["max_k"]))
        pairs = sum(rows * keys for rows, keys in zip(*lengths, strict=True))
    return pairs * q.shape[-2] * _share(options["block_mask"])


def _share(block_mask: int) -> float:
    if block_mask == 0 or not isinstance(block_mask, int):
        return 1
    return BlockMask(_native.BlockMask.of(block_mask), torch.device("cpu")).to("cpu").density


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: Any = None, **named: Any
) -> int:
    pairs = _pairs(q, k, ATTENTION.named(options) | named)
    return int(2 * pairs * (q.shape[-1] + v.shape[-1]))


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
    of_bias: bool = False,
    *options: Any,
    **named: Any,
) -> int:
    pairs = _pairs(q, k, ATTENTION.named(options) | named)
    return int(2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]))


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any, out_val: Any = None, **named: Any
) -> int:
    """All slots of the cache count, since a mask of pages or lengths may change on the device."""
    table = (DECODE.named(options) | named)["block_table"]
    keys = k_cache.shape[1] * (1 if table is None else table.shape[1])
    return 2 * q.shape[:-1].numel() * keys * (q.shape[-1] + v_cache.shape[-1])


def _index(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, granularity: int, *a: Any, **b: Any
) -> int:
    """All entries of the lists count."""
    keys = lists.shape[-1] * granularity
    return 2 * q.shape[:-1].numel() * keys * (q.shape[-1] + v.shape[-1])


def _index_backward(
    grad_o: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, lists: Tensor, o: Tensor,
    lse: Tensor, granularity: int, *a: Any, **b: Any,
) -> int:  # fmt: skip
    keys = lists.shape[-1] * granularity
    return 2 * q.shape[:-1].numel() * keys * (3 * q.shape[-1] + 2 * v.shape[-1])


def _append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, *a: Any, **b: Any) -> int:
    return _decode(q, k_cache, v_cache, *a, **b)


def _append_scales(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Any, v_scale: Any, *a: Any, **b: Any
) -> int:
    return _append(q, k_cache, v_cache, *a, **b)


def _latent(q: Tensor, cache: Tensor, head_dim_v: int, *a: Any, **b: Any) -> int:
    return _decode(q, cache, cache[..., :head_dim_v], *a, **b)


def _latent_out(q: Tensor, cache: Tensor, o: Tensor, lse: Any = None, *a: Any, **b: Any) -> int:
    return _latent(q, cache, o.shape[-1], *a, **b)


_FORMULAS = {
    "attention": _forward,
    "attention_forward": _forward,
    "attention_out": _out,
    "attention_backward": _backward,
    "attention_decode": _decode,
    "attention_append": _append,
    "attention_append_scales": _append_scales,
    "index_attention": _index,
    "index_attention_backward": _index_backward,
    "mla_decode": _latent,
    "mla_decode_out": _latent_out,
}


def register(namespace: str, *names: str) -> None:
    """Registers the formulas of these operators."""
    # torch's module complains if there is no triton, which concerns other operators.
    log = logging.getLogger("torch.utils.flop_counter")
    level = log.level
    log.setLevel(logging.ERROR)
    from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

    log.setLevel(level)
    # A counter copies the formulas when it is made. These come with the first use of an operator,
    # which may be what a counter is there for.
    counters = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    for name in names:
        operator = getattr(getattr(torch.ops, namespace), name)
        register_flop_formula(operator, get_raw=True)(_FORMULAS[name])
        for counter in counters:
            if isinstance(counter, FlopCounterMode):
                counter.flop_registry[operator] = flop_registry[operator]
