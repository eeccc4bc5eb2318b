"""The custom calls of XLA, and how a call of one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import ffi
from jax.sharding import NamedSharding, PartitionSpec

from .. import _native

Shape = tuple[tuple[int, ...], Any]
"""The shape of a result, and its element type."""


def _register() -> None:
    if jax.__version_info__ < (0, 10):
        raise ImportError(f"blockflash.jax needs JAX 0.10 or newer, not {jax.__version__}")
    for name, platform, address in _native.xla_targets():
        ffi.register_ffi_target(name, ffi.pycapsule(address), platform=platform, api_version=1)


_register()


def call(
    target: str,
    results: Sequence[Shape],
    operands: Mapping[str, jax.Array | None],
    attributes: Mapping[str, Any],
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """The results of a target for these operands and attributes, of which `None` are not passed.

    `aliases` are the places of operands that are changed into results of these places.
    """
    given = alike({name: value for name, value in operands.items() if value is not None})
    like = jax.typeof(next(iter(given.values())))
    kind: dict[str, Any] = {}
    if like.manual_axis_type.varying:
        # Inside of `shard_map`, results vary as the operands do.
        mesh = NamedSharding(like.sharding.mesh, PartitionSpec())
        kind = {"manual_axis_type": like.manual_axis_type, "sharding": mesh}
    shapes = [jax.ShapeDtypeStruct(*of, **kind) for of in results]
    # An operand that is changed is needed once for each entry of vmap. Others are not repeated.
    vmap_method = "broadcast_all" if aliases else "expand_dims"
    compute = ffi.ffi_call(target, shapes, vmap_method=vmap_method, input_output_aliases=aliases)
    named = {name: _typed(value) for name, value in attributes.items() if value is not None}
    return compute(*given.values(), operands=",".join(given), **named)


def _typed(value: bool | int | float) -> Any:
    """The attribute in the type in which a target reads it."""
    if isinstance(value, bool):
        return value
    return np.int64(value) if isinstance(value, int) else np.float64(value)


def _varying(array: jax.Array) -> frozenset[Any]:
    return jax.typeof(array).manual_axis_type.varying


def alike(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, all of which vary over the axes of `shard_map` over which one of them does.

    A custom call takes no others. The gradient of one that did not vary is summed by JAX.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    axes = frozenset[Any]().union(*map(_varying, given.values()))
    more = {name: tuple(sorted(axes - _varying(array))) for name, array in given.items()}
    cast = {
        name: jax.lax.pcast(given[name], axes, to="varying") for name, axes in more.items() if axes
    }
    return {**arrays, **cast}
