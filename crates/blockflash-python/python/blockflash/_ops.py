"""The operators of torch, `torch.ops.blockflash.*`.

| operator | what it is |
|---|---|
| `attention` | `(o, lse)`, with a gradient |
| `attention_forward` | `o` alone, for calls without a gradient: it spares autograd's wrapper |
| `attention_out` | into given tensors, without a gradient |
| `attention_backward` | `(dq, dk, dv, d_sink)`, what the gradient of `attention` calls |

All tensors are arguments, everything else is a number: -1 is an unlimited side of the window, 0 no
softcap and no block mask. An argument that has its default costs the host least if not passed. q is
`[B, Sq, Hq, D]` or packed `[Tq, Hq, D]`, lse f32 `[B, Hq, Sq]` or `[Hq, Tq]`. The functions that
users call are in the modules beside this one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import _flops, _gradient, _native

_QKV = "Tensor q, Tensor k, Tensor v"
_OPTIONS = (
    "Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_q=0, "
    "SymInt max_k=0, int left=-1, int right=-1, bool top_left=False, float? scale=None, "
    "float softcap=0.0, SymInt block_mask=0"
)


_DEFAULTS = {
    "cu_seqlens_q": None, "cu_seqlens_k": None, "max_q": 0, "max_k": 0, "left": -1, "right": -1,
    "top_left": False, "scale": None, "softcap": 0.0, "block_mask": 0,
}  # fmt: skip
"""The options after the sink, in their order."""


def empty_o(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """An output; zeros where rows may belong to no sequence."""
    empty = torch.empty_like if cu_seqlens_q is None else torch.zeros_like
    return empty(q, memory_format=torch.contiguous_format)


def empty_lse(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """Space for the log-sum-exp; zeros where rows may belong to no sequence."""
    if cu_seqlens_q is None:
        return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)


def _attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None = None,
    sink: Tensor | None = None,
    *options: Any,
) -> None:
    """Calls the native function.

    GPU kernels read q, k and v in units of 16 bytes: operands that are not aligned so are copied.
    """
    _gradient.refuse_to_lose(q, k, v, sink)
    try:
        _native.attention(q, k, v, o, lse, sink, *options)
    except _native.Misaligned:
        q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
        _native.attention(q, k, v, o, lse, sink, *options)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    o, lse = empty_o(q, cu_seqlens_q), empty_lse(q, cu_seqlens_q)
    _attention_out(q, k, v, o, lse, sink, cu_seqlens_q, *options)
    return o, lse


class Differentiable(torch.autograd.Function):
    """`attention` with its gradient, for calls that nothing traces or transforms.

    torch's wrapper around the operator does the same and costs the host several times as much.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attention_out: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """`(o, lse)` by the operator `attention_out`, with its options but the sink."""
        cu_seqlens_q = options.get("cu_seqlens_q")
        o, lse = empty_o(q, cu_seqlens_q), empty_lse(q, cu_seqlens_q)
        attention_out(q, k, v, o, lse, sink, **options)
        given = (options.get(name, default) for name, default in _DEFAULTS.items())
        _gradient.setup_context(ctx, (q, k, v, sink, *given), (o, lse))
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of q, k, v and the sink, in the places of `forward`'s arguments."""
        return (None, *_gradient.backward(ctx, grad_o, grad_lse)[:4], None)


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *options: Any,
) -> Tensor:
    o = empty_o(q, cu_seqlens_q)
    _attention_out(q, k, v, o, None, sink, cu_seqlens_q, *options)
    return o


def _fake_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *options: Any,
) -> Tensor:
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    return empty_o(q, cu_seqlens_q)


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    return _fake_attention_forward(q, k, v, sink, cu_seqlens_q), empty_lse(q, cu_seqlens_q)


def refuse_lazy_writes(library: torch.library.Library, operator: OpOverload) -> None:
    """Have an operator that writes tensors refuse those with torch's negative or conjugate bit.

    torch's own fallback copies all that have one, and aborts if one of them is written.
    """
    written = [bool(a.alias_info and a.alias_info.is_write) for a in operator._schema.arguments]

    def resolve(*given: Any, **options: Any) -> Any:
        for argument, write, value in zip(operator._schema.arguments, written, given, strict=False):
            if write and isinstance(value, Tensor) and (value.is_neg() or value.is_conj()):
                raise ValueError(
                    f"{argument.name} is written, but is a view of what it negates or conjugates: "
                    "use resolve_neg() and resolve_conj()"
                )
        return operator(*map(_resolved, given), **{k: _resolved(v) for k, v in options.items()})

    for key in ("Negative", "Conjugate"):
        library.impl(operator._schema.name.partition("::")[2], resolve, key)


def _resolved(value: Any) -> Any:
    return value.resolve_neg().resolve_conj() if isinstance(value, Tensor) else value


def register(namespace: str, native: bool) -> torch.library.Library:
    """Defines the operators; `native` kernels where they are possible, else kernels in Python."""
    library = torch.library.Library(namespace, "DEF")
    library.define(f"attention({_QKV}, {_OPTIONS}) -> (Tensor o, Tensor lse)")
    library.define(f"attention_forward({_QKV}, {_OPTIONS}) -> Tensor")
    outputs = "Tensor(a!) o, Tensor(b!)? lse=None"
    library.define(f"attention_out({_QKV}, {outputs}, {_OPTIONS}) -> ()")
    given = f"Tensor grad_o, Tensor? grad_lse, {_QKV}, Tensor o, Tensor lse, {_OPTIONS}"
    gradients = "(Tensor dq, Tensor dk, Tensor dv, Tensor d_sink)"
    library.define(f"attention_backward({given}) -> {gradients}")
    natively = _native.register_kernels(namespace) if native else []
    for key in ("CPU", "CUDA"):
        library.impl("attention", _attention, key)
        library.impl("attention_backward", _gradient.compute, key)
        if key not in natively:
            library.impl("attention_forward", _attention_forward, key)
            library.impl("attention_out", _attention_out, key)
    refuse_lazy_writes(library, getattr(torch.ops, namespace).attention_out.default)
    for name, fake in (
        ("attention", _fake_attention),
        ("attention_forward", _fake_attention_forward),
        ("attention_out", lambda *arguments, **options: None),
        ("attention_backward", _gradient.fake),
    ):
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    torch.library.register_autograd(
        f"{namespace}::attention",
        _gradient.backward,
        setup_context=_gradient.setup_context,
        lib=library,
    )
    names = ("attention", "attention_forward", "attention_out", "attention_backward")
    _flops.register(namespace, *names)
    return library


_KINDS = {
    "Value": ValueError,
    "Misaligned": ValueError,
    "Unsupported": _native.Unsupported,
    "Device": _native.DeviceError,
    "Memory": torch.OutOfMemoryError,
}


def typed(error: RuntimeError) -> Exception:
    """The exception that a native kernel means: C++ knows its text alone, after its kind."""
    kind, _, text = str(error).partition(": ")
    if kind in _KINDS:
        return _KINDS[kind](text)
    if "CUDA error" in str(error) and torch.cuda._is_in_bad_fork():
        return _native.DeviceError(
            "CUDA was initialised before this process was forked, and cannot be used in it: start "
            f"processes by spawn or forkserver ({str(error).splitlines()[0]})"
        )
    return error


_LIBRARY = register("blockflash", native=True)
