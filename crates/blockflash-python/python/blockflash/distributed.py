"""Attention over sequences that are divided among the processes of a `torch.distributed` group.

A sequence is cut into two chunks per rank. Rank `i` of `n` holds the chunks `i` and `2n - 1 - i`,
one after the other, so every rank has the same work under a causal mask: `shard`, `unshard` and
`positions` know this order.

- `heads`: rows travel for heads and back, all to all (Ulysses), so each rank has some heads of all
  rows. The number of ranks divides the heads of keys.
- `keys`: keys and values travel round the ring, and the partial results are merged by their
  log-sum-exp. Windows are not possible.

Both are exact, and repeats are equal bit for bit: partial results and gradients are summed in the
order of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from . import _attention, _decode, _native

_OPS = torch.ops.blockflash
_UNLIMITED = (None, None)


def shard(x: Tensor, group: Any = None, dim: int = 1) -> Tensor:
    """The rows of this rank, of a tensor that has all rows of the sequence along `dim`.

    Their number must be a multiple of twice the number of ranks: pad the sequence.
    """
    rank, world = _place(group)
    if x.shape[dim] % (2 * world):
        raise ValueError(f"{x.shape[dim]} rows are no multiple of twice the {world} ranks")
    chunks = x.chunk(2 * world, dim)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]), dim)


def unshard(x: Tensor, group: Any = None, dim: int = 1) -> Tensor:
    """All rows of the sequence, on every rank. It has no gradient."""
    _, world = _place(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(parts, x.detach().contiguous(), group)
    return _in_order(parts, dim)


def positions(seqlen: int, group: Any = None, device: Any = None) -> Tensor:
    """Where the rows of this rank stand in a sequence of `seqlen` rows, for rotary embeddings."""
    return shard(torch.arange(seqlen, device=device), group, 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    scheme: str = "auto",
    causal: bool = False,
    window: tuple[int | None, int | None] = _UNLIMITED,
    scale: float | None = None,
    softcap: float | None = None,
    check: bool = True,
) -> Tensor:
    """`blockflash.attention` of a sequence that is divided among the ranks of a group.

    Every rank makes the same call with its own rows. Gradients of q, k and v are those of one
    process but for rounding. The exchange of a step starts before the attention of the step before.

    Args:
        q: Queries of this rank, `[B, rows, Hq, D]`, an even number of rows; see `shard`.
        k: Keys of this rank, `[B, rows, Hk, D]`; Hq is a multiple of Hk.
        v: Values, in the shape of k.
        group: The group; by default all processes.
        scheme: `heads`, `keys`, or `auto`: heads where the number of ranks divides Hk, else keys.
        causal: A query attends the keys at its position in the whole sequence and before.
        window: As in `blockflash.attention`; only for `heads`.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        check: Compare the arguments of all ranks first, so that a difference is a ValueError on
            every rank. It makes the host wait for the other ranks: turn it off where a call with
            the same shapes and options has passed.

    Returns:
        The output for the queries of this rank, in the shape and element type of q.

    Raises:
        Unsupported: A window, and a scheme that divides keys.
        ValueError: Shapes or options are wrong, or differ between ranks.

    """
    world = _place(group)[1]
    error = _error(q, k, v, scheme, window, world)
    if check:
        options = (causal, window, scale, softcap, scheme)
        _agree((tuple(q.shape), tuple(k.shape), str(q.dtype), options), error, group)
    if error is not None:
        raise error
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, but must be positive; None is no softcap")
    shared: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap}
    if world == 1:
        return _attention.attention(q, k, v, window=window, **shared)
    if _by_heads(scheme, k, world):
        q, k, v = (_Exchange.apply(x, group, False) for x in (q, k, v))
        return _Exchange.apply(_attention.attention(q, k, v, window=window, **shared), group, True)
    head_dim = q.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    if q.is_cuda and head_dim % 8:
        q, k, v = (pad(x, (0, -head_dim % 8)) for x in (q, k, v))
    return _Ring.apply(q, k, v, group, causal, scale, softcap)[..., :head_dim]


def _place(group: Any) -> tuple[int, int]:
    """Number of this rank, and of ranks."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    return rank, dist.get_world_size(group)


def _by_heads(scheme: str, k: Tensor, world: int) -> bool:
    return scheme == "heads" or (scheme == "auto" and k.shape[2] % world == 0)


def _error(
    q: Tensor, k: Tensor, v: Tensor, scheme: str, window: tuple[int | None, int | None], world: int
) -> Exception | None:
    """What is wrong with the arguments of this rank."""
    if scheme not in ("auto", "heads", "keys"):
        return ValueError(f"scheme is {scheme!r}, not 'auto', 'heads' or 'keys'")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        return ValueError(f"q, k, v have shapes {shapes}, not [B, rows, heads, D] of equal rows")
    heads, heads_k = q.shape[2], k.shape[2]
    if heads_k == 0 or heads % heads_k or q.shape[3] != k.shape[3]:
        return ValueError(f"{heads} heads of queries do not go with {heads_k} heads of keys")
    if q.shape[1] % 2:
        return ValueError(f"a rank has {q.shape[1]} rows, which are not two equal chunks")
    if _by_heads(scheme, k, world):
        if heads_k % world:
            return ValueError(f"{heads_k} heads of keys cannot be divided among {world} ranks")
    elif window != _UNLIMITED and world > 1:
        return _native.Unsupported("a window where keys are divided among ranks: scheme='heads'")
    return None


def _agree(arguments: tuple[Any, ...], error: Exception | None, group: Any) -> None:
    """Raises on every rank if one has an error or other arguments."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (arguments, None if error is None else str(error)), group)
    if error is not None:
        raise error
    for rank, (theirs, wrong) in enumerate(everyone):
        if wrong is not None:
            raise ValueError(f"rank {rank} refused its arguments: {wrong}")
        if theirs != everyone[0][0]:
            raise ValueError(f"rank {rank} has {theirs}, but rank 0 has {everyone[0][0]}")


def _in_order(parts: list[Tensor], dim: int) -> Tensor:
    """The rows of all ranks in the order of the sequence."""
    first, second = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*first, *reversed(second)), dim)


def _rows_of(x: Tensor, rank: int, world: int) -> Tensor:
    """The rows of a rank, of rows in the order of the sequence."""
    chunks = x.chunk(2 * world, 1)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]), 1)


def _all_to_all(parts: list[Tensor], group: Any) -> list[Tensor]:
    """Sends a part to each rank, and gives the parts of all ranks."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return list(received)


class _Exchange(torch.autograd.Function):
    """Rows of this rank, of all heads, for heads of this rank, of all rows; or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, back: bool) -> Tensor:
        ctx.group, ctx.back = group, back
        world = dist.get_world_size(group)
        if not back:
            return _in_order(_all_to_all(list(x.chunk(world, 2)), group), 1)
        parts = [_rows_of(x, rank, world) for rank in range(world)]
        return torch.cat(_all_to_all(parts, group), 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(grad, ctx.group, not ctx.back), None, None


def _steps(k: Tensor, v: Tensor, group: Any) -> Any:
    """Keys and values of all ranks, and the rank: this one's first, then those before it.

    The next ones are on their way while the caller works on these.
    """
    rank, world = _place(group)
    ahead, behind = ((rank + step) % world for step in (1, -1))
    if group is not None:
        ahead, behind = (dist.get_global_rank(group, each) for each in (ahead, behind))
    held = torch.stack((k, v))
    for step in range(world):
        requests, following = [], held
        if step + 1 < world:
            following = torch.empty_like(held)
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, held, ahead, group),
                    dist.P2POp(dist.irecv, following, behind, group),
                ]
            )
        yield (rank - step) % world, *held
        for request in requests:
            request.wait()
        held = following


def _visible(source: int, rank: int, rows: int, causal: bool) -> tuple[slice, slice, bool]:
    """Queries and keys of a step, and whether the causal mask goes through them.

    Of two ranks, the earlier one has the first and the last chunk: its first is before both chunks
    of the other, its last behind them.
    """
    everything, half = slice(None), rows // 2
    if not causal or source == rank:
        return everything, everything, causal
    if source < rank:
        return everything, slice(half), False
    return slice(half, None), everything, False


class _Ring(torch.autograd.Function):
    """Attention of the queries of this rank to the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Any,
        causal: bool,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        ctx.options = group, causal, scale, softcap
        rank, world = _place(group)
        o = q.new_zeros((world, *q.shape))
        shape = (world, q.shape[0], q.shape[2], q.shape[1])
        lse = q.new_full(shape, -torch.inf, dtype=torch.float32)
        for source, keys, values in _steps(k, v, group):
            rows, seen, diagonal = _visible(source, rank, q.shape[1], causal)
            o[source, :, rows], lse[source, :, :, rows] = _attention.attention(
                q[:, rows], keys[:, seen], values[:, seen],
                causal=diagonal, scale=scale, softcap=softcap, return_lse=True,
            )  # fmt: skip
        o, lse = _decode.attention_merge(o, lse)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        group, causal, scale, softcap = ctx.options
        rank, world = _place(group)
        parts = [x.new_zeros((world, *x.shape)) for x in (q, k, v)]
        for source, keys, values in _steps(k, v, group):
            rows, seen, diagonal = _visible(source, rank, q.shape[1], causal)
            *grads, _ = _OPS.attention_backward(
                grad[:, rows], None, q[:, rows], keys[:, seen], values[:, seen],
                o[:, rows].contiguous(), lse[:, :, rows].contiguous(),
                right=0 if diagonal else -1, scale=scale, softcap=softcap or 0.0,
            )  # fmt: skip
            for part, at, found in zip(parts, (rows, seen, seen), grads, strict=True):
                part[source, :, at] = found
        dq, dk, dv = parts
        dk, dv = (torch.stack(_all_to_all(list(x), group)) for x in (dk, dv))
        total = (x.float().sum(0).to(q.dtype) for x in (dq, dk, dv))
        return (*total, None, None, None, None)
