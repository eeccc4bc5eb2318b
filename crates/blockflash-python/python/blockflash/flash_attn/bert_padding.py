"""Rows of padded batches without the padding, and back: `flash_attn.bert_padding`.

A mask says which rows of `[batch, seqlen, ...]` are tokens. How many there are is read from the
device, which waits for a GPU. All functions have gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of these indices."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros with this many rows, but `values` in the rows of these indices."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of these indices, and the input itself."""
    return input[indices], input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that are tokens, one after another.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask: bool or int `[batch, seqlen]`: where the tokens are.
        unused_mask: The same for rows that are kept, but not in use.

    Returns:
        The rows `[total, ...]`, their indices `[total]` among all rows, `cu_seqlens` int32
        `[batch + 1]`, the most rows of a sequence, and int32 `[batch]`, how many of the rows of
        each sequence are tokens (`seqused`).

    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    counts = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return (*_described(rows, indices, counts), attention_mask.sum(-1, dtype=torch.int32))


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for rows that hold several sequences each.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask_in_length: int `[batch, seqlen]`: each number that is not 0 is the length of
            a sequence, which begins where the one before in the same row ends.

    Returns:
        As `unpad_input`, without the last.

    """
    lengths = attention_mask_in_length.flatten()
    counts = lengths[lengths != 0].int()
    place = torch.arange(attention_mask_in_length.shape[-1], device=lengths.device)
    indices = (place < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    return _described(index_first_axis(hidden_states.flatten(0, 1), indices), indices, counts)


def _described(rows: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Rows with their indices, `cu_seqlens` and the most rows of a sequence."""
    cu_seqlens = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, cu_seqlens, int(counts.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: `[batch, seqlen, ...]`, zeros where there is no token."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))
