"""Masks of flex_attention, whatever their functions say, as block masks and back."""

from __future__ import annotations

import pickle

import pytest
import torch
from flex_masks import CASES, FlexCase
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from blockflash import BlockMask


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
