"""`blockflash.distributed` in processes that talk by gloo, against one process in float64."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reference import TOLERANCE, reference
from torch import Tensor

import blockflash

HEADS = (4, 4)
CASES = [
    (scheme, causal, heads, dtype)
    for scheme in ("heads", "keys")
    for causal in (False, True)
    for heads in (HEADS, (8, 4))
    for dtype in (torch.float32, torch.bfloat16)
]


def _process(rank: int, world: int, port: int, work: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)
    work(rank, world)
    dist.destroy_process_group()


def run(world: int, work: Callable[[int, int], None]) -> None:
    """Run `work(rank, world)` in as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, (world, port, work), nprocs=world)


def operands(heads: tuple[int, int], dtype: torch.dtype, rows: int = 48) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(2, rows, n, 16).to(dtype) for n in (heads[0], heads[1], heads[1])]


def _agrees_with_one_process(rank: int, world: int) -> None:
    from blockflash import distributed

    for scheme, causal, heads, dtype in CASES:
        for options in ({}, {"softcap": 1.5, "scale": 0.3}):
            whole = [x.requires_grad_() for x in operands(heads, dtype)]
            exact = reference(*whole, causal=causal, **options)[0]
            weights = torch.randn(exact.shape).to(dtype)
            wanted = torch.autograd.grad(exact, whole, weights.double())
            mine = [distributed.shard(x.detach()).requires_grad_() for x in whole]
            runs = []
            for _ in range(2):
                o = distributed.attention(*mine, scheme=scheme, causal=causal, **options)
                grads = torch.autograd.grad(o, mine, distributed.shard(weights))
                runs.append((o.detach(), *grads))
            # Parts are rounded to the element type before they are summed.
            tolerance = 4 * TOLERANCE[dtype]
            for found, again, all_rows in zip(*runs, (exact, *wanted), strict=True):
                assert torch.equal(found, again)
                size = all_rows.abs().max().clamp(min=1)
                rows = distributed.shard(all_rows.double())
                assert found.dtype == dtype and found.shape == rows.shape
                assert torch.allclose(found.double(), rows, 0, float(tolerance * size))
            gathered = distributed.unshard(runs[0][0])
            assert torch.equal(distributed.shard(gathered), runs[0][0])


def _finds_mistakes(rank: int, world: int) -> None:
    from blockflash import distributed

    attention = distributed.attention
    assert distributed.positions(4 * world).tolist() == [
        2 * rank, 2 * rank + 1, *(2 * (2 * world - 1 - rank) + i for i in (0, 1))
    ]  # fmt: skip
    q, k, v = (distributed.shard(x) for x in operands(HEADS, torch.float32))

    def refused(expected: type[Exception], words: str, *tensors: Tensor, **options: Any) -> None:
        with pytest.raises(expected, match=words):
            attention(*tensors, **options)
        dist.barrier()

    refused(ValueError, "rank 1 has", *(x[:, :2] if rank else x for x in (q, k, v)))
    refused(ValueError, "rank 1 has", q, k, v, causal=bool(rank))
    refused(ValueError, "two equal chunks", q[:, 1:], k[:, 1:], v[:, 1:])
    refused(ValueError, "scheme is 'ring'", q, k, v, scheme="ring")
    refused(
        ValueError, "refused its arguments|do not go", q, k[:, :, : 4 - rank], v[:, :, : 4 - rank]
    )
    refused(ValueError, "cannot be divided", q, k[:, :, :1], v[:, :, :1], scheme="heads")
    refused(blockflash.Unsupported, "window", q, k, v, scheme="keys", window=(3, 0))
    refused(ValueError, "softcap", q, k, v, softcap=-1.0)
    with pytest.raises(ValueError, match="no multiple"):
        distributed.shard(torch.zeros(1, 2 * world + 1))
    # A window where heads are divided, and what `auto` chooses.
    expected = reference(*operands(HEADS, torch.float32), window=(5, 2))[0]
    found = attention(q, k, v, window=(5, 2))
    assert torch.allclose(found.double(), distributed.shard(expected), 0, 1e-5)
    one = attention(q, k[:, :, :1], v[:, :, :1], check=False)
    assert torch.equal(one, attention(q, k[:, :, :1], v[:, :, :1], scheme="keys"))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_agrees_with_one_process(world: int) -> None:
    run(world, _agrees_with_one_process)


def test_mistakes_are_errors_on_every_rank() -> None:
    run(2, _finds_mistakes)
