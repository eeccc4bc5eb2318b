"""The operators of torch, `torch.ops.blockflash.*`.

| operator | what it is |
|---|---|
| `attention` | `(o, lse)` |
| `attention_forward` | `o` alone, which costs less where nobody differentiates |
| `attention_out` | into given tensors, without a gradient; by `attention` where it is traced |
| `attention_backward` | `(dq, dk, dv, d_sink, d_bias)`, the gradient of the first two |

`attention_backward` has no gradient itself, and computes that of the bias if `of_bias` says so.
All tensors are arguments, everything else is a number: -1 is an unlimited side of the window, 0 no
cap of the scores and no block mask. An argument that has its default costs the host least if not
passed. q is `[B, Sq, Hq, D]` or packed `[Tq, Hq, D]`, o has the D of v, lse is f32 `[B, Hq, Sq]` or
`[Hq, Tq]`. The functions that users call are in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import _autograd, _flops, _gradient, _native
from ._fakes import register_fake
from ._schema import ATTENTION, SCHEMAS

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""The element types of 8 bits that stand for numbers times a scale."""
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What `out_dtype` of the operators numbers from 1 on."""


def empty_o(q: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, out_dtype: int = 0) -> Tensor:
    """An output; zeros where rows may belong to no sequence."""
    dtype = None
    if 0 < out_dtype <= len(OUT_DTYPES):
        dtype = OUT_DTYPES[out_dtype - 1]
    elif q.dtype in CODES:
        dtype = torch.bfloat16
    if v.shape[-1:] != q.shape[-1:]:
        new = q.new_empty if cu_seqlens_q is None else q.new_zeros
        return new((*q.shape[:-1], *v.shape[-1:]), dtype=dtype)
    empty = torch.empty_like if cu_seqlens_q is None else torch.zeros_like
    return empty(q, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_o_of(q: Tensor, v: Tensor, options: Sequence[Any]) -> Tensor:
    """An output of a call with these options."""
    named = ATTENTION.value(options, "cu_seqlens_q"), ATTENTION.value(options, "out_dtype")
    return empty_o(q, v, *named)


def empty_lse(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """Space for the log-sum-exp; zeros where rows may belong to no sequence."""
    if cu_seqlens_q is None:
        shape = q.shape
        size = (shape[0], shape[2], shape[1])
        return q.new_empty(size, dtype=torch.float32)
    return q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)


def attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None = None,
    *options: Any,
) -> None:
    """Calls the native function.

    GPU kernels read q, k and v in units of 16 bytes: operands that are not aligned so are copied.
    """
    try:
        _native.attention(q, k, v, o, lse, *options)
    except _native.Misaligned:
        q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
        _native.attention(q, k, v, o, lse, *options)


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens_q = ATTENTION.value(options, "cu_seqlens_q")
    o, lse = _empty_o_of(q, v, options), empty_lse(q, cu_seqlens_q)
    attention_out(q, k, v, o, lse, *options)
    return o, lse


def into(
    operators: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None = None,
    *options: Any,
    **named: Any,
) -> None:
    """Attention into given tensors by an operator of a namespace that returns its results.

    For whoever traces, transforms or keeps results. A gradient is refused.
    """
    given = (o, lse, *options, *named.values())
    _autograd.refuse_to_lose(q, k, v, *(t for t in given if isinstance(t, Tensor)))
    results = operators.attention.default(q, k, v, *options, **named)
    for what, given, result in zip(("o", "lse"), (o, lse), results, strict=True):
        if given is None:
            continue
        if given.shape != result.shape or given.dtype != result.dtype:
            raise ValueError(
                f"{what} is {given.dtype} {list(given.shape)}, but must be {result.dtype} "
                f"{list(result.shape)}"
            )
        given.copy_(result)


def _attention_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    o = _empty_o_of(q, v, options)
    attention_out(q, k, v, o, None, *options)
    return o


def _fake_attention_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    return _empty_o_of(q, v, options)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    o = _fake_attention_forward(q, k, v, *options)
    return o, empty_lse(q, ATTENTION.value(options, "cu_seqlens_q"))


def refuse_lazy_writes(library: torch.library.Library, operator: OpOverload) -> None:
    """Have an operator that writes tensors refuse those with torch's negative or conjugate bit.

    torch's own fallback copies all that have one, and aborts if one of them is written.
    """
    arguments = operator._schema.arguments
    writes = _autograd.written(operator)

    def resolve(*given: Any, **options: Any) -> Any:
        for argument, value in zip(arguments[writes], given[writes], strict=False):
            if isinstance(value, Tensor) and (value.is_neg() or value.is_conj()):
                raise ValueError(
                    f"{argument.name} is written, but is a view of what it negates or conjugates: "
                    "use resolve_neg() and resolve_conj()"
                )
        return operator(*map(_resolved, given), **{k: _resolved(v) for k, v in options.items()})

    for key in ("Negative", "Conjugate"):
        library.impl(operator._schema.name.partition("::")[2], resolve, key)


def _resolved(value: Any) -> Any:
    return value.resolve_neg().resolve_conj() if isinstance(value, Tensor) else value


def register(namespace: str, native: bool) -> tuple[torch.library.Library, Any]:
    """Defines the operators; `native` kernels where they are possible, else kernels in Python.

    They last as long as the library, which comes with autograd's function of `attention`.
    """
    library = torch.library.Library(namespace, "DEF")
    names = ("attention", "attention_forward", "attention_out", "attention_backward")
    for name in names:
        library.define(name + SCHEMAS[name])
    natively = _native.register_kernels(namespace) if native else []
    for key in ("CPU", "CUDA"):
        library.impl("attention_backward", _gradient.compute, key)
        if key not in natively:
            library.impl("attention", _attention, key)
            library.impl("attention_forward", _attention_forward, key)
            library.impl("attention_out", attention_out, key)
    refuse_lazy_writes(library, getattr(torch.ops, namespace).attention_out.default)
    fakes = (_fake_attention, _fake_attention_forward, lambda *arguments, **options: None)
    for name, fake in zip(names, (*fakes, _gradient.fake), strict=True):
        register_fake(f"{namespace}::{name}", fake, lib=library)
    operators = getattr(torch.ops, namespace)
    _autograd.register_step(
        library, "attention_forward", lambda *given: operators.attention.default(*given)[0]
    )
    _autograd.register_writes(library, "attention_out", partial(into, operators))
    _autograd.register_gradient(library, "attention_backward")
    _flops.register(namespace, *names)
    rules = (_gradient.setup_context, _gradient.backward)
    return library, _autograd.register_gradient(library, "attention", *rules)


_LIBRARY, Differentiable = register("blockflash", native=True)
