"""Masks of transformers as our kernels take them, and how they are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from .block_mask import BlockMask


@dataclass(frozen=True)
class Mask:
    """A mask that needs no bits; the model hands it to each of its layers.

    It has what transformers asks of the dense mask, a boolean tensor `[B, 1, Sq, Sk]`, on the way.
    """

    shape: tuple[int, int, int, int]
    options: dict[str, Any]
    """The arguments of `blockflash.attention` that describe the mask, or with `seqused_k` those of
    `blockflash.attention_decode`."""
    dense: Callable[[], Tensor | None]
    """Makes the mask that SDPA takes; None has the meaning that SDPA gives to it."""

    ndim = 4

    @property
    def cached(self) -> bool:
        """Whether the options are those of `blockflash.attention_decode`."""
        return "seqused_k" in self.options

    def contiguous(self) -> Mask:
        """Returns the mask itself; `generate` calls this on every mask that it makes."""
        return self


_BLOCK_MASKS: Any = WeakTensorKeyDictionary()
"""The block masks of dense masks that are in use, since a mask goes to each layer of a model."""


def of_dense(mask: Tensor) -> dict[str, Any]:
    """The arguments of `blockflash.attention` for a mask that SDPA takes.

    A boolean mask becomes a block mask, whose hidden blocks cost nothing; the host waits for the
    GPU once for each mask. It is added to the scores instead where a graph is traced or captured,
    and in inference mode, in which nobody sees that a mask has changed since the last layer.
    """
    if mask.dtype != torch.bool:
        return {"bias": mask}
    if torch.compiler.is_compiling() or mask.is_inference() or _is_captured(mask):
        return {"bias": torch.zeros_like(mask, dtype=torch.float16).masked_fill(~mask, -torch.inf)}
    known = _BLOCK_MASKS.get(mask)
    if known is None or known[0] != mask._version:
        known = _BLOCK_MASKS[mask] = mask._version, BlockMask.from_token_mask(mask)
    return {"block_mask": known[1]}


def _is_captured(mask: Tensor) -> bool:
    """Whether work on the mask would become a part of a CUDA graph."""
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()


def block_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | Mask | None:
    """Makes the mask of a forward pass; the signature is that of transformers' `sdpa_mask`.

    Queries stand at positions `q_offset..q_offset + q_length` and keys at
    `kv_offset..kv_offset + kv_length`. `attention_mask`, `[B, positions]`, is False for padding.

    Returns a `Mask` for our kernels, None where SDPA needs no mask either (full attention, or
    causal with queries and keys that begin at the same position), or the dense mask of SDPA: see
    `of_dense`.
    """
    if isinstance(attention_mask, Mask):  # made by `generate` before the model asks for its mask
        return attention_mask
    if isinstance(q_offset, Tensor):  # the cache adds to it before attention runs
        q_offset = q_offset.clone()
    constraints = _constraints(mask_function)
    # What SDPA itself knows to do without a mask; its own test for it trusts `local_size`.
    simple = constraints in ({}, {"right": 0})
    dense = partial(
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and simple,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and simple,
        **kwargs,
    )
    packed = constraints is not None and "segments" in constraints
    cached = (
        constraints is not None
        and constraints.get("right") == 0
        and not packed
        and _is_static_cache(q_length, q_offset, allow_is_causal_skip, kwargs.get("config"))
    )
    if (
        constraints is None
        or not (allow_is_causal_skip or allow_is_bidirectional_skip or packed or cached)
        # The position in a static cache is known on the device only.
        or (isinstance(q_offset, Tensor) and not cached)
        # Padding and packing by position_ids cannot be read while a graph is traced.
        or ((packed or attention_mask is not None) and is_tracing(attention_mask))
    ):
        options = None
    elif cached:
        shape, device = (batch_size, q_length, kv_length), kwargs.get("device", "cpu")
        options = _cached(constraints, shape, (q_offset, kv_offset), attention_mask, device)
    elif packed:
        options = _packed(constraints, (batch_size, q_length, kv_length), attention_mask)
    else:
        options = _padded(
            constraints, (batch_size, q_length, kv_length), (q_offset, kv_offset), attention_mask
        )
    if options is None:
        return dense()
    # Without a mask SDPA is full for a single query and for modules that are not causal.
    full = options == {} and (q_length == 1 or "right" not in constraints)
    causal = options == {"causal": True, "top_left": True} and 1 < q_length <= kv_length
    return None if full or causal else Mask((batch_size, 1, q_length, kv_length), options, dense)


def _made_by(factory: Callable, *arguments: Any) -> Any:
    """The code of the functions that `factory` returns, by which they are recognized."""
    return factory(*arguments).__code__


_CAUSAL = masking_utils.causal_mask_function
_AND = _made_by(masking_utils.and_masks, _CAUSAL)
_WINDOW = _made_by(masking_utils.sliding_window_overlay, 1)
_BOTH_SIDES = _made_by(masking_utils.sliding_window_bidirectional_overlay, 1)
_SEGMENTS = _made_by(masking_utils.packed_sequence_mask_function, None)
_REMAPPED = (  # transformers 5.17 does not have it
    _made_by(masking_utils.remap_positions_for_packed_sequence, _CAUSAL, None)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence")
    else None
)


def _constraints(function: Callable) -> dict[str, Any] | None:
    """What a mask function asks for, or None if any part of it is unknown.

    `left` and `right` are the number of keys that a query sees on each side of its own position,
    `segments` the number of the sequence of each token, `positions` its position there.
    """
    if function is _CAUSAL:
        return {"right": 0}
    if function is masking_utils.bidirectional_mask_function:
        return {}
    code = getattr(function, "__code__", None)
    if code is None or not function.__closure__:
        return None
    cells = [cell.cell_contents for cell in function.__closure__]
    free = dict(zip(code.co_freevars, cells, strict=True))
    if code is _WINDOW:
        return {"left": free["sliding_window"] - 1}
    if code is _BOTH_SIDES:
        return {"left": free["sliding_window"], "right": free["sliding_window"]}
    if code is _SEGMENTS:
        return {"segments": free["packed_sequence_mask"]}
    if code is _REMAPPED:
        inner = _constraints(free["mask_function"])
        if inner is None or "segments" in inner or "positions" in inner:
            return None
        return {**inner, "positions": free["position_ids"]}
    if code is not _AND:
        return None
    merged: dict[str, Any] = {}
    for part in map(_constraints, free["mask_functions"]):
        if part is None:
            return None
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name in ("left", "right"):
                merged[name] = min(merged[name], value)
            else:
                return None
    return merged


def _sides(left: int | None, right: int | None) -> dict[str, Any]:
    """The arguments of `blockflash.attention` for a window."""
    if left is None:
        return (
            {} if right is None else {"causal": True} if right == 0 else {"window": (None, right)}
        )
    return {"window": (left, right)}


_NEED_TENSORS = (
    "diffusion_gemma",
    "doge",
    "dots3_note",
    "falcon",
    "mistral_large4",
    "unlimited_ocr",
)
"""Types of models that ask for a dense mask because they compute with it."""


def _is_static_cache(q_length: int, q_offset: int | Tensor, may_skip: bool, config: Any) -> bool:
    """Whether queries continue a static cache, which has slots behind the last key.

    transformers counts such a cache on the device, and asks for a dense mask for one query, as some
    models always do.
    """
    if not may_skip:
        model = getattr(config, "model_type", "")
        return q_length == 1 and not model.startswith(_NEED_TENSORS)
    return isinstance(q_offset, Tensor)


def _cached(
    constraints: dict[str, Any],
    shape: tuple[int, int, int],
    offset: tuple[int | Tensor, int],
    padding: Tensor | None,
    device: torch.device | str,
) -> dict[str, Any] | None:
    """The options for queries that are the last tokens in a static cache, if there are some.

    Only a mask with padding synchronizes.
    """
    batch, q_length, kv_length = shape
    length = offset[0] + (q_length - offset[1])
    if padding is not None:
        if padding.ndim != 2 or padding.shape[0] != batch:
            return None
        padding = padding[:, offset[1] : offset[1] + kv_length].bool()
        padding = F.pad(padding, (0, kv_length - padding.shape[1]))
        beyond = torch.arange(kv_length, device=padding.device) >= length
        if not (padding | beyond).all():
            return None
    if isinstance(length, Tensor):
        lengths = length.to(device, torch.int32).reshape(1).expand(batch).contiguous()
    else:
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    return {**_sides(constraints.get("left"), 0), "seqused_k": lengths}


def _packed(
    constraints: dict[str, Any], shape: tuple[int, int, int], padding: Tensor | None
) -> dict[str, Any] | None:
    """The options for sequences that are packed into rows, if there are some."""
    segments, positions = constraints["segments"], constraints.get("positions")
    batch, length, _ = shape
    if padding is not None or shape != (*segments.shape, length):
        return None
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments.diff() != 0
    if positions is not None and not (starts[:, 1:] | (positions.diff() == 1)).all():
        return None
    offsets = starts.flatten().nonzero()[:, 0]
    offsets = F.pad(offsets, (0, 1), value=batch * length).to(torch.int32)
    longest = int(offsets.diff().max())
    return {
        **_sides(constraints.get("left"), constraints.get("right")),
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _padded(
    constraints: dict[str, Any],
    shape: tuple[int, int, int],
    offset: tuple[int, int],
    padding: Tensor | None,
) -> dict[str, Any] | None:
    """The options for rows with or without padding, if there are some.

    The keys of a row that are not padding must be one run `start..stop`. Between these runs, the
    padding is a sequence that has keys and no queries, so no tensor is gathered.
    """
    batch, q_length, kv_length = shape
    q_end, kv_end = offset[0] + q_length, offset[1] + kv_length
    left, right = constraints.get("left"), constraints.get("right")
    # A side that reaches beyond every key restricts nothing.
    left = None if left is None or q_end - 1 - left <= offset[1] else left
    right = None if right is None or offset[0] + right >= kv_end - 1 else right
    runs: list[tuple[int, int]] | None = []
    if padding is not None:
        runs = _runs(padding[:, offset[1] : kv_end], batch, kv_length)
    if runs is None:
        return None
    options = _sides(left, right)
    if options:
        # A window is relative to the first query and key of a row, or to the last ones.
        first = offset[0] == offset[1] and all(start == 0 for start, _ in runs)
        last = q_end == kv_end and all(stop == kv_length for _, stop in runs)
        if not (first or last):
            return None
        if first:
            options["top_left"] = True
    if not runs:
        return options
    lengths = []
    for start, stop in runs:
        lengths += [(0, start), (q_length, stop - start), (0, kv_length - stop)]
    lengths = [(0, 0)] + [pair for pair in lengths if any(pair)]
    lengths = torch.tensor(lengths, device="cpu")
    offsets = lengths.cumsum(0).T.to(padding.device, torch.int32)
    return {
        **options,
        "cu_seqlens_q": offsets[0].contiguous(),
        "cu_seqlens_k": offsets[1].contiguous(),
        "max_seqlen_q": q_length,
        "max_seqlen_k": kv_length,
    }


def _runs(padding: Tensor, batch: int, length: int) -> list[tuple[int, int]] | None:
    """The keys `start..stop` of each row, none without padding; None for others. Synchronizes."""
    if padding.ndim != 2 or padding.shape[0] != batch:
        return None
    padding = F.pad(padding.bool(), (0, length - padding.shape[1]))
    count = padding.sum(1)
    start = padding.int().argmax(1)
    key = torch.arange(length, device=padding.device)
    run = (key >= start[:, None]) & (key < (start + count)[:, None])
    rows = torch.stack([start, start + count, (run == padding).all(1).int()], 1).tolist()
    if not all(contiguous for _, _, contiguous in rows):
        return None
    runs = [(start, stop) for start, stop, _ in rows]
    return [] if all(run == (0, length) for run in runs) else runs
