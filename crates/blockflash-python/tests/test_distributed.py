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

HEADS = (4, 4)
WINDOWS = [(None, None), (5, 0), (3, 2), (None, 4), (6, None), (0, 0), (40, 33)]


def operands(
    heads: tuple[int, int],
    dtype: torch.dtype,
    rows: int = 48,
    head_dim: int = 16,
    device: str = "cpu",
    batch: int = 2,
) -> list[Tensor]:
    torch.manual_seed(7)
    shapes = [(batch, rows, n, head_dim) for n in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def agrees(
    rows: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int = 16,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Outputs and gradients are those of one process, and the same bits in a second run."""
    from blockflash import distributed

    scheme, sink = options.pop("scheme"), options.pop("sink")
    offsets = options.pop("cu_seqlens", None)
    batch = 2 if offsets is None else 1
    whole = [x.requires_grad_() for x in operands(heads, dtype, rows, head_dim, device, batch)]
    logits = [torch.randn(heads[0]).to(device).requires_grad_()] if sink else []
    plain = options | ({"sink": logits[0]} if sink else {})
    visible = None if offsets is None else same_sequence(offsets).to(device)
    exact = reference(*whole, **plain, visible=visible, device=device)[0]
    plain["cu_seqlens"] = offsets
    weights = torch.randn(exact.shape).to(device, dtype)
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
        size = all_rows.detach().abs().max().clamp(min=1)
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


def same_sequence(cu_seqlens: list[int]) -> Tensor:
    """Which rows of a packed batch belong together."""
    lengths = torch.tensor(cu_seqlens).diff()
    of = torch.arange(len(lengths)).repeat_interleave(lengths)
    return of[:, None] == of[None, :]


def random_offsets(chance: random.Random, longest: int) -> list[int]:
    """A few long sequences, many short ones, both, or some without rows."""
    lengths = [
        chance.choice([0, chance.randint(1, 9), chance.randint(1, longest)])
        for _ in range(chance.randint(1, 8))
    ]
    return [0, *itertools.accumulate([*lengths, chance.randint(1, 3)])]


def schemes(world: int, heads_k: int) -> list[Any]:
    from blockflash.distributed import Scheme

    divides = [n for n in range(1, world + 1) if world % n == 0 and heads_k % n == 0]
    return ["auto", *(Scheme(n, world // n) for n in divides)]


def _agrees_in_every_scheme(rank: int, world: int) -> None:
    for heads in (HEADS, (8, 2)):
        for scheme, causal in itertools.product(schemes(world, heads[1]), (False, True)):
            agrees(48, heads, torch.float32, scheme=scheme, causal=causal, sink=False)
            options = {"softcap": 1.5, "scale": 0.3, "causal": causal}
            agrees(53, heads, torch.bfloat16, scheme=scheme, sink=True, **options)


def _agrees_in_random_cases(rank: int, world: int) -> None:
    chance = random.Random(world)
    for _ in range(30):
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


def _agrees_for_packed_batches(rank: int, world: int) -> None:
    chance = random.Random(10 + world)
    for _ in range(40):
        heads = chance.choice([HEADS, (6, 3), (8, 2), (3, 1)])
        window = chance.choice(WINDOWS)
        offsets = random_offsets(chance, 40)
        agrees(
            offsets[-1],
            heads,
            chance.choice([torch.float32, torch.bfloat16]),
            scheme=chance.choice(schemes(world, heads[1])),
            window=window,
            causal=chance.random() < 0.5 and not window[1],
            sink=chance.random() < 0.5,
            cu_seqlens=offsets,
        )


def _under_autocast(rank: int, world: int) -> None:
    from blockflash import distributed

    whole = [x.requires_grad_() for x in operands(HEADS, torch.float32)]
    for scheme in schemes(world, HEADS[1]):
        with torch.autocast("cpu", torch.bfloat16):
            o = distributed.attention(*map(distributed.shard, whole), scheme=scheme)
        assert o.dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for x in torch.autograd.grad(o.float().sum(), whole))


def _compiles(rank: int, world: int) -> None:
    from blockflash import distributed

    mine = [distributed.shard(x).requires_grad_() for x in operands(HEADS, torch.float32)]
    for scheme in ("heads", "keys"):

        def doubled(q: Tensor, k: Tensor, v: Tensor, scheme: str = scheme) -> Tensor:
            return 2 * distributed.attention(2 * q, k, v, scheme=scheme, causal=True)

        runs = []
        for function in (doubled, torch.compile(doubled, backend="aot_eager")):
            o = function(*mine)
            runs.append((o, *torch.autograd.grad(o.sum(), mine)))
        assert all(map(torch.equal, *runs))


def _in_groups(rank: int, world: int) -> None:
    """Two groups at once, whose ranks are not consecutive."""
    from blockflash import distributed

    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    mine = groups[rank % 2]
    torch.manual_seed(rank % 2)
    whole = [torch.randn(1, 13, 2, 8) for _ in range(3)]
    expected = reference(*whole, causal=True)[0]
    for scheme in ("heads", "keys"):
        q, k, v = (distributed.shard(x, mine) for x in whole)
        o = distributed.attention(q, k, v, group=mine, scheme=scheme, causal=True)
        assert torch.allclose(distributed.unshard(o, mine).double(), expected, 0, 1e-5)
    with pytest.raises(ValueError, match="not in the group"):
        distributed.shard(whole[0], groups[1 - rank % 2])


def _finds_mistakes(rank: int, world: int) -> None:
    from blockflash import distributed

    attention, shard = distributed.attention, distributed.shard
    q, k, v = (shard(x) for x in operands(HEADS, torch.float32))

    def refused(expected: type[Exception], words: str, *tensors: Any, **options: Any) -> None:
        with pytest.raises(expected, match=words) as found:
            attention(*tensors, **options)
        messages: list[Any] = [None] * world
        dist.all_gather_object(messages, str(found.value))
        assert len(set(messages)) == 1

    def one(x: Tensor) -> Tensor:
        return x[:, :, : 4 - rank]

    refused(ValueError, r"hold \[24, 22\] rows", *(x[:, 2 * rank :] for x in (q, k, v)))
    refused(ValueError, "rank 1 has", q, k, v, causal=bool(rank))
    refused(
        ValueError,
        "rank 1: q is torch.bfloat16, but k is torch.float32",
        q.bfloat16() if rank else q,
        k,
        v,
    )
    refused(ValueError, "rank 1 has", *(x.bfloat16() if rank else x for x in (q, k, v)))
    refused(ValueError, "rank 1 has", q.requires_grad_() if rank else q, k, v)
    q = q.detach()
    refused(ValueError, "scheme is 'ring'", q, k, v, scheme="ring")
    refused(ValueError, "3 x 2, but there are 2 ranks", q, k, v, scheme=(3, 2))
    refused(ValueError, "rank 1: 4 query heads are not", q, one(k), one(v))
    refused(ValueError, "rank 0: .* equal rows", q, k[:, 1:], v)
    refused(ValueError, "cannot be divided", q, k[:, :, :1], v[:, :, :1], scheme="heads")
    refused(ValueError, "rank 0: softcap", q, k, v, softcap=-1.0)
    refused(ValueError, "rank 0: window", q, k, v, causal=True, window=(3, 1), scheme="keys")
    refused(ValueError, "rank 0: sink", q, k, v, sink=torch.zeros(3), scheme="keys")
    refused(ValueError, "q is float64", q.double(), k.double(), v.double(), scheme="keys")
    refused(TypeError, "rank 1: q must be", [q] if rank else q, k, v)
    refused(ValueError, "seqlen is 47", q, k, v, seqlen=47)
    refused(ValueError, "needs seqlen", q, k, v, check=False)
    entry = [x[:1] for x in (q, k, v)]
    refused(ValueError, "rank 0: q has 2 batch entries", q, k, v, cu_seqlens=[0, 48])
    refused(ValueError, "ends at 47, but the ranks hold 48 rows", *entry, cu_seqlens=[0, 47])
    refused(ValueError, "ends at 48, but seqlen is 47", *entry, cu_seqlens=[0, 48], seqlen=47)
    refused(
        ValueError, r"rank 1: cu_seqlens\[2\] is 3", *entry, cu_seqlens=[0, [3, 9][rank], 3, 48]
    )
    refused(ValueError, "rank 0: .* must be 0", *entry, cu_seqlens=[] if rank else [1, 48])
    refused(ValueError, "rank 1 has", *entry, cu_seqlens=[0, 3 + rank, 48])
    refused(ValueError, "rank 1 has", *entry, cu_seqlens=[0, 48] if rank else None)
    refused(
        TypeError,
        r"rank 1: cu_seqlens is \[0, 48.0\], but must be",
        *entry,
        cu_seqlens=[0, [48, 48.0][rank]],
    )
    with pytest.raises(ValueError, match=f"rank {rank} holds .* of 50 rows, not 24"):
        attention(q, k, v, check=False, seqlen=50)
    with pytest.raises(ValueError, match="rows, but of"):
        distributed.unshard(q[:, rank:])
    with pytest.raises(ValueError, match="rank 1 has"):
        distributed.unshard(q[:, :, rank:])
    # Nothing is under way: the next call is right.
    o = attention(q, k, v)
    expected = reference(*operands(HEADS, torch.float32))[0]
    assert torch.allclose(o.double(), shard(expected), 0, 1e-5)


def _works(rank: int, world: int) -> None:
    _agrees_in_every_scheme(rank, world)
    _agrees_in_random_cases(rank, world)
    _agrees_for_packed_batches(rank, world)
    _under_autocast(rank, world)
    if world == 2:
        _finds_mistakes(rank, world)
        _compiles(rank, world)
    if world == 4:
        _in_groups(rank, world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_processes(world: int) -> None:
    run(world, _works)
