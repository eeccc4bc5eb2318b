"""Decoding of multi-head latent attention (MLA) whose projections are absorbed.

| operator | what it is |
|---|---|
| `mla_append` | new rows of a cache of latent rows |
| `mla_decode` | `(o, lse)` of queries that attend to such a cache |
| `mla_decode_out` | the same into given tensors |

The latter have the options of `attention_decode`. None has a gradient: differentiating one raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _autograd, _flops, _native, _stats
from ._arguments import (
    UNLIMITED,
    autocast_dtype,
    refuse_types,
    renamed,
    renaming,
    scores,
    together,
)
from ._decode import into, place
from ._fakes import register_fake
from ._native import Unsupported
from ._ops import empty_lse, empty_o, refuse_lazy_writes
from ._schema import DECODE, SCHEMAS

_OPS = torch.ops.blockflash
_NAMES = {
    "attention_decode": "mla_decode",
    "q": "q_nope",
    "k_cache": "cache",
    "v_cache": "cache",
    "seqused_k": "seqlens",
    "o": "out",
}
"""What the functions call parameters of `attention_decode`."""
_BYTES, _ROW, _VALUES = 656, 576, 512
"""Bytes of a row of codes, and elements of the key and of the value that it stands for."""
_BOTH = {"q_nope": "torch.cat([q_nope, q_rope], -1)"}
"""What they have made of two parameters."""


def mla_append(
    kv_latent: Tensor,
    k_rope: Tensor | None,
    cache: Tensor,
    block_table: Tensor | None = None,
    seqlens: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Writes the latent rows of new tokens into a cache that `mla_decode` reads.

    The lengths count the new tokens, which are the last ones of their sequences: of `n` of them,
    token `i` goes to position `seqlens - n + i`. A token whose position is negative or beyond the
    capacity is dropped. Sequences must not append to a page that they share. Lengths, table and
    offsets are read on the device at each call, so a CUDA graph follows them, and whatever they
    hold, nothing outside of the cache is written.

    Rows of codes (a cache of uint8, see `mla_decode`) are made of both parts in bfloat16: each 128
    of the first elements are divided by a scale that makes 448 of their greatest magnitude, rounded
    to nearest even, and stored as e4m3 behind which the scales are, 1 for zeros.

    On a GPU the element types are float16 and bfloat16, both parts have a multiple of 8 elements,
    and pages a multiple of 16 slots. The CPU takes every call, also in float32. There is no
    gradient.

    Args:
        kv_latent: The first elements of the new rows, which are their values, `[B, Sn, 512]`, or
            packed `[Tn, 512]` with `cu_seqlens`; or whole rows if `k_rope` is None.
        k_rope: The elements behind them, turned by their positions, `[B, Sn, 64]` or `[Tn, 64]`.
        cache: As `mla_decode` takes it, in the element type of the new rows, or uint8; it is
            written.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        seqlens: int32 `[B]`: how many keys each sequence has, new ones included. By default the
            cache is full.
        cu_seqlens: int32 `[B + 1]`: the new tokens of sequence `i` are the rows `cu_seqlens[i]` to
            `cu_seqlens[i + 1]`.

    Raises:
        Unsupported: No kernel takes the call, or a gradient would be lost.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    refuse_types(kv_latent=kv_latent, cache=cache)
    rows = _of_one_head(cache)
    if k_rope is not None:
        _refuse_parts(rows, kv_latent=kv_latent, k_rope=k_rope)
    elif rows.dtype == torch.uint8:
        raise ValueError("k_rope is None, but rows of codes are made of both parts")
    if kv_latent.dim() != (3 if cu_seqlens is None else 2):
        expected = "[B, Sn, L]" if cu_seqlens is None else "[Tn, L] with cu_seqlens"
        raise ValueError(f"kv_latent has shape {list(kv_latent.shape)}, expected {expected}")
    lower = torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype
    if autocast_dtype(kv_latent) == lower:
        kv_latent, k_rope = (
            t.to(lower) if t is not None and t.dtype == torch.float32 else t
            for t in (kv_latent, k_rope)
        )
    rest = (block_table, seqlens, cu_seqlens)
    try:
        _autograd.call_writing(_OPS.mla_append.default, (kv_latent, k_rope, cache), *rest)
    except RuntimeError as error:
        raise _autograd.typed(error) from None


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor | None,
    cache: Tensor,
    block_table: Tensor | None = None,
    seqlens: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    head_dim_v: int = 512,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last tokens of each sequence to a cache of latent rows.

    A row of the cache is a key, and its first elements are the value: 512 of the compressed keys
    and values, and 64 that are turned by their position. All heads of queries share it. Queries
    are multiplied with the key's half of the up-projection before, and outputs with the value's
    half afterwards (absorbed weights), which is the form that engines decode in.

    Lengths and table are read on the device at each call, so a CUDA graph follows them. Whatever
    they hold, nothing outside of the tensors is touched, as `attention_decode` describes; that
    function takes the same caches with a dimension of one head and `cache[..., :512]` as its
    values. It has more options, and by default no mask and a scale of `1 / sqrt(576)`.

    A cache of uint8 has rows of codes, of 656 bytes each: 512 of `torch.float8_e4m3fn`, which are
    the value, 4 scales in float32 of 128 codes each, and 64 elements of bfloat16 (`fp8_ds_mla` in
    vLLM). They stand for the codes times their scales, which no rounding changes, and the elements.

    On a GPU the element types are float16 and bfloat16, rows have 576 or 512 elements of which 512
    are values, and pages have a multiple of 16 slots; beside rows of codes queries are bfloat16.
    The CPU takes every call, also in float32. There is no gradient.

    Args:
        q_nope: Queries in the space of the values, `[B, Sq, H, 512]`, or packed `[Tq, H, 512]` with
            `cu_seqlens_q`; or whole ones, with all elements of a row, if `q_rope` is None.
        q_rope: The elements behind them, turned by their positions, `[B, Sq, H, 64]`. Both are
            copied into one tensor.
        cache: `[pages, page_size, 576]` with `block_table`, else `[B, capacity, 576]`, or 656
            bytes in place of 576 elements; a dimension of one head may be in front of the last one.
            Any strides but a contiguous last dimension.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        seqlens: int32 `[B]`: how many keys each sequence has. By default the cache is full.
        scale: Factor of `q @ k.T`: `1 / sqrt(128 + 64)` in DeepSeek's models, whose keys have that
            many elements before the projections are absorbed.
        causal: Query `i` of `n` of a sequence with `length` keys attends the keys up to
            `length - n + i`.
        head_dim_v: How many elements of a row are the value, if `q_rope` is None; those of `q_nope`
            otherwise.
        cu_seqlens_q: int32 `[B + 1]`: sequence `i` has the queries `cu_seqlens_q[i]` to
            `cu_seqlens_q[i + 1]`. Rows of no sequence get the output 0, but are left as they are in
            `out`.
        max_seqlen_q: The most queries of a sequence, needed with `cu_seqlens_q`.
        batch_invariant: The bits of a sequence depend on no other sequence of the batch.
        out: Where the output is written, in its shape and element type.
        return_lse: Return `(o, lse)`: lse is float32, `[B, H, Sq]` or `[H, Tq]`, of natural
            logarithms, as `attention_merge` takes it.

    Returns:
        The output, `[B, Sq, H, 512]` or `[Tq, H, 512]`, or a pair with the lse.

    Raises:
        Unsupported: No kernel takes the call, or a gradient would be lost.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    refuse_types(q_nope=q_nope, cache=cache)
    cache, q = _of_one_head(cache), q_nope
    if q_rope is not None:
        _refuse_parts(cache, q_nope=q_nope, q_rope=q_rope)
        head_dim_v, q = q_nope.shape[-1], torch.cat([q_nope, q_rope], -1)
    row = _elements(cache)
    if not 0 < head_dim_v <= row:
        raise ValueError(f"head_dim_v is {head_dim_v}, but a row has {row} elements")
    if cache.dtype == torch.uint8 and head_dim_v != _VALUES:
        raise ValueError(f"head_dim_v is {head_dim_v}, but rows of codes have {_VALUES} values")
    lower = autocast_dtype(q)
    if lower is not None:
        q, cache = (t.to(lower) if t.dtype == torch.float32 else t for t in (q, cache))
    given = scores(causal, UNLIMITED, scale, None, None)
    if cu_seqlens_q is not None or max_seqlen_q is not None:
        together(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    given |= {"seqused_k": seqlens, "block_table": block_table, "cu_seqlens_q": cu_seqlens_q}
    given |= {"max_q": max_seqlen_q or 0, "batch_invariant": batch_invariant}
    options = DECODE.ordered(given)
    place(q)
    try:
        if out is None:
            o, lse = _autograd.call_writing(
                _OPS.mla_decode.default, (q, cache), head_dim_v, *options
            )
        else:
            refuse_types(out=out)
            o, lse = out, empty_lse(q, cu_seqlens_q) if return_lse else None
            if o.shape[-1:] != (head_dim_v,):
                expected = [*q.shape[:-1], head_dim_v]
                raise ValueError(f"out has shape {list(o.shape)}, expected {expected}")
            _autograd.call_writing(_OPS.mla_decode_out.default, (q, cache, o), lse, *options)
    except (ValueError, Unsupported) as error:
        if q_rope is None:
            raise
        raise type(error)(renamed(error, _BOTH)) from None
    except RuntimeError as error:
        raise _autograd.typed(error) from None
    _stats.count("mla_decode")
    return (o, lse) if return_lse else o


def _of_one_head(cache: Tensor) -> Tensor:
    """A cache with the dimension of its head."""
    row = f"{_BYTES} bytes" if cache.dtype == torch.uint8 else "D"
    rows = cache.unsqueeze(2) if cache.dim() == 3 else cache
    if rows.dim() != 4 or rows.shape[2] != 1 or (row != "D" and rows.shape[3] != _BYTES):
        raise ValueError(
            f"cache has shape {list(cache.shape)}, expected [pages, page_size, {row}] or "
            f"[pages, page_size, 1, {row}]"
        )
    return rows


def _elements(cache: Tensor) -> int:
    """How many elements a row has, or stands for."""
    return _ROW if cache.dtype == torch.uint8 else cache.shape[-1]


def values_of(rows: Tensor, columns: int) -> Tensor:
    """The values of rows, as the native function takes them: those of codes are in the rows."""
    return rows if rows.dtype == torch.uint8 else rows[..., :columns]


def _refuse_parts(cache: Tensor, **parts: Tensor) -> None:
    """Raises for two parts that make no rows of a cache."""
    (first_name, first), (name, part) = parts.items()
    refuse_types(**{name: part})
    if part.shape[:-1] != first.shape[:-1] or part.dtype != first.dtype:
        raise ValueError(
            f"{name} is {part.dtype} {list(part.shape)}, expected {first.dtype} "
            f"{[*first.shape[:-1], 'R']}"
        )
    found, row = [t.shape[-1] for t in (first, part)], _elements(cache)
    if sum(found) != row:
        raise ValueError(
            f"{first_name} and {name} have {found[0]} and {found[1]} elements, expected {row} "
            "together, as a row of cache"
        )


@renaming(_NAMES)
def _decode(q: Tensor, cache: Tensor, head_dim_v: int, *options: Any) -> tuple[Tensor, Tensor]:
    o, lse = _fake_decode(q, cache, head_dim_v, *options)
    into(o, lse, q, cache, values_of(cache, head_dim_v), None, None, *options)
    return o, lse


def _fake_decode(q: Tensor, cache: Tensor, head_dim_v: int, *options: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens_q = DECODE.value(options, "cu_seqlens_q")
    return empty_o(q, cache[..., :head_dim_v], cu_seqlens_q), empty_lse(q, cu_seqlens_q)


@renaming(_NAMES)
def _decode_out(q: Tensor, cache: Tensor, o: Tensor, lse: Tensor | None, *options: Any) -> None:
    into(o, lse, q, cache, values_of(cache, o.shape[-1]), None, None, *options)


def _by_results(q: Tensor, cache: Tensor, o: Tensor, lse: Tensor | None, *options: Any) -> None:
    """Into given tensors, for whoever traces or transforms."""
    results = _OPS.mla_decode.default(q, cache, o.shape[-1], *options)
    for given, result in zip((o, lse), results, strict=True):
        if given is not None:
            given.copy_(result)


def _append_rows(kv_latent: Tensor, k_rope: Tensor | None, cache: Tensor, *rest: Any) -> None:
    """Calls the native function; new rows that are not aligned for a GPU are copied."""
    new = [None if t is None else t.unsqueeze(-2) for t in (kv_latent, k_rope)]
    rows = _of_one_head(cache)
    try:
        _native.mla_append(*new, rows, *rest)
    except _native.Misaligned:
        copies = [None if t is None else t.clone() for t in new]
        _native.mla_append(*copies, rows, *rest)


_NAMES_OF_APPENDS = {
    "k_cache": "cache",
    "v_cache": "cache",
    "seqused_k": "seqlens",
    "cu_seqlens_q": "cu_seqlens",
}
_append_whole = renaming(_NAMES_OF_APPENDS | {"k": "kv_latent"})(_append_rows)
_append_parts = renaming(_NAMES_OF_APPENDS | {"k": "k_rope", "v": "kv_latent"})(_append_rows)


def _append(
    kv_latent: Tensor,
    k_rope: Tensor | None,
    cache: Tensor,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    append = _append_whole if k_rope is None else _append_parts
    append(kv_latent, k_rope, cache, block_table, seqused_k, cu_seqlens)


def _nothing(*arguments: Any, **options: Any) -> None:
    """The results of what only writes."""


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    for name, kernel, fake in (
        ("mla_append", _append, _nothing),
        ("mla_decode", _decode, _fake_decode),
        ("mla_decode_out", _decode_out, _nothing),
    ):
        library.define(name + SCHEMAS[name])
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        register_fake(f"blockflash::{name}", fake, lib=library)
    refuse_lazy_writes(library, _OPS.mla_append.default)
    refuse_lazy_writes(library, _OPS.mla_decode_out.default)
    _flops.register("blockflash", "mla_decode", "mla_decode_out")
    _autograd.register_gradient(library, "mla_decode")
    _autograd.register_writes(library, "mla_append")
    _autograd.register_writes(library, "mla_decode_out", _by_results)
    return library


_LIBRARY = _register()
