"""What autograd sees of each operator: a derivative is computed or raises, a write is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import blockflash
from blockflash import attention, flash_attn, sparse

WHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PATTERN = sparse.BlockSparsePattern.from_mask(torch.eye(2, dtype=torch.bool), 32)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield


def randn(*shape: int, device: str) -> Tensor:
    """Normally distributed numbers of a type that the device has kernels for."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else None)


def lengths(*of: int, device: str) -> Tensor:
    return torch.tensor(of, dtype=torch.int32, device=device)


def both(q: Tensor) -> Tensor:
    """Attention whose output and log-sum-exp count."""
    o, lse = attention(q, q, q, causal=True, return_lse=True)
    return torch.cat([o.flatten(2), lse.transpose(1, 2).to(o.dtype)], -1)


def packed(x: Tensor) -> Tensor:
    starts = lengths(0, 7, 16, device=x.device)
    rows = x.flatten(0, 1)
    return attention(
        rows, rows, rows, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=9, max_seqlen_k=9
    ).view_as(x)


def linear(x: Tensor) -> Tensor:
    values = x.flatten()[: 2 * 32 * 32].view(2, 32, 32)
    return sparse.linear(x.view(-1, 64), values, PATTERN, activation="gelu")


def products(x: Tensor) -> Tensor:
    rows = x.view(-1, 64)
    return sparse.matmul(rows, sparse.sddmm(rows.t(), rows, PATTERN), PATTERN)


LAYERS = {
    device: sparse.BlockSparseLinear(64, 64, 32, PATTERN, bias=False, device=device, dtype=dtype)
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16))
    if device == "cpu" or torch.cuda.is_available()
}


def layer(x: Tensor) -> Tensor:
    """A pattern in buffers, which the operators get as tensors."""
    values = x.flatten()[: 2 * 32 * 32].view(2, 32, 32)
    made = LAYERS[x.device.type]
    return torch.func.functional_call(made, {"values": values}, x.view(-1, 64))


DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: attention(x, x * 2, x, window=(5, 0)),
    "with lse": both,
    "packed": packed,
    "operator": lambda x: torch.ops.blockflash.attention_forward(x, x, x),
    "operator in Python": lambda x: torch.ops.blockflash_library.attention_forward(x, x, x),
    "flash_attn": lambda x: flash_attn.flash_attn_func(x, x, x, causal=True),
    "sdpa": lambda x: blockflash.scaled_dot_product_attention(x, x, x),
    "linear": linear,
    "products": products,
    "layer": layer,
}


def cached(x: Tensor, **options: Any) -> Tensor:
    cache = x.detach().new_zeros(x.shape[0], 32, 2, 64)
    return blockflash.attention_decode(x, cache, cache, **options)


def appended(x: Tensor) -> Tensor:
    k_cache, v_cache = x.detach().new_zeros(2, x.shape[0], 32, 2, 64)
    used = lengths(*[16] * x.shape[0], device=x.device)
    q = x.detach().clone()
    return blockflash.attention_decode(q, k_cache, v_cache, k=x, v=x, seqused_k=used)


def with_kvcache(x: Tensor) -> Tensor:
    k_cache, v_cache = x.detach().new_zeros(2, x.shape[0], 32, 2, 64)
    used = lengths(*[3] * x.shape[0], device=x.device)
    return flash_attn.flash_attn_with_kvcache(x, k_cache, v_cache, x, x, cache_seqlens=used)


def paged(x: Tensor) -> Tensor:
    k_cache, v_cache = x.detach().new_zeros(2, 4, 256, 2, 64)
    starts = lengths(0, 16, device=x.device)
    table = lengths(1, 2, device=x.device).view(1, 2)
    return flash_attn.flash_attn_varlen_func(
        x.flatten(0, 1), k_cache, v_cache, starts, starts, 16, 16, block_table=table
    ).view_as(x)


def merged(x: Tensor) -> Tensor:
    lse = x.detach().new_zeros(2, 1, 2, 16, dtype=torch.float32)
    return blockflash.attention_merge(torch.stack([x, x]), lse)[0]


def given(x: Tensor) -> Tensor:
    return attention(x, x, x, out=torch.empty_like(x))


NOT_DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_decode": cached,
    "attention_decode, k=": appended,
    "flash_attn_with_kvcache": with_kvcache,
    "flash_attn_varlen_func, block_table=": paged,
    "attention_merge": merged,
    "attention, out=": given,
}

differentiable = pytest.mark.parametrize("call", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
not_differentiable = pytest.mark.parametrize(
    "call", NOT_DIFFERENTIABLE.values(), ids=NOT_DIFFERENTIABLE
)


def loss(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return call(x).float().square().sum()


def gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(call, x), x)[0]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Kernels give the same bits, but what surrounds them may be summed in another order."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@WHERE
@differentiable
def test_gradients_of_torch_func(call: Callable[[Tensor], Tensor], device: str) -> None:
    x = randn(1, 16, 2, 64, device=device)
    expected = gradient(call, x)
    f = partial(loss, call)
    assert_same(torch.func.grad(f)(x), expected)
    assert_same(torch.func.vjp(f, x)[1](torch.ones((), device=device))[0], expected)
    assert_same(torch.func.jacrev(f)(x), expected)
    many = torch.stack([x, 2 * x])
    wanted = torch.stack([expected, gradient(call, 2 * x)])
    assert_same(torch.func.vmap(torch.func.grad(f))(many), wanted)
    assert_same(torch.func.grad(lambda many: torch.func.vmap(f)(many).sum())(many), wanted)


@WHERE
def test_a_jacobian(device: str) -> None:
    """Each row is a gradient of its own."""
    x = randn(1, 3, 1, 8, device=device)
    found = torch.func.jacrev(lambda x: attention(x, x, x))(x)
    leaf = x.clone().requires_grad_()
    o = attention(leaf, leaf, leaf)
    for at, row in zip(o.flatten(), found.flatten(0, 3), strict=True):
        assert_same(row, torch.autograd.grad(at, leaf, retain_graph=True)[0])


@WHERE
@differentiable
def test_compiled_gradients(call: Callable[[Tensor], Tensor], device: str) -> None:
    x = randn(1, 16, 2, 64, device=device)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(gradient(compiled, x), gradient(call, x))
    transformed = torch.compile(torch.func.grad(partial(loss, call)), backend="aot_eager")
    assert_same(transformed(x), gradient(call, x))


@WHERE
@differentiable
def test_exported_gradients(call: Callable[[Tensor], Tensor], device: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    x = randn(1, 16, 2, 64, device=device)
    program = torch.export.export(Module(), (x.clone().requires_grad_(),))
    assert_same(gradient(program.module(), x), gradient(call, x))


FORWARD_MODE = DIFFERENTIABLE | NOT_DIFFERENTIABLE


@pytest.mark.parametrize("call", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_forward_mode_raises(call: Callable[[Tensor], Tensor]) -> None:
    x = randn(1, 16, 2, 64, device="cpu")
    with pytest.raises(blockflash.Unsupported):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises(blockflash.Unsupported):
        torch.func.jacfwd(call)(x)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(blockflash.Unsupported):
        call(forward_ad.make_dual(x, x))
    with forward_ad.dual_level():  # nothing is lost without a tangent
        assert_same(call(x), call(x))


@pytest.mark.parametrize("call", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_second_derivatives(call: Callable[[Tensor], Tensor]) -> None:
    """Those of attention raise when they are asked for; block-sparse products have them."""
    x = randn(1, 16, 2, 64, device="cpu").requires_grad_()
    (first,) = torch.autograd.grad(loss(call, x), x, create_graph=True)
    assert torch.equal(first, gradient(call, x))
    if call in (linear, products, layer):
        (second,) = torch.autograd.grad(first.sum(), x)
        inner = torch.func.grad(partial(loss, call))
        assert_same(torch.func.grad(lambda x: inner(x).sum())(x.detach()), second)
        assert second.abs().max() > 0
        return
    with pytest.raises(blockflash.Unsupported, match="once only"):
        torch.autograd.grad(first.sum(), x)
    with pytest.raises(blockflash.Unsupported):
        torch.func.hessian(partial(loss, call))(x.detach())
    with pytest.raises(blockflash.Unsupported):
        torch.func.grad(lambda x: torch.func.grad(partial(loss, call))(x).sum())(x.detach())


@WHERE
@not_differentiable
def test_no_gradient_is_lost(call: Callable[[Tensor], Tensor], device: str) -> None:
    """Eager, compiled, exported and transformed; without a gradient, all of these compute."""
    x = randn(1, 16, 2, 64, device=device)
    expected, leaf = call(x), x.clone().requires_grad_()
    weight = torch.ones(64, device=device, dtype=x.dtype, requires_grad=True)
    compiled = torch.compile(lambda x: call(x * weight) + x, backend="aot_eager")
    for attempt in (
        lambda: call(leaf),
        lambda: compiled(x).sum().backward(),
        lambda: torch.compile(call, backend="aot_eager")(leaf),
        lambda: torch.func.grad(partial(loss, call))(x),
        lambda: torch.func.vjp(call, x),
        lambda: torch.func.vmap(torch.func.grad(partial(loss, call)))(x[None]),
    ):
        with pytest.raises(blockflash.Unsupported, match="no gradient"):
            attempt()
    assert weight.grad is None
    torch.compiler.reset()  # a function that raises is compiled no more
    with torch.no_grad():
        assert torch.equal(call(leaf), expected)
        assert torch.equal(torch.compile(call, backend="aot_eager")(leaf), expected)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(x), expected)


def test_operators_called_by_name_lose_nothing() -> None:
    """Where the functions would have refused, differentiating raises; a write refuses at once."""
    ops = torch.ops.blockflash
    x = randn(1, 4, 2, 8, device="cpu").requires_grad_()
    cache = randn(1, 32, 2, 8, device="cpu")
    lse = torch.zeros(2, 2, 4)
    for o, _ in (
        ops.attention_decode(x, cache, cache),
        ops.attention_merge(torch.stack([x[0], x[0]]), lse),
        ops.attention_backward(x, None, x, x, x, x, lse[:1])[:2],
    ):
        with pytest.raises(blockflash.Unsupported, match="no gradient"):
            o.sum().backward()
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        ops.attention_out(x, x, x, torch.empty_like(x))
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        ops.attention_append(x, cache, cache.clone(), x, x, lengths(9, device="cpu"))


@WHERE
@pytest.mark.parametrize("kept", ["attention", "mul"])
def test_selective_checkpointing(kept: str, device: str) -> None:
    """Gradients are the same whichever results are kept."""
    x = randn(1, 64, 2, 64, device=device).requires_grad_()

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if kept in str(operator):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def into_given(x: Tensor) -> Tensor:
        with torch.no_grad():
            return attention(x, x, x, out=torch.empty_like(x))

    def f(x: Tensor) -> Tensor:
        y = x * 1.0
        o, lse = attention(y, x, x, return_lse=True)
        cache = cached(x.detach())
        return (o.float() * into_given(x) * cache).square().sum() + lse.sum()

    (expected,) = torch.autograd.grad(f(x), x)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(f, x, use_reentrant=False, context_fn=contexts).backward()
    assert torch.equal(x.grad, expected)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators of blockflash that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if operator.namespace == "blockflash":
            self.operators.append(operator)
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("call", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_modes_see_operators_that_return_their_results(call: Callable[[Tensor], Tensor]) -> None:
    x = randn(1, 16, 2, 64, device="cpu")
    with Seen() as seen:
        call(x)
        if call in DIFFERENTIABLE.values() and call is not DIFFERENTIABLE["operator in Python"]:
            gradient(call, x)
    assert seen.operators or call is DIFFERENTIABLE["operator in Python"]
    assert all(operator._schema.returns for operator in seen.operators)


def writes(device: str) -> dict[str, tuple[Callable[..., object], int]]:
    """Calls that write into the tensors they get, and how many."""
    x = randn(1, 32, 2, 64, device=device)
    new, used = x[:, :3], lengths(9, device=device)
    lse = torch.empty(1, 2, 32, device=device)
    ops = torch.ops.blockflash
    decode = partial(blockflash.attention_decode, new, k=new, v=new, seqused_k=used)
    kvcache = partial(
        flash_attn.flash_attn_with_kvcache, new, k=new, v=new, cache_seqlens=used, causal=True
    )
    return {
        "attention": (lambda o: attention(x, x, x, out=o), 1),
        "with lse": (lambda o: attention(x, x, x, out=o, return_lse=True), 1),
        "attention_out": (lambda o: ops.attention_out(x, x, x, o, lse), 1),
        "in Python": (lambda o: torch.ops.blockflash_library.attention_out(x, x, x, o, lse), 1),
        "attention_decode": (decode, 2),
        "attention_append": (lambda k, v: ops.attention_append(new, k, v, new, new, used), 2),
        "flash_attn_with_kvcache": (kvcache, 2),
    }


@WHERE
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", writes("cpu"))
def test_a_write_into_saved_tensors_is_noticed(name: str, inference: bool, device: str) -> None:
    call, count = writes(device)[name]
    for at in range(count):
        x = randn(1, 32, 2, 64, device=device).requires_grad_()
        tensors = [x.detach().clone() for _ in range(count)]
        saved = tensors[at] = x * 2
        loss = (saved * saved).sum()
        with torch.inference_mode(inference), torch.no_grad():
            call(*tensors)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@WHERE
@pytest.mark.parametrize("name", writes("cpu"))
def test_inference_tensors_are_protected(name: str, device: str) -> None:
    call, count = writes(device)[name]
    with torch.inference_mode():
        tensors = [randn(1, 32, 2, 64, device=device) for _ in range(count)]
        call(*tensors)
    kept = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
        call(*tensors)
    assert all(map(torch.equal, tensors, kept))


def test_what_is_read_may_be_an_inference_tensor() -> None:
    with torch.inference_mode():
        x = randn(1, 16, 2, 64, device="cpu")
    for call in FORWARD_MODE.values():
        assert call(x).isfinite().all()
