"""What the functions of the package do to their arguments before an operator gets them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ._native import Unsupported

# Looked up once: every call asks.
_is_compiling = torch.compiler.is_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def lowered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands in the element type of autocast, if it is on."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        refuse_types(q=q, k=k, v=v)
    lower = autocast_dtype(q)
    if lower is not None:
        q, k, v = (t.to(lower) if t.dtype == torch.float32 else t for t in (q, k, v))
    return q, k, v


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """What autocast, if it is on, makes of float32 on the device of q."""
    if _is_compiling() or _is_any_autocast_enabled():
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def refuse_types(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")


def together(**given: object) -> None:
    """Raises where some of these arguments are given and others are not."""
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{', '.join(given)} come together, but {', '.join(missing)} is None")


def sides(causal: bool, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """The sides of the window as the operators have them, -1 for unlimited."""
    left, right = window
    for side in window:
        if side is not None and side < 0:
            raise ValueError(f"window is {window}: a side is a number of keys, or None")
    if causal:
        if right:
            raise ValueError(f"window is {window}, but causal attention sees no later keys")
        right = 0
    return -1 if left is None else left, -1 if right is None else right


UNLIMITED = (None, None)
"""A window that limits no side."""


def scores(
    causal: bool,
    window: tuple[int | None, int | None],
    scale: float | None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> dict[str, Any]:
    """What happens to a score, as options of the operators: those that are not at their default."""
    options: dict[str, Any] = {}
    if causal or window != UNLIMITED:
        options["left"], options["right"] = sides(causal, window)
    if scale is not None:
        options["scale"] = scale
    if softcap is not None:
        if not softcap > 0:
            raise ValueError(f"softcap is {softcap}, but must be positive; None is no softcap")
        options["softcap"] = softcap
    if sink is not None:
        refuse_types(sink=sink)
        options["sink"] = sink
    if bias is not None:
        options["bias"] = of_pairs(bias)
    if alibi_slopes is not None:
        refuse_types(alibi_slopes=alibi_slopes)
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise Unsupported("alibi_slopes have no gradient: detach them, or use a bias")
        options["alibi_slopes"] = alibi_slopes
    return options


def of_pairs(bias: Tensor) -> Tensor:
    """A bias with the dimensions batch, heads, queries and keys."""
    refuse_types(bias=bias)
    if bias.dtype == torch.bool:
        raise ValueError(
            "bias is torch.bool, but is added to scores: BlockMask.from_token_mask makes a mask of "
            "it"
        )
    return bias if bias.dim() >= 4 else bias[(None,) * (4 - bias.dim())]


def renamed(error: Exception, names: dict[str, str]) -> str:
    """The text of an error, with other names for some of our parameters."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))


def renaming(names: dict[str, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a kernel whose errors have other names for some of our parameters.

    Compiled code calls kernels and nothing of the functions around them, so only a kernel can say
    what callers of such a function know.
    """

    def of(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(kernel)
        def named(*arguments: Any) -> Any:
            try:
                return kernel(*arguments)
            except (TypeError, ValueError, Unsupported) as error:
                raise type(error)(renamed(error, names)) from None

        return named

    return of


def natural(what: str, count: int) -> int:
    """The number, if it is not negative."""
    if count < 0:
        raise ValueError(f"{what} is {count}")
    return count


def block_sizes(
    seqlens: tuple[int, int], block: int | tuple[int, int]
) -> tuple[int, int, int, int]:
    """`(seqlen_q, seqlen_k, block_q, block_k)`."""
    block_q, block_k = (block, block) if isinstance(block, int) else block
    seqlen_q, seqlen_k = seqlens
    if min(seqlen_q, seqlen_k, block_q, block_k) < 0:
        raise ValueError(f"seqlens are {tuple(seqlens)}, and block is {block}")
    return seqlen_q, seqlen_k, block_q, block_k


def shared_token_mask(
    token_masks: Iterable[tuple[int | None, int | None] | None],
) -> tuple[int | None, int | None] | None:
    """The token mask of all masks that have one."""
    found = set(token_masks) - {None}
    if len(found) > 1:
        raise ValueError(f"the masks have different token masks: {sorted(map(str, found))}")
    return found.pop() if found else None
