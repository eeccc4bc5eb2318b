"""Block-sparse products and layers against dense ones of torch."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from reference import TOLERANCE
from torch import Tensor, nn

from blockflash import sparse
from blockflash.sparse import BlockSparseLinear, BlockSparsePattern, sparsify_

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
CASES = [
    ("cpu", torch.float32, 16),
    ("cpu", torch.float32, 5),
    ("cpu", torch.bfloat16, 16),
    ("cpu", torch.float16, 32),
    *(
        pytest.param("cuda", dtype, block, marks=pytest.mark.gpu)
        for dtype in (torch.float16, torch.bfloat16)
        for block in (16, 32, 64, 128)
    ),
]
FUNCTIONS = {
    None: lambda x: x,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}


def layer_of(
    device: str = "cpu", dtype: torch.dtype = torch.float32, block: int = 16, **options: Any
) -> BlockSparseLinear:
    """A layer of 4 x 3 blocks, of which one block row and one block column are empty."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
    return BlockSparseLinear(
        3 * block, 4 * block, block, mask, device=device, dtype=dtype, **options
    )


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Hold a result against float64, relative to the size of its values."""
    assert found.shape == expected.shape and found.dtype == dtype
    size = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (found.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= TOLERANCE[dtype] * size, f"error {error:.2e} at values up to {size:.2e}"


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("device", "dtype", "block"), CASES)
def test_layer_and_gradients(
    device: str, dtype: torch.dtype, block: int, bias: bool, activation: str | None
) -> None:
    layer = layer_of(device, dtype, block, bias=bias, activation=activation)
    for shape in ((2, 9, 3 * block), (7, 3 * block), (3 * block,), (0, 3 * block)):
        x = torch.randn(shape, device=device).to(dtype).requires_grad_()
        inputs = [x, *layer.parameters()]
        y = layer(x)
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, inputs, grad)
        exact = nn.functional.linear(
            x.double(), layer.to_dense().double(), layer.bias.double() if bias else None
        )
        exact = FUNCTIONS[activation](exact)
        # As for torch's own layer, the gradient of the activation takes the rounded sum.
        assert_near(y, exact, dtype)
        expected = torch.autograd.grad(exact, inputs, grad.double())
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other.double(), dtype)


@pytest.mark.parametrize(("device", "dtype", "block"), CASES)
def test_products(device: str, dtype: torch.dtype, block: int) -> None:
    layer = layer_of(device, dtype, block, bias=False)
    pattern, values = layer.pattern, layer.values
    x = torch.randn(5, 4 * block, device=device).to(dtype)
    dense = layer.to_dense().double()
    assert_near(sparse.matmul(x, values, pattern), x.double() @ dense, dtype)
    a = torch.randn(4 * block, 24, device=device).to(dtype)
    b = torch.randn(24, 3 * block, device=device).to(dtype)
    blocks = (a.double() @ b.double()).unflatten(1, (3, block)).unflatten(0, (4, block))
    expected = blocks.transpose(1, 2)[pattern.mask().to(device)]
    by_columns = a.t().contiguous().t()
    apart = torch.randn(4 * block, 48, device=device).to(dtype)[:, ::2].copy_(a)
    for left in (a, by_columns, apart):
        assert_near(sparse.sddmm(left, b, pattern), expected, dtype)


def test_second_derivatives() -> None:
    layer = layer_of()
    pattern, values = layer.pattern, layer.values.detach().requires_grad_()
    x, other = torch.randn(3, 48, requires_grad=True), torch.randn(3, 64, requires_grad=True)
    a, b = torch.randn(64, 4, requires_grad=True), torch.randn(4, 48, requires_grad=True)

    def dense(values: Tensor) -> Tensor:
        blocks = torch.zeros(4, 3, 16, 16).index_put(pattern.mask().nonzero().unbind(1), values)
        return blocks.transpose(1, 2).reshape(64, 48)

    mask = dense(torch.ones_like(values))
    for inputs, ours, exact in (
        (
            (x, values),
            lambda: sparse.linear(x, values, pattern, activation="gelu"),
            lambda: nn.functional.gelu(x @ dense(values).t()),
        ),
        (
            (other, values),
            lambda: sparse.matmul(other, values, pattern),
            lambda: other @ dense(values),
        ),
        ((a, b), lambda: dense(sparse.sddmm(a, b, pattern)), lambda: (a @ b) * mask),
    ):
        results = []
        for function in (ours, exact):
            first = torch.autograd.grad(function().square().sum(), inputs, create_graph=True)
            total = sum(grad.square().sum() for grad in first)
            results.append([*first, *torch.autograd.grad(total, inputs)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_against_sparse_bsr(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = layer_of(device, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Sparse invariant checks")
        weight = layer.to_sparse_bsr()
    assert weight.layout == torch.sparse_bsr and weight.dtype == dtype
    assert torch.equal(weight.to_dense(), layer.to_dense())
    assert weight.values().data_ptr() == layer.values.data_ptr()
    x = torch.randn(6, 48, device=device).to(dtype)
    if device == "cpu":
        expected = (weight @ x.t()).t() + layer.bias
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    again = BlockSparseLinear.from_sparse_bsr(weight, bias=layer.bias)
    assert again.values.data_ptr() == layer.values.data_ptr() and again.pattern == layer.pattern
    assert torch.equal(again(x), layer(x))


def test_from_dense_and_linear() -> None:
    linear = nn.Linear(64, 48).eval()
    with torch.no_grad():
        linear.weight[:16, 16:32] *= 10
        linear.weight[32:, 48:] *= 5
    layer = BlockSparseLinear.from_linear(linear, 16, density=2 / 12)
    assert layer.pattern.mask().nonzero().tolist() == [[0, 1], [2, 3]] and not layer.training
    assert torch.equal(layer.to_dense()[:16, 16:32], linear.weight[:16, 16:32])
    assert torch.equal(layer.bias, linear.bias) and layer.bias is not linear.bias
    whole = BlockSparseLinear.from_linear(linear, 16, density=1.0)
    torch.testing.assert_close(whole(torch.ones(64)), linear(torch.ones(64)))
    again = BlockSparseLinear.from_dense(layer.to_dense(), 16)
    assert again.pattern == layer.pattern and again.bias is None
    assert torch.equal(again.values, layer.values)
    assert BlockSparseLinear.from_linear(linear, 16, density=1e-9).pattern.nnz == 1
    nothing = BlockSparseLinear.from_dense(torch.zeros(32, 32), 16)
    assert nothing.pattern.nnz == 0 and torch.equal(nothing(torch.ones(3, 32)), torch.zeros(3, 32))


def test_state_is_portable(tmp_path: Any) -> None:
    layer, x = layer_of(activation="silu"), torch.randn(5, 48)
    state = layer.state_dict()
    assert set(state) == {"values", "bias", "row_ptr", "col_idx"}
    torch.save(state, tmp_path / "state.pt")
    other = BlockSparseLinear(48, 64, 16, torch.ones(4, 3, dtype=torch.bool), activation="silu")
    parameter = other.values
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert other.values is parameter and other.pattern == layer.pattern
    assert torch.equal(other(x), layer(x))
    with torch.device("meta"):
        empty = BlockSparseLinear(48, 64, 16, layer.pattern, activation="silu")
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty(x), layer(x))

    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    )
    for again in copies:
        assert torch.equal(again(x), layer(x)) and again.pattern is not layer.pattern
        assert again.pattern == layer.pattern

    for name, wrong, sentence in (
        ("col_idx", state["col_idx"] + 2, "pattern"),
        ("row_ptr", state["row_ptr"][:-1], "pattern"),
        ("values", state["values"][:-1], "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            layer_of().load_state_dict({**state, name: wrong})


def test_sparsify() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64)
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
            self.again, self.odd, self.head = self.up, nn.Linear(64, 33), nn.Linear(64, 32)
            self.head.weight = self.embedding.weight
            self.attention = nn.MultiheadAttention(64, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.down(self.again(self.embedding(tokens)).relu()))

    model = Model()
    replaced = sparsify_(model, 16, 0.25, exclude=("*.out_proj",))
    assert set(replaced) == {"up", "again", "down"} and model.up is model.again
    assert type(model.attention.out_proj) is not BlockSparseLinear
    assert model.head.weight is model.embedding.weight and type(model.odd) is nn.Linear
    assert abs(model.up.pattern.density - 0.25) < 0.02
    model(torch.arange(5)).sum().backward()
    assert model.up.values.grad is not None
    assert set(sparsify_(Model(), 16, 0.5, include=("up", "down"))) == {"up", "down"}
    with pytest.raises(ValueError, match="no linear layer"):
        sparsify_(model, 16, 0.25, include=("nothing",))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_autocast(device: str) -> None:
    layer, x = layer_of(device), torch.randn(5, 48, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert sparse.sddmm(y.t(), x, layer.pattern).dtype == torch.bfloat16
        y.float().sum().backward()
    assert layer.values.grad.dtype == torch.float32
    assert_near(y, (x.double() @ layer.to_dense().double().t()) + layer.bias, torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_training_as_dense(device: str) -> None:
    """Ten steps of SGD as with a dense weight, whose other blocks are masked."""
    dtype = torch.float32
    layer, x = layer_of(device, dtype), torch.randn(32, 48, device=device)
    target = torch.randn(32, 64, device=device)
    weight = layer.to_dense().detach().clone().requires_grad_()
    mask = (weight != 0).to(dtype)
    bias = layer.bias.detach().clone().requires_grad_()
    losses = []
    for parameters, model in (
        (list(layer.parameters()), layer),
        ([weight, bias], lambda x: nn.functional.linear(x, weight * mask, bias)),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = (model(x).float() - target).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if device == "cpu" else 1e-2)


def test_patterns() -> None:
    pattern = layer_of().pattern
    assert repr(pattern) == "BlockSparsePattern(64 x 48, block=16, nnz=4, density=33.3%)"
    equal = BlockSparsePattern(64, 48, 16, pattern.row_ptr.long(), pattern.col_idx.long())
    assert equal == pattern and hash(equal) == hash(pattern) and equal.number == pattern.number
    assert torch.equal(pattern.mask(), equal.mask())
    other = BlockSparsePattern.from_mask(~pattern.mask(), 16)
    assert other != pattern and other.number != pattern.number
    wide = BlockSparsePattern(128, 48, 16, torch.zeros(9, dtype=torch.int32), torch.zeros(0).int())
    assert wide.nnz == 0 and wide.density == 0


@pytest.mark.gpu
def test_other_devices_and_graphs() -> None:
    layer = layer_of().to("cuda", torch.bfloat16)
    assert layer.row_ptr.is_cuda
    x = torch.randn(64, 48, device="cuda").bfloat16()
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        values, bias = layer.values, layer.bias  # torch's memory, which the graph does not keep
        del layer  # The graph still reads the indices.
        for _ in range(3):
            y.zero_()
            graph.replay()
            torch.testing.assert_close(y, expected)
    del values, bias


@pytest.mark.gpu
def test_streams() -> None:
    layer = layer_of("cuda", torch.float16)
    x = torch.randn(512, 48, device="cuda").half()
    expected = layer(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = [layer(x) for _ in range(20)]
        stream.synchronize()
        assert all(torch.equal(y, expected) for y in results)
