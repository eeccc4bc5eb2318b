"""What is added to scores: a bias, with its gradient, and ALiBi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import TOLERANCE, assert_close, reference
from test_attention import operands
from test_gradient import WHERE, assert_gradients, leaves
from torch import Tensor

import blockflash

BATCH, HEADS, ROWS, KEYS = 2, 4, 9, 13
SHAPES = [
    (BATCH, HEADS, ROWS, KEYS),
    (1, HEADS, ROWS, KEYS),
    (BATCH, 1, ROWS, KEYS),
    (1, 1, ROWS, KEYS),
    (BATCH, HEADS, 1, KEYS),
    (BATCH, HEADS, ROWS, 1),
    (1, 1, 1, 1),
    (HEADS, ROWS, KEYS),
    (ROWS, KEYS),
    (KEYS,),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT,
    "heads last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "a part": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1, :1].expand_as(t),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (4, 2), "top_left": True, "softcap": 2.0},
    {"scale": 0.4, "sink": torch.linspace(-1, 1, HEADS)},
]


def sizes(dtype: torch.dtype, device: str) -> list[Tensor]:
    return leaves(device, (ROWS, KEYS), heads=(HEADS, 2), dtype=dtype)


@WHERE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_of_every_shape(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [*sizes(dtype, device), torch.randn(shape, device=device, requires_grad=True)]
    *qkv, bias = inputs
    o, lse = blockflash.attention(*qkv, bias=bias, return_lse=True)
    expected = reference(*qkv, bias=bias)
    assert_close(o.cpu(), expected[0], dtype)
    assert_close(lse.cpu(), expected[1], dtype)
    assert_gradients(inputs, o, expected[0])


@WHERE
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bias_of_every_layout(
    device: str, dtype: torch.dtype, of: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    whole = torch.randn(SHAPES[0], device=device, dtype=of, requires_grad=True)
    inputs = [*sizes(dtype, device), layout(whole)]
    *qkv, bias = inputs
    o = blockflash.attention(*qkv, bias=bias)
    expected = reference(*qkv, bias=bias)[0]
    assert_close(o.cpu(), expected, dtype)
    # The gradient has the type of the bias.
    found, wanted = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (o, expected))
    assert found.dtype == of and found.shape == bias.shape
    tolerance = 8 * max(TOLERANCE[of], TOLERANCE[dtype]) * wanted.abs().max().clamp(min=1)
    assert (found - wanted).abs().max() <= tolerance


@WHERE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(ROWS, KEYS), (KEYS, ROWS), (1, 9), (150, 70)], ids=str)
def test_together_with_everything(
    device: str, dtype: torch.dtype, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    inputs = leaves(device, lengths, heads=(HEADS, 2), dtype=dtype)
    inputs.append(torch.randn(1, HEADS, *lengths, device=device, requires_grad=True))
    *qkv, bias = inputs
    # With steep ones rounding of the scores themselves would decide.
    slopes = torch.rand(BATCH, HEADS, device=device) * 0.1
    options = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in options.items()}
    for added in ({"bias": bias}, {"alibi_slopes": slopes}, {"alibi_slopes": slopes[0]}):
        o = blockflash.attention(*qkv, **options, **added)
        expected = reference(*qkv, **options, **added)[0]
        assert_close(o.cpu(), expected, dtype)
        assert_gradients(inputs if "bias" in added else qkv, o, expected)


@WHERE
def test_hidden_by_the_bias(device: str, dtype: torch.dtype) -> None:
    """A pair of -inf is not attended, and a query without others gets 0."""
    inputs = [*sizes(dtype, device), torch.zeros(ROWS, KEYS, device=device)]
    inputs[3][torch.rand(ROWS, KEYS, device=device) < 0.4] = -torch.inf
    inputs[3][4] = -torch.inf
    *qkv, bias = inputs
    bias.requires_grad_()
    o, lse = blockflash.attention(*qkv, bias=bias, return_lse=True)
    assert not o[:, 4].any() and (lse[:, :, 4] == -torch.inf).all()
    expected = reference(*qkv, visible=bias == 0)
    assert_close(o.cpu(), expected[0], dtype)
    found = torch.autograd.grad(o.square().sum(), inputs)
    wanted = torch.autograd.grad(expected[0].square().sum(), qkv)
    for ours, exact in zip(found[:3], wanted, strict=True):
        assert ours.isfinite().all()
        assert_close(ours.cpu(), exact.cpu().double(), torch.bfloat16)
    assert not found[3][bias == -torch.inf].any() and found[3].isfinite().all()


@WHERE
def test_gradients_are_the_same_each_time(device: str, dtype: torch.dtype) -> None:
    inputs = leaves(device, (150, 170), heads=(HEADS, 2), dtype=dtype)
    *qkv, bias = inputs + [torch.randn(150, 170, device=device, requires_grad=True)]
    grads = []
    for _ in range(20):
        o, lse = blockflash.attention(*qkv, bias=bias, causal=True, return_lse=True)
        grads.append(torch.autograd.grad((o.square().sum(), lse.sum()), (*qkv, bias)))
    assert all(all(map(torch.equal, grads[0], other)) for other in grads)


def test_no_gradient_is_computed_that_nobody_needs() -> None:
    inputs, bias = sizes(torch.float32, "cpu"), torch.randn(ROWS, KEYS)
    o = blockflash.attention(*inputs, bias=bias)
    assert len(torch.autograd.grad(o.sum(), inputs)) == 3
    bias.requires_grad_()
    o = blockflash.attention(*(t.detach() for t in inputs), bias=bias)
    assert torch.autograd.grad(o.sum(), bias)[0].shape == bias.shape


@WHERE
@pytest.mark.parametrize("of_batch", [False, True])
def test_alibi_of_packed_sequences(device: str, dtype: torch.dtype, of_batch: bool) -> None:
    """The last query of each sequence stands at its last key."""
    starts = [torch.tensor(of, dtype=torch.int32) for of in ([0, 5, 5, 14], [0, 7, 9, 15])]
    q, k, v = (t[0].to(device, dtype) for t in operands((16, 18), batch=1))
    slopes = torch.rand((3, HEADS) if of_batch else (HEADS,), device=device)
    cu_q, cu_k = (of.to(device) for of in starts)
    o = blockflash.attention(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=9, max_seqlen_k=7,
        alibi_slopes=slopes, causal=True,
    )  # fmt: skip
    for i in range(3):
        rows, keys = (slice(*of[i : i + 2].tolist()) for of in starts)
        slope = slopes[i] if of_batch else slopes
        expected = reference(
            q[None, rows], k[None, keys], v[None, keys], causal=True, alibi_slopes=slope
        )[0][0]
        assert_close(o[rows].cpu(), expected, dtype)


@WHERE
def test_over_a_cache(device: str, dtype: torch.dtype) -> None:
    """Distances are counted from the last key of each sequence, a bias from the first slot."""
    q, cache, _ = (t.to(device, dtype) for t in operands((3, 48), heads=(HEADS, 2), head_dim=16))
    used = torch.tensor([37, 12], dtype=torch.int32, device=device)
    slopes = torch.rand(HEADS, device=device)
    bias = torch.randn(BATCH, HEADS, 1, 48, device=device)
    for added in ({"alibi_slopes": slopes}, {"bias": bias}, {"bias": bias.to(dtype)}):
        o = blockflash.attention_decode(q, cache, cache, seqused_k=used, causal=True, **added)
        for entry, length in enumerate(used.tolist()):
            part = {n: t[entry : entry + 1, ..., :length] for n, t in added.items() if n == "bias"}
            keys = cache[entry : entry + 1, :length]
            expected = reference(q[entry : entry + 1], keys, keys, causal=True, **added | part)[0]
            assert_close(o[entry : entry + 1].cpu(), expected, dtype)


def test_under_vmap() -> None:
    q, k, v = (t[:, None] for t in operands((ROWS, KEYS)))
    bias, slopes = torch.randn(BATCH, 1, HEADS, ROWS, KEYS), torch.rand(BATCH, HEADS)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return blockflash.attention(q, k, v, bias=bias, alibi_slopes=slopes)

    found = torch.vmap(call)(q, k, v, bias, slopes)
    assert torch.equal(found[:, 0], call(q[:, 0], k[:, 0], v[:, 0], bias[:, 0], slopes))


def test_compiled_gradient_of_the_bias() -> None:
    torch.compiler.reset()
    *qkv, bias = *sizes(torch.float32, "cpu"), torch.randn(HEADS, ROWS, KEYS, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return blockflash.attention(q, k, v, bias=2 * bias).square().sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    both = (torch.autograd.grad(f(*qkv, bias), (*qkv, bias)) for f in (compiled, call))
    assert all(map(torch.allclose, *both))


Q, K, V = operands((ROWS, KEYS))
WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "bias has shape": ({"bias": torch.zeros(ROWS, KEYS + 1)}, ValueError),
    "bias is float64": ({"bias": torch.zeros(ROWS, KEYS).double()}, ValueError),
    "bias is torch.bool": ({"bias": torch.ones(ROWS, KEYS).bool()}, ValueError),
    "bias must be a torch.Tensor": ({"bias": 1.0}, TypeError),
    "alibi_slopes has shape": ({"alibi_slopes": torch.zeros(HEADS + 1)}, ValueError),
    "alibi_slopes is f16": ({"alibi_slopes": torch.zeros(HEADS).half()}, ValueError),
    "alibi_slopes must be a torch.Tensor": ({"alibi_slopes": [1.0]}, TypeError),
    "alibi_slopes have no gradient": (
        {"alibi_slopes": torch.zeros(HEADS, requires_grad=True)},
        blockflash.Unsupported,
    ),
}


@pytest.mark.parametrize("match", WRONG)
def test_errors(match: str) -> None:
    options, kind = WRONG[match]
    with pytest.raises(kind, match=match):
        blockflash.attention(Q, K, V, **options)


def test_no_bias_of_packed_sequences() -> None:
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    with pytest.raises(ValueError, match="bias.*cu_seqlens"):
        blockflash.attention(Q[0], K[0, :ROWS], V[0, :ROWS], bias=torch.zeros(5, 5), **packed)


def test_a_write_has_no_gradient_of_the_bias() -> None:
    bias = torch.zeros(ROWS, KEYS, requires_grad=True)
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        blockflash.attention(Q, K, V, bias=bias, out=torch.empty_like(Q))
    cache = torch.zeros(BATCH, KEYS, HEADS, Q.shape[-1])
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        blockflash.attention_decode(Q, cache, cache, bias=bias)
