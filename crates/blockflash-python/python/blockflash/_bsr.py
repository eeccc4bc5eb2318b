"""The operators of torch for block-sparse matrices, `torch.ops.blockflash.*`.

| operator | what it is |
|---|---|
| `bsr_linear` | `activation(x @ W.T + bias)`, x `[..., cols]` |
| `dense_bsr` | `x @ W`, x `[..., rows]` |
| `sddmm` | the blocks of W's pattern of `a @ b`, a `[rows, k]`, b `[k, cols]` |

W is `[rows, cols]`: `values` `[nnz, block, block]` at the blocks of a pattern, which is passed by
its number. The gradient of each operator is made of the three, so it has gradients itself.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from . import _native

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "silu": 3}
_RELU, _GELU = ACTIVATIONS["relu"], ACTIVATIONS["gelu"]
_OPS = torch.ops.blockflash


def _checked(pattern: int, values: Tensor | None, **dense: tuple[Tensor, int, int]) -> Any:
    """`(rows, cols, block, nnz)` of a pattern.

    `dense` are the other operands: each with a dimension, and whether that has the length `rows`
    (0) or `cols` (1).
    """
    sizes = _native.BsrPattern.of(pattern).sizes
    rows, cols, block, nnz = sizes
    tensors = {name: tensor for name, (tensor, _, _) in dense.items()}
    if values is not None:
        tensors["values"] = values
        if tuple(values.shape) != (nnz, block, block):
            raise ValueError(
                f"values have shape {tuple(values.shape)}, but the pattern has "
                f"[{nnz}, {block}, {block}]"
            )
    for name, (tensor, dim, which) in dense.items():
        if tensor.dim() < 1 or tensor.shape[dim] != sizes[which]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but the matrix is {rows} x {cols}: "
                f"dimension {dim} must be {sizes[which]}"
            )
    (first, one), *others = tensors.items()
    for name, other in others:
        if other.dtype != one.dtype or other.device != one.device:
            raise ValueError(
                f"{first} is {one.dtype} on {one.device}, but {name} {other.dtype} on "
                f"{other.device}"
            )
    return sizes


def _bias(bias: Tensor | None, x: Tensor, rows: int) -> None:
    if bias is not None and (
        tuple(bias.shape) != (rows,) or bias.dtype != x.dtype or bias.device != x.device
    ):
        raise ValueError(
            f"bias is {tuple(bias.shape)} of {bias.dtype} on {bias.device}, but must be [{rows}] "
            f"of {x.dtype} on {x.device}"
        )


def _rows(x: Tensor) -> Tensor:
    """The tensor as a matrix of its last dimension; a view, unless strides forbid it."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _readable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy if neither its rows nor its columns are contiguous."""
    (rows, cols), (down, right) = matrix.shape, matrix.stride()
    readable = (right == 1 and down >= cols) or (down == 1 and right >= rows)
    return matrix if readable else matrix.contiguous()


def _fake_bsr_linear(
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: int, activation: int = 0
) -> Tensor:
    rows, *_ = _checked(pattern, values, x=(x, -1, 1))
    _bias(bias, x, rows)
    return x.new_empty((*x.shape[:-1], rows))


def _bsr_linear(
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: int, activation: int = 0
) -> Tensor:
    y = _fake_bsr_linear(x, values, bias, pattern, activation)
    operands = (bias, _rows(y), pattern, activation)
    try:
        _native.bsr_linear(_readable(_rows(x)), values, *operands)
    except _native.Misaligned:
        _native.bsr_linear(_readable(_rows(x)), values.clone(), *operands)
    return y


def _fake_dense_bsr(x: Tensor, values: Tensor, pattern: int) -> Tensor:
    _, cols, *_ = _checked(pattern, values, x=(x, -1, 0))
    return x.new_empty((*x.shape[:-1], cols))


def _dense_bsr(x: Tensor, values: Tensor, pattern: int) -> Tensor:
    y = _fake_dense_bsr(x, values, pattern)
    try:
        _native.dense_bsr(_readable(_rows(x)), values, _rows(y), pattern)
    except _native.Misaligned:
        _native.dense_bsr(_readable(_rows(x)), values.clone(), _rows(y), pattern)
    return y


def _fake_sddmm(a: Tensor, b: Tensor, pattern: int) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}: no product")
    *_, block, nnz = _checked(pattern, None, a=(a, 0, 0), b=(b, 1, 1))
    return a.new_empty((nnz, block, block))


def _sddmm(a: Tensor, b: Tensor, pattern: int) -> Tensor:
    values = _fake_sddmm(a, b, pattern)
    _native.sddmm(_readable(a), _readable(b), values, pattern)
    return values


def _keep(ctx: Any, pattern: int) -> None:
    """Keeps the pattern until the backward pass."""
    ctx.pattern, ctx.keep = pattern, _native.BsrPattern.of(pattern)


def _setup_bsr_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, bias, pattern, ctx.activation = inputs
    _keep(ctx, pattern)
    result = output if ctx.activation == _RELU else None
    ctx.save_for_backward(x, values, bias, result)


def _backward_bsr_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, bias, result = ctx.saved_tensors
    if ctx.activation == _RELU:
        grad = torch.ops.aten.threshold_backward(grad, result, 0)
    elif ctx.activation:
        # The sum before the activation is computed again rather than kept.
        before = _OPS.bsr_linear(x, values, bias, ctx.pattern, 0)
        if ctx.activation == _GELU:
            grad = torch.ops.aten.gelu_backward(grad, before)
        else:
            grad = torch.ops.aten.silu_backward(grad, before)
    grad_x = grad_values = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _OPS.dense_bsr(grad, values, ctx.pattern)
    if ctx.needs_input_grad[1]:
        grad_values = _OPS.sddmm(_rows(grad).t(), _rows(x), ctx.pattern)
    if ctx.needs_input_grad[2]:
        grad_bias = _rows(grad).sum(0)
    return grad_x, grad_values, grad_bias, None, None


def _setup_dense_bsr(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, pattern = inputs
    _keep(ctx, pattern)
    ctx.save_for_backward(x, values)


def _backward_dense_bsr(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values = ctx.saved_tensors
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        grad_x = _OPS.bsr_linear(grad, values, None, ctx.pattern, 0)
    if ctx.needs_input_grad[1]:
        grad_values = _OPS.sddmm(_rows(x).t(), _rows(grad), ctx.pattern)
    return grad_x, grad_values, None


def _setup_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, pattern = inputs
    _keep(ctx, pattern)
    ctx.save_for_backward(a, b)


def _backward_sddmm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad = grad.contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _OPS.bsr_linear(b, grad, None, ctx.pattern, 0).t()
    if ctx.needs_input_grad[1]:
        grad_b = _OPS.dense_bsr(a.t(), grad, ctx.pattern)
    return grad_a, grad_b, None


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    weights = "Tensor values"
    for schema, kernel, fake, backward, setup in (
        (
            f"bsr_linear(Tensor x, {weights}, Tensor? bias, int pattern, int activation=0)",
            _bsr_linear, _fake_bsr_linear, _backward_bsr_linear, _setup_bsr_linear,
        ),
        (
            f"dense_bsr(Tensor x, {weights}, int pattern)",
            _dense_bsr, _fake_dense_bsr, _backward_dense_bsr, _setup_dense_bsr,
        ),
        (
            "sddmm(Tensor a, Tensor b, int pattern)",
            _sddmm, _fake_sddmm, _backward_sddmm, _setup_sddmm,
        ),
    ):  # fmt: skip
        library.define(f"{schema} -> Tensor")
        name = schema.partition("(")[0]
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        name = f"blockflash::{name}"
        torch.library.register_fake(name, fake, lib=library)
        torch.library.register_autograd(name, backward, setup_context=setup, lib=library)
    return library


_LIBRARY = _register()
