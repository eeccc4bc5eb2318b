"""Block masks of `blockflash.distributed` in processes that talk by gloo."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import run
from reference import TOLERANCE, reference
from test_distributed import HEADS, operands, schemes
from torch import Tensor

from blockflash import BlockMask, Unsupported, distributed
from blockflash.distributed import DistributedBlockMask, Scheme, shard_block_mask


def random_mask(
    chance: random.Random, rows: int, block: tuple[int, int], batch: int, heads: int
) -> BlockMask:
    """Any blocks, a few of each row, or none at all; some rows are empty."""
    torch.manual_seed(chance.randrange(1 << 30))
    shape = (batch, heads, -(-rows // block[0]), -(-rows // block[1]))
    blocks = torch.rand(shape) < chance.choice([0.0, 0.2, 0.5, 1.0])
    blocks &= torch.rand(shape[:3])[..., None] < 0.8
    return BlockMask.from_dense_bool(blocks, seqlens=(rows, rows), block=block)


def visible(mask: BlockMask, heads: int) -> Tensor:
    """Which keys the queries of each head may attend to."""
    pairs = mask.to_dense().repeat_interleave(mask.block[0], 2)
    pairs = pairs.repeat_interleave(mask.block[1], 3)[..., : mask.seqlens[0], : mask.seqlens[1]]
    return pairs.repeat_interleave(heads // mask.shape[1], 1)


def agrees(
    mask: BlockMask,
    heads: tuple[int, int],
    dtype: torch.dtype,
    *,
    scheme: Scheme,
    sink: bool = False,
    block: int | None = None,
    head_dim: int = 16,
    device: str = "cpu",
    **options: Any,
) -> DistributedBlockMask:
    """Outputs and gradients are those of one process, and the same bits in a second run."""
    rows, _ = mask.seqlens
    whole = [x.requires_grad_() for x in operands(heads, dtype, rows, head_dim, device)]
    logits = [torch.randn(heads[0]).to(device).requires_grad_()] if sink else []
    options |= {"sink": logits[0]} if sink else {}
    seen = visible(mask, heads[0]).to(device)
    exact = reference(*whole, **options, visible=seen, device=device)[0]
    weights = torch.randn(exact.shape).to(device, dtype)
    wanted = torch.autograd.grad(exact, [*whole, *logits], weights.double())
    cuts = {"block": mask.block if block is None else block}
    token_mask = {name: options[name] for name in ("causal", "window") if name in options}
    lists = shard_block_mask(mask.to(device), block=block)
    made = DistributedBlockMask(lists, scheme=scheme, block=block, **token_mask)
    mine = [distributed.shard(x.detach(), **cuts).requires_grad_() for x in whole]
    runs = []
    for check in (True, False):
        o = distributed.attention(*mine, block_mask=made, check=check, **options)
        grads = torch.autograd.grad(o, [*mine, *logits], distributed.shard(weights, **cuts))
        runs.append((o.detach(), *grads))
    for found, again, all_rows in itertools.zip_longest(*runs, (exact, *wanted)):
        assert torch.equal(found, again)
        size = all_rows.detach().abs().max().clamp(min=1)
        if all_rows.dim() == 1:
            dist.all_reduce(found)
        else:
            all_rows = distributed.shard(all_rows.double(), **cuts)
            assert found.dtype == dtype
        limit = float(4 * TOLERANCE[dtype] * size)
        assert torch.allclose(found.double(), all_rows.double(), 0, limit)
    gathered = distributed.unshard(runs[0][0], **cuts)
    assert torch.equal(distributed.shard(gathered, **cuts), runs[0][0])
    return made


def agrees_in_a_random_case(
    chance: random.Random,
    world: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    **options: Any,
) -> None:
    heads = chance.choice([HEADS, (6, 3), (8, 2), (3, 1)])
    scheme = chance.choice(schemes(world, heads[1])[1:])
    block = (chance.choice([64, 128]), chance.choice([64, 64, 192]))
    rows = chance.choice([1, 64, chance.randint(1, 900), 64 * chance.randint(1, 12)])
    of_mask = chance.choice([n for n in (1, *heads) if n == 1 or n % scheme.heads == 0])
    mask = random_mask(chance, rows, block, chance.choice([1, 2]), of_mask)
    agrees(
        mask,
        heads,
        chance.choice(dtypes),
        scheme=scheme,
        sink=chance.random() < 0.5,
        causal=chance.random() < 0.6,
        block=chance.choice([None, None, 384]),
        **options | ({"window": (70, None)} if scheme.keys == 1 and chance.random() < 0.5 else {}),
    )


def bytes_sent(work: Any) -> tuple[int, Any]:
    """How much all ranks send in all-to-alls to others, and the result."""
    sent, exchange = 0, dist.all_to_all_single

    def counted(
        out: Tensor, x: Tensor, receives: Any, sends: list[int], *rest: Any, **kw: Any
    ) -> Any:
        nonlocal sent
        sent += (sum(sends) - sends[dist.get_rank()]) * x.element_size()
        return exchange(out, x, receives, sends, *rest, **kw)

    with mock.patch.object(dist, "all_to_all_single", counted):
        result = work()
    total = torch.tensor(sent)
    dist.all_reduce(total)
    return int(total), result


def _only_visited_blocks_travel(rank: int, world: int) -> None:
    """As in the Rust crate: sixteen blocks on three ranks, in chunks of two or three."""
    rows, block = 1000, 64
    sizes = {"seqlens": (rows, rows), "block": block}
    local = BlockMask.window(1, 0, **sizes) | BlockMask.sink(1, **sizes)
    mine = [distributed.shard(torch.randn(1, rows, 2, 8), block=block) for _ in range(3)]
    mine = [x.requires_grad_() for x in mine]

    def call(**options: Any) -> list[int]:
        forward, o = bytes_sent(lambda: distributed.attention(*mine, scheme="keys", **options))
        backward, _ = bytes_sent(lambda: torch.autograd.grad(o.sum(), mine))
        return [forward, backward]

    def masked(whole: BlockMask, causal: bool) -> list[int]:
        made = DistributedBlockMask(shard_block_mask(whole), causal=causal)
        assert made.density[0] <= 1 and made.density[1] <= 1
        return call(block_mask=made, causal=causal)

    dense = call(block=block, causal=True)
    some = masked(local, causal=True)
    # The block before each chunk but the first one, and the one behind a chunk of the same rank;
    # block 0 to the two ranks that do not hold it. The backward pass gets them again, and returns
    # their gradients.
    row = 2 * 2 * 8 * 4
    assert some == [6 * 64 * row, 2 * 6 * 64 * row] and 2 * some[0] < dense[0]
    every = BlockMask.window(None, None, **sizes)
    assert masked(every, causal=True) == dense
    assert masked(every, causal=False) == call(block=block)
    none = BlockMask.from_dense_bool(torch.zeros(16, 16, dtype=torch.bool), **sizes)
    assert masked(none, causal=False) == [0, 0]


def _finds_mistakes(rank: int, world: int) -> None:
    rows, block = 512, 64
    sizes = {"seqlens": (rows, rows), "block": block}
    causal = BlockMask.causal(**sizes)
    lists = shard_block_mask(causal)
    q, k, v = (distributed.shard(x, block=block) for x in operands(HEADS, torch.float32, rows))

    def refused(kind: type[Exception], words: str, call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=words) as found:
            call(*args, **options)
        messages: list[Any] = [None] * world
        dist.all_gather_object(messages, str(found.value))
        assert len(set(messages)) == 1

    def other(
        blocks: tuple[int, int], heads: int = 1, keys: int = rows, batch: int = 1
    ) -> BlockMask:
        shape = (batch, heads, -(-len(q[0]) // blocks[0]), -(-keys // blocks[1]))
        ones = torch.ones(shape, dtype=torch.bool)
        return BlockMask.from_dense_bool(ones, seqlens=(len(q[0]), keys), block=blocks)

    group = dist.new_group([0, 1])
    new, wide = DistributedBlockMask, other((64, 128))
    refused(TypeError, "rank 1: lists must be a BlockMask", new, None if rank else lists)
    refused(ValueError, "rank 1: queries and keys of", new, causal if rank else lists)
    refused(ValueError, "rank 1 has .*500 keys", new, other((64, 64), keys=[rows, 500][rank]))
    refused(ValueError, "rank 1 has .*(64, 128)", new, wide if rank else lists)
    refused(ValueError, "rank 0: blocks of the block mask", new, wide, block=64)
    refused(ValueError, "rank 0: block is 0", new, lists, block=0)
    refused(Unsupported, "rank 0: .*multiple of 64", new, lists, block=100)
    refused(ValueError, "rank 1 has .*cut at 128", new, lists, block=[64, 128][rank])
    refused(ValueError, "rank 0: scheme is 'auto'", new, lists, scheme="auto")
    refused(ValueError, "3 x 2, but there are 2 ranks", new, lists, scheme=(3, 2))
    refused(ValueError, "rank 1 has", new, lists, scheme=["keys", "heads"][rank])
    refused(ValueError, "rank 1 has", new, lists, causal=bool(rank))
    refused(ValueError, "rank 0: heads of", new, other((64, 64), 3), scheme="heads")
    refused(Unsupported, "rank 0: .* block mask with a window", new, lists, window=(9, 0))
    refused(ValueError, "rank 0: window", new, lists, window=(-1, 0))
    made, again = (new(lists, causal=True) for _ in range(2))
    different = new(shard_block_mask(BlockMask.sink(1, **sizes)), causal=True)
    two, three = new(other((64, 64), 2)), new(other((64, 64), batch=3))
    call = partial(distributed.attention, q, k, v)
    options = {"causal": True, "block_mask": made}
    for wrong, kind, words in (
        ({"block_mask": lists if rank else made}, TypeError, "rank 1: block_mask must be"),
        ({"block_mask": different if rank else made}, ValueError, "rank 1 has"),
        (
            {"block_mask": None if rank else made, "block": 64, "scheme": "keys"},
            ValueError,
            "rank 1 has",
        ),
        ({"causal": not rank}, ValueError, "rank 1: the token mask of block_mask"),
        ({"scheme": "heads"}, ValueError, "rank 0: the scheme of block_mask is keys over 2"),
        ({"seqlen": 511}, ValueError, "rank 0: the number of rows of block_mask is 512"),
        ({"block": 128}, ValueError, "rank 0: the block of block_mask is 64, not 128"),
        ({"group": group}, ValueError, "rank 0: block_mask was made for another process group"),
        ({"block_mask": two, "causal": False}, ValueError, "rank 0: the number of heads .* 1 or 4"),
        ({"block_mask": three, "causal": False}, ValueError, "rank 0: .* batch entries .* 1 or 2"),
    ):
        refused(kind, words, call, **options | wrong)
    attention = distributed.attention
    refused(
        ValueError,
        r"hold \[256, 255\] rows",
        attention,
        *(x[:, rank:] for x in (q, k, v)),
        **options,
    )
    less = [
        distributed.shard(x[:, :500], block=block) for x in operands(HEADS, torch.float32, rows)
    ]
    refused(ValueError, "keys of block_mask is 512, but .* 500", attention, *less, **options)
    entry = [x[:1] for x in (q, k, v)]
    refused(Unsupported, "rank 0: cu_seqlens", attention, *entry, cu_seqlens=[0, rows], **options)
    with pytest.raises(ValueError, match="rows"):
        attention(q[:, 1:], k[:, 1:], v[:, 1:], check=False, **options)
    with pytest.raises(TypeError, match="whole must be a BlockMask"):
        shard_block_mask(made)
    with pytest.raises(ValueError, match="queries and keys of the block mask"):
        shard_block_mask(lists)
    with pytest.raises(ValueError, match="block_q of the block mask: 128, expected a divisor"):
        shard_block_mask(BlockMask.causal(seqlens=(rows, rows), block=128), block=64)
    # Nothing is under way, and masks of equal lists are equal. The group is that of the mask.
    expected = reference(*operands(HEADS, torch.float32, rows), causal=True)[0]
    for mask in (again if rank else made, new(lists, group=group, causal=True)):
        o = call(causal=True, block_mask=mask)
        assert torch.allclose(o.double(), distributed.shard(expected, block=64), 0, 1e-5)
    assert "keys over 2" in repr(made)


def _compiles(rank: int, world: int) -> None:
    mask = DistributedBlockMask(shard_block_mask(BlockMask.causal(seqlens=(300, 300), block=64)))
    mine = [
        distributed.shard(x, block=64).requires_grad_() for x in operands(HEADS, torch.float32, 300)
    ]

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * distributed.attention(2 * q, k, v, block_mask=mask)

    runs = []
    for function in (doubled, torch.compile(doubled, backend="aot_eager")):
        o = function(*mine)
        runs.append((o, *torch.autograd.grad(o.sum(), mine)))
    assert all(map(torch.equal, *runs))


def _works(rank: int, world: int) -> None:
    chance = random.Random(world)
    for _ in range(8):
        agrees_in_a_random_case(chance, world)
    if world == 2:
        _compiles(rank, world)
        _finds_mistakes(rank, world)
    if world == 3:
        _only_visited_blocks_travel(rank, world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes(world: int) -> None:
    run(world, _works)
