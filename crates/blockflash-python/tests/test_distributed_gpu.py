"""`blockflash.distributed` in processes that talk by NCCL, with a GPU for each.

Small problems are held against float64, as those of gloo are. Large ones, in which exchanges run
beside attention, are held against one GPU, and their repeats against each other bit by bit.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from reference import TOLERANCE, reference
from test_context_parallel import SEQLEN, Attention, tables
from test_distributed import WINDOWS, agrees, operands, random_offsets, schemes
from test_distributed_block_mask import agrees_in_a_random_case
from torch import Tensor

import blockflash

HEADS = [(4, 4), (8, 2), (3, 1)]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (40, None)},
    {"window": (70, 33)},
    {"window": (None, 4)},
]


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether bfloat16 explains the difference, as it may in `agrees`."""
    size = expected.abs().max().clamp(min=1).item()
    limit = 4 * TOLERANCE[torch.bfloat16] * size
    return bool((found.double() - expected.double()).abs().max() <= limit)


@contextmanager
def reported(what: str, rank: int) -> Iterator[None]:
    """Says what took how long."""
    start = time.perf_counter()
    yield
    if rank == 0:
        print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _grid(rank: int, world: int) -> None:
    """Schemes by masks, heads and lengths that do not divide."""
    for heads, mask, rows in itertools.product(HEADS, MASKS, (200, 333)):
        for scheme in schemes(world, heads[1]):
            for sink in (False, True):
                options = mask | ({"softcap": 2.5, "scale": 0.2} if sink else {})
                dtype = torch.float16 if sink else torch.bfloat16
                agrees(rows, heads, dtype, 64, "cuda", scheme=scheme, sink=sink, **options)


def _random(rank: int, world: int) -> None:
    """Few rows, so that some ranks have none, and head dimensions that are padded."""
    chance = random.Random(world)
    for _ in range(60):
        heads, window = chance.choice([*HEADS, (6, 3)]), chance.choice(WINDOWS)
        agrees(
            chance.choice([1, 2, world, 2 * world - 1, 2 * world, chance.randint(1, 300)]),
            heads,
            chance.choice([torch.float16, torch.bfloat16]),
            chance.choice([16, 20, 96, 128]),
            "cuda",
            scheme=chance.choice(schemes(world, heads[1])),
            window=window,
            causal=chance.random() < 0.5 and not window[1],
            sink=chance.random() < 0.5,
        )


def _packed(rank: int, world: int) -> None:
    """Sequences that are within ranks, and such that several ranks hold."""
    chance = random.Random(20 + world)
    for _ in range(60):
        heads, window = chance.choice([*HEADS, (6, 3)]), chance.choice(WINDOWS)
        offsets = random_offsets(chance, 300)
        agrees(
            offsets[-1],
            heads,
            chance.choice([torch.float16, torch.bfloat16]),
            chance.choice([16, 20, 96, 128]),
            "cuda",
            scheme=chance.choice(schemes(world, heads[1])),
            window=window,
            causal=chance.random() < 0.5 and not window[1],
            sink=chance.random() < 0.5,
            cu_seqlens=offsets,
        )


def _block_masks(rank: int, world: int) -> None:
    chance = random.Random(40 + world)
    for _ in range(40):
        dtypes = (torch.float16, torch.bfloat16)
        agrees_in_a_random_case(
            chance, world, dtypes, head_dim=chance.choice([64, 128]), device="cuda"
        )


def _long(rank: int, world: int) -> None:
    """Against one GPU: attention takes long enough to run beside an exchange."""
    from blockflash import distributed

    torch.manual_seed(1)
    for rows, heads, mask in itertools.product((16384, 24001), HEADS[:2], MASKS[:3]):
        whole = [
            torch.randn(1, rows, n, 128, device="cuda", dtype=torch.bfloat16)
            for n in (heads[0], heads[1], heads[1])
        ]
        for x in whole:  # The same on all ranks.
            dist.broadcast(x, 0)
        weights = torch.randn_like(whole[0])
        dist.broadcast(weights, 0)
        leaves = [x.requires_grad_() for x in whole]
        o = blockflash.attention(*leaves, **mask)
        expected = [o.detach(), *torch.autograd.grad(o, leaves, weights)]
        expected = [distributed.shard(x) for x in expected]
        mine = [distributed.shard(x.detach()).requires_grad_() for x in whole]
        for scheme in schemes(world, heads[1]):
            first: list[Tensor] = []
            for _ in range(4):
                o = distributed.attention(*mine, scheme=scheme, check=False, seqlen=rows, **mask)
                found = [o, *torch.autograd.grad(o, mine, distributed.shard(weights))]
                first = first or found
                assert all(map(torch.equal, found, first))
            for x, one in zip(first, expected, strict=True):
                assert close(x, one)


def _on_streams(rank: int, world: int) -> None:
    """Streams of the caller, whose operands are made and whose results are read there."""
    from blockflash import distributed

    whole = operands((4, 4), torch.bfloat16, 4096, 64, "cuda")
    weights = distributed.shard(torch.randn_like(whole[0]))
    for scheme in schemes(world, 4):
        runs = []
        for priority in (0, -1):
            stream = torch.cuda.Stream(priority=priority)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    mine = [distributed.shard(x + 0).requires_grad_() for x in whole]
                    o = distributed.attention(*mine, scheme=scheme, causal=True)
                    runs.append((o, *torch.autograd.grad(o, mine, weights)))
                    del mine, o
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert all(all(map(torch.equal, each, runs[0])) for each in runs)


def _on_another_current_device(rank: int, world: int) -> None:
    """The device of the operands decides."""
    from blockflash import distributed

    whole = operands((4, 4), torch.bfloat16, 300, 64, "cuda")
    expected = reference(*whole, causal=True, device="cuda")[0]
    with torch.cuda.device(0):
        for scheme in schemes(world, 4):
            q, k, v = (distributed.shard(x) for x in whole)
            o = distributed.attention(q, k, v, scheme=scheme, causal=True)
            assert o.device.index == rank
            assert close(distributed.unshard(o), expected)


def _by_high_priority(rank: int, world: int) -> None:
    """A second group, whose exchanges go first."""
    from blockflash import distributed

    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    group = dist.new_group(pg_options=options)
    q, k, v = (distributed.shard(x, group) for x in operands((4, 4), torch.float16, 5000, 64))
    q, k, v = (x.cuda() for x in (q, k, v))
    for scheme in schemes(world, 4):
        runs = [
            distributed.attention(q, k, v, group=each, scheme=scheme, causal=True)
            for each in (group, None, group)
        ]
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def _in_context_parallel(rank: int, world: int) -> None:
    from blockflash.distributed import context_parallel, shard

    torch.manual_seed(3)
    model = Attention().to("cuda", torch.bfloat16)
    x, weights = torch.randn(2, 2, SEQLEN, 32).to("cuda", torch.bfloat16)
    expected = model(x)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    buffers = [x, weights, *tables(model)]
    before = [buffer.clone() for buffer in buffers]
    dims = (1, 1, *(0 for _ in tables(model)))
    for check, scheme in ((True, "auto"), (False, "keys")):
        settings = {"buffers": buffers, "buffer_seq_dims": dims, "check": check}
        with blockflash.activate_sdpa("cuda"), context_parallel(scheme=scheme, **settings):
            o = model(x)
            assert close(o, shard(expected))
            grads = torch.autograd.grad((o * weights).sum(), parameters)
        for found, grad in zip(grads, wanted, strict=True):
            dist.all_reduce(found)
            assert close(found, grad)
        assert all(map(torch.equal, buffers, before))


def _finds_mistakes(rank: int, world: int) -> None:
    from blockflash import distributed

    q, k, v = (distributed.shard(x) for x in operands((4, 4), torch.bfloat16, 64, 64, "cuda"))
    attention = distributed.attention
    with pytest.raises(ValueError, match="rank 1 has"):
        attention(q, k, v, causal=rank == 1)
    with pytest.raises(ValueError, match="rank 1 has .* on cpu"):
        attention(*(x.cpu() if rank == 1 else x for x in (q, k, v)))
    with pytest.raises(Exception, match="rank 0: "):
        attention(q.float(), k.float(), v.float())
    with pytest.raises(Exception, match="rank 0: "):
        attention(q, k, v, sink=torch.zeros(4))
    with pytest.raises(TypeError, match="rank 1: q must be"):
        attention([q] if rank == 1 else q, k, v)
    # Nothing is under way: the next call is right.
    whole = operands((4, 4), torch.bfloat16, 64, 64, "cuda")
    expected = distributed.shard(reference(*whole, device="cuda")[0])
    assert close(attention(q, k, v), expected)


CHECKS = (
    _grid,
    _random,
    _packed,
    _block_masks,
    _long,
    _on_streams,
    _by_high_priority,
    _on_another_current_device,
    _in_context_parallel,
    _finds_mistakes,
)


def _works(rank: int, world: int) -> None:
    for check in CHECKS:
        with reported(check.__name__, rank):
            check(rank, world)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
def test_processes(world: int) -> None:
    run(world, _works, "nccl")
