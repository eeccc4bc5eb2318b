"""The operators of torch for block-sparse matrices, `torch.ops.blockflash.*`.

| operator | what it is |
|---|---|
| `bsr_linear` | `activation(x @ W.T + bias)`, x `[..., cols]` |
| `dense_bsr` | `x @ W`, x `[..., rows]` |
| `sddmm` | the blocks of W's pattern of `a @ b`, a `[rows, k]`, b `[k, cols]` |

W is `[rows, cols]`: `values` `[nnz, block, block]` at the blocks of a pattern, which is passed by
its number. The overload `arrays` of each takes the pattern's arrays and `[rows, cols, block]` in
place of the number, and reads them when it runs: a graph that was traced obeys later ones, too. The
gradient of each operator is made of the three, so it has gradients itself.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _autograd, _native
from ._fakes import register_fake
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


class Arrays(NamedTuple):
    """A pattern by its arrays."""

    row_ptr: Tensor
    col_idx: Tensor
    shape: list[int]
    """Rows, columns and block size of the matrix."""


_Pattern = int | Arrays


def call(operator: Any, pattern: _Pattern, *operands: Any) -> Tensor:
    """Calls the overload of an operator for this pattern, whose place is behind the tensors."""
    at = _PLACES[operator]
    if isinstance(pattern, Arrays):
        return operator.arrays(*operands[:at], *pattern, *operands[at:])
    return operator.default(*operands[:at], pattern, *operands[at:])


def _number(pattern: _Pattern) -> int:
    """The number of the pattern; of arrays that hold none, the error."""
    if isinstance(pattern, Arrays):
        return read(pattern.row_ptr, pattern.col_idx, *pattern.shape).number
    return pattern


def _sizes(pattern: _Pattern) -> tuple[int, int, int, int]:
    """`(rows, cols, block, nnz)` of a pattern, for which its arrays are not read."""
    if not isinstance(pattern, Arrays):
        return _native.BsrPattern.of(pattern).sizes
    row_ptr, col_idx, shape = pattern
    if row_ptr is None or col_idx is None:
        raise ValueError("row_ptr and col_idx are needed")
    if row_ptr.dim() != 1 or col_idx.dim() != 1 or len(shape) != 3:
        raise ValueError(
            f"a pattern of {row_ptr.dim()} and {col_idx.dim()} dimensions and a shape of "
            f"{len(shape)} numbers, but these are 1, 1 and 3: rows, cols and block"
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
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: _Pattern, activation: int = 0
) -> Tensor:
    sizes = _sizes(pattern)
    _checked(sizes, values, x=(x, -1, 1))
    _bias(bias, x, sizes[0])
    return x.new_empty((*x.shape[:-1], sizes[0]))


def _bsr_linear(
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: _Pattern, activation: int = 0
) -> Tensor:
    y = _fake_bsr_linear(x, values, bias, pattern, activation)
    operands = (bias, _rows(y), _number(pattern), activation)
    try:
        _native.bsr_linear(_readable(_rows(x)), values, *operands)
    except _native.Misaligned:
        _native.bsr_linear(_readable(_rows(x)), values.clone(), *operands)
    return y


def _fake_dense_bsr(x: Tensor, values: Tensor, pattern: _Pattern) -> Tensor:
    sizes = _sizes(pattern)
    _checked(sizes, values, x=(x, -1, 0))
    return x.new_empty((*x.shape[:-1], sizes[1]))


def _dense_bsr(x: Tensor, values: Tensor, pattern: _Pattern) -> Tensor:
    y = _fake_dense_bsr(x, values, pattern)
    number = _number(pattern)
    try:
        _native.dense_bsr(_readable(_rows(x)), values, _rows(y), number)
    except _native.Misaligned:
        _native.dense_bsr(_readable(_rows(x)), values.clone(), _rows(y), number)
    return y


def _fake_sddmm(a: Tensor, b: Tensor, pattern: _Pattern) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}: no product")
    *_, block, nnz = sizes = _sizes(pattern)
    _checked(sizes, None, a=(a, 0, 0), b=(b, 1, 1))
    return a.new_empty((nnz, block, block))


def _sddmm(a: Tensor, b: Tensor, pattern: _Pattern) -> Tensor:
    values = _fake_sddmm(a, b, pattern)
    _native.sddmm(_readable(a), _readable(b), values, _number(pattern))
    return values


def _save(ctx: Any, pattern: _Pattern, *tensors: Tensor | None) -> None:
    """Saves tensors and the pattern for the backward pass, until which a number is kept in use."""
    if isinstance(pattern, Arrays):
        ctx.pattern = pattern.shape
        tensors = (*tensors, pattern.row_ptr, pattern.col_idx)
    else:
        ctx.pattern, ctx.keep = pattern, _native.BsrPattern.of(pattern)
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """The tensors that `_save` saved, and the pattern."""
    if isinstance(ctx.pattern, int):
        return (*ctx.saved_tensors, ctx.pattern)
    *tensors, row_ptr, col_idx = ctx.saved_tensors
    return (*tensors, Arrays(row_ptr, col_idx, ctx.pattern))


def _setup_bsr_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, bias, pattern, *rest = inputs
    (ctx.activation,) = rest or (0,)
    result = output if ctx.activation == _RELU else None
    _save(ctx, pattern, x, values, bias, result)


def _backward_bsr_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, bias, result, pattern = _saved(ctx)
    if ctx.activation == _RELU:
        grad = torch.ops.aten.threshold_backward(grad, result, 0)
    elif ctx.activation:
        # The sum before the activation is computed again rather than kept.
        before = call(_OPS.bsr_linear, pattern, x, values, bias)
        if ctx.activation == _GELU:
            grad = torch.ops.aten.gelu_backward(grad, before)
        else:
            grad = torch.ops.aten.silu_backward(grad, before)
    grad_x = grad_values = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = call(_OPS.dense_bsr, pattern, grad, values)
    if ctx.needs_input_grad[1]:
        grad_values = call(_OPS.sddmm, pattern, _rows(grad).t(), _rows(x))
    if ctx.needs_input_grad[2]:
        grad_bias = _rows(grad).sum(0)
    return grad_x, grad_values, grad_bias


def _setup_dense_bsr(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, pattern = inputs
    _save(ctx, pattern, x, values)


def _backward_dense_bsr(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, pattern = _saved(ctx)
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        grad_x = call(_OPS.bsr_linear, pattern, grad, values, None)
    if ctx.needs_input_grad[1]:
        grad_values = call(_OPS.sddmm, pattern, _rows(x).t(), _rows(grad))
    return grad_x, grad_values


def _setup_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, pattern = inputs
    _save(ctx, pattern, a, b)


def _backward_sddmm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, pattern = _saved(ctx)
    grad = grad.contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = call(_OPS.bsr_linear, pattern, b, grad, None).t()
    if ctx.needs_input_grad[1]:
        grad_b = call(_OPS.dense_bsr, pattern, a.t(), grad)
    return grad_a, grad_b


def _of_arrays(at: int, kernel: Any, fake: Any, backward: Any, setup: Any) -> tuple[Any, ...]:
    """The same functions for the overload `arrays`, whose pattern is three arguments."""

    def joined(given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*given[:at], Arrays(*given[at : at + 3]), *given[at + 3 :])

    return (
        lambda *given: kernel(*joined(given)),
        lambda *given: fake(*joined(given)),
        backward,
        lambda ctx, inputs, output: setup(ctx, joined(inputs), output),
    )


def _register() -> torch.library.Library:
    library = torch.library.Library("blockflash", "FRAGMENT")
    for name, tensors, rest, functions in (
        (
            "bsr_linear", ("Tensor x", "Tensor values", "Tensor? bias"), ", int activation=0",
            (_bsr_linear, _fake_bsr_linear, _backward_bsr_linear, _setup_bsr_linear),
        ),
        (
            "dense_bsr", ("Tensor x", "Tensor values"), "",
            (_dense_bsr, _fake_dense_bsr, _backward_dense_bsr, _setup_dense_bsr),
        ),
        (
            "sddmm", ("Tensor a", "Tensor b"), "",
            (_sddmm, _fake_sddmm, _backward_sddmm, _setup_sddmm),
        ),
    ):  # fmt: skip
        at, given = len(tensors), ", ".join(tensors)
        arrays = "Tensor row_ptr, Tensor col_idx, int[] shape"
        for overload, pattern, (kernel, fake, backward, setup) in (
            (name, "int pattern", functions),
            (f"{name}.arrays", arrays, _of_arrays(at, *functions)),
        ):
            library.define(f"{overload}({given}, {pattern}{rest}) -> Tensor")
            for key in ("CPU", "CUDA"):
                library.impl(overload, kernel, key)
            register_fake(f"blockflash::{overload}", fake, lib=library)
            _autograd.register_gradient(library, overload, setup, backward)
        _PLACES[getattr(_OPS, name)] = at
    return library


_PLACES: dict[Any, int] = {}
"""How many tensors come before the pattern, by operator."""
_LIBRARY = _register()
