"""Tensors that are made on the way are where the operands are, whatever the default device is."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fakes import LAYOUTS
from torch import Tensor
from torch.utils._device import _device_constructors

import blockflash
from blockflash import BlockMask, _sdpa_kernels, sparse, video

PACKAGE = Path(blockflash.__file__).parent
MAKERS = {function.__name__ for function in _device_constructors()}


def calls_without_a_device(path: Path) -> list[str]:
    """Where a module calls a function of torch that makes a tensor on the default device."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        # `**options` name it.
        and not {None, "device"} & {keyword.arg for keyword in node.keywords}
    ]


def test_every_new_tensor_names_its_device() -> None:
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) > 30 and {"arange", "empty_permuted", "tensor"} <= MAKERS
    assert sum(map(calls_without_a_device, modules), []) == []


def masks() -> list[Tensor]:
    mask = BlockMask.from_token_mask(PAIRS, block=64)
    flex = mask.to_flex()
    return [
        mask.to_dense(),
        mask.to_token_mask(),
        BlockMask.from_flex(flex).to_token_mask(),
        BlockMask.causal(seqlens=(128, 128), block=64).to_token_mask(),
        BlockMask.documents(DOCUMENTS, block=64).to_token_mask(),
    ]


def videos() -> list[Tensor]:
    for cached in (video._order, video._sliding_mask, video._diagonal):
        cached.cache_clear()
    q = ROWS[:1].reshape(1, 64, 2, 64)
    kinds = (video.SlidingTile((1, 1, 1), (4, 4, 4)), video.TopK(1, (4, 4, 4)))
    return [video.video_attention(q, q, q, (4, 4, 4), kind) for kind in kinds]


def weights() -> list[Tensor]:
    return [PATTERN.mask(), LAYER.to_dense(), LAYER.to_sparse_bsr().to_dense()]


PAIRS = torch.tril(torch.ones(128, 128, dtype=torch.bool))
DOCUMENTS = (torch.arange(128, dtype=torch.int32) // 50)[None]
ROWS = torch.linspace(-1, 1, 2 * 64 * 2 * 64).view(2, 64, 2, 64)
PATTERN = sparse.BlockSparsePattern.from_mask(torch.eye(2, dtype=torch.bool), 32)
LAYER = sparse.BlockSparseLinear(64, 64, 32, PATTERN)


@pytest.mark.parametrize("call", [masks, videos, weights], ids=["masks", "videos", "weights"])
def test_results_are_the_same(call: Callable[[], list[Tensor]]) -> None:
    expected = call()
    with torch.device("meta"):
        found = call()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("top_left", [False, True])
def test_gradients_of_activated_sdpa(layout: str, top_left: bool) -> None:
    """Those for a GPU, too, whose tensors would be on the CPU."""
    q, k, v, grad = (LAYOUTS[layout](t) for t in torch.randn(4, 2, 4, 9, 16))
    options: dict[str, Any] = {"top_left": top_left, "scale": None}

    def run() -> list[Tensor]:
        o, lse = _sdpa_kernels._forward(q, k, v, True, **options)
        tensors = (grad, q, k, v, o)
        return [o, lse, *_sdpa_kernels._backward(tensors, lse, True, **options)]

    expected = run()
    with torch.device("meta"):
        found = run()
    assert all(map(torch.equal, found, expected))
