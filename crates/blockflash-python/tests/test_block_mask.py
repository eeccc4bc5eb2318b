"""Block masks: attention visits the blocks that the lists name, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention import operands
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blockflash
from blockflash import BlockMask

# 3 block rows of 64 queries and 2 block columns of 64 keys: (0), (0, 1), (1).
ROW_PTR = torch.tensor([[[0, 1, 3, 4]]], dtype=torch.int32)
COL_IDX = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
SIZES = {"seqlens": (150, 100), "block": 64}


def masked(mask: BlockMask, inputs: list[Tensor], **options: Any) -> Tensor:
    """Attention under a mask."""
    return blockflash.attention(*inputs, block_mask=mask, **options)


def test_visited_blocks(route: str) -> None:
    inputs = operands((150, 100), heads=(2, 2))
    blocks = torch.tensor([[True, False], [True, True], [False, True]])
    visible = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)[:150, :100]
    by_head = (t.transpose(1, 2) for t in inputs)
    expected = scaled_dot_product_attention(*by_head, attn_mask=visible).transpose(1, 2)
    mask = BlockMask.from_lists(ROW_PTR, COL_IDX, **SIZES)
    assert torch.allclose(masked(mask, inputs), expected, atol=2e-6)
    with pytest.raises(ValueError, match="block_mask|block mask"):
        masked(mask, operands((150, 101), heads=(2, 2)))


def test_a_number_lives_as_long_as_its_mask(route: str) -> None:
    inputs = operands((150, 100), heads=(2, 2))
    masks = [BlockMask.from_lists(ROW_PTR, COL_IDX, **SIZES) for _ in range(2)]
    number = masks[0].number
    assert 0 != number != masks[1].number
    del masks[0]
    with pytest.raises(ValueError, match=f"no block mask of number {number}"):
        masked(SimpleNamespace(number=number, token_mask=None), inputs)
    masked(masks[0], inputs)


def test_wrong_lists() -> None:
    for row_ptr, col_idx, sentence in (
        (ROW_PTR[0], COL_IDX, "row_ptr has shape"),
        (ROW_PTR, COL_IDX.long(), "col_idx is int64"),
        (ROW_PTR, COL_IDX + 1, "block mask"),
        (ROW_PTR - 1, COL_IDX, "block mask"),
        (ROW_PTR.float(), COL_IDX, "f32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            BlockMask.from_lists(row_ptr, col_idx, **SIZES)
    with pytest.raises(ValueError, match="block"):
        BlockMask.from_lists(ROW_PTR, COL_IDX, seqlens=(150, 100), block=(0, 64))
    with pytest.raises(TypeError, match="row_ptr must be a torch.Tensor"):
        BlockMask.from_lists([0], COL_IDX, **SIZES)
