"""Masks of the last keys of a cache, against float64."""

from __future__ import annotations

import pytest
import torch
from reference import assert_close, reference
from test_decode import DIM, HEADS, LENGTHS, WHERE, cache_of, randn

from blockflash import attention_decode


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_masks_of_the_last_keys(device: str, dtype: torch.dtype) -> None:
    """A tree of tokens at the end of each sequence, as booleans or bytes, of one or all."""
    rows, tail = 5, 7
    q = randn(4, rows, HEADS, DIM, device=device, dtype=dtype)
    cache = cache_of("contiguous", device, dtype)
    mask = torch.rand(4, rows, tail, device=device) > 0.4
    for given in (mask, mask[:1].to(torch.uint8) * 3):
        o = attention_decode(q, *cache[:2], **cache[2], tail_mask=given)
        for entry, length in enumerate(LENGTHS.tolist()):
            shown = torch.ones(rows, length, dtype=torch.bool)
            last = min(length, tail)
            rows_of = given[entry if len(given) > 1 else 0].cpu() != 0
            shown[:, length - last :] = rows_of[:, tail - last :]
            for row in range(rows):
                if not shown[row].any():
                    assert not o[entry, row].any()
                    continue
                k, v = (c[entry, :length][None].cpu()[:, shown[row]] for c in cache[:2])
                expected = reference(q[entry : entry + 1, row : row + 1].cpu(), k, v)[0]
                assert_close(o[entry : entry + 1, row : row + 1].cpu(), expected, dtype)
    with pytest.raises(ValueError, match="tail_mask"):
        attention_decode(q, *cache[:2], **cache[2], tail_mask=mask[:, :1])
