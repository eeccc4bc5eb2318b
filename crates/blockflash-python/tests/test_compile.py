"""The operators under the rules of torch: schemas, tracing, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import operands
from torch import Tensor, nn

import blockflash

STARTS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
SLOPES = torch.linspace(0.1, 0.5, 4)
DENSE = (torch.zeros(4), None, None, None, SLOPES, *[None] * 3, 0, 0, -1, 0)
PACKED = (None, STARTS, STARTS, None, SLOPES, *[None] * 3, 9, 9, -1, -1, False, 0.3)


def packed(grad: bool = False) -> list[Tensor]:
    """q, k and v of 14 packed rows."""
    return [t.detach()[0].requires_grad_(grad) for t in operands((14, 14), batch=1)]


@pytest.mark.parametrize("namespace", ["blockflash", "blockflash_library"])
def test_schemas(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)
    for inputs, rest in ((operands(grad=True), DENSE), (packed(grad=True), PACKED)):
        torch.library.opcheck(ops.attention, (*inputs, *rest))
    for inputs, rest in ((operands(), DENSE), (packed(), PACKED)):
        torch.library.opcheck(ops.attention_forward, (*inputs, *rest))
        outputs = ops.attention(*inputs, *rest)
        torch.library.opcheck(ops.attention_out, (*inputs, *outputs, *rest))
        torch.library.opcheck(ops.attention_out, (*inputs, outputs[0], None, *rest))
        for lse in (None, outputs[1]):
            torch.library.opcheck(
                ops.attention_backward, (outputs[0], lse, *inputs, *outputs, False, *rest)
            )
    inputs, bias = operands(grad=True), torch.randn(1, 4, 17, 1, requires_grad=True)
    rest = (None, None, None, bias)
    torch.library.opcheck(ops.attention, (*inputs, *rest))
    with torch.no_grad():
        outputs = ops.attention(*inputs, *rest)
    given = (outputs[0], None, *inputs, *outputs, True, *rest)
    torch.library.opcheck(ops.attention_backward, tuple(map(_detached, given)))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class Block(nn.Module):
    """A layer of a transformer, reduced to attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.to_qkv = nn.Linear(32, 3 * 64)
        self.to_out = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, 32]` to the same."""
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 4, 16)).unbind(2)
        return x + self.to_out(blockflash.attention(q, k, v, **self.options).flatten(2))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (3, 1), "softcap": 4.0, "sink": torch.ones(4)},
        {"alibi_slopes": SLOPES, "bias": torch.linspace(-1, 1, 4)[:, None, None]},
    ],
)
def test_compile_for_training(options: dict[str, Any], dynamic: bool) -> None:
    torch.compiler.reset()
    model = nn.Sequential(Block(**options), Block(**options))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seqlen in (9, 12):
        x = torch.randn(2, seqlen, 32)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        assert all(map(torch.allclose, *gradients))


@pytest.mark.parametrize(
    "options", [{"window": (3, 0)}, {"softcap": 4.0, "sink": torch.ones(4)}, {"causal": True}]
)
def test_compile_for_inference(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    model = Block(**options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        x = torch.randn(2, 9, 32)
        assert torch.allclose(compiled(x), model(x))


def test_export() -> None:
    model, x = Block(causal=True), torch.randn(2, 9, 32)
    length = torch.export.Dim("length", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
        longer = torch.randn(2, 33, 32)
        assert torch.allclose(program.module()(longer), model(longer))


def test_vmap() -> None:
    q, k, v = (t[:, None] for t in operands())
    found = torch.vmap(lambda q, k, v: blockflash.attention(q, k, v))(q, k, v)
    assert torch.equal(found[:, 0], blockflash.attention(q[:, 0], k[:, 0], v[:, 0]))
