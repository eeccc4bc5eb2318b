"""`blockflash.attention` of `DTensor`s in two processes: batch and heads are divided."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor

import blockflash

WHERE = pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))])


def agrees(
    tensors: list[Tensor], dims: list[int | None], kept: int | None, mesh: Any, **options: Any
) -> None:
    """q, k, v and perhaps a sink, each divided along its dimension, or a copy on each rank.

    Outputs and gradients are those of the whole, and o is divided along `kept`.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    q, k, v, *rest = whole = [t.detach().requires_grad_() for t in tensors]
    sink = rest[0] if rest else None
    plain = blockflash.attention(q, k, v, sink=sink, return_lse=True, **options)
    weight = torch.randn_like(plain[0])
    wanted = torch.autograd.grad(plain[0], whole, weight)

    def place(t: Any, dim: int | None) -> Any:
        return distribute_tensor(t.detach(), mesh, [Replicate() if dim is None else Shard(dim)])

    mine = [place(t, dim).requires_grad_() for t, dim in zip(tensors, dims, strict=True)]
    q, k, v, *rest = mine
    spread = {n: place(t, None) if isinstance(t, Tensor) else t for n, t in options.items()}
    found = blockflash.attention(q, k, v, sink=rest[0] if rest else None, return_lse=True, **spread)
    assert all(isinstance(t, DTensor) for t in found)
    placement = found[0].placements[0]
    assert placement == (Replicate() if kept is None else Shard(kept)), placement
    grads = torch.autograd.grad(found[0], mine, place(weight, kept))
    with torch.no_grad():
        again = blockflash.attention(q, k, v, sink=rest[0] if rest else None, **spread)
    for ours, theirs in ((found[0], plain[0]), (found[1], plain[1]), (again, plain[0])):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(
            ours.full_tensor(), theirs, rtol=1e-2, atol=1e-2 if theirs.is_cuda else 1e-5
        )


ALONE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import blockflash

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
q, k, v = (distribute_tensor(torch.randn(2, 5, 2, 8), mesh, [Shard(0)]) for _ in range(3))
first, second = {order}
for call in (first, second):
    assert call(q, k, v).placements == (Shard(0),)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "names", [("attention", "attention_decode"), ("attention_decode", "attention")]
)
def test_rules_do_not_wait_for_other_operators(names: tuple[str, str]) -> None:
    """A program may begin with any operator."""
    order = ", ".join(f"lambda *t: blockflash.{name}(*t)" for name in names)
    subprocess.run([sys.executable, "-c", ALONE.format(order=order)], check=True, timeout=120)


def work(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.float16
    mesh = init_device_mesh(device, (world,))
    torch.manual_seed(0)

    def draw(heads: int, heads_k: int, *rows: int) -> list[Tensor]:
        shapes = [(*rows, n, 16) for n in (heads, heads_k, heads_k)]
        return [torch.randn(s, device=device, dtype=dtype) for s in shapes]

    dense, sink = draw(8, 2, 4, 9), torch.randn(8, device=device)
    agrees(dense, [0, 0, 0], 0, mesh, causal=True)
    agrees(dense, [2, 2, 2], 2, mesh, window=(3, 0))
    agrees([*dense, sink], [2, 2, 2, 0], 2, mesh, softcap=9.0)
    # What is not divided alike is brought together.
    agrees([*dense, sink], [2, 2, 2, None], 2, mesh)
    agrees([*dense, sink], [0, 0, 0, None], 0, mesh)
    agrees(dense, [1, 1, 1], None, mesh)
    agrees(dense, [None, None, None], None, mesh)
    agrees(draw(6, 3, 2, 9), [2, 2, 2], None, mesh)  # 3 heads of keys for 2 ranks
    agrees(draw(12, 3, 2, 9), [2, 2, 2], None, mesh)
    offsets = torch.tensor([0, 4, 4, 13], dtype=torch.int32, device=device)
    packed = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 9,
        "max_seqlen_k": 9,
    }
    agrees(draw(8, 2, 13), [1, 1, 1], 1, mesh, causal=True, **packed)
    agrees(draw(8, 2, 13), [0, 0, 0], None, mesh, causal=True, **packed)
    for heads, kept in ((1, 2), (2, None)):
        blocks = torch.rand(1, heads, 3, 3, device=device) < 0.7
        mask = blockflash.BlockMask.from_dense_bool(blocks, seqlens=(150, 150), block=64)
        agrees(draw(4, 2, 2, 150), [2, 2, 2], kept, mesh, block_mask=mask)
        agrees(draw(4, 2, 2, 150), [0, 0, 0], 0, mesh, block_mask=mask)


@WHERE
def test_batch_and_heads(backend: str) -> None:
    run(2, work, backend)


def coded(rank: int, world: int) -> None:
    """Scales of tensors of 8 bits are divided with them, and what is shared is not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    qkv = [torch.randint(-100, 100, (4, 9, n, 16), dtype=torch.int8) for n in (8, 2, 2)]
    for shapes in ((4, 8), (4, 2), (4, 1)), ((4, 2), (1, 2), (1,)):
        named = zip(("q_scale", "k_scale", "v_scale"), shapes, strict=True)
        scales = {name: 0.02 * (torch.rand(shape) + 0.5) for name, shape in named}
        expected = blockflash.attention(*qkv, out_dtype=torch.float32, **scales)
        spread = {n: distribute_tensor(t, mesh, [Replicate()]) for n, t in scales.items()}
        for dim in (0, 2):
            mine = [distribute_tensor(t, mesh, [Shard(dim)]) for t in qkv]
            found = blockflash.attention(*mine, out_dtype=torch.float32, **spread)
            assert found.placements == (Shard(dim),)
            torch.testing.assert_close(found.full_tensor(), expected)


def test_scales_of_codes() -> None:
    run(2, coded, "gloo")


def decodes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.float16
    mesh = init_device_mesh(device, (world,))
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def place(t: Any, dim: int | None) -> Any:
        return distribute_tensor(t, mesh, [Replicate() if dim is None else Shard(dim)])

    def agrees(kept: int | None, q: Any, cache: Any, **options: Any) -> None:
        """Each tensor comes with its dimension that is divided."""
        plain = {name: value[0] for name, value in options.items()}
        spread = {name: place(*value) for name, value in options.items()}
        k, v = cache[0], cache[0].flip(-1)
        wanted = blockflash.attention_decode(q[0], k, v, return_lse=True, **plain)
        caches = [place(t, cache[1]) for t in (k, v)]
        found = blockflash.attention_decode(place(*q), *caches, return_lse=True, **spread)
        assert found[0].placements[0] == (Replicate() if kept is None else Shard(kept))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)

    def numbers(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, cache, used = draw(4, 2, 8, 16), draw(4, 32, 2, 16), numbers([5, 32, 0, 9])
    sink = torch.randn(8, device=device)
    for dim, kept in ((0, 0), (2, 2), (1, None), (None, None)):
        agrees(kept, (q, dim), (cache, dim), seqused_k=(used, None), sink=(sink, None))
    agrees(2, (q, 2), (cache, 2), seqused_k=(used, None), sink=(sink, 0))
    agrees(0, (q, 0), (cache, 0), seqused_k=(used, 0))
    pages, table = draw(5, 16, 2, 16), numbers([[0, 1], [2, 3], [4, 0], [1, 2]])
    agrees(0, (q, 0), (pages, None), seqused_k=(used, 0), block_table=(table, 0))
    agrees(2, (q, 2), (pages, 2), seqused_k=(used, None), block_table=(table, None))

    # All heads of queries share latent rows. GPUs have kernels for rows of 576.
    q, rows = draw(4, 2, 8, 576), draw(4, 32, 576)
    wanted = blockflash.mla_decode(q, None, rows, None, used, scale=0.1, return_lse=True)
    for of_q, of_rows, of_used, kept in (
        (2, None, None, 2),
        (0, 0, 0, 0),
        (None, None, None, None),
    ):
        given = place(q, of_q), None, place(rows, of_rows), None, place(used, of_used)
        found = blockflash.mla_decode(*given, scale=0.1, return_lse=True)
        assert found[0].placements[0] == (Replicate() if kept is None else Shard(kept))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)

    o, lse = draw(3, 4, 5, 8, 16), torch.randn(3, 4, 8, 5, device=device)
    wanted = blockflash.attention_merge(o, lse)
    for of_o, of_lse, kept in ((1, 1, 0), (3, 2, 2), (None, None, None), (0, 0, None)):
        found = blockflash.attention_merge(place(o, of_o), place(lse, of_lse))
        assert found[0].placements[0] == (Replicate() if kept is None else Shard(kept))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)

    # What torch has redistributed for a call is not what the caller holds, so writes raise.
    new, written, x = place(draw(4, 1, 2, 16), 0), place(cache, 0), place(q, 0)
    with pytest.raises(NotImplementedError, match="attention_append"):
        blockflash.attention_decode(x, written, written.clone(), k=new, v=new)
    with pytest.raises(NotImplementedError, match="attention_out"):
        blockflash.attention(x, x, x, out=torch.empty_like(x))


@WHERE
def test_caches_and_parts(backend: str) -> None:
    run(2, decodes, backend)
