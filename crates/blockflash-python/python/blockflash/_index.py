"""Attention of each query to the blocks of keys that a list names.

| operator | what it is |
|---|---|
| `index_attention` | `(o, lse)`, with the options of `attention_decode` |
| `index_attention_backward` | `(dq, dk, dv, d_sink)`, the gradient of these two |

They are operators of torch like those of `_ops`. The lists are made by those of `_index_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _autograd, _flops, _index_gradient, _native, _stats
from ._arguments import UNLIMITED, lowered, refuse_types, scores, together
from ._fakes import register_fake
from ._mla import _VALUES, values_of
from ._native import Unsupported
from ._ops import empty_lse, empty_o
from ._schema import DECODE, SCHEMAS

_OPS = torch.ops.blockflash


def index_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    granularity: int,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNLIMITED,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    **further: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query to the blocks of keys that its list names.

    Entry `e` of a list stands for the keys `e * granularity` to `(e + 1) * granularity` of the
    query's sequence. Entries may be in any order. Negative ones, such as the -1 that fills a list,
    and blocks beyond the sequence are skipped; a block that is listed twice counts twice. Query
    `i` of `n` of a sequence with `length` keys stands at key `length - n + i`, and `causal` and
    `window` hold inside of blocks, too. A query that sees no key gets the output 0.

    Lists, lengths, offsets and tables are read on the device at each call, so a CUDA graph follows
    them, and whatever they hold, nothing outside of the tensors is touched. Results have the same
    bits in every run.

    On a GPU the element types are float16 and bfloat16, the head dimension is a multiple of 8 up to
    256, `granularity` is 1, 4, 16, 64 or 128, and pages have a multiple of 16 slots. Latent rows
    (`v` is `k[..., :512]` of 576 elements, or `k` itself of rows of 656 bytes, as `mla_decode`
    takes them) have kernels of their own. The CPU takes every call, also in float32. The gradient
    of q, k, v and the logits is computed in a fixed order, on a GPU for a `granularity` of 16, 64
    and 128, where keys fill their sequences: contiguous ones without `seqused_k`, or packed ones
    beside packed queries. Other calls have none, and raise.

    Args:
        q: Queries, `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`.
        k: Keys, `[B, capacity, Hk, D]`; `[pages, page_size, Hk, D]` with `block_table`; or packed
            `[Tk, Hk, D]` with `cu_seqlens_k`. Any strides but a contiguous last dimension.
        v: Values, in the shape of the keys but for their head dimension, which the output has.
        lists: int32 `[groups, rows, room]`, or `[rows, room]` for one group: rows are `Tq`, or
            `B * Sq`, sequence by sequence; groups are 1 for lists that all heads share, or Hk or
            Hq. `top_k` makes them.
        granularity: Tokens of a block. It need not divide the page size.
        seqused_k: int32 `[B]`: how many keys each sequence has. By default the cache is full.
        block_table: int32 `[B, max_pages]`: the pages of each sequence in the order of their keys.
        cu_seqlens_q: int32 `[B + 1]`: sequence `i` has the queries `cu_seqlens_q[i]` to
            `cu_seqlens_q[i + 1]`. Rows of no sequence get the output 0.
        cu_seqlens_k: The same for packed keys and values.
        max_seqlen_q: The most queries of a sequence, needed with `cu_seqlens_q`.
        max_seqlen_k: The most keys of a sequence, needed with `cu_seqlens_k`.
        causal: A query attends the keys up to its own.
        window: A query at key `p` attends the keys `p - window[0]` to `p + window[1]`; None is
            unlimited.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default.
        k_scale: float32, with keys of 8 bits: what they are multiplied with, as in
            `attention_decode`.
        v_scale: The same of the values.
        batch_invariant: The bits of a query depend on no other query, nor on their number, at some
            cost in speed.
        return_lse: Return `(o, lse)`: lse is float32, `[B, Hq, Sq]` or `[Hq, Tq]`.
        further: What else happens to a score, as in `attention_decode`: a cap, a bias, slopes, or a
            logit per head that joins the denominator.

    Returns:
        The output in the shape of q with the head dimension of `v`, in the element type of q,
        contiguous, or a pair with the lse.

    Raises:
        Unsupported: No kernel takes the call, or a gradient would be lost.
        ValueError: Shapes, types, devices or numbers are wrong.
        DeviceError: The driver failed.

    """
    refuse_types(lists=lists)
    q, k, v = lowered(q, k, v)
    given = scores(causal, window, scale, **further)
    both(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    both(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    tensors = {
        "seqused_k": seqused_k, "block_table": block_table, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    given |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if max_seqlen_q is not None:
        given["max_q"] = max_seqlen_q
    if batch_invariant:
        given["batch_invariant"] = True
    if lists.dim() == 2:
        lists = lists.unsqueeze(0)
    options = DECODE.leading(given)
    rest = (lists, granularity, max_seqlen_k or 0, *options)
    has_gradient = _index_gradient.WITHOUT.isdisjoint(given)
    o, lse = call(_OPS.index_attention.default, q, k, v, *rest, has_gradient=has_gradient)
    _stats.count("index_attention")
    return (o, lse) if return_lse else o


def attend_to_rows(
    q: Tensor, rows: Tensor, width: int, lists: Tensor, options: Sequence[Any]
) -> Tensor:
    """Attention to the latent rows that lists name, as engines call it: without autograd.

    Args:
        q: Queries as `index_attention` takes them.
        rows: `[pages, page_size, 1, row]`, of codes uint8 `[pages, page_size, 1, 656]`.
        width: How many elements of a row are its value.
        lists: int32 `[1, rows of q, room]`.
        options: Those of `attention_decode`, in their order.

    Returns:
        The output in the shape of q with the head dimension `width`.

    """
    o = q.new_empty(*q.shape[:-1], width)
    rest = (rows, values_of(rows, width), lists, o, None, allocate_like(q), 1, 0, *options)
    try:
        _native.index_attention(q, *rest)
    except _native.Misaligned:
        _native.index_attention(q.clone(memory_format=torch.contiguous_format), *rest)
    _stats.count("index_attention")
    return o


def both(**given: Any) -> None:
    """Raises where one of these is given and another one is not."""
    if any(value is not None for value in given.values()):
        together(**given)


def call(operator: Any, *arguments: Any, has_gradient: bool = False) -> Any:
    """Calls an operator, below autograd if that has no say."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    try:
        if _autograd.passes(*tensors):
            return _autograd.call_below(operator, *arguments)
        if not has_gradient:
            _refuse_to_lose(operator, tensors)
        return operator(*arguments)
    except RuntimeError as error:
        raise _autograd.typed(error) from None


def _refuse_to_lose(operator: Any, tensors: list[Tensor]) -> None:
    try:
        _autograd.refuse_to_lose(*tensors)
    except Unsupported:
        name = operator._schema.name.partition("::")[2]
        why = "of this call" if name == "index_attention" else "of its results"
        text = f"{name} has no gradient {why}: use torch.no_grad(), or detach its operands"
        raise Unsupported(text) from None


def allocate_like(tensor: Tensor) -> Callable[[int], Tensor]:
    """What makes a workspace of this many bytes for a call that a graph captures."""

    def allocate(count: int) -> Tensor:
        return tensor.new_empty(count, dtype=torch.uint8)

    return allocate


def register(
    library: torch.library.Library,
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *gradient: Callable[..., Any],
) -> None:
    """Defines an operator, with the rules of its gradient if it has one."""
    library.define(name + SCHEMAS[name])
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    register_fake(f"blockflash::{name}", fake, lib=library)
    _autograd.register_gradient(library, name, *gradient)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    granularity: int,
    max_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Calls the native function; queries that are not aligned for a GPU are copied."""
    o, lse = _fake_attention(q, k, v, lists, granularity, max_k, *options)
    rest = (lists, o, lse, allocate_like(q), granularity, max_k, *options)
    try:
        _native.index_attention(q, k, v, *rest)
    except _native.Misaligned:
        q = q.clone(memory_format=torch.contiguous_format)
        _native.index_attention(q, k, v, *rest)
    return o, lse


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    granularity: int,
    max_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    cu_seqlens_q = DECODE.value(options, "cu_seqlens_q")
    values = v[..., :_VALUES] if v.dtype == torch.uint8 else v
    return empty_o(q, values, cu_seqlens_q), empty_lse(q, cu_seqlens_q)


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    rules = (_index_gradient.setup_context, _index_gradient.backward)
    register(library, "index_attention", _attention, _fake_attention, *rules)
    of_backward = (_index_gradient.compute, _index_gradient.fake)
    register(library, "index_attention_backward", *of_backward)
    _flops.register("blockflash", "index_attention", "index_attention_backward")
    return library


_LIBRARY = _register()
