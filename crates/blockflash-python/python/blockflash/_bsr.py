"""The operators of torch for block-sparse matrices, `torch.ops.blockflash.*`.

| operator | what it is |
|---|---|
| `bsr_linear` | `activation(x @ W.T + bias)`, x `[..., cols]` |
| `dense_bsr` | `x @ W`, x `[..., rows]` |
| `sddmm` | the blocks of W's pattern of `a @ b`, a `[rows, k]`, b `[k, cols]` |

W is `[rows, cols]`: `values` `[nnz, block, block]` at the blocks of a pattern. This is passed by
its number, or by its arrays `row_ptr` and `col_idx` with `shape`, `[rows, cols, block]`: what these
hold when a call runs, which a graph that was traced obeys, too. The gradient of each operator is
made of the three, so it has gradients itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._pattern import read

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "silu": 3}
_RELU, _GELU = ACTIVATIONS["relu"], ACTIVATIONS["gelu"]
_OPS = torch.ops.blockflash


def autocast(x: Tensor, other: Tensor, bias: Tensor | None) -> Any:
    """The operands in the type of autocast, as `torch.nn.functional.linear` takes them."""
    for name, operand in (("x", x), ("values", other), ("bias", bias)):
        if not isinstance(operand, Tensor) and (name != "bias" or operand is not None):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(operand).__name__}")
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x, other, bias
    lower = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(lower) if t is not None and t.dtype == torch.float32 else t for t in (x, other, bias)
    )


_NO_ARRAYS = (None, None, [])


def _number(pattern: int, arrays: Sequence[Any]) -> int:
    """The number of the pattern; of arrays that hold none, the error."""
    row_ptr, col_idx, shape = *arrays, *_NO_ARRAYS[len(arrays) :]
    return pattern if row_ptr is None else read(row_ptr, col_idx, *shape).number


def _sizes(pattern: int, arrays: Sequence[Any]) -> tuple[int, int, int, int]:
    """`(rows, cols, block, nnz)` of a pattern, for which its arrays are not read."""
    row_ptr, col_idx, shape = *arrays, *_NO_ARRAYS[len(arrays) :]
    if row_ptr is None and col_idx is None and not shape:
        return _native.BsrPattern.of(pattern).sizes
    if row_ptr is None or col_idx is None or len(shape) != 3 or pattern:
        raise ValueError("a pattern is a number, or row_ptr, col_idx and [rows, cols, block]")
    if row_ptr.dim() != 1 or col_idx.dim() != 1:
        raise ValueError(
            f"row_ptr and col_idx have {row_ptr.dim()} and {col_idx.dim()} dimensions, not 1"
        )
    return (*shape, col_idx.shape[0])


def _checked(
    sizes: tuple[int, int, int, int], values: Tensor | None, **dense: tuple[Tensor, int, int]
) -> None:
    """Checks operands against `(rows, cols, block, nnz)` of a pattern.

    `dense` are the other operands: each with a dimension, and whether that has the length `rows`
    (0) or `cols` (1).
    """
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
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: int, activation: int = 0, *arrays: Any
) -> Tensor:
    sizes = _sizes(pattern, arrays)
    _checked(sizes, values, x=(x, -1, 1))
    _bias(bias, x, sizes[0])
    return x.new_empty((*x.shape[:-1], sizes[0]))


def _bsr_linear(
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: int, activation: int = 0, *arrays: Any
) -> Tensor:
    y = _fake_bsr_linear(x, values, bias, pattern, activation, *arrays)
    operands = (bias, _rows(y), _number(pattern, arrays), activation)
    try:
        _native.bsr_linear(_readable(_rows(x)), values, *operands)
    except _native.Misaligned:
        _native.bsr_linear(_readable(_rows(x)), values.clone(), *operands)
    return y


def _fake_dense_bsr(x: Tensor, values: Tensor, pattern: int, *arrays: Any) -> Tensor:
    sizes = _sizes(pattern, arrays)
    _checked(sizes, values, x=(x, -1, 0))
    return x.new_empty((*x.shape[:-1], sizes[1]))


def _dense_bsr(x: Tensor, values: Tensor, pattern: int, *arrays: Any) -> Tensor:
    y = _fake_dense_bsr(x, values, pattern, *arrays)
    pattern = _number(pattern, arrays)
    try:
        _native.dense_bsr(_readable(_rows(x)), values, _rows(y), pattern)
    except _native.Misaligned:
        _native.dense_bsr(_readable(_rows(x)), values.clone(), _rows(y), pattern)
    return y


def _fake_sddmm(a: Tensor, b: Tensor, pattern: int, *arrays: Any) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}: no product")
    *_, block, nnz = sizes = _sizes(pattern, arrays)
    _checked(sizes, None, a=(a, 0, 0), b=(b, 1, 1))
    return a.new_empty((nnz, block, block))


def _sddmm(a: Tensor, b: Tensor, pattern: int, *arrays: Any) -> Tensor:
    values = _fake_sddmm(a, b, pattern, *arrays)
    _native.sddmm(_readable(a), _readable(b), values, _number(pattern, arrays))
    return values


def _save(ctx: Any, pattern: int, arrays: Sequence[Any], *tensors: Tensor | None) -> None:
    """Saves tensors and the pattern for the backward pass, until which a number is kept in use."""
    row_ptr, col_idx, ctx.shape = arrays
    ctx.save_for_backward(*tensors, row_ptr, col_idx)
    ctx.number, ctx.keep = pattern, None if row_ptr is not None else _native.BsrPattern.of(pattern)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """The tensors that `_save` saved, and the pattern as an operator takes it."""
    *tensors, row_ptr, col_idx = ctx.saved_tensors
    return (*tensors, (ctx.number, row_ptr, col_idx, ctx.shape))


_NO_GRADIENT = (None,) * 4
"""The gradients of a pattern: of its number, its arrays and its shape."""


def _setup_bsr_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, bias, pattern, ctx.activation, *arrays = inputs
    result = output if ctx.activation == _RELU else None
    _save(ctx, pattern, arrays, x, values, bias, result)


def _backward_bsr_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, bias, result, pattern = _saved(ctx)
    if ctx.activation == _RELU:
        grad = torch.ops.aten.threshold_backward(grad, result, 0)
    elif ctx.activation:
        # The sum before the activation is computed again rather than kept.
        before = _linear(x, values, bias, pattern)
        if ctx.activation == _GELU:
            grad = torch.ops.aten.gelu_backward(grad, before)
        else:
            grad = torch.ops.aten.silu_backward(grad, before)
    grad_x = grad_values = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _OPS.dense_bsr(grad, values, *pattern)
    if ctx.needs_input_grad[1]:
        grad_values = _OPS.sddmm(_rows(grad).t(), _rows(x), *pattern)
    if ctx.needs_input_grad[2]:
        grad_bias = _rows(grad).sum(0)
    return grad_x, grad_values, grad_bias, None, *_NO_GRADIENT


def _linear(x: Tensor, values: Tensor, bias: Tensor | None, pattern: tuple[Any, ...]) -> Tensor:
    """`x @ W.T + bias`."""
    number, *arrays = pattern
    return _OPS.bsr_linear(x, values, bias, number, 0, *arrays)


def _setup_dense_bsr(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, pattern, *arrays = inputs
    _save(ctx, pattern, arrays, x, values)


def _backward_dense_bsr(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, pattern = _saved(ctx)
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        grad_x = _linear(grad, values, None, pattern)
    if ctx.needs_input_grad[1]:
        grad_values = _OPS.sddmm(_rows(x).t(), _rows(grad), *pattern)
    return grad_x, grad_values, *_NO_GRADIENT


def _setup_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, pattern, *arrays = inputs
    _save(ctx, pattern, arrays, a, b)


def _backward_sddmm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, pattern = _saved(ctx)
    grad = grad.contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _linear(b, grad, None, pattern).t()
    if ctx.needs_input_grad[1]:
        grad_b = _OPS.dense_bsr(a.t(), grad, *pattern)
    return grad_a, grad_b, *_NO_GRADIENT


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    arrays = "Tensor? row_ptr=None, Tensor? col_idx=None, int[] shape=[]"
    for schema, kernel, fake, backward, setup in (
        (
            "bsr_linear(Tensor x, Tensor values, Tensor? bias, int pattern, int activation=0, "
            f"{arrays})",
            _bsr_linear, _fake_bsr_linear, _backward_bsr_linear, _setup_bsr_linear,
        ),
        (
            f"dense_bsr(Tensor x, Tensor values, int pattern, {arrays})",
            _dense_bsr, _fake_dense_bsr, _backward_dense_bsr, _setup_dense_bsr,
        ),
        (
            f"sddmm(Tensor a, Tensor b, int pattern, {arrays})",
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
