"""`blockflash.distributed` in processes that talk by gloo, against one process in float64."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from reference import TOLERANCE, reference
from torch import Tensor

import blockflash

HEADS = (4, 4)
WINDOWS = [(None, None), (5, 0), (3, 2), (None, 4), (6, None), (0, 0), (40, 33)]


def operands(heads: tuple[int, int], dtype: torch.dtype, rows: int = 48) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(2, rows, n, 16).to(dtype) for n in (heads[0], heads[1], heads[1])]


def agrees(rows: int, heads: tuple[int, int], dtype: torch.dtype, **options: Any) -> None:
    """Outputs and gradients are those of one process, and the same bits in a second run."""
    from blockflash import distributed

    scheme, sink = options.pop("scheme"), options.pop("sink")
    whole = [x.requires_grad_() for x in operands(heads, dtype, rows)]
    logits = [torch.randn(heads[0], requires_grad=True)] if sink else []
    plain = options | ({"sink": logits[0]} if sink else {})
    exact = reference(*whole, **plain)[0]
    weights = torch.randn(exact.shape).to(dtype)
    wanted = torch.autograd.grad(exact, [*whole, *logits], weights.double())
    mine = [distributed.shard(x.detach()).requires_grad_() for x in whole]
    runs = []
    for check in (True, False):
        o = distributed.attention(*mine, scheme=scheme, check=check, seqlen=rows, **plain)
        grads = torch.autograd.grad(o, [*mine, *logits], distributed.shard(weights))
        runs.append((o.detach(), *grads))
    # Parts are rounded to the element type before they are summed.
    tolerance = 4 * TOLERANCE[dtype]
    for found, again, all_rows in itertools.zip_longest(*runs, (exact, *wanted)):
        assert torch.equal(found, again)
        size = all_rows.abs().max().clamp(min=1)
        if all_rows.dim() == 1:
            dist.all_reduce(found)
        else:
            all_rows = distributed.shard(all_rows.double())
            assert found.dtype == dtype
        assert found.shape == all_rows.shape
        assert torch.allclose(found.double(), all_rows.double(), 0, float(tolerance * size))
    gathered = distributed.unshard(runs[0][0])
    assert gathered.shape == exact.shape
    assert torch.equal(distributed.shard(gathered), runs[0][0])


def schemes(world: int, heads_k: int) -> list[Any]:
    from blockflash.distributed import Scheme

    divides = [n for n in range(1, world + 1) if world % n == 0 and heads_k % n == 0]
    return ["auto", *(Scheme(n, world // n) for n in divides)]


def _agrees_with_one_process(rank: int, world: int) -> None:
    for heads in (HEADS, (6, 3), (8, 2)):
        for scheme in schemes(world, heads[1]):
            for causal, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
                for options in ({}, {"softcap": 1.5, "scale": 0.3}):
                    for rows in (48, 53):
                        agrees(rows, heads, dtype, scheme=scheme, causal=causal, sink=False, **options)


def _agrees_in_random_cases(rank: int, world: int) -> None:
    chance = random.Random(world)
    for _ in range(60):
        heads = chance.choice([HEADS, (6, 3), (8, 2), (3, 1)])
        window = chance.choice(WINDOWS)
        agrees(
            chance.choice([1, 2, world, 2 * world - 1, 2 * world, chance.randint(1, 60)]),
            heads,
            chance.choice([torch.float32, torch.bfloat16]),
            scheme=chance.choice(schemes(world, heads[1])),
            window=window,
            causal=chance.random() < 0.5 and not window[1],
            sink=chance.random() < 0.5,
        )


def _works(rank: int, world: int) -> None:
    _agrees_with_one_process(rank, world)
    _agrees_in_random_cases(rank, world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_agrees_with_one_process(world: int) -> None:
    run(world, _works)
