"""`attn_mask` of torch's `scaled_dot_product_attention`, activated and by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import assert_close as assert_near
from test_sdpa import assert_close, qkv, with_gradients
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs

import blockflash
from blockflash import _sdpa_kernels as kernels
from blockflash import _stats, activate_sdpa, restore_sdpa, scaled_dot_product_attention

BATCH, HEADS, ROWS, KEYS = 2, 4, 7, 9
SHAPES = [
    (ROWS, KEYS),
    (1, KEYS),
    (ROWS, 1),
    (BATCH, HEADS, ROWS, KEYS),
    (BATCH, 1, 1, KEYS),
    (1, HEADS, ROWS, KEYS),
    (BATCH, 1, ROWS, KEYS),
    (HEADS, ROWS, KEYS),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT,
    "a part": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[..., :1].expand_as(t),
}
KINDS = ["bool", "float", "gradient"]


@pytest.fixture(autouse=True)
def _again() -> Iterator[None]:
    torch.manual_seed(0)
    blockflash.reset_stats()
    yield
    restore_sdpa()


def mask_of(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Of numbers, or of booleans of which one row may be without keys."""
    if kind != "bool":
        return torch.randn(shape)
    mask = torch.rand(shape) < 0.6
    if shape[-2] > 3:
        mask[..., 3, :] = False
    return mask


def results(function: Any, inputs: Any, mask: Tensor, kind: str, **options: Any) -> list[Tensor]:
    if kind == "gradient":
        return with_gradients(lambda *x: function(*x[:3], x[3], **options), (*inputs, mask))
    return with_gradients(lambda *x: function(*x, mask, **options), inputs)


def check(inputs: Any, mask: Tensor, kind: str, **options: Any) -> None:
    """Holds the activated and the named function against torch's in float64."""
    exact = [t.double() for t in inputs]
    of_mask = mask if mask.dtype == torch.bool else mask.double()
    expected = results(torchs, exact, of_mask, kind, **options)
    blockflash.reset_stats()
    with activate_sdpa("cpu"), blockflash.strict():
        ours = results(torchs, inputs, mask, kind, **options)
    assert blockflash.stats()["sdpa"] == _stats.Calls(1, {})
    named = results(scaled_dot_product_attention, inputs, mask, kind, **options)
    for found in (ours, named):
        assert all(t.isfinite().all() for t in found)
        assert_close([t.double() for t in found], expected, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], kind: str) -> None:
    check(qkv((ROWS, KEYS)), mask_of(kind, shape), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout: Callable[[Tensor], Tensor], kind: str) -> None:
    inputs = qkv((ROWS, KEYS))
    check(inputs, layout(mask_of(kind, (BATCH, HEADS, ROWS, KEYS))), kind)
    check(tuple(t.mT.contiguous().mT for t in inputs), layout(mask_of(kind, (ROWS, KEYS))), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1)], ids=str)
def test_grouped_heads(heads: tuple[int, int], kind: str) -> None:
    mask = mask_of(kind, (BATCH, HEADS, ROWS, KEYS))
    check(qkv((ROWS, KEYS), heads), mask, kind, enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_other_tensors(kind: str) -> None:
    """Three dimensions, and values of another width than keys."""
    q, k, v = qkv((ROWS, KEYS))
    check((q[0], k[0], v[0]), mask_of(kind, (HEADS, ROWS, KEYS)), kind)
    check((q, k, v[..., :8]), mask_of(kind, (ROWS, KEYS)), kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_mask", ["bool", "float32", "same"])
def test_half(dtype: torch.dtype, of_mask: str) -> None:
    inputs = [t.to(dtype) for t in qkv((ROWS, KEYS))]
    mask = mask_of("bool" if of_mask == "bool" else "float", (ROWS, KEYS))
    mask = mask.to(dtype) if of_mask == "same" else mask
    exact = mask if of_mask == "bool" else mask.float()
    expected = torchs(*(t.float() for t in inputs), exact)
    with activate_sdpa("cpu"), blockflash.strict():
        found = torchs(*inputs, mask)
    assert blockflash.stats()["sdpa"].kernel == 1
    for o in (found, scaled_dot_product_attention(*inputs, mask)):
        assert o.dtype == dtype
        torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)


def test_without_gradients() -> None:
    inputs, mask = qkv((ROWS, KEYS)), mask_of("float", (HEADS, ROWS, KEYS))
    expected = torchs(*inputs, mask)
    with activate_sdpa("cpu"), blockflash.strict():
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert_close([torchs(*inputs, mask)], [expected])
    assert blockflash.stats()["sdpa"].kernel == 2


def test_who_asks_for_torchs_math_gets_it() -> None:
    inputs, mask = qkv((ROWS, KEYS)), mask_of("gradient", (ROWS, KEYS))
    expected = results(torchs, inputs, mask, "gradient")
    with activate_sdpa("cpu"), sdpa_kernel(SDPBackend.MATH):
        assert all(map(torch.equal, results(torchs, inputs, mask, "gradient"), expected))
    assert blockflash.stats()["sdpa"] == _stats.Calls(0, {})


def test_what_has_no_kernel_is_torchs() -> None:
    q, k, v = qkv((ROWS, KEYS))
    for inputs, mask, options, reason in (
        ([t.double() for t in (q, k, v)], mask_of("bool", (ROWS, KEYS)), {}, "float64"),
        ((q, k[:1], v[:1]), mask_of("bool", (ROWS, KEYS)), {}, "batches"),
    ):
        expected = torchs(*inputs, mask, **options)
        with activate_sdpa("cpu"), pytest.warns(UserWarning, match=reason):
            assert torch.equal(torchs(*inputs, mask, **options), expected)
        restore_sdpa()


def test_after_the_activation_everything_is_torchs() -> None:
    inputs, mask = qkv((ROWS, KEYS)), mask_of("gradient", (ROWS, KEYS))
    expected = results(torchs, inputs, mask, "gradient")
    with activate_sdpa("cpu"):
        pass
    assert all(map(torch.equal, results(torchs, inputs, mask, "gradient"), expected))
    assert blockflash.stats()["sdpa"] == _stats.Calls(0, {})


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: str) -> None:
    torch.compiler.reset()
    inputs, mask = qkv((ROWS, KEYS)), mask_of(kind, (HEADS, ROWS, KEYS))
    expected = results(torchs, inputs, mask, kind)
    for function in (torchs, scaled_dot_product_attention):
        blockflash.reset_stats()
        with activate_sdpa("cpu"):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            ours = results(compiled, inputs, mask, kind)
        assert_close(ours, expected)
        assert sum(calls.kernel for calls in blockflash.stats().values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(ROWS, KEYS), (40, 33)], ids=str)
def test_the_kernels_for_gpus_on_the_cpu(lengths: tuple[int, int], causal: bool) -> None:
    """Results of the efficient backend's operators are those that torch's fake kernels say."""
    inputs = qkv(lengths)
    bias = torch.randn(1, HEADS, *lengths).expand(BATCH, -1, -1, -1)
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    for wants_lse in (False, True):
        given = (*inputs, bias, wants_lse, 0.0, causal)
        expected = op(*(t.to("meta") if isinstance(t, Tensor) else t for t in given))
        found = kernels.efficient_attention(None, None, *given)
        for ours, right in zip(found, expected, strict=True):
            assert (ours.shape, ours.dtype) == (right.shape, right.dtype)
            assert ours.stride() == right.stride() or not ours.numel()
    leaves = [t.double().requires_grad_() for t in (*inputs, bias)]
    hidden = torch.ones(lengths, dtype=torch.bool).triu(1) & causal
    wanted = torchs(*leaves[:3], leaves[3].masked_fill(hidden, -torch.inf))
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(found[0])
    right = torch.autograd.grad(wanted, leaves, grad.double())
    for of_bias in (False, True):
        given = (grad, *inputs, bias, *found, 0.0, [True, True, True, of_bias], causal)
        ours = kernels.efficient_attention_backward(None, None, *given)
        *described, of_mask = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(t.to("meta") if isinstance(t, Tensor) else t for t in given)
        )
        assert [t.stride() for t in ours[:3]] == [t.stride() for t in described]
        assert (ours[3] is None) == (not of_bias)
        assert_close([t.double() for t in ours[: 3 + of_bias]], list(right[: 3 + of_bias]), 2e-5)


def test_padding_of_modules() -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x, padding = torch.randn(2, 9, 32), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    options = {"key_padding_mask": padding, "need_weights": False}
    expected = with_gradients(lambda x: layer(x, x, x, **options)[0], (x,))
    with activate_sdpa("cpu"), blockflash.strict():
        ours = with_gradients(lambda x: layer(x, x, x, **options)[0], (x,))
    assert blockflash.stats()["sdpa"].kernel == 1
    assert_close(ours, expected)


WRONG: dict[str, tuple[Tensor, type[Exception]]] = {
    "attn_mask is torch.int32": (torch.zeros(ROWS, KEYS, dtype=torch.int32), ValueError),
    "attn_mask is torch.float64": (torch.zeros(ROWS, KEYS).double(), ValueError),
    "attn_mask has 1 dimensions": (torch.zeros(KEYS), ValueError),
    "attn_mask has shape": (torch.zeros(ROWS, KEYS + 1), ValueError),
}


@pytest.mark.parametrize("match", WRONG)
def test_errors_of_the_named_function(match: str) -> None:
    mask, kind = WRONG[match]
    inputs = qkv((ROWS, KEYS))
    with pytest.raises((RuntimeError, IndexError)):
        torchs(*inputs, mask)
    with pytest.raises(kind, match=match):
        scaled_dot_product_attention(*inputs, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(65, 130), (BATCH, 1, 65, 130), (1, HEADS, 65, 130)], ids=str)
def test_on_a_gpu(
    shape: tuple[int, ...], kind: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    shapes = [(BATCH, heads[0], 65, 64), *[(BATCH, heads[1], 130, 64)] * 2]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    mask = mask_of(kind, shape).to("cuda")
    mask = mask if kind == "bool" else mask.to(dtype)
    options = {"enable_gqa": heads[0] != heads[1]}
    with sdpa_kernel(SDPBackend.MATH):
        of_mask = mask if kind == "bool" else mask.double()
        expected = results(torchs, [t.double() for t in inputs], of_mask, kind, **options)
    with activate_sdpa(), blockflash.strict():
        ours = results(torchs, inputs, mask, kind, **options)
    assert blockflash.stats()["sdpa"] == _stats.Calls(1, {})
    for own, right in zip(ours, expected, strict=True):
        assert_near(own.detach(), right.detach(), dtype)
