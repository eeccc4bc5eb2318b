"""Operators of block-sparse matrices under the rules of torch, and bad calls of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from test_sparse import GPU, layer_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blockflash import _native, sparse
from blockflash.sparse import BlockSparseLinear, BlockSparsePattern

OPS = torch.ops.blockflash
LAYER = layer_of()
X, VALUES, PATTERN = torch.randn(5, 48), LAYER.values.detach(), LAYER.pattern


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_schemas(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    layer = layer_of(device, dtype)
    number = layer.pattern.number

    def dense(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    for activation in range(4):
        for bias in (layer.bias, None):
            arguments = (dense(2, 5, 48), layer.values, bias, number, activation)
            torch.library.opcheck(OPS.bsr_linear.default, arguments)
    arrays = (layer.row_ptr, layer.col_idx, [64, 48, 16])
    for overload, pattern in (("default", (number,)), ("arrays", arrays)):
        linear, dense_bsr, sddmm = (
            getattr(operator, overload) for operator in (OPS.bsr_linear, OPS.dense_bsr, OPS.sddmm)
        )
        torch.library.opcheck(dense_bsr, (dense(3, 64), layer.values, *pattern))
        torch.library.opcheck(sddmm, (dense(64, 7), dense(48, 7).t(), *pattern))
        torch.library.opcheck(linear, (dense(2, 5, 48), layer.values, layer.bias, *pattern, 2))


class Model(nn.Module):
    """Two layers of different patterns, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layer_of(activation="gelu"), nn.Linear(64, 48)
        mask = torch.eye(3, dtype=torch.bool)
        self.last = BlockSparseLinear(48, 48, 16, mask, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., 48]` to the same."""
        return self.last(x + self.down(self.up(x)) + self.down(self.up(x * 2)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    torch.compiler.reset()
    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (9, 12):
        x = torch.randn(2, rows, 48, requires_grad=True)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            x.grad = None
            run(x).square().sum().backward()
            gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        assert all(map(torch.allclose, *gradients))


def test_compile_with_autocast() -> None:
    torch.compiler.reset()
    model, x = Model(), torch.randn(4, 48)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x))


def test_export() -> None:
    model, rows = Model(), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (torch.randn(5, 48),), dynamic_shapes=({0: rows},))
    x = torch.randn(33, 48)
    torch.testing.assert_close(program.module()(x), model(x))


def test_a_pattern_has_the_same_number_in_every_process() -> None:
    code = """
import torch
from blockflash.sparse import BlockSparsePattern
mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
BlockSparsePattern.from_mask(torch.ones(1, 1, dtype=torch.bool), 16)
print(BlockSparsePattern.from_mask(mask, 16).number)
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert int(found) == PATTERN.number


def freed_pattern() -> int:
    """The number of a pattern that is gone."""
    return BlockSparsePattern.from_mask(torch.ones(2, 7, dtype=torch.bool), 16).number


def test_a_pattern_lives_until_the_backward_pass() -> None:
    pattern = BlockSparsePattern.from_mask(torch.ones(2, 7, dtype=torch.bool), 16)
    number, values = pattern.number, torch.randn(14, 16, 16, requires_grad=True)
    y = sparse.linear(torch.randn(3, 112), values, pattern)
    del pattern
    y.sum().backward()
    assert values.grad is not None
    del y
    with pytest.raises(ValueError, match="no pattern of number"):
        OPS.bsr_linear(torch.randn(3, 112), values, None, number, 0)


STRIDED = torch.randn(4, 16, 32)[:, :, ::2]
ARRAYS = (PATTERN.row_ptr, PATTERN.col_idx)
BAD_VALUES: dict[str, tuple[Any, str]] = {
    "x shape": (lambda: sparse.linear(X[:, :-1], VALUES, PATTERN), "x has shape"),
    "x scalar": (lambda: sparse.linear(torch.tensor(1.0), VALUES, PATTERN), "x has shape"),
    "x type": (lambda: sparse.linear(X.half(), VALUES, PATTERN), "x is torch.float16"),
    "both f64": (lambda: sparse.linear(X.double(), VALUES.double(), PATTERN), "float64"),
    "both int8": (
        lambda: sparse.linear(X.char(), VALUES.char(), PATTERN), "values is i8, expected f16 or b"
    ),
    "x meta": (lambda: sparse.linear(X.to("meta"), VALUES, PATTERN), "meta"),
    "values meta": (lambda: sparse.linear(X, VALUES.to("meta"), PATTERN), "meta"),
    "values shape": (lambda: sparse.linear(X, VALUES[:2], PATTERN), "values have shape"),
    "values rank": (lambda: sparse.linear(X, VALUES.flatten(), PATTERN), "values have shape"),
    "values strides": (lambda: sparse.linear(X, VALUES.mT, PATTERN), "values"),
    "values apart": (lambda: sparse.linear(X, STRIDED, PATTERN), "values"),
    "values expanded": (
        lambda: sparse.linear(X, VALUES[:1].expand(4, 16, 16), PATTERN), "values"
    ),
    "bias shape": (lambda: sparse.linear(X, VALUES, PATTERN, X[0]), "bias is"),
    "bias type": (lambda: sparse.linear(X, VALUES, PATTERN, torch.zeros(64).half()), "bias is"),
    "activation": (lambda: sparse.linear(X, VALUES, PATTERN, activation="tanh"), "'tanh'"),
    "activation number": (
        lambda: OPS.bsr_linear(X, VALUES, None, PATTERN.number, 7), "no activation of number 7"
    ),
    "no pattern": (lambda: OPS.bsr_linear(X, VALUES, None, 0, 0), "no pattern of number 0"),
    "array rank": (
        lambda: OPS.dense_bsr(X, VALUES, ARRAYS[0][None], ARRAYS[1], [64, 48, 16]), "dimensions"
    ),
    "shape of arrays": (lambda: OPS.dense_bsr(X, VALUES, *ARRAYS, [64, 48]), "rows, cols and blo"),
    "negative": (lambda: OPS.dense_bsr(X, VALUES, -5), "no pattern of number -5"),
    "freed": (lambda: OPS.sddmm(X, X, freed_pattern()), "no pattern|shape"),
    "freed fake": (
        lambda: OPS.bsr_linear(X.to("meta"), VALUES.to("meta"), None, freed_pattern()),
        "no pattern",
    ),
    "some on meta": (
        lambda: OPS.dense_bsr(X.to("meta"), VALUES, *ARRAYS, [64, 48, 16]),
        "several devices: x on meta, values on cpu",
    ),
    "matmul": (lambda: sparse.matmul(X, VALUES, PATTERN), "x has shape"),
    "sddmm k": (lambda: sparse.sddmm(torch.ones(64, 3), torch.ones(2, 48), PATTERN), "no product"),
    "sddmm rows": (lambda: sparse.sddmm(torch.ones(48, 3), torch.ones(3, 48), PATTERN), "a has"),
    "sddmm rank": (lambda: sparse.sddmm(X[0], X[0], PATTERN), "no product"),
    "ragged": (lambda: BlockSparsePattern(63, 48, 16, *ARRAYS), "63 x 48 are not multiples"),
    "block 0": (lambda: BlockSparsePattern(64, 48, 0, *ARRAYS), "in blocks of 0"),
    "block 2048": (lambda: BlockSparsePattern(4096, 2048, 2048, *ARRAYS), "block"),
    "negative rows": (lambda: BlockSparsePattern(-64, 48, 16, *ARRAYS), "-64 x 48"),
    "row_ptr": (lambda: BlockSparsePattern(64, 48, 16, ARRAYS[0][:-1], ARRAYS[1]), "row_ptr"),
    "column": (lambda: BlockSparsePattern(64, 48, 16, ARRAYS[0], ARRAYS[1] + 2), "col"),
    "huge column": (
        lambda: BlockSparsePattern(64, 48, 16, ARRAYS[0], ARRAYS[1].long() + 2**32), "beyond"
    ),
    "float indices": (
        lambda: BlockSparsePattern(64, 48, 16, ARRAYS[0].float(), ARRAYS[1]), "must be an int32"
    ),
    "meta indices": (
        lambda: BlockSparsePattern(64, 48, 16, ARRAYS[0].to("meta"), ARRAYS[1]), "meta"
    ),
    "list": (lambda: BlockSparsePattern(64, 48, 16, [0], ARRAYS[1]), "must be an int32"),
    "mask": (lambda: BlockSparsePattern.from_mask(torch.ones(2, 2), 16), "not a bool"),
    "other pattern": (lambda: BlockSparseLinear(64, 48, 16, PATTERN), "the pattern is"),
    "layer activation": (lambda: layer_of(activation="gelu_new"), "gelu_new"),
    "density": (lambda: BlockSparseLinear.from_linear(nn.Linear(32, 32), 16, 0.0), "density"),
    "ragged linear": (lambda: BlockSparseLinear.from_linear(nn.Linear(30, 32), 16), "no|not"),
    "layout": (lambda: BlockSparseLinear.from_sparse_bsr(torch.ones(32, 32)), "layout"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values(name: str) -> None:
    call, sentence = BAD_VALUES[name]
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("bad", [None, 1.0, [[1.0]], X.numpy()])
def test_types(bad: object) -> None:
    for call in (
        lambda: sparse.linear(bad, VALUES, PATTERN),
        lambda: sparse.linear(X, bad, PATTERN),
        lambda: sparse.sddmm(bad, X, PATTERN),
    ):
        with pytest.raises(TypeError, match="must be a torch.Tensor"):
            call()


def test_tensors_without_memory() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    y = torch.empty(5, 64)
    for bad in (fake, X.to("meta")):
        with pytest.raises(ValueError, match="^x"):
            _native.bsr_linear(bad, VALUES, None, y, PATTERN.number)
        with pytest.raises(ValueError, match="^y"):
            _native.bsr_linear(X, VALUES, None, bad, PATTERN.number)
    with pytest.raises(ValueError, match="shares memory"):
        _native.bsr_linear(X, VALUES, None, X, PATTERN.number)
    meta = sparse.linear(X.to("meta"), VALUES.to("meta"), PATTERN)
    assert meta.is_meta and meta.shape == (5, 64)


@pytest.mark.gpu
def test_bad_calls_on_a_gpu() -> None:
    layer = layer_of("cuda", torch.float16)
    with pytest.raises(ValueError, match="cuda"):
        layer(X.half())
    with pytest.raises(NotImplementedError, match="f32"):
        layer_of("cuda")(X.cuda())
    with pytest.raises(NotImplementedError, match="block size 24"):
        layer_of("cuda", torch.float16, 24)(torch.randn(5, 72, device="cuda").half())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Exception, match="captur"), torch.cuda.graph(graph):
        BlockSparseLinear(
            32, 32, 16, torch.ones(2, 2, dtype=torch.bool), device="cuda", dtype=torch.float16
        )(torch.ones(4, 32, device="cuda").half())
