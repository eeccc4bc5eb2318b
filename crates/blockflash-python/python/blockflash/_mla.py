"""Decoding of multi-head latent attention (MLA) whose projections are absorbed.

| operator | what it is |
|---|---|
| `mla_decode` | `(o, lse)` of queries that attend to a cache of latent rows |
| `mla_decode_out` | the same into given tensors |

They have the options of `attention_decode`, and no gradient: differentiating one raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _autograd, _flops, _stats
from ._arguments import UNLIMITED, autocast_dtype, refuse_types, scores, together
from ._decode import into, place
from ._ops import empty_lse, empty_o, refuse_lazy_writes
from ._schema import DECODE, SCHEMAS

_OPS = torch.ops.blockflash


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

    On a GPU the element types are float16 and bfloat16, rows have 576 or 512 elements of which 512
    are values, and pages have a multiple of 16 slots. The CPU takes every call, also in float32.
    There is no gradient.

    Args:
        q_nope: Queries in the space of the values, `[B, Sq, H, 512]`, or packed `[Tq, H, 512]` with
            `cu_seqlens_q`; or whole ones, with all elements of a row, if `q_rope` is None.
        q_rope: The elements behind them, turned by their positions, `[B, Sq, H, 64]`. Both are
            copied into one tensor.
        cache: `[pages, page_size, 576]` with `block_table`, else `[B, capacity, 576]`; a dimension
            of one head may be in front of the last one. Any strides but a contiguous last
            dimension.
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
    if cache.dim() == 3:
        cache = cache.unsqueeze(2)
    if cache.dim() != 4 or cache.shape[2] != 1:
        raise ValueError(
            f"cache has shape {list(cache.shape)}, expected [pages, page_size, D] or "
            "[pages, page_size, 1, D]"
        )
    q = q_nope
    if q_rope is not None:
        refuse_types(q_rope=q_rope)
        if q_rope.shape[:-1] != q_nope.shape[:-1] or q_rope.dtype != q_nope.dtype:
            raise ValueError(
                f"q_rope is {q_rope.dtype} {list(q_rope.shape)}, expected {q_nope.dtype} "
                f"{[*q_nope.shape[:-1], 'R']}"
            )
        head_dim_v, q = q_nope.shape[-1], torch.cat([q_nope, q_rope], -1)
    if not 0 < head_dim_v <= cache.shape[-1]:
        raise ValueError(f"head_dim_v is {head_dim_v}, but a row has {cache.shape[-1]} elements")
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
            o, lse = _call(_OPS.mla_decode.default, (q, cache), head_dim_v, *options)
        else:
            refuse_types(out=out)
            o, lse = out, empty_lse(q, cu_seqlens_q) if return_lse else None
            if o.shape[-1:] != (head_dim_v,):
                expected = [*q.shape[:-1], head_dim_v]
                raise ValueError(f"out has shape {list(o.shape)}, expected {expected}")
            _call(_OPS.mla_decode_out.default, (q, cache, o), lse, *options)
    except RuntimeError as error:
        raise _autograd.typed(error) from None
    _stats.count("mla_decode")
    return (o, lse) if return_lse else o


def _call(operator: Any, tensors: tuple[Tensor, ...], *rest: Any) -> Any:
    """Calls an operator, below autograd where that has nothing to do."""
    if not _autograd.passes(*tensors):
        _autograd.refuse_to_lose(*tensors)
        return operator(*tensors, *rest)
    _autograd.note_write(*tensors[2:])
    return _autograd.call_below(operator, *tensors, *rest)


def _decode(q: Tensor, cache: Tensor, head_dim_v: int, *options: Any) -> tuple[Tensor, Tensor]:
    o, lse = _fake_decode(q, cache, head_dim_v, *options)
    into(o, lse, q, cache, cache[..., :head_dim_v], None, None, *options)
    return o, lse


def _fake_decode(q: Tensor, cache: Tensor, head_dim_v: int, *options: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens_q = DECODE.value(options, "cu_seqlens_q")
    return empty_o(q, cache[..., :head_dim_v], cu_seqlens_q), empty_lse(q, cu_seqlens_q)


def _decode_out(q: Tensor, cache: Tensor, o: Tensor, lse: Tensor | None, *options: Any) -> None:
    into(o, lse, q, cache, cache[..., : o.shape[-1]], None, None, *options)


def _by_results(q: Tensor, cache: Tensor, o: Tensor, lse: Tensor | None, *options: Any) -> None:
    """Into given tensors, for whoever traces or transforms."""
    results = _OPS.mla_decode.default(q, cache, o.shape[-1], *options)
    for given, result in zip((o, lse), results, strict=True):
        if given is not None:
            given.copy_(result)


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    names = ("mla_decode", "mla_decode_out")
    fakes = (_fake_decode, lambda *arguments, **options: None)
    for name, kernel, fake in zip(names, (_decode, _decode_out), fakes, strict=True):
        library.define(name + SCHEMAS[name])
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        torch.library.register_fake(f"blockflash::{name}", fake, lib=library)
    refuse_lazy_writes(library, _OPS.mla_decode_out.default)
    _flops.register("blockflash", *names)
    _autograd.register_gradient(library, "mla_decode")
    _autograd.register_writes(library, "mla_decode_out", _by_results)
    return library


_LIBRARY = _register()
