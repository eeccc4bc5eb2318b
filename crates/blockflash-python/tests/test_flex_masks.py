"""Masks of flex_attention, whatever their functions say, against dense masks."""

from __future__ import annotations

import pickle

import pytest
import torch
from flex_masks import CASES, FlexCase
from reference import assert_close, reference
from test_gradient import WHERE, assert_gradients
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from blockflash import BlockMask, block_sparse_attention


def flex_of(case: FlexCase, device: str, block: int) -> object:
    shape = (case.batch, case.heads, *case.lengths)
    with torch.device(device):
        return create_block_mask(case.mod, *shape, device=device, BLOCK_SIZE=block)


def pairs_of(case: FlexCase) -> torch.Tensor:
    return create_mask(case.mod, case.batch, case.heads, *case.lengths, device="cpu")


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pairs(case: FlexCase, block: int) -> None:
    expected = pairs_of(case)
    flex = flex_of(case, "cpu", block)
    mask = BlockMask.from_flex(flex)
    assert mask.block == (block, block) and torch.equal(mask.to_token_mask(), expected)
    assert torch.equal(mask.to_dense(), flex.to_dense().bool())
    back = mask.to_flex()
    if mask.token_mask is None:
        shape = (case.batch, case.heads, *case.lengths)
        assert torch.equal(create_mask(back.mask_mod, *shape, device="cpu"), expected)
        assert torch.equal(BlockMask.from_flex(back).to_token_mask(), expected)
    for same in (
        BlockMask.from_mask_mod(
            case.mod, seqlens=case.lengths, batch=case.batch, heads=case.heads, block=block
        ),
        BlockMask.from_token_mask(expected, block=block),
        pickle.loads(pickle.dumps(mask)),
    ):
        assert torch.equal(same.to_token_mask(), expected)


@WHERE
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention(case: FlexCase, device: str, dtype: torch.dtype) -> None:
    pairs = pairs_of(case)
    mask = BlockMask.from_flex(flex_of(case, "cpu", 64)).to(device)
    (queries, keys), heads = case.lengths, max(case.heads, 2)
    shapes = [(queries, heads), (keys, heads), (keys, heads)]
    inputs = [
        torch.randn(case.batch, *shape, 16).to(device, dtype).requires_grad_() for shape in shapes
    ]
    o, lse = block_sparse_attention(*inputs, mask, return_lse=True)
    expected = reference(*inputs, visible=pairs)
    assert_close(o.cpu(), expected[0], dtype)
    assert_close(lse.cpu(), expected[1], dtype)
    assert_gradients(inputs, o, expected[0])


def test_most_are_no_windows() -> None:
    """Those that are need no bits."""
    windows = {
        name: mask.token_mask
        for name, case in CASES.items()
        if (mask := BlockMask.from_flex(flex_of(case, "cpu", 64))).token_mask is not None
    }
    assert windows == {
        "everything": (None, None), "causal": (None, 0), "sliding window": (70, 0)
    }  # fmt: skip
