"""The gradient of attention.

torch's own flash backward computes it from our output and log-sum-exp. It knows full and causal
masks; whatever else is asked for a gradient is an error, never a result without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._native import Unsupported

SCHEMA = (
    "Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k, bool causal, bool top_left, float? scale"
)

_INPUTS = 14


def refuse_to_lose(*tensors: Tensor | None) -> None:
    """Raises where autograd would silently lose a gradient: in an operator that has none."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise Unsupported(
            "this operator of blockflash has no gradient: call blockflash.attention, without out=, "
            "and only once differentiated, or use torch.no_grad()"
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves what the gradient needs, or says why there is none."""
    q, k, v, sink, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *numbers = inputs
    left, right, top_left, scale, softcap, block_mask = numbers
    causal = (left, right) == (-1, 0)
    what = None
    if block_mask != 0:
        what = "a block mask"
    elif sink is not None:
        what = "a sink"
    elif softcap != 0:
        what = "a softcap"
    elif not causal and (left, right) != (-1, -1):
        what = "a window"
    elif causal and top_left and q.device.type == "cuda":
        # The backward kernel aligns a causal mask at the bottom right.
        if cu_seqlens_q is not None or q.shape[1] != k.shape[1]:
            what = "a causal mask aligned at the top left for different lengths"
    if what is not None:
        raise Unsupported(
            f"attention with {what} has no gradient yet: full and causal masks have one. Use "
            "torch.no_grad(), or detach q, k and v, if none is needed"
        )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.numbers = (max_q, max_k, causal, top_left, scale)


def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Gradients of the inputs of the operator `attention`."""
    if grad_lse is not None:
        raise Unsupported("the log-sum-exp of attention has no gradient: use lse.detach()")
    if grad_o is None:
        return (None,) * _INPUTS
    saved = ctx.saved_tensors
    grads = torch.ops.blockflash.attention_backward(grad_o, *saved, *ctx.numbers)
    return (*grads, *(None,) * (_INPUTS - 3))


def fake(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of the gradients."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def backward_cuda(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by torch's FlashAttention 2; causal is aligned bottom-right."""
    refuse_to_lose(grad_o, q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return _zeros(q, k, v)
    if cu_seqlens_q is None:
        max_q, max_k = q.shape[1], k.shape[1]
    # A row without keys has probability 0 everywhere: exp(-inf - inf).
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    # States of the random numbers of dropout, which is not used.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, 0.0, causal, seed,
        offset, scale=scale,
    )  # fmt: skip
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def backward_cpu(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by torch's flash backward for CPUs, one sequence after another."""
    refuse_to_lose(grad_o, q, k, v)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _dense_cpu(grad_o, q, k, v, o, lse, causal, top_left, scale)
    dq, dk, dv = _zeros(q, k, v)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        operands = (t[None] for t in (grad_o[rows], q[rows], k[keys], v[keys], o[rows]))
        grads = _dense_cpu(*operands, lse[None, :, rows], causal, top_left, scale)
        dq[rows], dk[keys], dv[keys] = (grad[0] for grad in grads)
    return dq, dk, dv


def _dense_cpu(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return _zeros(q, k, v)
    (seqlen_q, heads), (seqlen_k, heads_k) = q.shape[1:3], k.shape[1:3]
    # torch's function aligns a causal mask at the top left, and takes as many heads of k as of q.
    mask = None
    if causal and not top_left and seqlen_q != seqlen_k:
        hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(seqlen_k - seqlen_q + 1)
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        causal = False
    group = heads // heads_k
    repeated = (t.repeat_interleave(group, dim=2) for t in (k, v))
    by_head = [t.transpose(1, 2) for t in (grad_o, q, *repeated, o)]
    # A row without keys has probability 0 everywhere: exp(-inf - inf).
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *by_head, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    dk, dv = (grad.unflatten(1, (heads_k, group)).sum(2) for grad in (dk, dv))
    return tuple(grad.transpose(1, 2).contiguous() for grad in (dq, dk, dv))


def _zeros(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors)
