"""The gradient of attention by an index, in a fixed order, so that it is the same in each run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _autograd, _native
from ._decode import LOGITS
from ._gradient import COLUMNS, empty_rows, with_columns
from ._schema import DECODE

_TENSORS = len(DECODE.tensors)
WITHOUT = {"seqused_k", "block_table", "k_scale", "v_scale", "bias", "alibi_slopes"}
"""Options of calls that have no gradient."""


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves what the gradient needs: of q, k, v, lists, granularity, most keys and options."""
    ctx.set_materialize_grads(False)
    tensors, ctx.sizes, options = inputs[:4], inputs[4:6], inputs[6:]
    ctx.save_for_backward(*tensors, *output, *options[:_TENSORS])
    ctx.numbers = options[_TENSORS:]


def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Gradients of the inputs of the operator `index_attention` that have any."""
    saved = ctx.saved_tensors
    if grad_o is None:
        if grad_lse is None:
            return ()
        grad_o = torch.zeros_like(saved[4])
    given = (grad_o, grad_lse, *saved[:6], *ctx.sizes, *saved[6:], *ctx.numbers)
    operator = torch.ops.blockflash.index_attention_backward.default
    if torch.is_grad_enabled() or _autograd.is_transformed():
        dq, dk, dv, d_logits = operator(*given)
    else:
        with _autograd.below():
            dq, dk, dv, d_logits = operator(*given)
    none = [None] * (3 + LOGITS)
    has_logits = len(saved) > 6 + LOGITS and saved[6 + LOGITS] is not None
    return (dq, dk, dv, *none, d_logits) if has_logits else (dq, dk, dv)


def fake(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    o: Tensor,
    lse: Tensor,
    granularity: int,
    max_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the gradients; that of the logits may have no element."""
    has_logits = len(options) > LOGITS and options[LOGITS] is not None
    d_logits = lse.new_empty(q.shape[-2] if has_logits else 0)
    dq, dk, dv = (empty_rows(t) for t in (q, k, v))
    return dq, dk, dv, d_logits


def compute(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    o: Tensor,
    lse: Tensor,
    granularity: int,
    max_k: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    """The kernel of `index_attention_backward`; operands that are not aligned are copied."""
    if grad_lse is not None:
        named = DECODE.named(options)
        if named["scale"] is None:
            named["scale"] = q.shape[-1] ** -0.5
        options = tuple(named.values())
        q, k, v = (pad(t, (0, COLUMNS)) for t in (q, k, v))
        o, grad_o = with_columns(o, grad_o, grad_lse.masked_fill(lse == -torch.inf, 0))
    grad_o = grad_o if grad_o.stride(-1) == 1 else grad_o.contiguous()

    def allocate(count: int) -> Tensor:
        return q.new_empty(count, dtype=torch.uint8)

    given = (grad_o, None, q, k, v, lists, o, lse, granularity, max_k, *options)
    dq, dk, dv, d_logits = fake(*given)
    written = (dq, dk, dv, d_logits if d_logits.numel() else None, allocate)
    rest = (*written, granularity, max_k, *options)
    try:
        _native.index_attention_backward(q, k, v, lists, o, lse, grad_o, *rest)
    except _native.Misaligned:
        q, k, v, o, grad_o = (
            t.clone(memory_format=torch.contiguous_format) for t in (q, k, v, o, grad_o)
        )
        _native.index_attention_backward(q, k, v, lists, o, lse, grad_o, *rest)
    if grad_lse is None:
        return dq, dk, dv, d_logits
    return (*(grad[..., :-COLUMNS].contiguous() for grad in (dq, dk, dv)), d_logits)
