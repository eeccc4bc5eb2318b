"""Nodes of ComfyUI that let the attention of a model run on blockflash.

A custom node of ComfyUI is a folder in `custom_nodes`. This one's `__init__.py` is

    from blockflash.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

The package of ComfyUI itself is not imported. A node sets `optimized_attention_override` among the
options of a copy of the model. What no kernel takes goes to the override that the model had, or to
ComfyUI's own function, with a warning once for each reason: `blockflash.stats()` counts such calls,
and `blockflash.strict()` makes them raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from . import _stats
from ._native import Unsupported
from .sdpa import scaled_dot_product_attention
from .video import Dense, Kind, Sizes, SlidingTile, TopK, video_attention

# Further arguments of ComfyUI's functions: `scale` and `enable_gqa` are those of SDPA, 8 bits are
# never used, so that they may be forbidden, and the others say nothing about the result.
_KNOWN = {
    "_inside_attn_wrapper",
    "enable_gqa",
    "low_precision_attention",
    "scale",
    "transformer_options",
}
_TILES = {f"{t} x {h} x {w}": (t, h, w) for t, h, w in ((4, 4, 4), (4, 4, 8), (1, 8, 8), (2, 8, 8))}


class Override:
    """An `optimized_attention_override` of ComfyUI.

    A sparse kind is for the attention of a video to itself, whose grid a model publishes as
    `grid_sizes` in `transformer_options`, as Wan does. Attention to text is dense. Attention to
    itself without such a grid, with tokens besides it, or with a mask has no kernel here.
    """

    def __init__(
        self, kind: Kind, *, sigma_start: float = inf, previous: Callable[..., Tensor] | None = None
    ) -> None:
        """Takes the override that the model had, which gets what has no kernel.

        Args:
            kind: Which tokens are seen.
            sigma_start: A sparse kind is dense in steps with a larger sigma.
            previous: None is ComfyUI's own function.

        """
        self.kind, self.sigma_start, self.previous = kind, sigma_start, previous
        self._sigma: tuple[weakref.ref[Tensor], float] | None = None

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Attention by the arguments of ComfyUI's function, which is given."""
        try:
            o = self._attention(*args, **kwargs)
        except (Unsupported, ValueError) as error:
            _stats.fall_back("comfyui", str(error))
            if self.previous is not None:
                return self.previous(func, *args, **kwargs)
            return func(*args, **kwargs)
        _stats.count("comfyui")
        return o

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **rest: Any,
    ) -> Tensor:
        """Attention of `[B, N, H * D]`, or `[B, H, N, D]` if the reshape is skipped.

        Scores are summed in float32 whatever `attn_precision` is.
        """
        unknown = [name for name in rest.keys() - _KNOWN if rest[name] is not None]
        if unknown:
            raise Unsupported(f"the argument {unknown[0]} of ComfyUI is not known")
        gqa, scale = bool(rest.get("enable_gqa")), rest.get("scale")
        if not skip_reshape:
            q, k, v = _heads_apart(q, k, v, heads, gqa)
        if q.dim() != 4 or q.shape[1] != heads:
            raise ValueError(f"q has shape {tuple(q.shape)}, not [batch, {heads}, tokens, dim]")
        if mask is not None and mask.dim() < 4:
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
        grid = None
        if not isinstance(self.kind, Dense):
            grid = self._grid(q, k, mask, rest.get("transformer_options") or {})
        if grid is None:
            o = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            o = video_attention(q, k, v, grid, self.kind, scale=scale).transpose(1, 2)
        return o if skip_output_reshape else o.transpose(1, 2).flatten(2)

    @torch.compiler.disable(reason="it reads a tensor")
    def _grid(
        self, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Sizes | None:
        """The grid of a call that is sparse; None if it is dense."""
        tokens = q.shape[2]
        if k.shape[2] != tokens or self._is_early(options.get("sigmas")):
            return None
        grid = options.get("grid_sizes")
        if mask is not None:
            raise Unsupported(f"{self.kind} does not go with a mask")
        if grid is None:
            raise Unsupported(f"{self.kind} needs the grid_sizes of the model, which has none")
        if len(grid) != 3 or prod(grid) != tokens:
            raise Unsupported(f"{self.kind}: {tokens} tokens are not those of grid {tuple(grid)}")
        return tuple(grid)

    def _is_early(self, sigmas: Tensor | None) -> bool:
        """Whether the step comes before the sparse ones. Waits for a GPU once a step."""
        if sigmas is None or self.sigma_start == inf:
            return False
        if self._sigma is None or self._sigma[0]() is not sigmas:
            self._sigma = weakref.ref(sigmas), float(sigmas.flatten()[0])
        return self._sigma[1] > self.sigma_start


def _heads_apart(
    q: Tensor, k: Tensor, v: Tensor, heads: int, gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, H, N, D]` of `[B, N, H * D]`."""
    if q.dim() != 3 or heads < 1 or not q.shape[2] or q.shape[2] % heads:
        raise ValueError(f"q has shape {tuple(q.shape)}, not [batch, tokens, {heads} * dim]")
    dim = q.shape[2] // heads
    for name, tensor in (("k", k), ("v", v)):
        odd = tensor.dim() != 3 or tensor.shape[2] % dim
        if odd or not (gqa or tensor.shape[2] == heads * dim):
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} has shape {shape}, not [batch, tokens, {heads} * {dim}]")
    return tuple(t.unflatten(2, (-1, dim)).transpose(1, 2) for t in (q, k, v))


def patched(model: Any, kind: Kind, start_percent: float = 0.0) -> Any:
    """A copy of a `ModelPatcher` of ComfyUI whose attention is of this kind.

    Args:
        model: The output of a loader.
        kind: `Dense()`, `SlidingTile` or `TopK` of `blockflash.video`.
        start_percent: The part of the sampling, 0 to 1, before which a sparse kind is dense.

    """
    sigma_start = inf
    if start_percent > 0:
        sampling = model.get_model_object("model_sampling")
        sigma_start = float(sampling.percent_to_sigma(start_percent))
    model = model.clone()
    options = model.model_options.setdefault("transformer_options", {})
    previous = options.get("optimized_attention_override")
    options["optimized_attention_override"] = Override(
        kind, sigma_start=sigma_start, previous=previous
    )
    return model


_TILE = (list(_TILES), {"tooltip": "Tokens of a block along frames, height and width."})
_START = (
    "FLOAT",
    {
        "default": 0.2,
        "min": 0.0,
        "max": 1.0,
        "step": 0.01,
        "tooltip": "The part of the sampling before which attention is dense.",
    },
)


class BlockflashAttention:
    """All attention of a model, dense."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "model/patch"
    DESCRIPTION = "Attention by blockflash; what it has no kernel for stays as it was."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs of the node."""
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        """The model with this attention."""
        return (patched(model, Dense()),)


class BlockflashSlidingTile(BlockflashAttention):
    """Attention of a video to itself within sliding tiles; the rest is dense."""

    DESCRIPTION = "Tokens of a video see the tiles around their own. For Wan and its relatives."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs of the node."""
        tiles = ("INT", {"default": 3, "min": 1, "max": 1024, "tooltip": "Tiles that are seen."})
        sides = {f"window_{side}": tiles for side in ("frames", "height", "width")}
        inputs = {"model": ("MODEL",), **sides, "tile": _TILE, "start_percent": _START}
        return {"required": inputs}

    def patch(
        self,
        model: Any,
        window_frames: int,
        window_height: int,
        window_width: int,
        tile: str,
        start_percent: float,
    ) -> tuple[Any]:
        """The model with this attention."""
        window = (window_frames, window_height, window_width)
        return (patched(model, SlidingTile(window, _TILES[tile]), start_percent),)


class BlockflashTopK(BlockflashAttention):
    """Attention of a video to itself within the best blocks; the rest is dense."""

    DESCRIPTION = "Blocks of a video see those with the best scores. For Wan and its relatives."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs of the node."""
        share = {"default": 0.3, "min": 0.01, "max": 1.0, "step": 0.01}
        share["tooltip"] = "The share of blocks that is seen."
        inputs = {"model": ("MODEL",), "share": ("FLOAT", share)}
        return {"required": {**inputs, "tile": _TILE, "start_percent": _START}}

    def patch(self, model: Any, share: float, tile: str, start_percent: float) -> tuple[Any]:
        """The model with this attention."""
        return (patched(model, TopK(share, _TILES[tile]), start_percent),)


NODE_CLASS_MAPPINGS = {
    "BlockflashAttention": BlockflashAttention,
    "BlockflashSlidingTile": BlockflashSlidingTile,
    "BlockflashTopK": BlockflashTopK,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "BlockflashAttention": "Attention (blockflash)",
    "BlockflashSlidingTile": "Sliding Tile Attention (blockflash)",
    "BlockflashTopK": "Top-k Attention (blockflash)",
}
