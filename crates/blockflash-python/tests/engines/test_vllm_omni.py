"""The backend as vLLM-Omni's registry finds it, and the values of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from engine import needs
from torch import Tensor

needs("vllm_omni", "vllm_omni.diffusion.attention.backends.sdpa")

from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata  # noqa: E402
from vllm_omni.diffusion.attention.backends.registry import (  # noqa: E402
    DiffusionAttentionBackendEnum,
)
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl  # noqa: E402

import blockflash  # noqa: E402
from blockflash import vllm_omni  # noqa: E402
from blockflash.vllm_omni._backend import BlockflashBackend, BlockflashImpl  # noqa: E402

SDPA = DiffusionAttentionBackendEnum.TORCH_SDPA


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    blockflash.reset_stats()
    yield
    SDPA.clear_override()
    blockflash.reset_stats()


def calls() -> tuple[int, int]:
    counted = blockflash.stats()["vllm_omni"]
    return counted.kernel, sum(counted.fallback.values())


@pytest.mark.parametrize(("value", "backend"), [("", SDPABackend), ("1", BlockflashBackend)])
def test_register(value: str, backend: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_omni.VARIABLE, value)
    vllm_omni.register()
    vllm_omni.register()
    assert SDPA.get_class() is backend
    assert backend.supports_head_size(128) and backend.supports_attention_mask()


def test_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_omni.VARIABLE, "yes")
    with pytest.raises(ValueError, match="BLOCKFLASH_VLLM_OMNI is 'yes', not 0 or 1"):
        vllm_omni.register()


def test_vllm_omni_finds_the_plugin() -> None:
    found = metadata.entry_points(group="vllm_omni.general_plugins", name="blockflash")
    if not found:
        pytest.skip("the package is imported from its source and has no entry points")
    assert [point.load() for point in found] == [vllm_omni.register]


def tensors(dtype: torch.dtype = torch.float32, heads_k: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 33, 4, 16), (2, 41, heads_k, 16), (2, 41, heads_k, 16)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


MASKS = {
    "none": lambda: None,
    "padding": lambda: torch.arange(41) < torch.tensor([[41], [7]]),
    "numbers": lambda: torch.randn(2, 1, 33, 41),
    "bool": lambda: torch.rand(2, 4, 33, 41) > 0.5,
}


@pytest.mark.parametrize(("mask", "causal"), [*((mask, False) for mask in MASKS), ("none", True)])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_values(mask: str, causal: bool, heads_k: int) -> None:
    made = MASKS[mask]()
    given: Any = None if made is None else AttentionMetadata(attn_mask=made)
    impls = [cls(4, 16, 0.3, causal=causal) for cls in (SDPAImpl, BlockflashImpl)]
    q, k, v = tensors(heads_k=heads_k)
    expected, found = (impl.forward_cuda(q, k, v, given) for impl in impls)
    assert calls() == (1, 0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_has_no_kernel_is_left_to_sdpa() -> None:
    q, k, v = tensors(torch.float64)
    with pytest.warns(UserWarning, match="blockflash.vllm_omni"):
        found = BlockflashImpl(4, 16, 0.3).forward_cuda(q, k, v)
    assert calls() == (0, 1)
    assert torch.equal(found, SDPAImpl(4, 16, 0.3).forward_cuda(q, k, v))
