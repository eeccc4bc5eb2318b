"""`torch.compile` with its own code generator, which needs a C++ compiler and a minute."""

from __future__ import annotations

import pytest
import torch
from test_compile import Block
from test_sparse_operators import Model
from torch import nn

pytestmark = pytest.mark.inductor


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_training(sparse: bool, dynamic: bool) -> None:
    torch.compiler.reset()
    model = Model() if sparse else nn.Sequential(Block(causal=True), Block())
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for seqlen in (9, 12):
        x = torch.randn(2, seqlen, 48 if sparse else 32)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for eager, generated in zip(*gradients):
            assert torch.allclose(eager, generated, 1e-4, 1e-4)


def test_inference() -> None:
    torch.compiler.reset()
    model = Block(window=(3, 0), softcap=4.0, sink=torch.ones(4))
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, fullgraph=True)(x), model(x), 1e-4, 1e-5)
