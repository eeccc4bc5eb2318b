"""`flash_attn.bert_padding`, `flash_attn.layers.rotary`, and the package under its own name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from blockflash.flash_attn import bert_padding
from blockflash.flash_attn.layers import rotary

PLACES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def test_alias() -> None:
    """Code that imports flash-attn needs no change, submodules included."""
    code = """
import sys, blockflash.flash_attn, blockflash.flash_attn_interface
sys.modules["flash_attn"] = blockflash.flash_attn
sys.modules["flash_attn_interface"] = blockflash.flash_attn_interface
import flash_attn
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import USE_TRITON_ROCM, _get_block_size_n
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn_interface import flash_attn_combine, get_scheduler_metadata
assert flash_attn.__version__ >= "2.8" and not USE_TRITON_ROCM
import importlib.util
assert importlib.util.find_spec("flash_attn") is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@PLACES
def test_padding(device: str) -> None:
    x = torch.randn(3, 5, 2, 4, device=device, requires_grad=True)
    tokens = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]], device=device)
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, tokens.bool())
    assert torch.equal(rows, x[tokens.bool()]) and cu.dtype == used.dtype == torch.int32
    assert cu.tolist() == [0, 2, 7, 9] and longest == 5 and used.tolist() == [2, 5, 2]
    again = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(again, x * tokens[..., None, None])
    (grad,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(grad, tokens[..., None, None].expand_as(x).float())
    kept = torch.zeros_like(tokens)
    kept[0, 2] = 1
    rows, _, cu, longest, used = bert_padding.unpad_input(x, tokens, kept)
    assert torch.equal(rows, x[(tokens + kept).bool()])
    assert cu.tolist() == [0, 3, 8, 10] and longest == 5 and used.tolist() == [2, 5, 2]
    chosen, whole = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(chosen, x[tokens.bool()]) and torch.equal(whole, x.flatten(0, 1))


def test_padding_of_concatenated_sequences() -> None:
    x = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 4, 1, 0, 0, 0]])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5]]))
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert cu.tolist() == [0, 2, 5, 9, 10] and longest == 4


def by_definition(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Turned x `[tokens, heads, head_dim]`; angles `[tokens, rotary_dim / 2]`."""
    half = angles.shape[1]
    part = x[..., : 2 * half].double()
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).mT
    turned = torch.view_as_complex(pairs.contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)[:, None])
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([turned, x[..., 2 * half :].double()], -1)


@PLACES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary(packed: bool, inplace: bool, interleaved: bool, device: str) -> None:
    x = torch.randn(3, 6, 2, 16, device=device)
    table = torch.rand(9, 4, device=device, dtype=torch.float64) * 6
    cos, sin = table.cos().float(), table.sin().float()
    starts = torch.tensor([0, 2, 3], device=device, dtype=torch.int32)
    options: dict[str, Any] = {"interleaved": interleaved, "inplace": inplace}
    rows, positions = x.flatten(0, 1), (starts[:, None] + torch.arange(6, device=device)).flatten()
    given = x.clone()
    if packed:
        lengths = [4, 1, 6]
        kept = torch.cat([torch.arange(n) + 6 * i for i, n in enumerate(lengths)]).to(device)
        rows, positions, given = rows[kept], positions[kept], rows[kept].clone()
        cu = torch.tensor([0, 4, 5, 11], device=device, dtype=torch.int32)
        options |= {"cu_seqlens": cu, "max_seqlen": 6}
    given.requires_grad_()
    found = rotary.apply_rotary_emb(given, cos, sin, seqlen_offsets=starts, **options)
    expected = by_definition(rows, table[positions], interleaved).view_as(given)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(given.detach() if inplace else found.detach(), found)
    # The gradient is turned back.
    weight = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, given, weight)
    back = by_definition(weight.view_as(rows), -table[positions], interleaved).view_as(given)
    torch.testing.assert_close(grad.double(), back, rtol=1e-5, atol=1e-5)


def test_rotary_of_packed_projections() -> None:
    qkv, kv = torch.randn(2, 5, 3, 2, 8), torch.randn(2, 5, 2, 2, 8)
    cos, sin = torch.rand(2, 7, 4)
    turned = [rotary.apply_rotary_emb(t, cos, sin, seqlen_offsets=1) for t in qkv.unbind(2)[:2]]
    expected = torch.stack([*turned, qkv[:, :, 2]], 2)
    options = {"seqlen_offsets": 1}
    for given in (qkv.clone(), qkv.clone().requires_grad_(), qkv.clone().requires_grad_() * 1):
        found = rotary.apply_rotary_emb_qkv_(given, cos, sin, **options)
        assert torch.equal(found, expected) and torch.equal(given, expected)
    flat = qkv.flatten(2, 3)
    found = rotary.apply_rotary_emb_qkv_(flat.clone(), cos, sin, num_heads_q=2, **options)
    assert torch.equal(found, expected.flatten(2, 3))
    expected = torch.stack([rotary.apply_rotary_emb(kv[:, :, 0], cos, sin), kv[:, :, 1]], 2)
    assert torch.equal(rotary.apply_rotary_emb_kv_(kv, cos, sin), expected)
    rows = rotary.apply_rotary_emb_torch(qkv[:, :, 0], cos[1:6], sin[1:6])
    assert torch.equal(rows, turned[0])


def test_rotary_module() -> None:
    layer = rotary.RotaryEmbedding(8)
    qkv = torch.randn(2, 5, 3, 2, 16)
    angles = torch.outer(torch.arange(5.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8)).double()
    expected = by_definition(qkv[1, :, 1], angles, False)
    found = layer(qkv.clone())
    torch.testing.assert_close(found[1, :, 1].double(), expected, rtol=1e-5, atol=1e-5)
    q, kv = layer(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())
    torch.testing.assert_close(torch.stack([q, *kv.unbind(2)], 2), found)
    scaled = rotary.RotaryEmbedding(16, scale_base=512)(torch.ones(1, 4, 3, 1, 16))
    products = (scaled[0, :, 0, 0, None] * scaled[0, None, :, 1, 0]).sum(-1)
    # Scales of queries and keys cancel but for the distance.
    torch.testing.assert_close(products.diagonal(1), products[0, 1].expand(3))


def test_rotary_refuses() -> None:
    x, table = torch.randn(2, 5, 2, 8), torch.rand(6, 4)
    for arguments, text in (
        ((x, table, table[:, :3]), "both"),
        ((x, torch.rand(6, 5), torch.rand(6, 5)), "up to 4"),
        ((x, table[:4], table[:4]), "4 positions"),
        ((x[0], table, table), "with or without cu_seqlens"),
    ):
        with pytest.raises(ValueError, match=text):
            rotary.apply_rotary_emb(*arguments)
    with pytest.raises(ValueError, match="up to 7"):
        rotary.apply_rotary_emb(x, table, table, seqlen_offsets=2)
    with pytest.raises(ValueError, match="num_heads_q is 3"):
        rotary.apply_rotary_emb_qkv_(x, table, table, num_heads_q=3)
