"""Kernels that take the places of torch's while blockflash is active: see `sdpa`.

Each override has torch's kernel in its place as the first argument, and passes to it what has no
kernel here, with a warning. A backward pass decides by the same arguments as its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled, mem_efficient_sdp_enabled
from torch.nn.functional import pad

from . import _gradient, _native, _ops, _stats
from ._arguments import of_pairs
from ._flash import contiguous_rows
from ._native import Unsupported
from ._schema import ATTENTION
from ._sdpa_function import bias_of, scaled_dot_product_attention

_LOGS = 32
"""torch's efficient backend rounds the number of log-sum-exps of a row of queries up to that."""


def flash_attention(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`: tensors `[B, H, S, D]`, causal bottom-right."""
    reason = "return_debug_mask is set" if return_debug_mask else _refusal(query, dropout_p)
    if reason is None:
        try:
            o, lse = _forward(query, key, value, is_causal, top_left=False, scale=scale)
        except (Unsupported, ValueError) as error:
            reason = str(error)
        else:
            _stats.count("sdpa")
            lengths, like = (query.size(2), key.size(2)), _examples(query)
            # The state of the random generator is for dropout.
            unused = like.rng_state.new_empty(2), like.rng_state.new_empty(())
            return o, lse, None, None, *lengths, *unused, torch.empty_like(like.debug_mask)
    _stats.fall_back("sdpa", reason)
    arguments = (query, key, value, dropout_p, is_causal, return_debug_mask)
    return torchs_kernel.call_boxed(keyset, *arguments, scale=scale)


def flash_attention_backward(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradient of `flash_attention`."""
    tensors = (grad_out, query, key, value, out)
    reason = _refusal(query, dropout_p)
    if reason is None:
        try:
            return _backward(tensors, logsumexp, is_causal, top_left=False, scale=scale)
        except (Unsupported, ValueError) as error:
            reason = str(error)
    _stats.leave("sdpa", reason)
    varlen = (cum_seq_q, cum_seq_k, max_q, max_k)
    rest = (dropout_p, is_causal, philox_seed, philox_offset)
    return torchs_kernel.call_boxed(keyset, *tensors, logsumexp, *varlen, *rest, scale=scale)


def flash_attention_for_cpu(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, where causal is top-left."""
    reason = _refusal(query, dropout_p)
    if reason is None:
        try:
            if attn_mask is None:
                results = _forward(query, key, value, is_causal, top_left=True, scale=scale)
            else:
                o, lse = _masked(query, key, value, attn_mask, is_causal, scale)
                results = torch.empty_like(query).copy_(o), _by_rows(lse)
        except (Unsupported, ValueError) as error:
            reason = str(error)
        else:
            _stats.count("sdpa")
            return results
    _stats.fall_back("sdpa", reason)
    rest = {"attn_mask": attn_mask, "scale": scale}
    return torchs_kernel.call_boxed(keyset, query, key, value, dropout_p, is_causal, **rest)


def flash_attention_for_cpu_backward(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradient of `flash_attention_for_cpu`, by the same kernel as its forward."""
    tensors = (grad_out, query, key, value, out)
    reason = _refusal(query, dropout_p)
    if reason is None:
        try:
            if attn_mask is None:
                return _backward(tensors, logsumexp, is_causal, top_left=True, scale=scale)
            return _masked_backward(tensors, logsumexp, attn_mask, False, is_causal, scale)[:3]
        except (Unsupported, ValueError) as error:
            reason = str(error)
    _stats.leave("sdpa", reason)
    rest = {"attn_mask": attn_mask, "scale": scale}
    return torchs_kernel.call_boxed(keyset, *tensors, logsumexp, dropout_p, is_causal, **rest)


def efficient_attention(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_efficient_attention`, of which calls with a mask are ours."""
    if attn_bias is not None:
        reason = _refusal(query, dropout_p)
        if reason is None:
            try:
                o, lse = _masked(query, key, value, attn_bias, is_causal, scale)
            except (Unsupported, ValueError) as error:
                reason = str(error)
            else:
                _stats.count("sdpa")
                logs = lse.new_empty((*lse.shape[:2], 0))
                if compute_log_sumexp:
                    logs = pad(lse, (0, -lse.shape[2] % _LOGS))
                # The state of the random generator is for dropout.
                return o, logs, *(query.new_empty((), dtype=torch.int64) for _ in range(2))
        _stats.fall_back("sdpa", reason)
    tensors = (query, key, value, attn_bias)
    rest = (compute_log_sumexp, dropout_p, is_causal)
    return torchs_kernel.call_boxed(keyset, *tensors, *rest, scale=scale)


def efficient_attention_backward(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradient of `efficient_attention`."""
    if attn_bias is not None and attn_bias.numel():
        reason = _refusal(query, dropout_p)
        if reason is None:
            tensors, of_bias = (grad_out_, query, key, value, out), grad_input_mask[3]
            lse = logsumexp[:, :, : query.shape[2]]
            try:
                return _masked_backward(tensors, lse, attn_bias, of_bias, is_causal, scale)
            except (Unsupported, ValueError) as error:
                reason = str(error)
        _stats.leave("sdpa", reason)
    tensors = (grad_out_, query, key, value, attn_bias, out, logsumexp)
    rest = (philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal)
    return torchs_kernel.call_boxed(keyset, *tensors, *rest, scale=scale)


def attention_math(
    torchs_kernel: Any,
    keyset: torch.DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """`aten::_scaled_dot_product_attention_math`, of which calls with a mask are ours.

    The second result, the weights, which attention does not use, has no element then. A program
    that switches all other backends off asks for torch's.
    """
    asked_for = not (flash_sdp_enabled() or mem_efficient_sdp_enabled())
    if attn_mask is not None and not asked_for and not (query.is_cuda and _is_traced(query)):
        reason = _refusal(query, dropout_p)
        if reason is None:
            options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            try:
                o = scaled_dot_product_attention(query, key, value, attn_mask, **options)
            except (Unsupported, ValueError) as error:
                reason = str(error)
            else:
                _stats.count("sdpa")
                return o, query.new_empty(0)
        _stats.fall_back("sdpa", reason)
    given = (query, key, value, attn_mask, dropout_p, is_causal, dropout_mask)
    return torchs_kernel.call_boxed(keyset, *given, scale=scale, enable_gqa=enable_gqa)


def _is_traced(query: Tensor) -> bool:
    """Whether what no kernel takes would be noticed after the choice only."""
    return torch.compiler.is_compiling() or type(query) not in (Tensor, torch.nn.Parameter)


def _refusal(query: Tensor, dropout_p: float) -> str | None:
    """Why a call has no kernel here, by arguments that its backward pass has, too."""
    if dropout_p != 0.0:
        return "there is no kernel with dropout"
    return "there is no kernel for float64" if query.dtype == torch.float64 else None


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of `[B, H, S, D]` tensors with a mask: o, laid out by rows, and lse."""
    q, k, v = (contiguous_rows(tensor).transpose(1, 2) for tensor in (query, key, value))
    o, lse = _ops.empty_o(q, v, None), _ops.empty_lse(q, None)
    _ops.attention_out(q, k, v, o, lse, *_options(query, mask, causal, scale))
    return o.transpose(1, 2), lse


def _masked_backward(
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    mask: Tensor,
    of_mask: bool,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of `[B, H, S, D]` tensors, laid out by rows, and of the mask."""
    options = _options(tensors[1], mask, causal, scale)
    given = (contiguous_rows(tensor).transpose(1, 2) for tensor in tensors)
    grad_o, q, k, v, o = given
    grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    d_mask = torch.empty_like(mask, memory_format=torch.contiguous_format) if of_mask else None
    results = (*grads, None, d_mask if d_mask is None else of_pairs(d_mask))
    _gradient.into(results, grad_o, q, k, v, o, lse.contiguous(), *options)
    return (*(grad.transpose(1, 2) for grad in grads), d_mask)


def _options(query: Tensor, mask: Tensor, causal: bool, scale: float | None) -> Sequence[Any]:
    """The options of the operators for a mask."""
    options = {"bias": of_pairs(bias_of(mask, query.dtype)), "scale": scale}
    return ATTENTION.leading(options | ({"right": 0, "top_left": True} if causal else {}))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, *, top_left: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of `[B, H, S, D]` tensors without gradients, laid out as torch's fake kernels say.

    `torch.compile` relies on these strides: of o those of query, of lse another order on the CPU.
    """
    options = _examples(query).lse, causal, top_left, scale
    try:
        o, lse = _native.sdpa(query, key, value, *options)
    except _native.Misaligned:
        o, lse = _with_copies(_native.sdpa, (query, key, value), *options)
        if o.shape == query.shape:
            o = torch.empty_like(query).copy_(o)
    return o, _by_rows(lse) if lse.is_cpu else lse


def _backward(
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    *,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of `[B, H, S, D]` tensors from those of the result, q, k, v and the result.

    They are laid out as torch's fake kernels say: on a GPU like the tensors, on the CPU by rows.
    """
    query = tensors[1]
    make = _empty_by_rows if query.is_cpu else torch.empty_like
    read, options = (*tensors, lse.contiguous()), (causal, top_left, scale)
    try:
        return _native.sdpa_backward(*read, make, _examples(query).bytes, *options)
    except _native.Misaligned:
        grads = _with_copies(
            _native.sdpa_backward, read, _empty_by_rows, _examples(query).bytes, *options
        )
        return tuple(make(t).copy_(grad) for t, grad in zip(tensors[1:4], grads, strict=True))


def _with_copies(
    function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], *options: Any
) -> tuple[Tensor, ...]:
    """The results of a native function that cannot take these tensors as they are."""
    rows = [contiguous_rows(tensor) for tensor in tensors]
    try:
        return function(*rows, *options)
    except _native.Misaligned:
        copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in rows)
        return function(*copies, *options)


class _Examples(NamedTuple):
    """Tensors without elements on one device, whose type and device new ones take over.

    To say them each time costs the host more.
    """

    lse: Tensor
    rng_state: Tensor
    bytes: Tensor
    debug_mask: Tensor


_EXAMPLES: dict[tuple[torch.dtype, torch.device], _Examples] = {}


def _examples(query: Tensor) -> _Examples:
    place = query.dtype, query.device
    found = _EXAMPLES.get(place)
    if found is None:
        dtypes = torch.float32, torch.uint64, torch.uint8, query.dtype
        found = _EXAMPLES[place] = _Examples(*(query.new_empty(0, dtype=dtype) for dtype in dtypes))
    return found


def _by_rows(lse: Tensor) -> Tensor:
    """A copy in the order that torch has on the CPU."""
    order, made = (0, 2, 1), {"dtype": lse.dtype, "device": lse.device}
    return torch.empty_permuted(lse.shape, order, **made).copy_(lse)


def _empty_by_rows(tensor: Tensor) -> Tensor:
    made = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_permuted(tensor.shape, (0, 2, 1, 3), **made)
