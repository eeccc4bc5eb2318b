"""New keys and values of a cache, beside calls that only read it.

| operator | what it is |
|---|---|
| `append_kv` | new rows of keys and of values |

It is an operator of torch like those of `_ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _autograd, _native
from ._arguments import autocast_dtype, refuse_types, renaming
from ._fakes import register_fake
from ._ops import refuse_lazy_writes
from ._schema import SCHEMAS

_OPS = torch.ops.blockflash


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new keys and values into a cache that `index_attention` or `attention_decode` reads.

    `attention_decode` with `k` and `v` does both in one call, and turns keys by their positions.
    Here they come as they are stored.

    The lengths count the new tokens, which are the last ones of their sequences: of `n` of them,
    token `i` goes to position `seqused_k - n + i`. A token whose position is negative or beyond the
    capacity is dropped. Sequences must not append to a page that they share. Lengths, table and
    offsets are read on the device at each call, so a CUDA graph follows them, and whatever they
    hold, nothing outside of the cache is written.

    On a GPU the element types are float16 and bfloat16, rows have a multiple of 8 elements, and
    pages a multiple of 16 slots. The CPU takes every call, also in float32. There is no gradient.

    Args:
        k: New keys, `[B, Sn, Hk, D]`, or packed `[Tn, Hk, D]` with `cu_seqlens_k`.
        v: New values, in that shape but for their head dimension.
        k_cache: `[B, capacity, Hk, D]`, or `[pages, page_size, Hk, D]` with `block_table`, in the
            type of the new rows, or of 8 bits; it is written.
        v_cache: The same for the values; it is written.
        seqused_k: int32 `[B]`: how many keys each sequence has, new ones included. By default the
            cache is full.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        cu_seqlens_k: int32 `[B + 1]`: the new tokens of sequence `i` are the rows `cu_seqlens_k[i]`
            to `cu_seqlens_k[i + 1]`.
        k_scale: float32, with a cache of 8 bits: what its keys are multiplied with, as in
            `attention_decode`, so that new ones are divided by it.
        v_scale: The same of the values.

    Raises:
        Unsupported: No kernel takes the call, or a gradient would be lost.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    refuse_types(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if autocast_dtype(k) == k_cache.dtype:
        k, v = (t.to(k_cache.dtype) if t.dtype == torch.float32 else t for t in (k, v))
    rest = (block_table, seqused_k, cu_seqlens_k, k_scale, v_scale)
    try:
        _autograd.call_writing(_OPS.append_kv.default, (k, v, k_cache, v_cache), *rest)
    except RuntimeError as error:
        raise _autograd.typed(error) from None


@renaming({"cu_seqlens_q": "cu_seqlens_k"})
def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
    """Calls the native function.

    New rows that are not aligned for a GPU are copied. On the CPU, values that are between the keys
    of their cache are copied, and copied back.
    """
    rest += (None,) * (5 - len(rest))
    try:
        _native.append_kv(k, v, k_cache, v_cache, *rest)
    except _native.Misaligned:
        k, v = (t.clone(memory_format=torch.contiguous_format) for t in (k, v))
        apart = v_cache.clone() if v_cache.is_cpu else v_cache
        _native.append_kv(k, v, k_cache, apart, *rest)
        if apart is not v_cache:
            v_cache.copy_(apart)


def _nothing(*arguments: Any, **options: Any) -> None:
    """The results of what only writes."""


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    library.define("append_kv" + SCHEMAS["append_kv"])
    for key in ("CPU", "CUDA"):
        library.impl("append_kv", _append, key)
    register_fake("blockflash::append_kv", _nothing, lib=library)
    refuse_lazy_writes(library, _OPS.append_kv.default)
    _autograd.register_writes(library, "append_kv")
    return library


_LIBRARY = _register()
