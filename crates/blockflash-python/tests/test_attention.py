"""`blockflash.attention` against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close, reference
from torch import Tensor

import blockflash

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MASKS = [
    {},
    {"causal": True},
    {"causal": True, "top_left": True},
    {"window": (5, None)},
    {"window": (None, 3)},
    {"window": (4, 2)},
    {"window": (4, 2), "top_left": True},
    {"window": (0, 0)},
    {"window": (6, None), "causal": True},
    {"window": (10_000, 10_000)},
]
WHERE = [("cpu", torch.float32), pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)]
LENGTHS = [(17, 17), (5, 19), (19, 5), (1, 33), (33, 1)]


def operands(
    lengths: tuple[int, int] = (17, 17),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    grad: bool = False,
) -> list[Tensor]:
    """q, k and v of normally distributed numbers."""
    torch.manual_seed(lengths[0] * 64 + lengths[1])
    shapes = [
        (batch, seqlen, count, head_dim)
        for seqlen, count in (
            (lengths[0], heads[0]),
            (lengths[1], heads[1]),
            (lengths[1], heads[1]),
        )
    ]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", MASKS)
def test_masks(dtype: torch.dtype, lengths: tuple[int, int], options: dict[str, Any]) -> None:
    q, k, v = operands(lengths, dtype=dtype)
    o, lse = blockflash.attention(q, k, v, return_lse=True, **options)
    expected = reference(q, k, v, **options)
    assert o.dtype == dtype and lse.dtype == torch.float32 and o.is_contiguous()
    assert_close(o, expected[0], dtype)
    assert_close(lse, expected[1], torch.float32)
    assert torch.equal(blockflash.attention(q, k, v, **options), o)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 1)])
@pytest.mark.parametrize("head_dim", [8, 59, 64, 111])
def test_heads(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    q, k, v = operands((9, 13), heads, head_dim, dtype)
    assert_close(blockflash.attention(q, k, v), reference(q, k, v)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_softcap_and_sink(dtype: torch.dtype, route: str) -> None:
    q, k, v = operands(dtype=dtype)
    sink = torch.linspace(-2, 3, 4)
    for options in (
        {"scale": 0.7},
        {"softcap": 1.5},
        {"sink": sink},
        {"scale": 0.3, "softcap": 20.0, "sink": sink, "window": (3, 0)},
    ):
        o, lse = blockflash.attention(q, k, v, return_lse=True, **options)
        expected = reference(q, k, v, **options)
        assert_close(o, expected[0], dtype)
        assert_close(lse, expected[1], torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_with_empty_ones(causal: bool, route: str) -> None:
    lengths = [(5, 7), (0, 3), (4, 0), (9, 9), (0, 0), (6, 2)]
    starts = [torch.tensor([0, *of]).cumsum(0).int() for of in zip(*lengths, strict=True)]
    (total_q, total_k) = (int(of[-1]) for of in starts)
    # Two rows at the end belong to no sequence.
    q, k, v = (t[0] for t in operands((total_q + 2, total_k + 2), batch=1))
    o, lse = blockflash.attention(
        q, k, v, causal=causal, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=9,
        max_seqlen_k=9, return_lse=True,
    )  # fmt: skip
    assert o.shape == q.shape and lse.shape == (q.shape[1], q.shape[0])
    for i in range(len(lengths)):
        rows, keys = (slice(*of[i : i + 2].tolist()) for of in starts)
        expected = reference(q[None, rows], k[None, keys], v[None, keys], causal=causal)
        assert_close(o[None, rows], expected[0], torch.float32)
        assert_close(lse[None, :, rows], expected[1], torch.float32)
    assert o[total_q:].abs().max() == 0


def test_strides(route: str) -> None:
    q, k, v = operands((9, 13))
    expected = blockflash.attention(q, k, v)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(blockflash.attention(*by_head), expected)
    joined = torch.randn(2, 11, 3, 4, 16)
    q, k, v = joined.unbind(2)
    assert torch.equal(
        blockflash.attention(q, k, v), blockflash.attention(*(t.contiguous() for t in (q, k, v)))
    )
    shared = k[:1].expand(2, -1, -1, -1)
    assert torch.equal(
        blockflash.attention(q, shared, shared),
        blockflash.attention(q, shared.contiguous(), shared.contiguous()),
    )


def test_empty_tensors() -> None:
    for lengths, batch in (((0, 4), 2), ((4, 4), 0), ((4, 0), 2)):
        q, k, v = operands(lengths, batch=batch)
        o, lse = blockflash.attention(q, k, v, return_lse=True)
        assert o.shape == q.shape and lse.shape == (batch, 4, lengths[0])
        assert torch.equal(o, torch.zeros_like(q))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_into_given_tensors(route: str) -> None:
    q, k, v = operands()
    expected, expected_lse = blockflash.attention(q, k, v, return_lse=True)
    space = torch.full((2, 4, 17, 16), torch.nan)
    out = space.transpose(1, 2)
    found, lse = blockflash.attention(q, k, v, out=out, return_lse=True)
    assert found is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_autocast() -> None:
    q, k, v = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = blockflash.attention(q, k, v)
    assert torch.equal(o, blockflash.attention(*(t.bfloat16() for t in (q, k, v))))


def test_threads() -> None:
    """The interpreter is free while a call computes; results do not mix."""
    from concurrent.futures import ThreadPoolExecutor

    cases = [operands((64 + i, 64), batch=1) for i in range(16)]
    expected = [blockflash.attention(*case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: blockflash.attention(*case), cases))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_output_beside_the_operands(route: str, device: str, dtype: torch.dtype) -> None:
    """Rows of the output between rows of q, k and v: no element is of two of them."""
    buffer = torch.randn(2, 17, 4, 3, 16, device=device, dtype=dtype)
    q, k, v, out = buffer.unbind(2)
    expected, before = blockflash.attention(q, k, v), buffer[:, :, :3].clone()
    assert blockflash.attention(q, k, v, out=out) is out
    assert torch.equal(out, expected) and torch.equal(buffer[:, :, :3], before)
    wide = torch.randn(2, 17, 3, 32, device=device, dtype=dtype)
    q, out = wide.chunk(2, -1)
    assert torch.equal(blockflash.attention(q, q, q, out=out), blockflash.attention(q, q, q))
    with pytest.raises(ValueError, match="o shares memory with q"):
        blockflash.attention(q, q, q, out=wide[..., 8:24])


def test_views_that_negate(route: str) -> None:
    """Torch's negative bit, which a kernel does not see."""
    q, k, v = operands()
    for at in range(3):
        negated = [torch._neg_view(-t) if i == at else t for i, t in enumerate((q, k, v))]
        assert torch.equal(blockflash.attention(*negated), blockflash.attention(q, k, v))
    sink = torch.randn(4)
    expected = blockflash.attention(q, k, v, sink=sink)
    assert torch.equal(blockflash.attention(q, k, v, sink=torch._neg_view(-sink)), expected)
    with pytest.raises(ValueError, match="o is written.*resolve_neg"):
        blockflash.attention(q, k, v, out=torch._neg_view(torch.empty_like(q)))
    with pytest.raises(ValueError, match="o is written.*resolve_conj"):
        blockflash.attention(q, k, v, out=torch.empty(q.shape, dtype=torch.complex64).conj())
    # The imaginary part of a conjugate has the bit.
    complex_q = torch.complex(q, -q).conj()
    assert complex_q.imag.is_neg()
    found = blockflash.attention(complex_q.imag.contiguous(), k, v)
    assert torch.equal(found, blockflash.attention(q, k, v))
