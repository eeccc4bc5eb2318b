"""Gradients of `blockflash.attention` against float64, and that none is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from reference import TOLERANCE, reference
from test_attention import DTYPES, LENGTHS, MASKS, operands
from torch import Tensor

import blockflash
from blockflash import BlockMask, _native, attention, attention_decode, attention_merge

HALF = [pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.float16, torch.bfloat16)]
WHERE = pytest.mark.parametrize(("device", "dtype"), [*(("cpu", t) for t in DTYPES), *HALF])


def assert_gradients(inputs: list[Tensor], o: Tensor, expected: Tensor) -> None:
    """Hold the gradients of o against those of the same value in float64 on the CPU."""
    weights = torch.randn(o.shape).to(o.dtype)
    found = torch.autograd.grad(o, inputs, weights.to(o.device), retain_graph=True)
    again = torch.autograd.grad(o, inputs, weights.to(o.device))
    wanted = torch.autograd.grad(
        expected, inputs, weights.double(), retain_graph=True, materialize_grads=True
    )
    tolerance = 4 * TOLERANCE[inputs[0].dtype]
    for gradient, repeated, exact in zip(found, again, wanted, strict=True):
        assert gradient.shape == exact.shape and gradient.dtype == exact.dtype
        assert torch.equal(gradient, repeated)
        size = exact.abs().max().clamp(min=1) if exact.numel() else 1
        assert torch.allclose(gradient.double(), exact.double(), 0, tolerance * size)


def leaves(device: str, *arguments: Any, **options: Any) -> list[Tensor]:
    """The operands of `operands` on a device, which require gradients."""
    return [t.to(device).requires_grad_() for t in operands(*arguments, **options)]


@WHERE
@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 4), (4, 0), (200, 300)])
@pytest.mark.parametrize("options", [*MASKS, {"scale": 0.4}])
def test_masks(
    device: str, dtype: torch.dtype, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    inputs = leaves(device, lengths, heads=(6, 2), dtype=dtype)
    o = blockflash.attention(*inputs, **options)
    assert_gradients(inputs, o, reference(*inputs, **options)[0])


@WHERE
@pytest.mark.parametrize("options", [{}, {"window": (4, 2)}, {"scale": 0.3, "causal": True}])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_softcap_and_sink(
    device: str, dtype: torch.dtype, options: dict[str, Any], softcap: float | None
) -> None:
    inputs = leaves(device, dtype=dtype)
    inputs.append(torch.linspace(-2, 3, 4, device=device).requires_grad_())
    *qkv, sink = inputs
    options = {**options, "softcap": softcap, "sink": sink}
    o = blockflash.attention(*qkv, **options)
    assert_gradients(inputs, o, reference(*qkv, **options)[0])


@WHERE
@pytest.mark.parametrize("head_dim", [8, 59, 128, 192, 256, 512])
def test_head_dims_and_strides(device: str, dtype: torch.dtype, head_dim: int) -> None:
    storage = torch.randn(2, 3, 4, 70, head_dim).to(device, dtype).requires_grad_()
    q, k, v = storage.transpose(2, 3).unbind(1)
    o = blockflash.attention(q, k[:, :, :2], v[:, :, :2], causal=True)
    expected = reference(q, k[:, :, :2], v[:, :, :2], causal=True)[0]
    assert_gradients([storage], o.transpose(0, 2), expected.transpose(0, 2))


@WHERE
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "top_left": True}, {"window": (3, 1), "softcap": 2.0}],
)
def test_packed(device: str, dtype: torch.dtype, options: dict[str, Any], sink: bool) -> None:
    starts = [torch.tensor(of, dtype=torch.int32) for of in ([0, 5, 5, 14], [0, 7, 9, 15])]
    inputs = [t[0].to(device).requires_grad_() for t in operands((16, 18), dtype=dtype, batch=1)]
    if sink:
        inputs.append(torch.linspace(-2, 3, 4, device=device).requires_grad_())
        options = {**options, "sink": inputs[3]}
    q, k, v, *_ = inputs
    on_device = (of.to(device) for of in starts)
    o = blockflash.attention(
        q, k, v, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), on_device, strict=True)),
        max_seqlen_q=9, max_seqlen_k=7, **options,
    )  # fmt: skip
    parts = []
    for i in range(3):
        rows, keys = (slice(*of[i : i + 2].tolist()) for of in starts)
        parts.append(reference(q[None, rows], k[None, keys], v[None, keys], **options)[0][0])
    # Two rows of q and three of k belong to no sequence.
    assert_gradients(inputs, o, torch.cat([*parts, torch.zeros(2, 4, 16)]))


# 3 block rows of 64 queries and 2 block columns of 64 keys.
BLOCKS = torch.tensor([[[True, False], [True, True], [False, True]]])
BLOCKS = torch.cat((BLOCKS, ~BLOCKS))


@WHERE
@pytest.mark.parametrize("made", ["listed", "chosen"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 9), "softcap": 2.0}])
def test_block_masks(device: str, dtype: torch.dtype, options: dict[str, Any], made: str) -> None:
    inputs = leaves(device, (150, 100), heads=(4, 2), dtype=dtype)
    sizes = {"seqlens": (150, 100), "block": 64}
    if made == "listed":
        mask = BlockMask.from_dense_bool(BLOCKS[None], **sizes).to(device)
    else:
        mask = BlockMask.top_k(BLOCKS[None].float().to(device), 1, **sizes)
    blocks = mask.to_dense().cpu().repeat_interleave(2, 1)
    visible = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :150, :100]
    o = blockflash.attention(*inputs, block_mask=mask, **options)
    number = mask.number
    del mask  # the gradient keeps it
    assert_gradients(inputs, o, reference(*inputs, visible=visible, **options)[0])
    del o
    with pytest.raises(ValueError, match=f"no block mask of number {number}"):
        _native.BlockMask.of(number)


@pytest.mark.parametrize("which", range(4))
def test_one_input_requires_a_gradient(which: int) -> None:
    inputs = [*operands(), torch.zeros(4)]
    inputs[which].requires_grad_()
    *qkv, sink = inputs
    blockflash.attention(*qkv, sink=sink, causal=True).sum().backward()
    assert inputs[which].grad is not None


@WHERE
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 2), "softcap": 2.0}])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_lse(
    device: str, dtype: torch.dtype, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    inputs = leaves(device, (7, 12), heads=heads, dtype=dtype)
    inputs.append(torch.linspace(-2, 3, 4, device=device).requires_grad_())
    *qkv, options["sink"] = inputs
    o, lse = blockflash.attention(*qkv, return_lse=True, **options)
    expected_o, expected_lse = reference(*qkv, **options)
    assert_gradients(inputs, lse, expected_lse)
    o, lse = blockflash.attention(*qkv, return_lse=True, **options)
    weights = torch.randn(4)[:, None]
    both = o.float().sum((2, 3)) + (lse * weights.to(device)).sum(1)
    expected = expected_o.sum((2, 3)) + (expected_lse * weights).sum(1)
    assert_gradients(inputs, both, expected)


@WHERE
def test_lse_of_a_query_without_keys(device: str, dtype: torch.dtype) -> None:
    """Whatever its gradient is."""
    inputs = leaves(device, (19, 5), dtype=dtype)
    _, lse = blockflash.attention(*inputs, return_lse=True, causal=True)
    empty = lse == -torch.inf
    assert empty.any()
    found = torch.autograd.grad(lse, inputs, (~empty).float() / ~empty, retain_graph=True)
    for gradient, expected in zip(found, torch.autograd.grad(lse, inputs, (~empty).float()),
                                  strict=True):  # fmt: skip
        assert torch.equal(gradient, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_graph_trains(masked: bool) -> None:
    """A captured step has the gradients of an eager one, bit by bit, with other operands, too."""
    inputs = leaves("cuda", (1200, 1100), head_dim=64, dtype=torch.bfloat16)
    inputs.append(torch.zeros(4, device="cuda", requires_grad=True))
    sizes = {"seqlens": (1200, 1100), "block": 128}
    mask = BlockMask.window(2, 0, **sizes).to("cuda") if masked else None

    def step() -> tuple[Tensor, ...]:
        *qkv, sink = inputs
        o = blockflash.attention(*qkv, sink=sink, causal=True, block_mask=mask)
        return torch.autograd.grad(o.float().square().sum(), inputs)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        with torch.no_grad():
            for operand in inputs:
                operand.normal_()
        graph.replay()
        assert all(map(torch.equal, found, step()))


@pytest.mark.gpu
def test_a_capture_cannot_prepare_a_mask() -> None:
    inputs = leaves("cuda", (256, 256), head_dim=64, dtype=torch.bfloat16)
    mask = BlockMask.sink(1, seqlens=(256, 256)).to("cuda")
    torch.cuda.synchronize()
    with (
        pytest.raises(blockflash.Unsupported, match="before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        blockflash.attention(*inputs, block_mask=mask).sum().backward()


def test_traced_without_a_compiler() -> None:
    """Shapes from meta tensors, wrong arguments and checkpoints."""
    inputs = operands(grad=True)
    meta = [t.detach().to("meta").requires_grad_() for t in inputs]
    blockflash.attention(*meta, causal=True).sum().backward()
    assert [t.grad.shape for t in meta] == [t.shape for t in inputs]
    with pytest.raises(ValueError, match="k has shape"):
        blockflash.attention(inputs[0], inputs[1][..., :8], inputs[2])

    def loss(*qkv: Tensor) -> Tensor:
        return blockflash.attention(*qkv, window=(3, 1)).square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    kept = torch.utils.checkpoint.checkpoint(loss, *inputs, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(kept, inputs), expected))


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_calls_leave_autograd_as_it_was(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Calls switch its steps off for themselves: whether they succeed or raise, they end that."""
    q, wrong = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 3, 8)
    with mode():
        attention(q, q, q, out=torch.empty_like(q))
        attention_decode(q, q.clone(), q.clone(), k=q, v=q, seqused_k=torch.tensor([4]).int())
        attention_merge(q[None], torch.zeros(1, 1, 2, 4))
        for call in (attention, attention_decode):
            with pytest.raises(ValueError, match="heads"):
                call(q, wrong, wrong)
    x = q.clone().requires_grad_()
    saved = x * 2
    loss = (saved * saved).sum() + attention(x, x, x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    saved.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
