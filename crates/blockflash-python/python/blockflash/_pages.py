"""The choice of the pages of a cache that queries visit.

| operator | what it is |
|---|---|
| `summarize_pages` | what is kept of the keys of each page |
| `choose_pages` | `(lists, counts)` of the pages with the largest scores |

They have no gradient, and nothing is lost by that: the results are places, not numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _autograd, _native
from ._arguments import together
from ._fakes import register_fake
from ._ops import refuse_lazy_writes
from ._schema import SCHEMAS

_OPS = torch.ops.blockflash


def summarize_pages(
    k_cache: Tensor,
    summaries: Tensor,
    *,
    block_table: Tensor,
    seqused_k: Tensor | None = None,
    tokens: int | None = None,
) -> None:
    """Writes what `choose_pages` scores pages by: once for the prompt, then after each append.

    A summary is computed from the keys that its page holds now. Lengths and table are read on the
    device, so a CUDA graph follows them.

    Args:
        k_cache: Keys, `[pages, page_size, Hk, D]`.
        summaries: `[pages, 1, Hk, D]` for the mean of the keys of each page and head, or
            `[pages, 2, Hk, D]` for their minimum and their maximum, in the element type of the
            cache.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        seqused_k: int32 `[B]`: how many keys each sequence has. By default the cache is full.
        tokens: At least as many tokens as were appended to any sequence since the last call: only
            pages that hold the last ones are read. All by default.

    Raises:
        Unsupported: No kernel takes the call.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    if tokens is None:
        tokens = block_table.shape[-1] * k_cache.shape[1]
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}, which is negative")
    try:
        _OPS.summarize_pages.default(k_cache.detach(), summaries, block_table, seqused_k, tokens)
    except RuntimeError as error:
        raise _autograd.typed(error) from None


def choose_pages(
    q: Tensor,
    k_cache: Tensor,
    summaries: Tensor,
    *,
    block_table: Tensor,
    room: int,
    seqused_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The pages that the queries of each sequence visit: `pages` of `attention_decode`.

    The first and the last page of a sequence are always chosen, and then those with the largest
    scores, of equal scores the first ones, until the list is full. The score of a page for a head
    of keys is the largest one of all queries of the sequence in all heads that share it: q · mean,
    or the upper bound of q · k that follows from minimum and maximum.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`, turned by their
            positions if the keys are.
        k_cache: Keys, `[pages, page_size, Hk, D]`. Only their sizes matter.
        summaries: Written by `summarize_pages`.
        block_table: int32 `[B, max_pages]`.
        room: Pages of a list, at least 2.
        seqused_k: int32 `[B]`: how many keys each sequence has. By default the cache is full.
        cu_seqlens_q: int32 `[B + 1]`: where the queries of each sequence start.
        max_seqlen_q: The most queries of a sequence, needed with `cu_seqlens_q`.

    Returns:
        `(lists, counts)`, int32 `[B, Hk, room]` and `[B]`: columns of the block table, ascending;
        those of a list beyond the count are 0.

    Raises:
        Unsupported: No kernel takes the call.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    together(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    most = 0 if max_seqlen_q is None else max_seqlen_q
    for name, number in (("room", room), ("max_seqlen_q", most)):
        if number < 0:
            raise ValueError(f"{name} is {number}, which is negative")
    tensors = (q.detach(), k_cache.detach(), summaries.detach(), block_table, seqused_k)
    try:
        return _OPS.choose_pages.default(*tensors, cu_seqlens_q, most, room)
    except RuntimeError as error:
        raise _autograd.typed(error) from None


def _summarize(
    k_cache: Tensor, summaries: Tensor, block_table: Tensor, seqused_k: Tensor | None, tokens: int
) -> None:
    _native.summarize_pages(k_cache, summaries, block_table, seqused_k, tokens)


def _choose(
    q: Tensor,
    k_cache: Tensor,
    summaries: Tensor,
    block_table: Tensor,
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_q: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    lists, counts = _results(block_table, k_cache, room)

    def allocate(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=q.device)

    options = (lists, counts, allocate, block_table, seqused_k, cu_seqlens_q, max_q)
    try:
        _native.choose_pages(q, k_cache, summaries, *options)
    except _native.Misaligned:
        q = q.clone(memory_format=torch.contiguous_format)
        _native.choose_pages(q, k_cache, summaries, *options)
    return lists, counts


def _results(block_table: Tensor, k_cache: Tensor, room: int) -> tuple[Tensor, Tensor]:
    batch, heads = block_table.shape[0], k_cache.shape[-2]
    return (
        k_cache.new_empty((batch, heads, room), dtype=torch.int32),
        k_cache.new_empty((batch,), dtype=torch.int32),
    )


def _fake_choose(
    q: Tensor, k_cache: Tensor, summaries: Tensor, block_table: Tensor, *rest: object
) -> tuple[Tensor, Tensor]:
    room = rest[-1]
    assert isinstance(room, (int, torch.SymInt))
    return _results(block_table, k_cache, room)  # type: ignore[arg-type]


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    kernels = (
        ("summarize_pages", _summarize, lambda *arguments: None),
        ("choose_pages", _choose, _fake_choose),
    )
    for name, kernel, fake in kernels:
        library.define(name + SCHEMAS[name])
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        register_fake(f"blockflash::{name}", fake, lib=library)
    refuse_lazy_writes(library, _OPS.summarize_pages.default)
    _autograd.register_writes(library, "summarize_pages")
    _autograd.register_gradient(library, "choose_pages")
    return library


_LIBRARY = _register()
