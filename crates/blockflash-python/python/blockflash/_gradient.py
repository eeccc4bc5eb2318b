"""The gradient of attention, by our own backward pass.

It is computed once and in a fixed order, so it is the same bit for bit in repeats. A gradient of
the gradient is an error, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _autograd, _native
from ._schema import ATTENTION

# Places among the arguments of `attention`, of which q, k and v are the first.
_NUMBERS = 3 + len(ATTENTION.tensors)
_BLOCK_MASK = 3 + ATTENTION.places["block_mask"]
_SINK = ATTENTION.places["sink"]
_BIAS = ATTENTION.places["bias"]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves what the gradient needs."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:_NUMBERS])
    ctx.numbers = inputs[_NUMBERS:]
    if len(inputs) <= _BLOCK_MASK:
        return
    # While a graph is traced, the number of a block mask may be a symbol. Whoever calls the graph
    # keeps the mask then; a number that is gone is an error.
    block_mask = inputs[_BLOCK_MASK]
    if isinstance(block_mask, int) and block_mask != 0:
        ctx.block_mask = _native.BlockMask.of(block_mask)


def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Gradients of the inputs of the operator `attention` that have any."""
    saved = ctx.saved_tensors
    if grad_o is None:
        if grad_lse is None:
            return ()
        grad_o = torch.zeros_like(saved[3])
    of_bias = any(ctx.needs_input_grad[3 + _BIAS : 4 + _BIAS])
    given = (grad_o, grad_lse, *saved[:5], of_bias, *saved[5:], *ctx.numbers)
    operator = torch.ops.blockflash.attention_backward.default
    if torch.is_grad_enabled() or _autograd.is_transformed():
        grads = operator(*given)
    else:
        with _autograd.below():
            grads = operator(*given)
    of_options: list[Tensor | None] = []
    for place, needed, grad in ((_SINK, _given(saved[5:], _SINK), 3), (_BIAS, of_bias, 4)):
        if needed:
            of_options += [None] * (place - len(of_options))
            of_options.append(grads[grad])
    return (*grads[:3], *of_options)


def _given(options: Sequence[Any], place: int) -> bool:
    return len(options) > place and options[place] is not None


def fake(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    of_bias: bool = False,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Memory for the gradients; those of the sink and the bias may have no element."""
    sink = ATTENTION.value(options, "sink")
    grads = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    d_sink = lse.new_empty(0 if sink is None else q.shape[-2])
    return (*grads, d_sink, _like_bias(of_bias, lse, options))


def _like_bias(of_bias: bool, lse: Tensor, options: Sequence[Any]) -> Tensor:
    """Memory for the gradient of the bias, if that is asked for."""
    bias = ATTENTION.value(options, "bias")
    return empty_rows(bias) if of_bias and bias is not None else lse.new_empty(0)


def compute(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    of_bias: bool = False,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, sink and bias: the kernel of `attention_backward`."""
    head_dim = q.shape[-1]
    if grad_lse is not None:
        widest = max(head_dim, v.shape[-1])
        if q.is_cuda and widest > 504:
            raise _native.Unsupported(
                f"the gradient of lse takes head dimensions up to 504 on a GPU, not {widest}"
            )
        named = ATTENTION.named(options)
        if named["scale"] is None:
            named["scale"] = head_dim**-0.5
        options = tuple(named.values())
        q, k, v = (pad(t, (0, COLUMNS)) for t in (q, k, v))
        o, grad_o = with_columns(o, grad_o, grad_lse.masked_fill(lse == -torch.inf, 0))
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    has_sink = _given(options, _SINK)
    d_sink = lse.new_empty(q.shape[-2] if has_sink else 0)
    d_bias = _like_bias(of_bias, lse, options)
    wanted = (d_sink if has_sink else None, d_bias if of_bias else None)
    into((dq, dk, dv, *wanted), grad_o, q, k, v, o, lse, *options)
    if grad_lse is None:
        return dq, dk, dv, d_sink, d_bias
    grads = (grad[..., :-COLUMNS].contiguous() for grad in (dq, dk, dv))
    return (*grads, d_sink, d_bias)


def empty_rows(tensor: Tensor) -> Tensor:
    """Contiguous memory like that of a tensor: to ask costs the host less than to say so."""
    if tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def into(
    results: tuple[Tensor | None, ...],
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *options: Any,
) -> None:
    """Writes `(dq, dk, dv, d_sink, d_bias)`, of any strides but a contiguous last dimension.

    GPU kernels read rows in units of 16 bytes: operands that are not aligned so are copied.
    """

    def allocate(count: int) -> Tensor:
        return q.new_empty(count, dtype=torch.uint8)

    results = (*results, allocate)
    grad_o = grad_o if grad_o.stride(-1) == 1 else grad_o.contiguous()
    try:
        _native.attention_backward(q, k, v, o, lse, grad_o, *results, *options)
    except _native.Misaligned:
        q, k, v, o, grad_o = (
            t.clone(memory_format=torch.contiguous_format) for t in (q, k, v, o, grad_o)
        )
        _native.attention_backward(q, k, v, o, lse, grad_o, *results, *options)


COLUMNS = 8
"""Further columns for the gradient of lse; eight keep rows aligned."""


def with_columns(o: Tensor, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Brings in the gradient of lse, by further columns of `(o, grad_o)`.

    The gradient of a score is `p * (grad_o @ v.T - sum(grad_o * o) + grad_lse)`, of which the
    backward pass computes all but the last term. In columns where v is 0 and the products of grad_o
    and o add up to -grad_lse, the sum contains it. Three columns hold its leading bits, the next
    ones and the last ones: all 24 of float32, however few the element type has.
    """
    rest = -grad_lse.transpose(-1, -2)
    parts, units = [], []
    for unit in (1.0, 2.0**-10, 2.0**-20):
        part = (rest / unit).to(o.dtype)
        rest = rest - part.float() * unit
        parts.append(part)
        units.append(torch.full_like(part, unit))
    columns = (torch.stack(each, dim=-1) for each in (parts, units))
    pairs = zip((o, grad_o), columns, strict=True)
    o, grad_o = (pad(torch.cat(pair, dim=-1), (0, COLUMNS - len(parts))) for pair in pairs)
    return o, grad_o
