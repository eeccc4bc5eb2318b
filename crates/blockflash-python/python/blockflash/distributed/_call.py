"""The call that users make: its checks, and the choice of what is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _attention
from ._agree import agree
from ._exchange import Exchange
from ._grid import Grid, Scheme
from ._ring import Options, Ring
from ._rows import count, place, ranges

_UNLIMITED = (None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    scheme: str | tuple[int, int] = "auto",
    causal: bool = False,
    window: tuple[int | None, int | None] = _UNLIMITED,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
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
        seqlen: Rows of the whole sequence, the sum over the ranks. It is needed without `check`.
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
    shared = {"group": group, "scheme": scheme, "seqlen": seqlen, "check": check}
    # What ranks exchange is no part of a graph.
    call = torch.compiler.disable(run) if torch.compiler.is_compiling() else run
    return call(lambda: (q, k, v), options, **shared)


def run(
    operands: Callable[[], tuple[Tensor, Tensor, Tensor]],
    options: dict[str, Any],
    *,
    group: Any,
    scheme: Any,
    seqlen: int | None,
    check: bool,
) -> Tensor:
    """`attention` of operands that are made here, so that an error is one on every rank."""
    world = place(group)[1]
    if not check:
        q, k, v = _attention.lowered(*operands())
        scheme = _checked(q, k, v, scheme, world)
        seqlen = _length(q.shape[1], seqlen, group)
    else:
        arguments, rows, device, error = (), 0, torch.device("cpu"), None
        try:
            q, k, v = _attention.lowered(*operands())
            rows, device = q.shape[1], q.device
            scheme = _checked(q, k, v, scheme, world)
            _try(q, k, v, options)
            arguments = _arguments(q, k, v, scheme, options) + (seqlen,)
        except Exception as refused:  # Raised by `agree`, on every rank.
            error = refused
        found = sum(agree(group, arguments, rows, device, error))
        if seqlen not in (None, found):
            raise ValueError(f"seqlen is {seqlen}, but the ranks hold {found} rows")
        seqlen = found
    return _run(q, k, v, Grid(group, scheme, seqlen), options)


def _run(q: Tensor, k: Tensor, v: Tensor, grid: Grid, options: dict[str, Any]) -> Tensor:
    heads, keys = grid.scheme
    sink = options["sink"]
    if heads > 1:
        q, k, v = Exchange.apply(grid, False, q, k, v)
        if sink is not None:
            sink = sink.narrow(0, grid.member * q.shape[2], q.shape[2])
    if keys == 1:
        o = _attention.attention(q, k, v, **(options | {"sink": sink}))
    else:
        head_dim = q.shape[-1]
        scale = head_dim**-0.5 if options["scale"] is None else options["scale"]
        if q.is_cuda and head_dim % 8:
            q, k, v = (pad(x, (0, -head_dim % 8)) for x in (q, k, v))
        window = _attention.sides(options["causal"], options["window"])
        chosen = Options(window, scale, options["softcap"])
        o = Ring.apply(grid, chosen, q, k, v, sink)[..., :head_dim]
    return Exchange.apply(grid, True, o)[0] if heads > 1 else o


def _checked(q: Tensor, k: Tensor, v: Tensor, scheme: Any, world: int) -> Scheme:
    """The scheme, if it and the shapes of this rank are right."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}, not [B, rows, heads, D] of equal rows")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, but k is {k.dtype} and v is {v.dtype}")
    return Scheme.of(scheme, world, k.shape[2])


def _try(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """The same call of one row: whatever it does not take is found before anything travels."""
    with torch.no_grad():
        _attention.attention(*(x.new_zeros((1, 1, *x.shape[2:])) for x in (q, k, v)), **options)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme, options: dict[str, Any]
) -> tuple[Any, ...]:
    """What is the same on every rank."""
    sink = options["sink"]
    inputs = [x for x in (q, k, v, sink) if x is not None]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    sizes = [(x.shape[0], *x.shape[2:]) for x in (q, k)]
    values = {**options, "sink": sink is not None}
    kind = f"{q.dtype} on {q.device.type}"
    return (sizes, kind, str(scheme), values, "differentiated" if differentiated else "")


def _length(rows: int, seqlen: int | None, group: Any) -> int:
    """The rows of the whole sequence, for a call that asks no other rank."""
    rank, world = place(group)
    if seqlen is None:
        raise ValueError("check=False needs seqlen, the rows of the whole sequence")
    expected = count(ranges(seqlen, world, rank))
    if rows != expected:
        raise ValueError(f"rank {rank} holds {expected} of {seqlen} rows, not {rows}")
    return seqlen
