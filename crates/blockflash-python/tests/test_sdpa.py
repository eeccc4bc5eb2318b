"""torch's own `scaled_dot_product_attention` on blockflash, by torch's registry.

It is tested on CPU tensors; what torch does around it is the same on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import plain
import pytest
import torch
from torch import Tensor, nn
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.profiler import ProfilerActivity, profile

import blockflash
from blockflash import _sdpa_kernels as kernels
from blockflash import activate_sdpa, restore_sdpa

LENGTHS = [(5, 5), (3, 7), (7, 3), (1, 9)]


def qkv(
    lengths: tuple[int, int] = (7, 7), heads: tuple[int, int] = (4, 4), **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    (sq, sk), (hq, hk) = lengths, heads
    shapes = [(2, hq, sq, 16), (2, hk, sk, 16), (2, hk, sk, 16)]
    return tuple(torch.randn(*shape, **options) for shape in shapes)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    restore_sdpa()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of q of the calls that reached blockflash by the registry."""
    return counted(monkeypatch, "_forward", lambda q, *rest: q.shape)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of q of the gradients that blockflash computed by the registry."""
    return counted(monkeypatch, "_backward", lambda tensors, *rest: tensors[1].shape)


def counted(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: Callable[..., torch.Size]
) -> list[torch.Size]:
    seen, function = [], getattr(kernels, name)

    def count(*arguments: Any, **options: Any) -> Any:
        seen.append(shape(*arguments))
        return function(*arguments, **options)

    monkeypatch.setattr(kernels, name, count)
    return seen


def with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    o = function(*leaves)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


def assert_close(ours: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_registry(
    calls: list[Any], gradients: list[Any], lengths: Any, heads: Any, causal: bool
) -> None:
    inputs = qkv(lengths, heads)
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1], "scale": 0.3}
    exact = tuple(tensor.double() for tensor in inputs)
    expected = with_gradients(lambda *x: torchs(*x, **options), exact)
    with activate_sdpa("cpu"):
        ours = with_gradients(lambda *x: torchs(*x, **options), inputs)
    assert len(calls) == len(gradients) == 1
    assert_close([tensor.double() for tensor in ours], expected)


def test_results_are_laid_out_as_torch_expects() -> None:
    apart = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv())
    for q, k, v in (qkv(), apart):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        expected = op(q, k, v)
        with activate_sdpa("cpu"):
            ours = op(q, k, v)
        for left, right in zip(ours, expected, strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape
        assert ours[0].stride() == expected[0].stride()


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_rows_that_are_not_contiguous(calls: list[Any], gradients: list[Any], which: Any) -> None:
    inputs = tuple(
        tensor.mT.contiguous().mT if place in which else tensor
        for place, tensor in enumerate(qkv())
    )
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def sums(*leaves: Tensor) -> list[Tensor]:
        """The gradient of the output is one number, expanded."""
        leaves = [tensor.detach().requires_grad_() for tensor in leaves]
        o, _ = op(*leaves, is_causal=True)
        return [o, *torch.autograd.grad(o.sum(), leaves)]

    with activate_sdpa("cpu"):
        ours = sums(*inputs)
    assert len(calls) == len(gradients) == 1
    assert ours[0].stride() == torch.empty_like(inputs[0]).stride()
    assert_close(ours, sums(*(tensor.contiguous() for tensor in inputs)))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernels_for_gpus_on_the_cpu(lengths: tuple[int, int]) -> None:
    """Their results are those that torch's fake kernel says; causal is aligned at the bottom."""
    inputs = tuple(tensor.requires_grad_() for tensor in qkv(lengths))
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    expected = op(*(tensor.detach().to("meta") for tensor in inputs), is_causal=True)
    with torch.no_grad():
        o, lse, *rest = kernels.flash_attention(None, None, *inputs, is_causal=True)
    for ours, right in zip((o, lse, *rest), expected, strict=True):
        if isinstance(ours, Tensor):
            assert (ours.shape, ours.dtype) == (right.shape, right.dtype)
        else:
            assert ours == right
    wanted = blockflash.attention(*(tensor.transpose(1, 2) for tensor in inputs), causal=True)
    assert torch.equal(o, wanted.transpose(1, 2))
    grad, unused = torch.randn_like(o), (None, None, *lengths, 0.0, True, *rest[4:6])
    grads = kernels.flash_attention_backward(None, None, grad, *inputs, o, lse, *unused)
    expected = torch.autograd.grad(wanted, inputs, grad.transpose(1, 2))
    assert all(map(torch.equal, grads, expected))


def test_a_call_uses_no_operators_but_for_memory() -> None:
    """Each would cost the host a microsecond."""
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in qkv()]
    grad = torch.ones_like(leaves[0])
    with activate_sdpa("cpu"):
        torchs(*leaves)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.autograd.grad(torchs(*leaves), leaves, grad)
    names = {event.key for event in profiler.key_averages()}
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {flash, f"{flash}_backward"} <= names
    assert "aten::transpose" not in names
    assert not any(name.startswith("blockflash::") for name in names)


def test_compiles_with_gradients(calls: list[Any]) -> None:
    with activate_sdpa("cpu"):
        compiled = torch.compile(
            lambda *x: torchs(*x, is_causal=True), backend="aot_eager", fullgraph=True
        )
        inputs = qkv()
        ours = with_gradients(compiled, inputs)
    assert calls
    assert_close(ours, with_gradients(lambda *x: torchs(*x, is_causal=True), inputs))


def test_multihead_attention(calls: list[Any]) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    expected = with_gradients(lambda x: layer(x, x, x, need_weights=False)[0], (x,))
    with activate_sdpa("cpu"):
        ours = with_gradients(lambda x: layer(x, x, x, need_weights=False)[0], (x,))
    assert calls
    assert_close(ours, expected)


def train() -> list[float]:
    """Losses of a small encoder that learns to reverse sequences."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(8, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 8, (16, 6))
    losses = []
    for _ in range(12):
        logits = model(tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training(calls: list[Any], gradients: list[Any]) -> None:
    expected = train()
    with activate_sdpa("cpu"):
        losses = train()
    assert len(calls) == len(gradients) == 24
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-3)


def test_torch_keeps_f64(calls: list[Any]) -> None:
    double = [tensor.double() for tensor in qkv()]
    expected = torchs(*double)
    blockflash.reset_stats()
    with activate_sdpa("cpu"), pytest.warns(UserWarning, match="float64"):
        assert torch.equal(torchs(*double), expected)
    assert not calls


def test_dropout_is_torchs() -> None:
    """Its kernel for the CPU does not have it either."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with activate_sdpa("cpu"), pytest.raises(RuntimeError, match="do not support dropout"):
        op(*qkv(), 0.5)


def test_a_backward_pass_that_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns, once, and counts with its forward pass; in strict mode it raises."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise blockflash.Unsupported("there is no gradient today")

    monkeypatch.setattr(kernels, "_backward", refuse)
    inputs = qkv()
    expected = with_gradients(torchs, inputs)
    blockflash.reset_stats()
    with activate_sdpa("cpu"):
        with pytest.warns(UserWarning, match="no gradient today"):
            assert_close(with_gradients(torchs, inputs), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with_gradients(torchs, inputs)
        found = blockflash.stats()["sdpa"]
        assert (found.kernel, found.fallback) == (2, {})
        with blockflash.strict(), pytest.raises(blockflash.Unsupported, match="no gradient today"):
            with_gradients(torchs, inputs)


def test_restore_undoes(calls: list[Any]) -> None:
    restore_sdpa()  # nothing to undo
    activate_sdpa("cpu")
    assert registry.current_flash_attention_impl() == "blockflash-cpu"
    torchs(*qkv())
    activate_sdpa("cpu")
    torchs(*qkv())
    restore_sdpa()
    assert registry.current_flash_attention_impl() is None
    torchs(*qkv())
    assert len(calls) == 2


def test_end_of_with_restores_what_was_active() -> None:
    class Other:
        def remove(self) -> None:
            pass

    registry.register_flash_attention_impl("other", register_fn=Other)
    registry.activate_flash_attention_impl("other")
    with activate_sdpa("cpu"):
        with activate_sdpa("cpu"):
            pass
        assert registry.current_flash_attention_impl() == "blockflash-cpu"
    assert registry.current_flash_attention_impl() == "other"
    restore_sdpa()  # leaves what is not ours
    assert registry.current_flash_attention_impl() == "other"
    registry.restore_flash_attention_impl()


def test_wrong_device() -> None:
    with pytest.raises(ValueError, match='device must be "cuda" or "cpu"'):
        activate_sdpa("mps")
    if not torch.cuda.is_available():
        with pytest.raises(blockflash.DeviceError, match="there is no CUDA GPU"):
            activate_sdpa()
        assert registry.current_flash_attention_impl() is None


def test_torch_2_10_cannot_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    with activate_sdpa("cpu"), monkeypatch.context() as patch:
        patch.delattr(registry, "restore_flash_attention_impl")
        with pytest.raises(blockflash.Unsupported, match=r"torch 2\.10"):
            restore_sdpa()


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", [False, True])
def test_cudnn_gets_its_switch_back(cudnn: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        for _ in range(2):
            with activate_sdpa():
                activate_sdpa()
                assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 80, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_registry_on_gpu(
    calls: list[Any],
    gradients: list[Any],
    dtype: Any,
    causal: bool,
    heads: tuple[int, int],
    dim: int,
) -> None:
    shapes = [(2, heads[0], 777, dim), (2, heads[1], 777, dim), (2, heads[1], 777, dim)]
    inputs = tuple(torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes)
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}

    def run(*inputs: Tensor) -> list[Tensor]:
        return with_gradients(lambda *x: torchs(*x, **options), inputs)

    with sdpa_kernel(SDPBackend.MATH):
        exact = run(*(tensor.double() for tensor in inputs))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = run(*inputs)
    with activate_sdpa():
        ours = run(*inputs)
    assert len(calls) == len(gradients) == 1
    case, lengths = plain.Case(causal=causal, top_left=True), torch.full((2,), 777, device="cuda")
    visible = case.visible(lengths, lengths, 777, 777)

    def same_type(*inputs: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
        return plain.attention(q, k, v, visible)[0].transpose(1, 2)

    rounded = with_gradients(same_type, inputs)
    # The largest error against plain attention in the same type, the typical error against torch's
    # flash kernel: the largest of a million errors differs by chance more than the typical one.
    for own, of_plain, of_flash, right in zip(ours, rounded, flash, exact, strict=True):
        assert (own - right).abs().max() <= 2 * (of_plain - right).abs().max() + 1e-5
        assert (own - right).norm() <= 1.5 * (of_flash - right).norm()


@pytest.mark.gpu
def test_what_torch_does_not_give_to_flash(calls: list[Any]) -> None:
    inputs = qkv(device="cuda", dtype=torch.float16)
    mask = torch.zeros(7, 7, device="cuda", dtype=torch.float16)
    with activate_sdpa():
        torchs(*inputs, attn_mask=mask)
        torchs(*(tensor.float() for tensor in inputs))
        assert not calls
        compiled = torch.compile(torchs, backend="aot_eager", fullgraph=True)
        assert_close(with_gradients(compiled, inputs), with_gradients(torchs, inputs), 1e-2)
