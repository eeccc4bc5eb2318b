"""Attention over a cache of keys and values, and the merge of attention over parts of the keys.

| operator | what it is |
|---|---|
| `attention_decode` | `(o, lse)` of queries that attend to a cache |
| `attention_append` | the same after new keys and values were written into the cache |
| `attention_append_scales` | the same, where the scales of new rows are chosen and written |
| `attention_merge` | `(o, lse)` of the `(o, lse)` of parts |

They are operators of torch like those of `_ops`. They have no gradient: differentiating one raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _autograd, _flops, _native, _stats
from ._arguments import UNLIMITED, autocast_dtype, scores, together
from ._fakes import register_fake
from ._ops import empty_lse, empty_o, refuse_lazy_writes
from ._schema import DECODE, SCHEMAS
from ._slots import empty_values, has_slots, without_keys

_OPS = torch.ops.blockflash
_CU_SEQLENS_Q = DECODE.places["cu_seqlens_q"]
LOGITS = DECODE.places["sink"]
"""The place of the logits that join the denominator among the options."""
_NUMBERS = {name: value for name, value in DECODE.defaults.items() if name not in DECODE.tensors}


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNLIMITED,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale_per_token: bool = False,
    tail_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    pages: tuple[Tensor, Tensor] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last tokens of each sequence to the keys and values in a cache.

    Query `i` of `n` of a sequence with `length` keys stands at key `length - n + i`. Lengths, table
    and lists are read on the device at each call, so a CUDA graph follows them: it holds the call,
    not the lengths. Whatever they hold, nothing outside of the tensors is touched. A length counts
    at most as the capacity, and what is in slots beyond a length does not matter. They must not
    change while a call runs: its results are unspecified then.

    On a GPU the element types are float16 and bfloat16, the head dimension is a multiple of 8
    up to 512, or 256 with bias, ALiBi or `tail_mask`, and pages have a multiple of 16 slots.
    The CPU takes every call, also in float32. There is no gradient. A cache may also be
    `torch.float8_e4m3fn`, `torch.float8_e5m2` or `torch.int8`, beside q, k and v in the types
    above; on a GPU with a head dimension of a multiple of 16 up to 256 and without bias, ALiBi
    and `tail_mask`. Autocast lowers float32 operands, but never caches that are written.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`.
        k_cache: Keys, `[B, capacity, Hk, D]`, or `[pages, page_size, Hk, D]` with `block_table`;
            Hq is a multiple of Hk. Any strides but a contiguous last dimension.
        v_cache: Values, in the shape of the keys but for their head dimension, which the output
            has. Both may be parts of one buffer, such as
            `[B, capacity, 2, Hk, D]`; on the CPU, an append then copies the values.
        k: New keys, `[B, Sn, Hk, D]` or packed `[Tn, Hk, D]`, which are written into the cache
            first, as the last ones of `seqused_k`. Those beyond the capacity are dropped.
        v: New values, in the shape of `k` with the head dimension of `v_cache`.
        seqused_k: int32 `[B]`: how many keys each sequence has, new ones included. By default the
            cache is full.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        causal: A query attends the keys up to its own.
        window: A query at key `p` attends the keys `p - window[0]` to `p + window[1]`; None is
            unlimited.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sink: float32 `[Hq]`, a logit per head that joins the denominator of the softmax.
        bias: float16, bfloat16 or float32, broadcast to `[B, Hq, Sq, capacity]` and of any strides:
            added to the scores behind the scale and the softcap. Not with `cu_seqlens_q`.
        alibi_slopes: float32 `[Hq]` or `[B, Hq]`: `-slope * distance` is added to a score, with the
            distance of the key from the query's own.
        k_scale: float32, with a cache of 8 bits: what its keys are multiplied with, 1 by default.
            `[1]`; `[B, Hk]`, for sequences and heads; or `[pages, page_size, Hk]`, for rows, where
            a contiguous cache has B pages. Each extent may also be 1. New keys are divided by it,
            rounded to nearest even, and saturated at 448, 57344 or 127; NaN is 0 in int8.
        v_scale: The same of the values.
        scale_per_token: `k` and `v` get scales of their own, which are written into `k_scale` and
            `v_scale`, `[pages, page_size, Hk]` both, in the places of their rows: the greatest
            magnitude of a row becomes the greatest code, and a row of zeros has the scale 1.
        tail_mask: bool or uint8 `[B, Sq, tail]`, where B may be 1 and then serves all, or
            `[Tq, tail]` with `cu_seqlens_q`: of the last `tail` keys of its sequence, at most the
            capacity, query `i` sees key `j` only where entry `[i, j]` is not 0, as in a tree of
            drafted tokens. `causal` and `window` hold as well.
        cu_seqlens_q: int32 `[B + 1]`: sequence `i` has the queries `cu_seqlens_q[i]` to
            `cu_seqlens_q[i + 1]`. Rows of no sequence get the output 0.
        cu_seqlens_k: The same for packed `k` and `v`; `cu_seqlens_q` by default.
        max_seqlen_q: The most queries of a sequence, needed with `cu_seqlens_q`.
        rotary_cos: `[positions, rotary_dim / 2]`, float32 or in the type of q, with at least as
            many positions as the capacity: queries and new keys are turned by their positions.
        rotary_sin: As `rotary_cos`.
        rotary_interleaved: Elements 2 i and 2 i + 1 are turned together; by default elements i and
            i + rotary_dim / 2.
        pages: `(lists, counts)`, int32 `[B, Hk, room]` and `[B]`: for each head of keys, only the
            first `counts` columns of the block table in its list are visited; they ascend.
            `choose_pages` makes them.
        batch_invariant: The bits of a sequence depend on no other sequence of the batch, nor on
            their number, at some cost in speed: otherwise keys are divided so that the batch fills
            the GPU. Of packed queries and with `pages` the bits never depend on others.
        return_lse: Return `(o, lse)`: lse is float32, `[B, Hq, Sq]` or `[Hq, Tq]`.

    Returns:
        The output in the shape of q with the head dimension of `v_cache`, in the element type of
        q, contiguous, or a pair with the lse.

    Raises:
        Unsupported: No kernel takes the call, or a gradient would be lost.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    lower = autocast_dtype(q) if isinstance(q, Tensor) else None
    if lower is not None:
        if k is None:
            q, k_cache, v_cache = (_lowered(t, lower) for t in (q, k_cache, v_cache))
        elif k_cache.dtype == lower or k_cache.dtype.itemsize == 1:
            q, k, v = (_lowered(t, lower) for t in (q, k, v))
    given = scores(causal, window, scale, softcap, sink, bias, alibi_slopes)
    if cu_seqlens_q is not None or max_seqlen_q is not None:
        together(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    if k is not None or v is not None:
        together(k=k, v=v)
        if k.dim() == 3 and cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
    chosen: tuple[Any, ...] = ()
    if scale_per_token:
        if k is None or k_scale is None or v_scale is None:
            raise ValueError("scale_per_token needs k and v, and k_scale and v_scale to write")
        chosen, k_scale, v_scale = (k_scale, v_scale), None, None
    lists, counts = (None, None) if pages is None else pages
    # In the order of the table.
    options: list[Any] = [
        seqused_k, block_table, cu_seqlens_q, cu_seqlens_k, given.pop("sink", None), rotary_cos,
        rotary_sin, lists, counts, given.pop("bias", None), given.pop("alibi_slopes", None),
        k_scale, v_scale,
        _as_bytes(tail_mask),
    ]  # fmt: skip
    if max_seqlen_q is None and not (given or rotary_interleaved or batch_invariant):
        # What is at its default at the end costs the host nothing if it is not passed.
        while options and options[-1] is None:
            options.pop()
    else:
        given |= {"max_q": max_seqlen_q or 0, "interleaved": rotary_interleaved}
        given["batch_invariant"] = batch_invariant
        options += (_NUMBERS | given).values()
    tensors = (q, k_cache, v_cache) if k is None else (q, k_cache, v_cache, *chosen, k, v)
    if k is None:
        operator = _OPS.attention_decode.default
    else:
        operator = (_OPS.attention_append_scales if chosen else _OPS.attention_append).default
    place(q)
    try:
        if _autograd.passes(*tensors, sink, bias, rotary_cos, rotary_sin):
            if k is not None:
                _autograd.note_write(k_cache, v_cache, *chosen)
            o, lse = _autograd.call_below(operator, *tensors, *options)
        else:
            _autograd.refuse_to_lose(*tensors, sink, bias, rotary_cos, rotary_sin)
            o, lse = operator(*tensors, *options)
    except RuntimeError as error:
        raise _autograd.typed(error) from None
    _stats.count("attention_decode")
    return (o, lse) if return_lse else o


def place(tensor: Any) -> None:
    """Registers the placements of `DTensor`s when the first one comes."""
    if type(tensor).__name__ == "DTensor":
        from . import _sharding

        _sharding.place()


def _as_bytes(mask: Any) -> Any:
    is_bool = isinstance(mask, Tensor) and mask.dtype == torch.bool
    return mask.view(torch.uint8) if is_bool else mask


def _lowered(tensor: Any, lower: torch.dtype) -> Any:
    is_float = isinstance(tensor, Tensor) and tensor.dtype == torch.float32
    return tensor.to(lower) if is_float else tensor


def attention_merge(
    o: Tensor | Sequence[Tensor], lse: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention to all keys from the attention to parts of the keys.

    A part in which a query sees no key, of lse -inf, does not count. At most one part may have a
    sink. There is no gradient.

    Args:
        o: The outputs, `[parts, B, S, H, D]` or `[parts, T, H, D]`, or a sequence of tensors, which
            are copied.
        lse: Their log-sum-exps, float32 `[parts, B, H, S]` or `[parts, H, T]`.

    Returns:
        `(o, lse)` without the first dimension.

    """
    o, lse = (t if isinstance(t, Tensor) else torch.stack(tuple(t)) for t in (o, lse))
    if o.dim() not in (4, 5) or lse.dim() != o.dim() - 1:
        raise ValueError(
            f"o has shape {list(o.shape)} and lse {list(lse.shape)}, not [parts, B, S, H, D] and "
            "[parts, B, H, S], nor [parts, T, H, D] and [parts, H, T]"
        )
    place(o)
    if _autograd.passes(o, lse):
        merge = partial(_autograd.call_below, _OPS.attention_merge.default)
    else:
        _autograd.refuse_to_lose(o, lse)
        merge = _OPS.attention_merge.default
    if o.dim() == 4:
        return merge(o, lse)
    batches = o.shape[1:3]
    o, lse = merge(o.flatten(1, 2), lse.transpose(1, 2).flatten(2))
    return o.unflatten(0, batches), lse.unflatten(1, batches).transpose(0, 1)


def _compute(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *options: Any,
    **token_scales: Tensor,
) -> tuple[Tensor, Tensor]:
    """The kernel of these operators."""
    cu_seqlens_q = options[_CU_SEQLENS_Q] if len(options) > _CU_SEQLENS_Q else None
    o, lse = empty_o(q, v_cache, cu_seqlens_q), empty_lse(q, cu_seqlens_q)
    into(o, lse, q, k_cache, v_cache, k, v, *options, **token_scales)
    return o, lse


def into(
    o: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *options: Any,
    **token_scales: Tensor,
) -> None:
    """Calls the native function.

    GPU kernels read rows in units of 16 bytes: queries and new keys that are not aligned so are
    copied, but a cache never is. On the CPU, values that are between the keys of their cache are
    copied for an append, and copied back.
    """

    def allocate(count: int) -> Tensor:
        return q.new_empty(count, dtype=torch.uint8)

    try:
        _native.attention_decode(
            q, k_cache, v_cache, o, lse, allocate, k, v, *options, **token_scales
        )
    except _native.Misaligned:
        q, k, v = (
            None if t is None else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)
        )
        apart = v_cache.clone() if k is not None and v_cache.is_cpu else v_cache
        _native.attention_decode(
            q, k_cache, apart, o, lse, allocate, k, v, *options, **token_scales
        )
        if apart is not v_cache:
            v_cache.copy_(apart)
    except _native.Unsupported:
        named = DECODE.named(options)
        if has_slots(k_cache, named):
            raise
        empty, named = without_keys(k_cache, named)
        options = named.values()
        none = empty_values(empty, v_cache)
        _native.attention_decode(q, empty, none, o, lse, allocate, k, v, *options)


def _attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return _compute(q, k_cache, v_cache, None, None, *options)


def _append_scales(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_token_scale: Tensor,
    v_token_scale: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    scales = {"k_token_scale": k_token_scale, "v_token_scale": v_token_scale}
    return _compute(q, k_cache, v_cache, k, v, *options, **scales)


def _fake_append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    cu_seqlens_q = DECODE.value(options, "cu_seqlens_q")
    return empty_o(q, v_cache, cu_seqlens_q), empty_lse(q, cu_seqlens_q)


def _fake_append_scales(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _fake_append(q, k_cache, v_cache, *rest)


def _fake_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return _fake_append(q, k_cache, v_cache, None, None, *options)


def _merge(parts_o: Tensor, parts_lse: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = _fake_merge(parts_o, parts_lse)
    try:
        _native.attention_merge(parts_o, parts_lse, o, lse)
    except _native.Misaligned:
        parts_o = parts_o.clone(memory_format=torch.contiguous_format)
        _native.attention_merge(parts_o, parts_lse, o, lse)
    return o, lse


def _fake_merge(parts_o: Tensor, parts_lse: Tensor) -> tuple[Tensor, Tensor]:
    return parts_o.new_empty(parts_o.shape[1:]), parts_lse.new_empty(parts_lse.shape[1:])


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    for name, kernel, fake in (
        ("attention_decode", _attention_decode, _fake_decode),
        ("attention_append", _compute, _fake_append),
        ("attention_append_scales", _append_scales, _fake_append_scales),
        ("attention_merge", _merge, _fake_merge),
    ):
        library.define(name + SCHEMAS[name])
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        register_fake(f"blockflash::{name}", fake, lib=library)
    refuse_lazy_writes(library, _OPS.attention_append.default)
    refuse_lazy_writes(library, _OPS.attention_append_scales.default)
    appends = ("attention_append", "attention_append_scales")
    _flops.register("blockflash", "attention_decode", *appends)
    _autograd.register_gradient(library, "attention_decode")
    _autograd.register_gradient(library, "attention_merge")
    for name in appends:
        _autograd.register_writes(library, name)
    return library


_LIBRARY = _register()
