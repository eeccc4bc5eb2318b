"""Values with another head dimension than queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import assert_close, reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import blockflash
from blockflash import flash_attn, flash_attn_interface
from blockflash.sdpa import activate_sdpa, scaled_dot_product_attention

transformers = pytest.importorskip("blockflash.transformers")
block_attention = transformers.block_attention
MODULE = SimpleNamespace(num_key_value_groups=2, training=False)
HEAD_DIMS = [(192, 128), (64, 128), (72, 40), (13, 7), (5, 9), (512, 256)]
"""Of q and k, and of v and the output."""


def operands(
    head_dims: tuple[int, int], dtype: torch.dtype = torch.float32, rows: tuple[int, int] = (9, 14)
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    (qk, v), (rows_q, rows_k) = head_dims, rows
    shapes = ((2, rows_q, 4, qk), (2, rows_k, 2, qk), (2, rows_k, 2, v))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = operands(head_dims, dtype)
    options = {"causal": True, "softcap": 3.0, "sink": torch.randn(4)}
    o, lse = blockflash.attention(q, k, v, return_lse=True, **options)
    o_expected, lse_expected = reference(q, k, v, **options)
    assert o.shape == (2, 9, 4, head_dims[1]) and o.is_contiguous()
    assert_close(o, o_expected, dtype)
    assert_close(lse, lse_expected, torch.float32)
    out = torch.empty_like(o)
    assert blockflash.attention(q, k, v, out=out, **options) is out
    assert torch.equal(out, o)
    with pytest.raises(ValueError, match="o has shape"):
        blockflash.attention(q, k, v, out=torch.empty(2, 9, 4, head_dims[1] + 1, dtype=dtype))


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients(head_dims: tuple[int, int], with_lse: bool) -> None:
    inputs = [*operands(head_dims), torch.randn(4)]

    def gradients(function: object) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        q, k, v, sink = leaves
        o, lse = function(q, k, v, causal=True, softcap=3.0, sink=sink)
        weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
        total = (o * weights).sum() + (lse.sin().sum() if with_lse else 0)
        return torch.autograd.grad(total, leaves)

    ours = gradients(lambda *args, **named: blockflash.attention(*args, return_lse=True, **named))
    expected = gradients(reference)
    for found, exact, like in zip(ours, expected, inputs, strict=True):
        assert found.shape == like.shape
        assert_close(found, exact.double(), torch.float32)


def test_packed_sequences_and_block_masks() -> None:
    q, k, v = operands((24, 10), rows=(128, 128))
    offsets = torch.tensor([0, 100, 250], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 150}
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    o = blockflash.attention(*flat, **packed, max_seqlen_k=150)
    assert o.shape == (256, 4, 10) and not o[250:].any()
    for start, end in ((0, 100), (100, 250)):
        alone = (t[None, start:end] for t in flat)
        assert_close(o[None, start:end], reference(*alone)[0], torch.float32)
    mask = blockflash.BlockMask.from_dense_bool(
        torch.ones(2, 2).bool(), seqlens=(128, 128), block=64
    )
    o = blockflash.block_sparse_attention(q, k, v, mask, causal=True)
    assert_close(o, reference(q, k, v, causal=True)[0], torch.float32)


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
def test_attention_to_a_cache(head_dims: tuple[int, int]) -> None:
    q, k, v = operands(head_dims, rows=(3, 32))
    options = {"causal": True, "softcap": 2.0, "sink": torch.randn(4)}
    o, lse = blockflash.attention_decode(q, k, v, return_lse=True, **options)
    o_expected, lse_expected = reference(q, k, v, **options)
    assert_close(o, o_expected, torch.float32)
    assert_close(lse, lse_expected, torch.float32)
    # The last three keys are appended, to pages in another order.
    order = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32)
    pages = [torch.zeros(4, 16, *t.shape[2:]) for t in (k, v)]
    for cache, rows in zip(pages, (k, v), strict=True):
        cache[order.flatten().long()] = rows.reshape(4, 16, *rows.shape[2:])
        cache[[1, 3], 13:] = torch.nan
    found = blockflash.attention_decode(
        q, *pages, k=k[:, 29:], v=v[:, 29:], block_table=order, **options
    )
    assert torch.equal(found, o)


@pytest.mark.parametrize("head_dims", [(192, 128), (16, 8)])
def test_torchs_function(head_dims: tuple[int, int]) -> None:
    q, k, v = (t.transpose(1, 2) for t in operands(head_dims, rows=(11, 11)))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with activate_sdpa("cpu"):
        o, _ = flash(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected)
    inputs = (q, k, v)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*leaves, is_causal=True).sin().sum(), leaves)

    ours, exact = map(
        gradients, (scaled_dot_product_attention, functional.scaled_dot_product_attention)
    )
    for found, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_shapes_without_data() -> None:
    inputs = operands((16, 8))
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t).requires_grad_() for t in inputs)
        o, lse = blockflash.attention(q, k, v, return_lse=True)
        assert o.shape == (2, 9, 4, 8) and lse.shape == (2, 4, 9)
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert [t.shape for t in gradients] == [t.shape for t in inputs]
        q, k, v = (t.detach() for t in (q, k, v))
        assert blockflash.attention_decode(q, k, v).shape == (2, 9, 4, 8)
    compiled = torch.compile(blockflash.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), blockflash.attention(*inputs))


def test_operations_are_counted() -> None:
    inputs = [t.requires_grad_() for t in operands((16, 8))]
    pairs = 2 * 4 * 9 * 14
    with FlopCounterMode(display=False) as counter:
        o = blockflash.attention(*inputs)
    assert counter.get_total_flops() == 2 * pairs * (16 + 8)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * 8)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_flash_attn(module: Any, device: str) -> None:
    """The functions of flash-attn, with a cache also where it is copied first."""
    table = "block_table" if module is flash_attn else "page_table"
    for head_dims in [(192, 128), (64, 128), (40, 36), (36, 40)]:
        q, k, v = (t.to(device) for t in operands(head_dims, torch.bfloat16))
        expected, _ = reference(q, k, v, causal=True)
        o = module.flash_attn_func(q, k, v, causal=True)
        assert_close((o[0] if isinstance(o, tuple) else o).cpu(), expected, torch.bfloat16)
        paged = {table: torch.arange(2, device=device, dtype=torch.int32)[:, None]}
        for pages in ({}, paged):
            o = module.flash_attn_with_kvcache(q, k, v, causal=True, **pages)
            assert_close(o.cpu(), expected, torch.bfloat16)


def test_transformers() -> None:
    for head_dims in [(192, 128), (64, 128)]:
        q, k, v = (t.transpose(1, 2) for t in operands(head_dims, rows=(9, 9)))
        with blockflash.strict():
            o, _ = block_attention(MODULE, q, k, v, None, is_causal=True)
        expected, _ = reference(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
        assert_close(o, expected, torch.float32)
        # A mask of which nothing is known, as of a padded batch.
        visible = torch.ones(9, 9).tril().bool().repeat(2, 1, 1, 1)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with blockflash.strict():
            o, _ = block_attention(MODULE, *leaves, visible)
        assert_close(o.detach(), expected, torch.float32)
        found = torch.autograd.grad(o.sin().sum(), leaves)
        exact, _ = reference(*(t.transpose(1, 2) for t in leaves), causal=True)
        for ours, other in zip(found, torch.autograd.grad(exact.sin().sum(), leaves), strict=True):
            assert_close(ours, other.double(), torch.float32)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for head_dims in HEAD_DIMS:
        q, k, v = (t.cuda() for t in operands(head_dims, torch.float16))
        o = blockflash.attention(q, k, v, causal=True)
        assert_close(o.cpu(), reference(q, k, v, causal=True)[0], torch.float16)
    q, k, v = (t.cuda() for t in operands((576, 512), torch.float16))
    with pytest.raises(blockflash.Unsupported, match="head_dim 576 of q and k, 512 of v"):
        blockflash.attention(q, k, v)
