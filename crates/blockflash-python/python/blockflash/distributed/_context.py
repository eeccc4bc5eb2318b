"""A model that calls torch's `scaled_dot_product_attention`, on a sequence over several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # noqa: F401
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from .._native import Unsupported
from ..sdpa import operands
from ._call import run
from ._shard import shard

# torch's compiler is loaded above because `set_stance` would do it later: a process group that is
# older than the compiler is not freed (torch 2.15), and its threads may abort a process that ends.

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")


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

    Inside, the buffers hold the rows of this rank, and attention is that of the whole sequence.
    Everything else in a model works row by row, so an unchanged model computes the rows of its
    rank. Afterwards the buffers are what they were. Backward passes that compute the forward pass
    again (activation checkpoints) belong inside, too.

    - What depends on positions is a buffer: tokens, labels that were shifted before, position ids,
      tables of rotary embeddings. A model that counts positions itself counts those of its rows.
    - A loss that is a mean is one of the rows of this rank. Sum instead, divide by the number of
      all rows, and sum the gradients of the parameters over the ranks.
    - Attention by other functions (flash_attn, flex_attention, products of the model's own) is not
      seen, and stays within the rows of a rank.
    - Functions that `torch.compile` made run uncompiled. All threads of the process are affected.

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
        Unsupported: Inside, for a call with a mask or dropout, for tensors of other classes, and
            for `nn.MultiheadAttention` with `need_weights`. With `check` on every rank.
        ValueError: Buffers are not of one length, need gradients, or are named twice.

    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    kept = {id(buffer) for buffer in no_restore_buffers}
    seqlen = _length(buffers, buffer_seq_dims, kept)
    if seqlen is None and not check:
        raise ValueError("check=False needs a buffer, which says how long the sequence is")
    attention = partial(run, group=group, scheme=scheme, seqlen=seqlen, check=check)
    with ExitStack() as stack:
        stack.enter_context(_instead_of_torchs(attention))
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            if id(buffer) not in kept:
                stack.callback(_set, buffer, buffer.detach())
            _set(buffer, shard(buffer, group, dim))
        yield


def _length(buffers: Sequence[Tensor], dims: Sequence[int], kept: set[int]) -> int | None:
    """The length of the sequence that buffers have, if there is one."""
    if len(buffers) != len(dims):
        raise ValueError(f"there are {len(buffers)} buffers, but {len(dims)} buffer_seq_dims")
    if len({id(buffer) for buffer in buffers}) < len(buffers):
        raise ValueError(f"one of the {len(buffers)} buffers is named twice")
    if not kept <= {id(buffer) for buffer in buffers}:
        raise ValueError("no_restore_buffers has a tensor that is not in buffers")
    if any(buffer.requires_grad for buffer in buffers):
        raise ValueError(
            "a buffer has requires_grad: shard it by blockflash.distributed.shard instead"
        )
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers have {sorted(lengths)} rows, not those of one sequence")
    return next(iter(lengths), None)


def _set(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        buffer.set_(value)


@contextmanager
def _instead_of_torchs(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Puts `attention` into torch's dispatcher, above the choice of a backend."""
    if _ACTIVE:
        raise ValueError("context_parallel inside of context_parallel")
    kernel, mha = partial(_kernel, attention), torch.backends.mha
    with ExitStack() as stack:
        stack.callback(_ACTIVE.clear)
        _ACTIVE.append(attention)
        # nn.TransformerEncoder has kernels of its own for inference.
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        # A compiled function has chosen its backend before.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        forward = functional.multi_head_attention_forward
        replaced = _without_weights(forward, attention)
        stack.enter_context(mock.patch.object(functional, forward.__name__, replaced))
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # torch warns of every override; this one is what the caller asked for.
                warnings.filterwarnings("ignore", message=".*only once for all operators")
                for key in _KEYS:
                    library.impl("scaled_dot_product_attention", kernel, key)
            yield
        finally:
            del library  # This gives the operator back to torch.


_ACTIVE: list[Any] = []
"""What `_instead_of_torchs` has put in place."""


def _kernel(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten::scaled_dot_product_attention`."""

    def plain() -> tuple[Tensor, Tensor, Tensor]:
        for x in (query, key, value):
            if type(x) not in (Tensor, nn.Parameter):
                raise Unsupported(f"{type(x).__name__} inside of context_parallel")
        if attn_mask is not None:
            raise Unsupported("attn_mask inside of context_parallel")
        return operands(query, key, value, dropout_p, enable_gqa)

    o = attention(plain, {"causal": is_causal, "scale": scale}).transpose(1, 2)
    return o if query.dim() == 4 else o.squeeze(0)


def _without_weights(forward: Any, attention: Callable[..., Tensor]) -> Any:
    """`multi_head_attention_forward`, which multiplies by itself where weights are wanted."""

    def refuse() -> Any:
        raise Unsupported("need_weights of nn.MultiheadAttention inside of context_parallel")

    @wraps(forward)
    def without_weights(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
        if need_weights:
            attention(refuse, {})
        return forward(*args, need_weights=need_weights, **kwargs)

    return without_weights
