"""The pattern of a layer is in its buffers: however they change, calls obey them, or raise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_sparse import GPU, layer_of
from torch import Tensor, nn

from blockflash import sparse
from blockflash.sparse import BlockSparseLinear, BlockSparsePattern

SIZES = (4, 3, 16)  # block rows and columns, and the size of a block


def pair(device: str = "cpu") -> tuple[BlockSparseLinear, BlockSparseLinear, Tensor]:
    """Two layers of as many blocks at other places, and an input."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    first = layer_of(device, dtype)
    mask = first.pattern.mask().flip(0, 1)
    second = BlockSparseLinear(48, 64, 16, mask, device=device, dtype=dtype)
    assert second.pattern != first.pattern and second.values.shape == first.values.shape
    return first, second, torch.randn(5, 48, device=device).to(dtype)


def copied(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
            tensor.copy_(source.state_dict()[name])


def assigned(target: nn.Module, source: nn.Module) -> None:
    for name, tensor in [*source.named_parameters(), *source.named_buffers()]:
        setattr(target, name, tensor)


def stored(target: nn.Module, source: nn.Module) -> None:
    """As loaders do that go around `nn.Module.__setattr__`."""
    target._parameters.update(source._parameters)
    target._buffers.update({name: tensor.clone() for name, tensor in source.named_buffers()})


WRITES = [
    copied,
    assigned,
    stored,
    lambda target, source: target.load_state_dict(source.state_dict()),
]
NAMES = ["copy_", "setattr", "_buffers", "load_state_dict"]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("write", WRITES, ids=NAMES)
def test_writes(write: Callable[..., None], device: str) -> None:
    source, target, x = pair(device)
    target(x)
    write(target, source)
    assert torch.equal(target(x), source(x))
    assert target.pattern == source.pattern and str(target) == str(source)
    assert torch.equal(target.to_dense(), source.to_dense())
    assert torch.equal(target.to_sparse_bsr().to_dense(), source.to_dense())
    for again in (copy.deepcopy(target), pickle.loads(pickle.dumps(target)), target.to(device)):
        assert torch.equal(again(x), source(x)) and again.pattern == source.pattern


def test_copies_of_a_layer_that_was_written_and_not_called() -> None:
    """Copies start with buffers whose count of writes is that of the layer before."""
    for copied_by in (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))):
        source, target, x = pair()
        copied(target, source)
        assert torch.equal(copied_by(target)(x), source(x))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_functional_call(device: str) -> None:
    source, target, x = pair(device)
    state = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    expected = target(x)
    assert torch.equal(torch.func.functional_call(target, state, (x,)), source(x))
    assert torch.equal(target(x), expected)

    parameters, buffers = dict(source.named_parameters()), dict(source.named_buffers())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(target, (parameters, buffers), (x,)).square().sum()

    gradients = torch.autograd.grad(loss(parameters), [*parameters.values()])
    wanted = torch.autograd.grad(source(x).square().sum(), [*source.parameters()])
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_compiled_code_obeys_later_writes(device: str) -> None:
    source, target, x = pair(device)
    torch.compiler.reset()
    compiled = torch.compile(target, backend="aot_eager", fullgraph=True)
    compiled(x)
    for write in (copied, assigned):
        _, target_state, _ = pair(device)
        copied(target, target_state)
        assert torch.equal(compiled(x), target_state(x))
        write(target, source)
        target.zero_grad()
        source.zero_grad()
        y, expected = compiled(x), source(x)
        assert torch.equal(y, expected)
        gradient = torch.autograd.grad(y.square().sum(), target.values)
        assert torch.equal(*gradient, *torch.autograd.grad(expected.square().sum(), source.values))


def test_an_exported_program_has_the_pattern() -> None:
    """Its buffers say what it computes, also where no layer of that pattern is alive."""
    source, target, x = pair()
    program = torch.export.export(target, (x,))
    del target
    module = program.module()
    copied(module, source)
    assert torch.equal(module(x), source(x))


def test_a_write_before_the_backward_pass_raises() -> None:
    source, target, x = pair()
    y = target(x)
    copied(target, source)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_buffers_without_a_pattern_raise() -> None:
    for name, value, sentence in (
        ("row_ptr", 7, "row_ptr"),
        ("col_idx", -1, "col_idx has entries"),
        ("col_idx", 3, "col"),
    ):
        layer, _, x = pair()
        getattr(layer, name).fill_(value)
        with pytest.raises(ValueError, match=sentence):
            layer(x)
    layer.row_ptr = layer.row_ptr.float()
    with pytest.raises(ValueError, match="must be an int32"):
        layer(x)
    layer.row_ptr = None
    with pytest.raises(ValueError, match="row_ptr and col_idx are needed"):
        layer(x)


@pytest.mark.parametrize("change", [lambda layer: layer, copy.deepcopy], ids=["same", "copy"])
def test_meta(change: Callable[..., BlockSparseLinear]) -> None:
    """A layer on the meta device has its pattern when it gets memory, or takes a loaded one."""
    source, other, x = pair()
    layer = BlockSparseLinear(48, 64, 16, other.pattern, device="meta")
    layer = change(layer)
    assert layer(x.to("meta")).is_meta and layer.pattern == other.pattern
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.pattern == other.pattern and layer(x).isfinite().all()
    copied(layer, source)
    assert torch.equal(layer(x), source(x))
    layer = change(BlockSparseLinear(48, 64, 16, other.pattern, device="meta"))
    assigned(layer, source)
    assert torch.equal(layer(x), source(x))


def test_inference_mode() -> None:
    """Tensors of inference mode do not count writes: they are not kept, or read in each call."""
    source, other, x = pair()
    with torch.inference_mode():
        made = BlockSparseLinear(48, 64, 16, other.pattern)
        moved = made.to("meta").to_empty(device="cpu")
        assert not made.row_ptr.is_inference() and not moved.row_ptr.is_inference()
        copied(made, source)
        assert torch.equal(made(x), source(x))
        made.row_ptr, made.col_idx = other.row_ptr.clone(), other.col_idx.clone()
        made(x)
        copied(made, source)
        assert torch.equal(made(x), source(x))


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    source, target, x = pair()
    full = BlockSparseLinear(48, 64, 16, torch.ones(4, 3, dtype=torch.bool))
    expected = target(x)
    state = {name: tensor for name, tensor in full.state_dict().items() if name != "values"}
    with pytest.raises(RuntimeError, match="size mismatch: values"):
        target.load_state_dict(state, strict=False)
    assert torch.equal(target(x), expected)


def test_patterns_do_not_change() -> None:
    pattern = layer_of().pattern
    pattern.row_ptr.zero_()
    pattern.col_idx.zero_()
    assert pattern == BlockSparsePattern(64, 48, 16, pattern.row_ptr, pattern.col_idx)
    assert pattern.mask().sum() == pattern.nnz == 4
    for name in ("rows", "block", "number", "row_ptr", "other"):
        with pytest.raises(AttributeError):
            setattr(pattern, name, 16)
    with pytest.raises(AttributeError):
        del pattern.number
    assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern


class SparseConfig(transformers.PretrainedConfig):
    """Which way the pattern of the model below is built: a checkpoint may have another one."""

    model_type = "sparse_test"

    def __init__(self, flipped: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.flipped = flipped


class SparseModel(transformers.PreTrainedModel):
    """A layer whose pattern a checkpoint brings."""

    config_class = SparseConfig

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config)
        with torch.device("cpu"):
            pattern = layer_of().pattern
            if config.flipped:
                pattern = BlockSparsePattern.from_mask(pattern.mask().flip(0, 1), 16)
        self.layer = BlockSparseLinear(48, 64, 16, pattern)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leaves weights as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., 48]` to `[..., 64]`."""
        return self.layer(x)


def test_from_pretrained(tmp_path: Any) -> None:
    source, x = SparseModel(SparseConfig()), torch.randn(5, 48)
    source.save_pretrained(tmp_path)
    loaded = SparseModel.from_pretrained(tmp_path, config=SparseConfig(flipped=True))
    assert loaded.layer.pattern == source.layer.pattern
    assert torch.equal(loaded(x), source(x))
    assert torch.equal(
        sparse.linear(x, loaded.layer.values, source.layer.pattern, loaded.layer.bias), source(x)
    )
