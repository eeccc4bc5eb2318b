"""The call that users make: its checks, and the choice of what is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _attention
from .._arguments import UNLIMITED, lowered, scores, sides
from .._native import Unsupported
from ._agree import agree
from ._block_mask import DistributedBlockMask
from ._exchange import Exchange
from ._grid import Grid, Scheme
from ._packed import Offsets, checked, on_device
from ._ring import Options, Ring
from ._rows import Block, count, cut, place, ranges


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    scheme: str | tuple[int, int] = "auto",
    causal: bool = False,
    window: tuple[int | None, int | None] = UNLIMITED,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    block_mask: DistributedBlockMask | None = None,
    block: Block | None = None,
    seqlen: int | None = None,
    check: bool = True,
) -> Tensor:
    """`blockflash.attention` of a sequence that is divided among the ranks of a group.

    Every rank makes the same call with its own rows, a rank without rows, too, and each computes
    gradients or none does. Gradients of q, k and v are those of one process but for rounding.

    Args:
        q: Queries of this rank, `[B, rows, Hq, D]`; see `shard`.
        k: Keys of this rank, `[B, rows, Hk, D]`; Hq is a multiple of Hk.
        v: Values, in the shape of k.
        group: The group; by default all processes.
        scheme: `heads`, `keys`, a `Scheme(heads, keys)` for both together, or `auto`: heads over as
            many ranks as their number and that of heads of keys have in common, keys over the rest.
        causal: A query attends the keys at its position in the whole sequence and before.
        window: A query at position `p` of the whole sequence attends the keys `p - window[0]` to
            `p + window[1]`; None is unlimited. Where keys are divided, only keys that some query
            attends travel.
        scale: Factor of `q @ k.T`; `1 / sqrt(D)` by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sink: float32 `[Hq]`, the same on all ranks: a logit per head that joins the denominator of
            the softmax. The sum over the ranks of its gradients is the gradient.
        cu_seqlens: The rows of all ranks are a packed batch: sequence `i` has the rows
            `cu_seqlens[i]` to `cu_seqlens[i + 1]` of them and attends only itself, and the mask is
            one of each sequence. Numbers or a tensor on the CPU, the same on all ranks; B is 1. The
            chunks of the ranks may cut sequences anywhere, and keys of a sequence that is within
            the rows of a rank do not travel for `keys`.
        block_mask: Which blocks of queries and keys are visited at all. It was made for the token
            mask of the call, and for a group and a scheme, which are the defaults then.
        block: Where the sequence is cut, as in `shard`; by default where the block mask has it, or
            anywhere.
        seqlen: Rows of the whole sequence or packed batch, the sum over the ranks. It is needed
            without `check`, `cu_seqlens` and `block_mask`.
        check: Compare the arguments of all ranks first, so that a mistake is the same error on
            every rank. It makes the host wait for the other ranks: turn it off where a call with
            the same shapes and options has passed. Without it a mistake may end in the timeout of
            the group.

    Returns:
        The output for the queries of this rank, in the shape and element type of q.

    Raises:
        Unsupported: No kernel takes the call.
        ValueError: Shapes or options are wrong, or differ between ranks.

    """
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "sink": sink}
    shared = {
        "group": group, "scheme": scheme, "cu_seqlens": cu_seqlens, "block_mask": block_mask,
        "block": block, "seqlen": seqlen, "check": check,
    }  # fmt: skip
    # What ranks exchange is no part of a graph.
    call = torch.compiler.disable(run) if torch.compiler.is_compiling() else run
    return call(lambda: (q, k, v), options, **shared)


_SCORES = {
    name: parameter.default
    for name, parameter in signature(attention).parameters.items()
    if name in signature(scores).parameters
}
"""The options that say what happens to a score, and their defaults."""


def run(
    operands: Callable[[], tuple[Tensor, Tensor, Tensor]],
    options: dict[str, Any],
    *,
    group: Any,
    scheme: Any,
    seqlen: int | None,
    check: bool,
    cu_seqlens: Any = None,
    block_mask: Any = None,
    block: Block | None = None,
) -> Tensor:
    """`attention` of operands that are made here, so that an error is one on every rank.

    `options` say what happens to a score.
    """
    options = _SCORES | options
    if isinstance(block_mask, DistributedBlockMask):
        group = block_mask.group if group is None else group
        scheme = block_mask.scheme if scheme == "auto" else scheme
    world = place(group)[1]

    def placed(q: Tensor, k: Tensor, v: Tensor) -> Grid:
        """Where the rows are. The number of all is None if only the other ranks know it."""
        chosen = _checked(q, k, v, scheme, world)
        offsets, rows = _packed(q, cu_seqlens, seqlen)
        if block_mask is None:
            return Grid(group, chosen, rows, offsets, 1 if block is None else cut(block))
        if not isinstance(block_mask, DistributedBlockMask):
            kind = type(block_mask).__name__
            raise TypeError(f"block_mask must be a DistributedBlockMask, not {kind}")
        if offsets is not None:
            raise Unsupported("cu_seqlens with a block mask")
        block_mask.check(q, k, group, chosen, seqlen, block, options)
        return Grid(group, chosen, block_mask.seqlen, None, block_mask.block)

    if not check:
        q, k, v = lowered(*operands())
        grid = placed(q, k, v)
        _check_rows(q.shape[1], grid)
    else:
        arguments, rows, device, error = (), 0, torch.device("cpu"), None
        grid = Grid(group, Scheme(1, world), None)
        try:
            q, k, v = lowered(*operands())
            rows, device = q.shape[1], q.device
            grid = placed(q, k, v)
            _try(q, k, v, options)
            arguments = _arguments(q, k, v, grid, block_mask, options)
        except Exception as refused:  # Raised by `agree`, on every rank.
            error = refused
        found = sum(agree(group, arguments, rows, device, error, grid.block))
        if grid.seqlen not in (None, found):
            what = "seqlen is" if grid.cu_seqlens is None else "cu_seqlens ends at"
            what = what if block_mask is None else "the number of keys of block_mask is"
            raise ValueError(f"{what} {grid.seqlen}, but the ranks hold {found} rows")
        grid = grid._replace(seqlen=found)
    return _run(q, k, v, grid, block_mask, options)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    block_mask: DistributedBlockMask | None,
    options: dict[str, Any],
) -> Tensor:
    heads, keys = grid.scheme
    sink = options["sink"]
    if heads > 1:
        q, k, v = Exchange.apply(grid, False, q, k, v)
        if sink is not None:
            sink = sink.narrow(0, grid.member * q.shape[2], q.shape[2])
    if keys == 1:
        mask = None if block_mask is None else block_mask.of_all_rows()
        given = options | {"sink": sink, "block_mask": mask}
        o = _alone(q, k, v, grid.cu_seqlens, given)
    else:
        head_dim = q.shape[-1]
        scale = head_dim**-0.5 if options["scale"] is None else options["scale"]
        if q.is_cuda and head_dim % 8:
            q, k, v = (pad(x, (0, -head_dim % 8)) for x in (q, k, v))
        window = sides(options["causal"], options["window"])
        given = scores(**options | {"scale": scale, "sink": None})
        chosen = Options(window, given)
        plans = (None,) if block_mask is None else block_mask.plans
        if len(plans) == 1:
            o = Ring.apply(grid._replace(plan=plans[0]), chosen, q, k, v, sink)
        else:
            entries = zip(plans, q.split(1), k.split(1), v.split(1), strict=True)
            o = torch.cat(
                [Ring.apply(grid._replace(plan=p), chosen, *x, sink) for p, *x in entries]
            )
        o = o[..., :head_dim]
    return Exchange.apply(grid, True, o)[0] if heads > 1 else o


def _alone(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Offsets | None, options: dict[str, Any]
) -> Tensor:
    """Attention of all rows."""
    if cu_seqlens is None:
        return _attention.attention(q, k, v, **options)
    packed = on_device(cu_seqlens, q)
    longest = packed["max_q"]
    offsets = {name: packed[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    options |= offsets | {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return _attention.attention(q[0], k[0], v[0], **options)[None]


def _packed(q: Tensor, cu_seqlens: Any, seqlen: int | None) -> tuple[Offsets | None, int | None]:
    """The offsets of a packed batch, if it is one, and the rows of all ranks, if they are known."""
    if cu_seqlens is None:
        return None, seqlen
    offsets = checked(cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(f"q has {q.shape[0]} batch entries, but a packed batch is one")
    if seqlen not in (None, offsets[-1]):
        raise ValueError(f"cu_seqlens ends at {offsets[-1]}, but seqlen is {seqlen}")
    return offsets, offsets[-1]


def _checked(q: Tensor, k: Tensor, v: Tensor, scheme: Any, world: int) -> Scheme:
    """The scheme, if it and the shapes of this rank are right."""
    if q.dim() != 4 or k.dim() != 4 or k.shape[:-1] != v.shape[:-1] or q.shape[:2] != k.shape[:2]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}, not [B, rows, heads, D] of equal rows")
    if v.shape[-1] != q.shape[-1]:
        raise Unsupported(f"head_dim of v is {v.shape[-1]}, of q {q.shape[-1]}, on several ranks")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, but k is {k.dtype} and v is {v.dtype}")
    return Scheme.of(scheme, world, k.shape[2])


def _try(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """The same call of one row: whatever it does not take is found before anything travels."""
    with torch.no_grad():
        _attention.attention(*(x.new_zeros((1, 1, *x.shape[2:])) for x in (q, k, v)), **options)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, block_mask: Any, options: dict[str, Any]
) -> tuple[Any, ...]:
    """What is the same on every rank."""
    sink = options["sink"]
    inputs = [x for x in (q, k, v, sink) if x is not None]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    sizes = [(x.shape[0], *x.shape[2:]) for x in (q, k)]
    values = {**options, "sink": sink is not None}
    kind = f"{q.dtype} on {q.device.type}"
    mask = "no block mask" if block_mask is None else block_mask.arguments
    gradients = "differentiated" if differentiated else ""
    rows = (grid.seqlen, grid.cu_seqlens, grid.block)
    return (sizes, kind, str(grid.scheme), values, gradients, mask, *rows)


def _check_rows(rows: int, grid: Grid) -> None:
    """Raises if a call that asks no other rank has other rows than its rank."""
    if grid.seqlen is None:
        raise ValueError("check=False needs seqlen, the rows of the whole sequence")
    rank, world = place(grid.process_group)
    expected = count(ranges(grid.seqlen, world, rank, grid.block))
    if rows != expected:
        raise ValueError(f"rank {rank} holds {expected} of {grid.seqlen} rows, not {rows}")
