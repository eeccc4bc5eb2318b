"""A cache of transformers that holds codes of 8 bits, which attention reads as they are.

The caches that transformers quantizes itself hand numbers of 16 bits to attention, made anew of the
whole cache in each step. Here a layer hands over its codes, and their scales as an attribute of the
tensor, which every operation on it loses: attention refuses codes without scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from . import Unsupported
from ._codes import CODES, quantize

_SCALE = "_blockflash_scale"
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


def scale_of(states: Tensor) -> Tensor:
    """The scales of codes `[B, H, S, D]` of a cache, float32 `[B, S, H]`."""
    scale = getattr(states, _SCALE, None)
    if scale is None:
        raise Unsupported(
            f"keys or values are {states.dtype} without scales: only those that a CodesCache hands "
            "over have them"
        )
    return scale


def widened(states: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes `[B, H, S, D]` of a cache stand for."""
    return (states.float() * scale_of(states).transpose(1, 2)[..., None]).to(dtype)


class CodesLayer(DynamicLayer):
    """The keys and values of a layer as codes, with a scale for each token and head.

    Layers with a window keep all keys, too: the mask hides those outside of it.
    """

    def __init__(self, code: torch.dtype) -> None:
        super().__init__()
        self._code, self._length = code, 0
        # Bytes of keys and their scales, and of values and theirs: `[B, capacity, H, D]` and
        # `[B, capacity, H]`.
        self._rows: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes the first states as the type and device of all."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends states `[B, H, S, D]`. Returns all codes, or the first states as they came."""
        given = (key_states, value_states)
        if torch.is_grad_enabled() and any(states.requires_grad for states in given):
            raise Unsupported("a CodesCache keeps no gradient: call the model in torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(*given)
        start = self._length
        new: list[Tensor] = []
        for states in given:
            codes, scale = quantize(states.transpose(1, 2), self._code, per="token")
            new += [codes.view(torch.uint8), scale]
        self._length = start + key_states.shape[2]
        self._reserve(new)
        for rows, more in zip(self._rows, new):
            rows[:, start : self._length] = more
        if start == 0:
            return given
        k, k_scale, v, v_scale = (rows[:, : self._length] for rows in self._rows)
        return self._handed(k, k_scale), self._handed(v, v_scale)

    def _handed(self, rows: Tensor, scale: Tensor) -> Tensor:
        states = rows.view(self._code).transpose(1, 2)
        setattr(states, _SCALE, scale)
        return states

    def _reserve(self, new: list[Tensor]) -> None:
        """Makes room for all tokens: an eighth more than they need, so that few copies are made."""
        if self._rows and self._length <= self._rows[0].shape[1]:
            return
        capacity = self._length + self._length // 8 + 64
        old = self._rows
        self._rows = [rows.new_zeros(rows.shape[0], capacity, *rows.shape[2:]) for rows in new]
        for rows, before in zip(self._rows, old):
            rows[:, : before.shape[1]] = before

    def get_seq_length(self) -> int:
        """How many tokens there are."""
        return self._length

    def reset(self) -> None:
        """Forgets all tokens."""
        self._rows, self._length, self.is_initialized = [], 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes as many of the last tokens as the number is below 0."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}, expected minus the number of tokens"
            )
        self._length = max(self._length + tokens_to_remove, 0)

    def offload(self) -> None:
        """Moves the layer to the CPU."""
        self._each(lambda rows: rows.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves the layer back."""
        self._each(lambda rows: rows.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the sequences of these numbers, as in beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences of these numbers, or where a mask of booleans is true."""
        self._each(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence."""
        self._each(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self._rows = [change(rows) for rows in self._rows]


class CodesCache(Cache):
    """A cache of 8 bits for `attn_implementation="block_attention"`, which grows with its tokens.

    Each token and head of keys and of values has a scale of its own. What a call finds in an empty
    cache is attended as it came, so a prompt that comes at once is not rounded; later tokens attend
    to the codes. A mask that attention over a cache does not take, such as padding, runs on numbers
    of 16 bits that are made of the codes, with a warning once, as all that falls back. On a GPU the
    head_dim is a multiple of 16. It has no gradient, and is not compiled by `generate`.

    Args:
        config: The configuration of the model.
        dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2` or `torch.int8`.

    Raises:
        ValueError: Another dtype, or a model with layers that are no attention.

    """

    def __init__(self, config: Any, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        if dtype not in CODES:
            raise ValueError(f"dtype is {dtype}, but must be float8_e4m3fn, float8_e5m2 or int8")
        config = config.get_text_config(decoder=True)
        others = set(getattr(config, "layer_types", None) or ()) - set(_LAYERS)
        if others:
            raise ValueError(
                f"layer_types has {', '.join(sorted(others))}, but a CodesCache holds "
                f"{', '.join(_LAYERS)} alone"
            )
        super().__init__(layers=[CodesLayer(dtype) for _ in range(config.num_hidden_layers)])
