"""The gradient of attention.

torch's own flash backward computes it from our output and log-sum-exp. It knows full and causal
masks; whatever else is asked for a gradient is an error, never a result without one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._native import Unsupported

SCHEMA = (
    "Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k, bool causal, "
    "bool top_left, float? scale"
)

_INPUTS = 14


def refuse_to_lose(*tensors: Tensor | None) -> None:
    """Raises where autograd would silently lose a gradient: in an operator that has none."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise Unsupported(
            "this call has no gradient: use blockflash.attention without out= and differentiate it "
            "once only, or use torch.no_grad()"
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
    if grad_o is None:
        if grad_lse is None:
            return (None,) * _INPUTS
        grad_o = torch.zeros_like(ctx.saved_tensors[3])
    saved = ctx.saved_tensors
    grads = torch.ops.blockflash.attention_backward(grad_o, grad_lse, *saved, *ctx.numbers)
    return (*grads, *(None,) * (_INPUTS - 3))


def fake(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Shapes of the gradients."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


@dataclass
class _Call:
    """The arguments of `attention_backward`; a row of lse without keys is inf, not -inf.

    Then its probabilities are 0: exp(-inf - inf).
    """

    grad_o: Tensor
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_q: int
    max_k: int
    causal: bool
    top_left: bool
    scale: float | None

    def __post_init__(self) -> None:
        refuse_to_lose(self.grad_o, self.q, self.k, self.v)
        self.lse = self.lse.masked_fill(self.lse == -torch.inf, torch.inf)
        if self.grad_lse is not None:
            self._add_column(self.grad_lse)

    def _add_column(self, grad_lse: Tensor) -> None:
        """Bring in the gradient of lse.

        The gradient of the scores is `p * (grad_o @ v.T - sum(grad_o * o) + grad_lse)`, of which
        torch knows all but the last term. In a further column where grad_o is 1, v is 0 and o is
        `-grad_lse`, the sum contains it. Eight columns keep rows aligned.
        """
        self.scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        self.q, self.k, self.v = (pad(t, (0, 8)) for t in (self.q, self.k, self.v))
        self.grad_o = pad(pad(self.grad_o, (0, 1), value=1.0), (0, 7))
        column = -grad_lse.transpose(-1, -2).unsqueeze(-1).to(self.o.dtype)
        self.o = pad(torch.cat((self.o, column), dim=-1), (0, 7))


def backward_cuda(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k and v by torch's FlashAttention 2; causal is aligned bottom-right."""
    head_dim, call = arguments[2].shape[-1], _Call(*arguments)
    q, k, v = (_aligned(t) for t in (call.q, call.k, call.v))
    starts, lengths = (None, None), (q.shape[1], k.shape[1])
    if call.cu_seqlens_q is not None:
        starts = (_inside(call.cu_seqlens_q, q), _inside(call.cu_seqlens_k, k))
        lengths = (call.max_q, call.max_k)
    if q.numel() == 0 or k.numel() == 0 or 0 in lengths:
        return _gradients(head_dim, *(torch.zeros_like(t) for t in (q, k, v)))
    # States of the random numbers of dropout, which is not used.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        call.grad_o, q, k, v, call.o, call.lse, *starts, *lengths, 0.0, call.causal, seed, offset,
        scale=call.scale,
    )  # fmt: skip
    if starts[0] is not None:
        # Rows that belong to no sequence were not written.
        ends = (starts[0][-1], starts[1][-1], starts[1][-1])
        grads = tuple(map(_zero_from, grads, ends))
    return _gradients(head_dim, *grads)


def backward_cpu(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k and v by torch's flash backward for CPUs, one sequence after another."""
    head_dim, call = arguments[2].shape[-1], _Call(*arguments)
    if call.cu_seqlens_q is None:
        return _gradients(head_dim, *_sequence_cpu(call))
    grads = [torch.zeros_like(t) for t in (call.q, call.k, call.v)]
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        by_rows = {name: getattr(call, name)[None, rows] for name in ("grad_o", "q", "o")}
        by_keys = {name: getattr(call, name)[None, keys] for name in ("k", "v")}
        one = replace(call, grad_lse=None, lse=call.lse[None, :, rows], **by_rows, **by_keys)
        for grad, place, part in zip(grads, (rows, keys, keys), _sequence_cpu(one)):
            grad[place] = part[0]
    return _gradients(head_dim, *grads)


def _sequence_cpu(call: _Call) -> tuple[Tensor, ...]:
    """Gradients of operands that are not packed."""
    q, k, v = call.q, call.k, call.v
    if q.numel() == 0 or k.numel() == 0:
        return tuple(torch.zeros_like(t) for t in (q, k, v))
    (seqlen_q, heads), (seqlen_k, heads_k) = q.shape[1:3], k.shape[1:3]
    # torch's function aligns a causal mask at the top left, and takes as many heads of k as of q.
    causal, mask = call.causal, None
    if causal and not call.top_left and seqlen_q != seqlen_k:
        hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(seqlen_k - seqlen_q + 1)
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        causal = False
    repeated = (t.repeat_interleave(heads // heads_k, dim=2) for t in (k, v))
    by_head = (t.transpose(1, 2) for t in (call.grad_o, q, *repeated, call.o))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *by_head, call.lse, 0.0, causal, attn_mask=mask, scale=call.scale
    )
    dk, dv = (grad.unflatten(1, (heads_k, -1)).sum(2) for grad in (dk, dv))
    return tuple(grad.transpose(1, 2) for grad in (dq, dk, dv))


def _gradients(head_dim: int, *grads: Tensor) -> tuple[Tensor, ...]:
    """The gradients without added columns, contiguous."""
    return tuple(grad[..., :head_dim].contiguous() for grad in grads)


def _inside(starts: Tensor, rows: Tensor) -> Tensor:
    """Offsets that ascend and stay inside the rows, as the kernel trusts them; good ones as is."""
    return starts.clamp(0, rows.shape[0]).cummax(0).values


def _zero_from(grad: Tensor, end: Tensor) -> Tensor:
    """Zeros in the rows from `end` on, whatever they hold."""
    row = torch.arange(grad.shape[0], device=grad.device)
    return grad.masked_fill((row >= end)[:, None, None], 0)


def _aligned(operand: Tensor) -> Tensor:
    """The operand, or a copy if the kernel could not read it in units of 16 bytes."""
    unit = 16 // operand.element_size()
    fits = operand.data_ptr() % 16 == 0 and all(n % unit == 0 for n in operand.stride()[:-1])
    return operand if fits else operand.clone(memory_format=torch.contiguous_format)
