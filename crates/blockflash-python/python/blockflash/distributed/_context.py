"""A model that calls torch's `scaled_dot_product_attention`, on a sequence over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .._native import Unsupported
from ..sdpa import operands
from ._call import run
from ._shard import shard

_LOCAL = {
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
}
"""Attention in one call of torch that does not go through `scaled_dot_product_attention`."""


@contextmanager
def context_parallel(
    group: Any = None,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Sequence[Tensor] = (),
    scheme: str | tuple[int, int] = "auto",
    check: bool = True,
) -> Iterator[None]:
    """Runs `torch.nn.functional.scaled_dot_product_attention` over the ranks of a group.

    Inside, the buffers hold the rows of this rank, and attention is that of the whole sequence:
    everything else in a model works row by row, so an unchanged model computes its rows. Afterwards
    the buffers are what they were. Backward passes, and what they compute again for activation
    checkpoints, belong inside, too.

    - What depends on positions is a buffer: tokens, labels that were shifted before, position ids
      or tables of rotary embeddings. A model that counts positions itself counts them wrong.
    - A loss that is a mean over rows is that of this rank's rows. Sum it, divide by the number of
      all rows, and sum the gradients of the parameters over the ranks.
    - Attention that a model computes otherwise (by flash_attn or flex_attention, by products of its
      own) is not seen and stays local.

    Args:
        group: The group, or a device mesh of one dimension; by default all processes.
        buffers: Tensors with all rows of the sequence, the same ones on all ranks. They are changed
            in place; their views are not, and what is written to them inside is dropped.
        buffer_seq_dims: The dimension of the sequence, of each of them.
        no_restore_buffers: Those of the buffers that keep the rows of this rank, whose other rows
            are not needed any more.
        scheme: As in `attention`.
        check: As in `attention`. Without it there is at least one buffer, which says how long the
            sequence is.

    Raises:
        Unsupported: Inside, for a call with a mask or dropout, for attention to another sequence,
            and for `nn.MultiheadAttention` that returns weights. With `check` on every rank.
        ValueError: Buffers are not of one length, need gradients, or are named twice.

    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    kept = {id(buffer) for buffer in no_restore_buffers}
    seqlen = _length(buffers, buffer_seq_dims, kept)
    if seqlen is None and not check:
        raise ValueError("check=False needs a buffer, which says how long the sequence is")
    settings = {"group": group, "scheme": scheme, "seqlen": seqlen, "check": check}
    with ExitStack() as stack, torch.no_grad():
        parts = [shard(*each) for each in zip(buffers, [group] * len(buffers), buffer_seq_dims)]
        for buffer, part in zip(buffers, parts, strict=True):
            if id(buffer) not in kept:
                stack.callback(_set, buffer, buffer.detach())
            _set(buffer, part)
        del parts, part, buffer
        with torch.enable_grad(), _OverRanks(settings):
            yield


def _length(buffers: Sequence[Tensor], dims: Sequence[int], kept: set[int]) -> int | None:
    """The length of the sequence that buffers have, if there is one."""
    if len(buffers) != len(dims):
        raise ValueError(f"there are {len(buffers)} buffers, but {len(dims)} buffer_seq_dims")
    if len({id(buffer) for buffer in buffers}) < len(buffers):
        raise ValueError("a buffer is named twice")
    if not kept <= {id(buffer) for buffer in buffers}:
        raise ValueError("no_restore_buffers are buffers, too")
    if any(buffer.requires_grad for buffer in buffers):
        raise ValueError("a buffer needs a gradient: shard it by blockflash.distributed.shard")
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers have {sorted(lengths)} rows, not those of one sequence")
    return next(iter(lengths), None)


def _set(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        buffer.set_(value)


class _OverRanks(TorchFunctionMode):
    """Sees every call of a function of torch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self._settings = settings

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _LOCAL:
            raise Unsupported(f"{func.__name__} inside of context_parallel")
        if func is functional.multi_head_attention_forward:
            # It runs with this mode switched off, and finds its attention in its module.
            if kwargs.get("need_weights", True):
                raise Unsupported("attention weights (need_weights) inside of context_parallel")
            name = "scaled_dot_product_attention"
            with mock.patch.object(functional, name, self._attention):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """`scaled_dot_product_attention`, whose arguments are torch's."""
        causal, scale = _causal_and_scale(*args, **kwargs)
        options = {"causal": causal, "scale": scale, "window": (None, None)}
        options |= {"softcap": None, "sink": None}
        o = run(lambda: operands(query, key, value, *args, **kwargs), options, **self._settings)
        o = o.transpose(1, 2)
        return o if query.dim() == 4 else o.squeeze(0)


def _causal_and_scale(
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[bool, float | None]:
    return is_causal, scale
