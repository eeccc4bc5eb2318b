"""`blockflash.flash_attn` over the parameters of FlashAttention's own tests, outputs and gradients.

All of them on a GPU, and some on the CPU. The largest error may be twice that of plain attention in
the same type, both held against plain attention in f32 (f64 on the CPU). It is the rule of those
tests for outputs, and stricter for gradients: `tests/test_flash_attn.py` allows them three times
the error, `hopper/test_flash_attn.py` twice (three times with a softcap) and what is lost when 0.3
is added and taken off again, twice, and both round what they compare with to the type.

Tensors have more rows than there where they would have one query, see `batch_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import plain
import pytest
import torch
from plain import Case
from torch import Tensor

from blockflash.flash_attn import flash_attn_func, flash_attn_varlen_func

HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
LENGTHS = [
    (1, 147),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
]
HEADS_K = {"mha": 6, "gqa": 2, "mqa": 1}
HEADS = 6
FACTORS = {"o": 2, "dq": 2, "dk": 2, "dv": 2}
"""How many times the error of plain attention is allowed."""
FLOOR = 1e-5
"""Added to the allowed error, for cases in which plain attention is exact."""


def cases(seqlen_k: int, capped: float = 50.0) -> Iterator[Case]:
    """Full and causal, with and without a random window and a softcap."""
    for softcap, causal, local in itertools.product([0.0, capped], [False, True], [False, True]):
        window = tuple(torch.randint(0, seqlen_k, (2,)).tolist()) if local else (-1, -1)
        yield Case(causal, window, softcap)


def tensors(
    device: str, dtype: torch.dtype, batch: int, lengths: tuple[int, int], heads_k: int, dim: int
) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of o, `[batch, seqlen, heads, head_dim]`, standard normal."""
    (sq, sk), kv = lengths, (heads_k, dim)
    shapes = [(sq, HEADS, dim), (sk, *kv), (sk, *kv), (sq, HEADS, dim)]
    return tuple(torch.randn(batch, *shape, device=device, dtype=dtype) for shape in shapes)


class Errors:
    """Largest errors of ours and of plain attention in the same type.

    They are compared at the end, so that a GPU is not waited for in between.
    """

    def __init__(self) -> None:
        self._rules: list[tuple[str, int]] = []
        self._pairs: list[Tensor] = []

    def add(self, label: str, name: str, ours: Tensor, same_type: Tensor, exact: Tensor) -> None:
        """Note the largest errors of one result."""
        assert ours.shape == exact.shape, label
        errors = [plain.largest(value - exact) for value in (ours, same_type)]
        self._rules.append((f"{label} {name}", FACTORS[name]))
        self._pairs.append(torch.stack(errors))

    def check(self) -> None:
        """Fail with all results whose error is too large."""
        errors = torch.stack(self._pairs).tolist()
        wrong = [
            f"{label}: {ours:.3g} > {factor} x {same:.3g}"
            for (label, factor), (ours, same) in zip(self._rules, errors, strict=True)
            if not ours <= factor * same + FLOOR  # so that NaN is wrong
        ]
        assert not wrong, "\n".join(wrong)


def compare(
    run: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    seqlens: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor] | None,
    errors: Errors,
    label: str,
    case: Case,
    slopes: Tensor | None,
) -> None:
    """Compares one case and its gradients with plain attention.

    `run` takes q, k, v, the case and slopes of ALiBi, packed by `rows` (those of q, those of k) if
    given.
    """
    q, k, v, grad = inputs
    added = None
    if slopes is not None:
        added = plain.alibi(slopes, *seqlens, q.size(1), k.size(1))
    exact_type = torch.float64 if q.device.type == "cpu" else torch.float32
    visible = case.visible(*seqlens, q.size(1), k.size(1))

    def pack(tensor: Tensor, side: int) -> Tensor:
        return tensor if rows is None else tensor.flatten(0, 1)[rows[side]]

    def reference(dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype) for tensor in (q, k, v)]
        for leaf in leaves:
            leaf.requires_grad_()
        attention = partial(plain.attention, *leaves, visible, case.softcap, added=added)
        o = pack(attention()[0], 0)
        # With a softcap the rounding of scores and of the lse dominates errors in f32.
        from_lse = case.softcap != 0.0 and q.dtype == dtype == torch.float32
        differentiated = pack(attention(from_lse=True)[0], 0) if from_lse else o
        grads = torch.autograd.grad(differentiated, leaves, pack(grad, 0).to(dtype))
        return [o, *(pack(each, side) for each, side in zip(grads, (0, 1, 1), strict=True))]

    packed = [pack(tensor, side) for tensor, side in zip((q, k, v), (0, 1, 1), strict=True)]
    leaves = [tensor.detach().requires_grad_() for tensor in packed]
    o = run(*leaves, case, slopes)
    ours = [o, *torch.autograd.grad(o, leaves, pack(grad, 0))]
    both = (reference(q.dtype), reference(exact_type))
    for name, *values in zip(("o", "dq", "dk", "dv"), ours, *both, strict=True):
        errors.add(f"{label} {case}", name, *values)


def options(case: Case, slopes: Tensor | None) -> dict[str, Any]:
    masks = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    return {**masks, "alibi_slopes": slopes}


def dense(q: Tensor, k: Tensor, v: Tensor, case: Case, slopes: Tensor | None) -> Tensor:
    return flash_attn_func(q, k, v, **options(case, slopes))


def cap_of(dtype: torch.dtype) -> float:
    """A softcap, in f32 one below that of FlashAttention's tests.

    The rounding of scores of 50, whose largest effect differs among machines, is all that would be
    compared there.
    """
    return 5.0 if dtype == torch.float32 else 50.0


def slopes_of(alibi: bool, batch: int, device: str) -> Tensor | None:
    return torch.rand(batch, HEADS, device=device) * 0.3 if alibi else None


def run_dense(
    device: str,
    dtype: torch.dtype,
    batch: int,
    lengths: tuple[int, int],
    heads: str,
    dim: int,
    alibi: bool,
) -> None:
    torch.manual_seed(0)
    errors = Errors()
    seqlens = tuple(torch.full((batch,), length, device=device) for length in lengths)
    inputs = tensors(device, dtype, batch, lengths, HEADS_K[heads], dim)
    slopes = slopes_of(alibi, batch, device)
    for case in cases(lengths[1], cap_of(dtype)):
        # With a softcap the scores shall reach it.
        scaled = inputs if case.softcap == 0.0 else (inputs[0] * case.softcap, *inputs[1:])
        compare(dense, scaled, seqlens, None, errors, f"{heads} {lengths}", case, slopes)
    errors.check()


def run_varlen(
    device: str,
    dtype: torch.dtype,
    batch: int,
    lengths: tuple[int, int],
    heads: str,
    dim: int,
    alibi: bool,
) -> None:
    torch.manual_seed(0)
    errors = Errors()
    inputs = tensors(device, dtype, batch, lengths, HEADS_K[heads], dim)
    random = [torch.randint(max(1, length // 3), length + 1, (batch,)) for length in lengths]
    rows = tuple(
        (torch.arange(length)[None] < lens[:, None]).flatten().nonzero()[:, 0].to(device)
        for length, lens in zip(lengths, random, strict=True)
    )
    cu_seqlens = [
        torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(device, torch.int32) for lens in random
    ]
    seqlens = tuple(lens.to(device) for lens in random)
    slopes = slopes_of(alibi, batch, device)

    def varlen(q: Tensor, k: Tensor, v: Tensor, case: Case, slopes: Tensor | None) -> Tensor:
        return flash_attn_varlen_func(q, k, v, *cu_seqlens, *lengths, **options(case, slopes))

    for case in cases(lengths[1], cap_of(dtype)):
        scaled = inputs if case.softcap == 0.0 else (inputs[0] * case.softcap, *inputs[1:])
        label = f"varlen {heads} {lengths}"
        compare(varlen, scaled, seqlens, rows, errors, label, case, slopes)
    errors.check()


def batch_of(lengths: tuple[int, int], usual: int) -> int:
    """How many sequences are compared: more where they have few rows.

    The rounding of a row's output is shared by its gradients. In a simulation of a kernel that sums
    in f32 and rounds the probabilities, their gradients and the results once, a gradient had more
    than twice the error of plain attention in 3 of 976 cases of four sequences with one query, the
    24 rows of FlashAttention's tests, and in none of 676 cases of 32 sequences.
    """
    return max(usual, 32 // lengths[0])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS_K)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", [run_dense, run_varlen], ids=lambda run: run.__name__)
@pytest.mark.parametrize("alibi", [False, True])
def test_grid_on_gpu(run: Any, dtype: Any, heads: str, dim: int, lengths: Any, alibi: bool) -> None:
    run("cuda", dtype, batch_of(lengths, 4), lengths, heads, dim, alibi)


@pytest.mark.parametrize(
    ("dim", "lengths"), [(32, (108, 37)), (59, (113, 203)), (111, (1, 147))], ids=str
)
@pytest.mark.parametrize("heads", HEADS_K)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", [run_dense, run_varlen], ids=lambda run: run.__name__)
@pytest.mark.parametrize("alibi", [False, True])
def test_grid_on_cpu(run: Any, dtype: Any, heads: str, dim: int, lengths: Any, alibi: bool) -> None:
    run("cpu", dtype, batch_of(lengths, 2), lengths, heads, dim, alibi)
