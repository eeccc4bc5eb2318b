"""Fake kernels promise the shapes, types and strides that the real ones give: every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import blockflash
from blockflash import _decode, sparse

WHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
OPS, ATEN = _decode._OPS, torch.ops.aten
PATTERN = sparse.BlockSparsePattern.from_mask(torch.eye(2, dtype=torch.bool), 32)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "by the second dimension": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "a part of each row": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other entry": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "expanded": lambda t: t[:1].expand_as(t),
    "columns": lambda t: t.mT.contiguous().mT,
}
ONLY_ROWS = [name for name in LAYOUTS if name != "columns"]


def randn(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else None)


def described(results: Any) -> list[tuple[Any, ...]]:
    """What `torch.compile` relies on."""
    tensors = (t for t in tree_leaves(results) if isinstance(t, Tensor) and t.device.type != "meta")
    return [(t.shape, t.stride() if t.numel() else None, t.dtype, t.device) for t in tensors]


def check(call: Callable[..., Any], *tensors: Tensor, aside: int = 0) -> None:
    """Holds a call's results against those of fake tensors; the last `aside` are not compared."""
    with torch.no_grad(), FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        expected = call(*fakes)
    with torch.no_grad():
        found = call(*tensors)
    end = len(expected) - aside if isinstance(expected, tuple) else None
    cut = slice(None, end)
    if end is not None:
        expected, found = expected[cut], found[cut]
    assert described(found) == described(expected)


@WHERE
@pytest.mark.parametrize("layout", ONLY_ROWS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 1)], ids=str)
def test_attention(layout: str, heads: tuple[int, int], device: str) -> None:
    of = LAYOUTS[layout]
    q, k, v = (of(randn(2, 16, count, 64, device=device)) for count in (heads[0], *[heads[1]] * 2))
    check(OPS.attention_forward, q, k, v)
    check(OPS.attention, q, k, v)
    o, lse = OPS.attention(q, k, v)
    for grad_o in (o, of(torch.ones_like(o)), torch.ones_like(o[..., :1]).expand_as(o)):
        check(lambda *t: OPS.attention_backward(t[0], None, *t[1:]), grad_o, q, k, v, o, lse)
    sink = torch.zeros(heads[0], device=device)
    check(lambda *t: OPS.attention_backward(*t[:7], False, t[7]), o, lse, q, k, v, o, lse, sink)
    check(
        lambda *t: OPS.attention_backward(*t[:7], True, None, None, None, t[7]),
        o, lse, q, k, v, o, lse, torch.zeros(1, heads[0], 16, 1, device=device),
    )  # fmt: skip
    cache = of(randn(2, 32, heads[1], 64, device=device))
    used = torch.tensor([20, 17], dtype=torch.int32, device=device)
    check(OPS.attention_decode, q, cache, cache, used)
    if layout != "expanded":  # one element of a cache would be written twice
        check(OPS.attention_append, q, cache, cache.clone(), k, v, used)
    if device == "cpu":
        codes = torch.zeros(2, 32, heads[1], 64).to(torch.float8_e4m3fn)
        scales = torch.ones(2, 32, heads[1])
        given = (codes, codes.clone(), scales, scales.clone(), k, v, used)
        check(OPS.attention_append_scales, q, *given)


@WHERE
@pytest.mark.parametrize("layout", ["contiguous", "a part of each row"])
def test_packed_rows(layout: str, device: str) -> None:
    q, k, v = (LAYOUTS[layout](randn(16, count, 64, device=device)) for count in (4, 2, 2))
    starts = torch.tensor([0, 5, 14], dtype=torch.int32, device=device)
    rest = (None, starts, starts, *[None] * 5, 9, 9)
    for operator in (OPS.attention_forward, OPS.attention):
        check(
            lambda q, k, v, at, f=operator: f(q, k, v, None, at, at, *[None] * 5, 9, 9),
            q,
            k,
            v,
            starts,
        )
    o, lse = OPS.attention(q, k, v, *rest)
    check(
        lambda grad, *t: OPS.attention_backward(
            grad, None, *t[:-1], False, None, t[-1], t[-1], *[None] * 5, 9, 9
        ),
        o, q, k, v, o, lse, starts,
    )  # fmt: skip
    cache = randn(2, 32, 2, 64, device=device)
    check(
        lambda q, cache, at: OPS.attention_decode(q, cache, cache, cu_seqlens_q=at, max_q=9),
        q, cache, starts,
    )  # fmt: skip


@WHERE
@pytest.mark.parametrize("layout", ["contiguous", "by the second dimension", "a part of each row"])
def test_merge(layout: str, device: str) -> None:
    parts, lse = randn(3, 8, 2, 64, device=device), torch.zeros(3, 2, 8, device=device)
    check(OPS.attention_merge, LAYOUTS[layout](parts), lse)


@WHERE
@pytest.mark.parametrize("layout", ["contiguous", "by the second dimension", "expanded", "columns"])
def test_block_sparse(layout: str, device: str) -> None:
    x = LAYOUTS[layout](randn(2, 5, 64, device=device))
    values, bias = randn(2, 32, 32, device=device), randn(64, device=device)
    for activation in range(4):
        check(lambda *t, a=activation: OPS.bsr_linear(*t, PATTERN.number, a), x, values, bias)
    check(lambda *t: OPS.dense_bsr(*t, PATTERN.number), x, values)
    check(lambda a: OPS.sddmm(a.mT, a, PATTERN.number), x[0])


@WHERE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(16, 16), (5, 9), (1, 16)], ids=str)
def test_activated_sdpa(
    layout: str, heads: tuple[int, int], lengths: tuple[int, int], device: str
) -> None:
    """Ours in place of torch's kernels, held against torch's own fake ones."""
    of, name = LAYOUTS[layout], "_scaled_dot_product_flash_attention"
    name = name if device == "cuda" else f"{name}_for_cpu"
    shapes = [(heads[0], lengths[0]), *[(heads[1], lengths[1])] * 2]
    q, k, v = (of(randn(2, *shape, 64, device=device)) for shape in shapes)
    forward, backward = (getattr(ATEN, f"{name}{end}") for end in ("", "_backward"))
    with blockflash.activate_sdpa(device):
        check(forward, q, k, v)
        with torch.no_grad():
            o, lse, *rest = forward(q, k, v)
        options, state = (0.0, False), ()
        if device == "cuda":
            options, state = (None, None, lengths[0], lengths[1], *options), rest[4:6]
        for grad_o in (o, of(torch.ones_like(o)), torch.ones_like(o[..., :1]).expand_as(o)):
            inputs = (grad_o, q, k, v, o, lse)
            check(lambda *t: backward(*t[:6], *options, *t[6:]), *inputs, *state)


@WHERE
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_a_compiled_layer_trains_on_activated_sdpa(backend: str, device: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 64, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 9, 256, device=device)
    if device == "cuda":
        layer, x = layer.bfloat16(), x.bfloat16()

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        run(x).float().square().sum().backward()
        return [p.grad.float() for p in layer.parameters()]

    expected = gradients(layer)
    with blockflash.activate_sdpa(device):
        found = gradients(torch.compile(layer, backend=backend, fullgraph=True))
    size = max(grad.abs().max() for grad in expected)
    for left, right in zip(found, expected, strict=True):
        assert (left - right).abs().max() <= (1e-4 if device == "cpu" else 5e-2) * size
