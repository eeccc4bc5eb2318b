"""Block masks of packed batches: each sequence is what it is alone, gradients included."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from blockflash import BlockMask, attention, block_sparse_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [(300, 300), (0, 70), (65, 200), (130, 1)]


def masks(heads: int, device: str) -> list[BlockMask]:
    torch.manual_seed(heads)
    made = []
    for seqlens in LENGTHS:
        rows, cols = (-(-n // 64) for n in seqlens)
        blocks = torch.rand(1, heads, rows, cols, device=device) < 0.6
        made.append(BlockMask.from_dense_bool(blocks, seqlens=seqlens, block=64))
    return made


def offsets(side: int, device: str) -> Tensor:
    lengths = torch.tensor([0] + [pair[side] for pair in LENGTHS])
    return lengths.cumsum(0).int().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal: bool, heads: int, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    each = masks(heads, device)
    whole = BlockMask.packed(each)
    cu_q, cu_k = offsets(0, device), offsets(1, device)
    place = {"device": device, "dtype": dtype}
    q = torch.randn(int(cu_q[-1]), 4, 64, **place, requires_grad=True)
    k, v = (torch.randn(int(cu_k[-1]), 2, 64, **place, requires_grad=True) for _ in range(2))
    sizes = {"max_seqlen_q": 300, "max_seqlen_k": 300, "causal": causal}
    o = block_sparse_attention(q, k, v, whole, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **sizes)
    parts = []
    for i, mask in enumerate(each):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone = (t[None, at] for t, at in ((q, rows), (k, keys), (v, keys)))
        parts.append(attention(*alone, block_mask=mask, causal=causal)[0])
    expected = torch.cat(parts)
    torch.testing.assert_close(o, expected)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 if q.is_cuda else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_packed_mask_is(device: str) -> None:
    each = masks(2, device)
    whole = BlockMask.packed(each)
    assert whole.shape[:2] == (4, 2) and whole.device == each[0].device
    for again in (whole, whole.to("cpu"), copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert len(again.sequences()) == 4 and again.density == pytest.approx(whole.density)
        for one, other in zip(again.sequences(), each, strict=True):
            assert torch.equal(one.to_dense(), other.to_dense().cpu())
    with pytest.raises(ValueError, match=r"sequences\(\)"):
        whole.to_dense()
    assert each[0].sequences() == []


def test_refused() -> None:
    each = masks(2, "cpu")
    for wrong, text in (
        ([], "no sequence"),
        ([BlockMask.packed(each)], "packed already"),
        ([each[0], BlockMask.causal(seqlens=(9, 9), block=128)], "blocks of 128"),
    ):
        with pytest.raises(ValueError, match=text):
            BlockMask.packed(wrong)
    q, cu = torch.randn(300, 2, 16), torch.tensor([0, 300], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300}
    with pytest.raises(ValueError, match="packed mask"):
        attention(q, q, q, block_mask=each[0], **lengths)
    with pytest.raises(ValueError, match="block_mask"):
        attention(q[None], q[None], q[None], block_mask=BlockMask.packed(each[:1]))
    short = torch.tensor([0, 299], dtype=torch.int32)
    lengths |= {"cu_seqlens_q": short}
    with pytest.raises(ValueError, match="299 rows, but 300"):
        attention(q, q, q, block_mask=BlockMask.packed(each[:1]), **lengths)
