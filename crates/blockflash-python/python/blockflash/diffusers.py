"""Attention of the transformers of diffusers, dense or block-sparse over the grid of a video.

`set_attention` puts a processor around each processor of attention of a model. It runs the one that
was there, which projects, norms and rotates as its model does, and computes what that asks torch's
`scaled_dot_product_attention` for. The package diffusers itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import _stats
from ._native import Unsupported
from .sdpa import operands, scaled_dot_product_attention
from .video import Dense, Kind, Sizes, SlidingTile, TopK, video_attention

__all__ = ["Dense", "Patch", "SlidingTile", "TopK", "set_attention"]


def set_attention(
    transformer: nn.Module, kind: Kind | None = None, *, dense_layers: Collection[int] = ()
) -> Patch:
    """Lets the attention of a transformer of diffusers run on blockflash.

    With `Dense`, that is any model whose processors call torch's `scaled_dot_product_attention`,
    as the backend "native" of diffusers does. A call that no kernel takes is left to torch, with a
    warning once for each reason: `blockflash.stats()` counts them, and `blockflash.strict()` makes
    them raise.

    `SlidingTile` and `TopK` are for models that are built like Wan: a `Conv3d` named
    `patch_embedding` makes the tokens, whose number gives the grid, and `blocks[i].attn1` is
    attention of these tokens to each other. Attention to text or images stays dense. A pipeline
    with two transformers takes a call for each.

    Args:
        transformer: `pipe.transformer`. A compiled one has a break of its graph at each attention.
        kind: `Dense()` by default.
        dense_layers: Layers whose attention is dense all the same, as indices of `blocks`.

    Returns:
        A context manager whose end restores the processors. Used without `with`, the change lasts
        until its `restore()`.

    Raises:
        Unsupported: The model is not built so. When it runs: a sparse kind meets a mask, several
            GPUs share the tokens, no kernel takes the tensors, or the processor of a layer does not
            call `scaled_dot_product_attention`, as with another backend of diffusers.
        ValueError: A number of `dense_layers` is no layer, or the model is changed already.

    """
    kind = Dense() if kind is None else kind
    if not isinstance(kind, Dense | SlidingTile | TopK):
        raise TypeError(f"kind must be Dense, SlidingTile or TopK, not {type(kind).__name__}")
    name = type(transformer).__name__
    modules = [m for m in transformer.modules() if hasattr(m, "set_processor")]
    if not modules:
        raise Unsupported(f"{name} has no processors of attention")
    if any(isinstance(module.processor, _Processor) for module in modules):
        raise ValueError(f"the attention of {name} is set already: restore() it first")
    sparse: set[nn.Module] = set()
    state = _State(kind)
    if isinstance(kind, Dense):
        if dense_layers:
            raise ValueError(f"dense_layers is {list(dense_layers)}, but kind is Dense()")
    else:
        sparse = _self_attention(transformer, dense_layers)
    processors = [(module, module.processor) for module in modules]
    hook = None
    if sparse:
        hook = transformer.patch_embedding.register_forward_hook(state.note_grid)
    for module, processor in processors:
        module.set_processor(_Processor(processor, state, module in sparse))
    return Patch(processors, hook)


def _self_attention(transformer: nn.Module, dense_layers: Collection[int]) -> set[nn.Module]:
    """The modules that a sparse kind is for."""
    name = type(transformer).__name__
    if not isinstance(getattr(transformer, "patch_embedding", None), nn.Conv3d):
        raise Unsupported(
            f"{name} has no Conv3d named patch_embedding, by which the grid of its tokens is known"
        )
    layers = [getattr(block, "attn1", None) for block in getattr(transformer, "blocks", ())]
    if not layers or any(not hasattr(layer, "set_processor") for layer in layers):
        raise Unsupported(f"{name} has no blocks with an attn1, which is attention to itself")
    for layer in dense_layers:
        if not 0 <= layer < len(layers):
            last = len(layers) - 1
            raise ValueError(f"dense_layers has {layer}, but {name} has the layers 0 to {last}")
    return {layer for i, layer in enumerate(layers) if i not in dense_layers}


class Patch:
    """The result of `set_attention`: a context manager that restores what was before."""

    def __init__(self, processors: list[tuple[nn.Module, Any]], hook: Any) -> None:
        """Takes the modules with the processors that they had."""
        self._processors = processors
        self._hook = hook

    def restore(self) -> None:
        """Gives the modules their processors back. Does nothing the second time."""
        for module, processor in self._processors:
            module.set_processor(processor)
        if self._hook is not None:
            self._hook.remove()
        self._processors, self._hook = [], None

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()


class _State:
    """What the processors of a model have in common."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.grid: Sizes | None = None

    def note_grid(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.grid = tuple(output.shape[2:])


class _Processor:
    """Runs another processor, and computes the attention that it asks torch for.

    Its attributes are those of the other one: diffusers sets the backend as such.
    """

    def __init__(self, inner: Callable[..., Any], state: _State, sparse: bool) -> None:
        vars(self).update(inner=inner, state=state, sparse=sparse)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # copy and pickle ask before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    @torch.compiler.disable(reason="torch's functions are replaced, and block masks made")
    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.sparse and getattr(self.inner, "_parallel_config", None) is not None:
            raise Unsupported(f"{self.state.kind} with a sequence that several GPUs share")
        with _Attention(self.state, self.sparse) as attention:
            result = self.inner(attn, *args, **kwargs)
        if not attention.calls:
            raise Unsupported(
                f"{type(self.inner).__name__} did not call torch's scaled_dot_product_attention: "
                'transformer.set_attention_backend("native") makes it'
            )
        return result


class _Attention(TorchFunctionMode):
    """While it is active, `scaled_dot_product_attention` is ours."""

    def __init__(self, state: _State, sparse: bool) -> None:
        super().__init__()
        self.state, self.sparse, self.calls = state, sparse, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        if self.sparse:
            return self._sparse(*args, **kwargs)
        try:
            o = scaled_dot_product_attention(*args, **kwargs)
        except (Unsupported, ValueError) as error:
            _stats.fall_back("diffusers", str(error))
            return func(*args, **kwargs)
        _stats.count("diffusers")
        return o

    def _sparse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The same arguments as those of torch's function."""
        kind, grid = self.state.kind, self.state.grid
        if attn_mask is not None or is_causal:
            raise Unsupported(f"{kind} does not go with an attn_mask or is_causal")
        if grid is None or not prod(grid) == query.shape[2] == key.shape[2]:
            raise Unsupported(
                f"{kind} is for {grid} tokens, and attention has {query.shape[2]} queries and "
                f"{key.shape[2]} keys"
            )
        q, k, v = operands(query, key, value, dropout_p, enable_gqa)
        o = video_attention(q, k, v, grid, kind, scale=scale)
        _stats.count("diffusers")
        return o.transpose(1, 2)
