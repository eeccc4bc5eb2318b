"""`blockflash.jax`: values, gradients and transformations against the definition in jax.numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from engine import needs

needs("jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import (  # noqa: E402
    DTYPE,
    DTYPES,
    assert_close,
    draw,
    qkv,
    reference,
)

from blockflash import Unsupported  # noqa: E402
from blockflash import jax as bj  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window": (5, 3)},
    "rows_without_keys": {"window": (3, -0), "top_left": False, "causal": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": (4,), "causal": True},
    "bias": {"bias": (2, 4, 24, 40)},
    "bias_broadcast": {"bias": (4, 1, 40), "softcap": 5.0},
    "alibi": {"alibi_slopes": (4,), "causal": True},
    "alibi_batch": {"alibi_slopes": (2, 4)},
}


def drawn(options: dict[str, Any]) -> dict[str, Any]:
    """The options with arrays in place of their shapes."""
    names = ("sink", "bias", "alibi_slopes")
    return {
        name: draw(7, *value, dtype=jnp.float32) if name in names else value
        for name, value in options.items()
    }


def loss(compute: Any, options: dict[str, Any], *arrays: jax.Array) -> jax.Array:
    """Depends on all of o and of lse, where that is finite."""
    o, lse = compute(*arrays[:3], **options | dict(zip(("sink", "bias"), arrays[3:], strict=False)))
    weights = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
    finite = jnp.where(jnp.isneginf(lse), 0, lse)
    return (o.astype(jnp.float32) * weights).sum() + (jnp.sin(finite) * 0.3).sum()


with_lse = partial(bj.attention, return_lse=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", OPTIONS)
def test_values(name: str, dtype: Any) -> None:
    options, operands = drawn(OPTIONS[name]), qkv(dtype=dtype)
    found = jax.jit(partial(with_lse, **options))(*operands)
    expected = jax.jit(partial(reference, **options))(*operands)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, dtype)
    assert found[0].dtype == dtype
    assert found[1].dtype == jnp.float32


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str) -> None:
    options = drawn(OPTIONS[name])
    names = [name for name in ("sink", "bias") if name in options]
    more = [options.pop(name) for name in names]

    def compute(of: Any, *arrays: jax.Array) -> jax.Array:
        given = options | dict(zip(names, arrays[3:], strict=True))
        return loss(of, given, *arrays[:3])

    arrays = (*qkv(), *more)
    places = tuple(range(len(arrays)))
    found = jax.jit(jax.grad(partial(compute, with_lse), places))(*arrays)
    expected = jax.jit(jax.grad(partial(compute, reference), places))(*arrays)
    for one, other, array in zip(found, expected, arrays, strict=True):
        assert one.dtype == array.dtype
        assert_close(one, other)


def test_gradients_are_the_same_in_repeats() -> None:
    compute = jax.jit(
        jax.grad(lambda *arrays: loss(with_lse, {"causal": True}, *arrays), (0, 1, 2))
    )
    first, second = compute(*qkv()), compute(*qkv())
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_the_output_or_only_the_lse_is_used() -> None:
    def picked(compute: Any, pick: int, *arrays: jax.Array) -> jax.Array:
        return compute(*arrays)[pick].astype(jnp.float32).sum()

    for pick in (0, 1):
        found, expected = (
            jax.jit(jax.grad(partial(picked, f, pick), (0, 1, 2)))(*qkv())
            for f in (with_lse, reference)
        )
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_head_dims(head_dim: int) -> None:
    q, k, v = qkv(head_dim=head_dim)
    v = v[..., : head_dim - 3]
    assert_close(bj.attention(q, k, v), reference(q, k, v)[0])
    found, expected = (
        jax.jit(jax.grad(partial(loss, f, {}), (0, 1, 2)))(q, k, v) for f in (with_lse, reference)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_without_a_batch_and_without_elements() -> None:
    q, k, v = qkv()
    o, lse = with_lse(q[0], k[0], v[0], causal=True)
    expected = reference(q[:1], k[:1], v[:1], causal=True)
    assert_close(o, expected[0][0])
    assert_close(lse, expected[1][0])
    assert bj.attention(q[:0], k[:0], v[:0]).shape == (0, *q.shape[1:])
    # No keys: nothing to attend.
    o, lse = with_lse(q, k[:, :0], v[:, :0])
    assert not o.any()
    assert jnp.isneginf(lse).all()


def blocks(heads: int = 1, batch: int = 1) -> jax.Array:
    visited = np.random.default_rng(5).random((batch, heads, 3, 5)) < 0.5
    visited[:, :, 1] = False
    return jnp.asarray(visited)


def pairs(visited: jax.Array, block: int, seqlens: tuple[int, int]) -> jax.Array:
    shown = jnp.repeat(jnp.repeat(visited, block, axis=2), block, axis=3)
    return shown[:, :, : seqlens[0], : seqlens[1]]


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_block_masks(shape: tuple[int, int]) -> None:
    block, visited = 64, blocks(*shape)
    operands = qkv(seqlens=(3 * block - 7, 5 * block - 3))
    seqlens = (operands[0].shape[1], operands[1].shape[1])

    @jax.jit
    def found(visited: jax.Array, *arrays: jax.Array) -> Any:
        mask = bj.BlockMask(visited, block)
        masked = partial(bj.block_sparse_attention, mask=mask, return_lse=True, causal=True)
        grads = jax.grad(lambda *arrays: loss(masked, {}, *arrays), (0, 1, 2))(*arrays)
        return (*masked(*arrays), *grads)

    masked = partial(reference, causal=True, visible=pairs(visited, block, seqlens))
    grads = jax.grad(lambda *arrays: loss(masked, {}, *arrays), (0, 1, 2))
    expected = (*jax.jit(masked)(*operands), *jax.jit(grads)(*operands))
    for one, other in zip(found(visited, *operands), expected, strict=True):
        assert_close(one, other)


def test_alibi_slopes_have_no_gradient() -> None:
    slopes = draw(1, 4, dtype=jnp.float32)
    with pytest.raises(Unsupported, match="alibi_slopes have no gradient"):
        jax.grad(lambda slopes: bj.attention(*qkv(), alibi_slopes=slopes).sum())(slopes)


def test_second_derivatives_and_forward_mode_raise() -> None:
    q, k, v = qkv()

    def summed(q: jax.Array) -> jax.Array:
        return bj.attention(q, k, v).astype(jnp.float32).sum()

    with pytest.raises(ValueError, match="blockflash_attention_backward` cannot be diff"):
        jax.grad(lambda q: jax.grad(summed)(q).astype(jnp.float32).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(summed, (q,), (q,))


@pytest.mark.parametrize("name", ["none", "sink", "bias_broadcast", "alibi"])
@pytest.mark.parametrize("shared", ["", "k and v", "q"])
def test_vmap(name: str, shared: str) -> None:
    options = drawn(OPTIONS[name])
    q, k, v = (jnp.stack([rows, rows[::-1] * 0.5, rows + 1]) for rows in qkv())
    axes = [0, 0, 0]
    if shared == "q":
        q, axes[0] = q[0], None
    elif shared:
        k, v, axes[1:] = k[0], v[0], [None, None]

    def all_of(compute: Any, *arrays: jax.Array) -> Any:
        grads = jax.grad(lambda *arrays: loss(compute, options, *arrays), (0, 1, 2))(*arrays)
        return (*compute(*arrays, **options), *grads)

    found = jax.jit(jax.vmap(partial(all_of, with_lse), tuple(axes)))(q, k, v)
    expected = jax.jit(jax.vmap(partial(all_of, reference), tuple(axes)))(q, k, v)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_vmap_of_options_and_of_vmap() -> None:
    operands = [jnp.stack([jnp.stack([rows, rows + 1])] * 3) for rows in qkv(batch=1)]
    sinks = draw(3, 2, 4, dtype=jnp.float32)

    def computed(compute: Any, *arrays: jax.Array) -> Any:
        def one(q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array) -> Any:
            of_sink = jax.grad(lambda sink: loss(compute, {"sink": sink}, q, k, v))(sink)
            return (*compute(q, k, v, sink=sink), of_sink)

        return jax.vmap(jax.vmap(one), (0, 0, 0, None))(*arrays)

    found, expected = (
        jax.jit(partial(computed, f))(*operands, sinks) for f in (with_lse, reference)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def mesh() -> jax.sharding.Mesh:
    count = min(4, jax.device_count())
    if count < 2:
        pytest.skip("there is one device: shard_map needs two")
    devices = np.array(jax.devices()[: count // 2 * 2]).reshape(2, -1)
    return jax.sharding.Mesh(devices, ("batch", "heads"))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    operands = (*qkv(heads=(4, 2)), draw(9, 4, dtype=jnp.float32))
    rows = P("batch", None, "heads", None)
    compute = partial(with_lse, causal=True)
    mapped = jax.shard_map(
        lambda q, k, v, sink: compute(q, k, v, sink=sink),
        mesh=mesh(),
        in_specs=(rows, rows, rows, P("heads")),
        out_specs=(rows, P("batch", "heads", None)),
        check_vma=check_vma,
    )

    def all_of(compute: Any, *arrays: jax.Array) -> Any:
        grads = jax.grad(lambda *arrays: loss(compute, {"causal": True}, *arrays), (0, 1, 2, 3))
        return (*compute(*arrays[:3], sink=arrays[3], causal=True), *grads(*arrays))

    def sharded(*arrays: jax.Array, sink: jax.Array, causal: bool) -> Any:
        return mapped(*arrays, sink)

    found, expected = (jax.jit(partial(all_of, f))(*operands) for f in (sharded, reference))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_shard_map_inside_of_the_gradient() -> None:
    """Data parallel: the loss is summed over the devices, the sink is shared."""
    operands = (*qkv(batch=4), draw(9, 4, dtype=jnp.float32))
    mask = bj.BlockMask(jnp.ones((1, 1, 1, 1), bool), 64)
    rows = P("batch")

    def step(*arrays: jax.Array) -> Any:
        def total(*arrays: jax.Array) -> jax.Array:
            q, k, v, sink = arrays
            o = bj.attention(q, k, v, sink=sink, block_mask=mask)
            return jax.lax.psum((o.astype(jnp.float32) ** 2).sum(), "batch")

        return jax.grad(total, (0, 1, 2, 3))(*arrays)

    specs = (rows, rows, rows, P())
    found = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=specs, out_specs=specs))(*operands)

    def total(*arrays: jax.Array) -> jax.Array:
        return (reference(*arrays[:3], sink=arrays[3])[0] ** 2).sum()

    for one, other in zip(found, jax.grad(total, (0, 1, 2, 3))(*operands), strict=True):
        assert_close(one, other)


def test_remat_scan_and_checkpoint() -> None:
    operands = qkv(seqlens=(16, 16), heads=(2, 2))

    def layers(compute: Any, *arrays: jax.Array) -> jax.Array:
        q, k, v = arrays

        def layer(rows: jax.Array, _: None) -> tuple[jax.Array, None]:
            return compute(rows, k, v)[0].astype(rows.dtype), None

        return jax.lax.scan(jax.checkpoint(layer), q, length=3)[0].astype(jnp.float32).sum()

    found = jax.jit(jax.grad(partial(layers, with_lse), (0, 1, 2)))(*operands)
    expected = jax.jit(jax.grad(partial(layers, reference), (0, 1, 2)))(*operands)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, jnp.bfloat16 if DTYPE != jnp.float32 else DTYPE)
