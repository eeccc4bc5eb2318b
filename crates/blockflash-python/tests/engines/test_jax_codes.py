"""`blockflash.jax` with codes of 8 bits: q, k and v, and caches whose appends choose scales."""

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
from jax_reference import DTYPE, ON_GPU, assert_close, draw, reference  # noqa: E402

from blockflash import Unsupported  # noqa: E402
from blockflash import jax as bj  # noqa: E402

CODES = (jnp.float8_e4m3fn,) if ON_GPU else (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
CACHE_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
GREATEST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0, jnp.int8: 127.0}
LENGTHS = jnp.array([20, 33], jnp.int32)
TABLE = jnp.array([[4, 1, 7], [2, 0, 6]], jnp.int32)
"""Pages of 16 slots."""


def made(code: Any, seed: int, *shape: int) -> jax.Array:
    values = draw(seed, *shape, dtype=jnp.float32)
    return jnp.round(values * 40).astype(code) if code == jnp.int8 else values.astype(code)


def scales_of(heads: Any, code: Any) -> dict[str, jax.Array]:
    """Of q, k and v, in these shapes."""
    unit = 0.03 if code == jnp.int8 else 1.0
    shapes = zip("qkv", heads, strict=True)
    return {
        f"{name}_scale": unit * (0.5 + jnp.abs(draw(seed, *shape, dtype=jnp.float32)))
        for seed, (name, shape) in enumerate(shapes)
        if shape is not None
    }


def wide(codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """What codes `[B, S, H, D]` and scales `[1]` or `[B, H]` stand for."""
    rows = codes.astype(jnp.float32)
    if scale is not None and scale.ndim == 2:
        repeats = rows.shape[2] // scale.shape[1]
        scale = jnp.repeat(scale, repeats, 1)[:, None, :, None]
    return rows if scale is None else rows * scale


SHAPES: dict[str, Any] = {
    "none": (None, None, None),
    "one": ((1,), (1,), (1,)),
    "heads": ((2, 4), (2, 2), (2, 2)),
    "heads of keys": ((1, 2), (2, 2), (1, 2)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_attention(head_dim: int, code: Any, shapes: Any) -> None:
    q = made(code, 1, 2, 24, 4, head_dim)
    k, v = (made(code, seed, 2, 40, 2, head_dim) for seed in (2, 3))
    scales = scales_of(shapes, code)
    how = {"causal": True, "scale": 0.4, "return_lse": True}
    rows = [wide(t, scales.get(f"{name}_scale")) for name, t in zip("qkv", (q, k, v), strict=True)]
    expected, expected_lse = reference(*rows, **{n: how[n] for n in ("causal", "scale")})
    for out_dtype in (None, jnp.float16) if ON_GPU else (None, jnp.float16, jnp.float32):
        compute = jax.jit(partial(bj.attention, out_dtype=out_dtype, **how))
        o, lse = compute(q, k, v, **scales)
        assert o.dtype == (out_dtype or jnp.bfloat16)
        assert o.shape == q.shape
        # Kernels round probabilities to four significant bits.
        error = jnp.linalg.norm(o.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
        assert error < (0.05 if ON_GPU else {2: 4e-3, 4: 1e-5}[o.dtype.itemsize])
        if not ON_GPU:
            assert_close(lse, expected_lse, jnp.float32)


def test_block_mask_of_codes() -> None:
    q, k, v = (made(CODES[0], seed, 1, 128, 2, 16) for seed in (1, 2, 3))
    mask = bj.BlockMask(jnp.array([[[[True, False], [True, True]]]]), 64)
    found = bj.block_sparse_attention(q, k, v, mask)
    shown = jnp.ones((1, 1, 128, 128), bool).at[:, :, :64, 64:].set(False)
    expected = reference(*(wide(t, None) for t in (q, k, v)), visible=shown)[0]
    assert jnp.linalg.norm(found - expected) < 0.05 * jnp.linalg.norm(expected)


def test_vmap() -> None:
    q, k, v = (made(CODES[0], seed, 3, 2, 24, 2, 16) for seed in (1, 2, 3))
    of_k, of_v = draw(4, 3, 2, 2, dtype=jnp.float32), draw(5, 1, dtype=jnp.float32)

    def attend(q: Any, k: Any, v: Any, of_k: Any) -> jax.Array:
        return bj.attention(q, k, v, k_scale=jnp.abs(of_k), v_scale=of_v)

    for axes, given in (((0, 0, 0, 0), of_k), ((0, 0, 0, None), of_k[0])):
        found = jax.vmap(attend, axes)(q, k, v, given)
        each = [
            attend(q[at], k[at], v[at], given[at] if axes[3] == 0 else given) for at in range(3)
        ]
        assert np.array_equal(found, jnp.stack(each))


def test_shard_map() -> None:
    if jax.device_count() < 2:
        pytest.skip("there is one device")
    mesh = jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Auto,))
    q = made(CODES[0], 1, 2, 24, 2, 16)
    scale = jnp.abs(draw(2, 2, 2, dtype=jnp.float32))
    one = jnp.ones(1)

    def attend(q: jax.Array, scale: jax.Array, one: jax.Array) -> jax.Array:
        return bj.attention(q, q, q, q_scale=scale, k_scale=one, v_scale=scale)

    specs = (P("batch"), P("batch"), P())
    divided = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("batch")))
    assert np.array_equal(divided(q, scale, one), attend(q, scale, one))


def test_codes_have_no_gradient() -> None:
    q = made(CODES[0], 1, 1, 8, 2, 16)
    v, scale = q.astype(jnp.float32), jnp.ones(1)
    for loss in (
        lambda scale: bj.attention(q, q, q, q_scale=scale).astype(jnp.float32).sum(),
        lambda scale: bj.attention(q, q, (v * scale).astype(q.dtype)).astype(jnp.float32).sum(),
    ):
        with pytest.raises(Unsupported, match="attention of float8_e4m3fn has no gradient"):
            jax.grad(loss)(scale)
    # What does not pass through them has one.
    assert jax.grad(lambda x: (x * bj.attention(q, q, q).astype(jnp.float32)).sum())(1.0) != 0


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": made(jnp.float8_e5m2, 1, 2, 8, 2, 16)}, TypeError, "k has element type float8_e5m2"),
    ({"k_scale": jnp.ones((2, 4))}, ValueError, r"k_scale has shape \(2, 4\), expected \(1,\) or"),
    ({"q_scale": jnp.ones((3, 4))}, ValueError, "of 1 or 2 batch entries and 1 or 2 or 4 heads"),
    ({"v_scale": jnp.ones(1, jnp.bfloat16)}, TypeError, "v_scale has element type bfloat16"),
    ({"v_scale": 2.0}, TypeError, "v_scale is float, expected an array"),
    ({"out_dtype": jnp.int8}, TypeError, "out_dtype is .*int8.*, expected float16, bfloat16"),
]


@pytest.mark.parametrize(("changes", "kind", "match"), WRONG, ids=[wrong[2] for wrong in WRONG])
def test_attention_refuses(changes: dict[str, Any], kind: Any, match: str) -> None:
    given = {name: made(CODES[0], 1, 2, 8, heads, 16) for name, heads in zip("qkv", (4, 2, 2))}
    with pytest.raises(kind, match=match):
        bj.attention(**given | changes)
    with pytest.raises(ValueError, match="k_scale is given, but q is .*, expected codes"):
        rows = {name: draw(1, *codes.shape) for name, codes in given.items()}
        bj.attention(**rows, k_scale=jnp.ones(1))


def cache_of(code: Any, seed: int) -> tuple[jax.Array, jax.Array]:
    """Codes of 8 pages with 16 slots, and a scale for each row."""
    codes = made(code, seed, 8, 16, 2, 16)
    return codes, 0.01 + jnp.abs(draw(seed + 1, 8, 16, 2, dtype=jnp.float32))


def rows_of(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """What each sequence has, one row after another."""
    rows = (codes.astype(jnp.float32) * scale[..., None])[TABLE]
    return rows.reshape(TABLE.shape[0], -1, *rows.shape[3:])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("code", CACHE_CODES, ids=lambda code: code.__name__)
def test_appends_choose_scales(code: Any, donate: bool) -> None:
    q, new_k, new_v = draw(1, 2, 2, 4, 16), draw(2, 2, 2, 2, 16), draw(3, 2, 2, 2, 16)
    new_k = new_k.at[0, 0, 1].set(0)
    (k, k_scale), (v, v_scale) = cache_of(code, 4), cache_of(code, 6)
    kept = [np.array(array.astype(jnp.float32)) for array in (k, v, k_scale, v_scale)]

    def step(q: Any, new_k: Any, new_v: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> Any:
        return bj.attention_append(
            q, new_k, new_v, k, v, k_scale=k_scale, v_scale=v_scale, scale_per_token=True,
            seqused_k=LENGTHS, block_table=TABLE, causal=True,
        )  # fmt: skip

    compiled = jax.jit(step, donate_argnums=(3, 4, 5, 6) if donate else ())
    given = [jnp.array(array) for array in (k, v, k_scale, v_scale)]
    o, *found = compiled(q, new_k, new_v, *given)
    for new, codes, scale, at in ((new_k, found[0], found[2], 0), (new_v, found[1], found[3], 1)):
        expected_codes, expected_scale = np.array(kept[at]), np.array(kept[2 + at])
        for sequence, length in enumerate(np.asarray(LENGTHS)):
            for token in range(2):
                place = int(length) - 2 + token
                slot = (int(TABLE[sequence, place // 16]), place % 16)
                row = np.asarray(new[sequence, token], np.float32)
                most = np.abs(row).max(-1) / np.float32(GREATEST[code])
                expected_scale[slot] = np.where(most == 0, 1, most)
                # On the host, which rounds once.
                numbers = row / expected_scale[slot][:, None]
                numbers = np.round(numbers) if code == jnp.int8 else numbers.astype(code)
                expected_codes[slot] = numbers.astype(np.float32)
        assert np.array_equal(scale, expected_scale)
        assert np.array_equal(codes.astype(jnp.float32), expected_codes)
    rows = rows_of(found[0], found[2]), rows_of(found[1], found[3])
    assert_close(o, reference(q, *rows, lengths=LENGTHS, causal=True)[0])
    if not donate:
        again = [np.array(array.astype(jnp.float32)) for array in given]
        assert all(np.array_equal(a, b) for a, b in zip(again, kept, strict=True))


def test_generation_in_a_loop() -> None:
    """Codes and scales that a scan carries, under vmap."""
    tokens = 6
    q, new_k, new_v = (draw(s, 3, tokens, 2, 1, h, 16) for s, h in ((1, 4), (2, 2), (3, 2)))

    def generate(q: jax.Array, new_k: jax.Array, new_v: jax.Array) -> Any:
        codes = jnp.zeros((2, 16, 2, 16), jnp.float8_e4m3fn)
        scale = jnp.ones((2, 16, 2), jnp.float32)

        def step(carry: Any, rows: Any) -> Any:
            *cache, lengths = carry
            k, v, k_scale, v_scale = cache
            o, *cache = bj.attention_append(
                *rows, k, v, k_scale=k_scale, v_scale=v_scale, scale_per_token=True,
                seqused_k=lengths + 1,
            )  # fmt: skip
            return (*cache, lengths + 1), o

        start = (codes, codes, scale, scale, jnp.zeros(2, jnp.int32))
        return jax.lax.scan(step, start, (q, new_k, new_v))

    (k, v, k_scale, v_scale, _), o = jax.vmap(generate)(q, new_k, new_v)
    for entry in range(3):
        rows = [
            (codes[entry].astype(jnp.float32) * scale[entry][..., None])[:, :tokens]
            for codes, scale in ((k, k_scale), (v, v_scale))
        ]
        turned = jnp.moveaxis(q[entry, :, :, 0], 0, 1)
        expected = reference(turned, *rows, causal=True)[0]
        assert_close(jnp.moveaxis(o[entry, :, :, 0], 0, 1), expected)


def test_appends_refuse() -> None:
    q, new = draw(1, 2, 1, 4, 16), draw(2, 2, 1, 2, 16)
    (k, k_scale), (v, v_scale) = cache_of(jnp.int8, 4), cache_of(jnp.int8, 6)
    paged = {"block_table": TABLE, "scale_per_token": True}
    append = partial(bj.attention_append, q, new, new)
    with pytest.raises(ValueError, match="scale_per_token needs k and v, and k_scale and v_scale"):
        append(k, v, **paged, k_scale=k_scale)
    with pytest.raises(ValueError, match=r"v_scale has shape \(8, 1, 2\), expected \[pages, page"):
        append(k, v, **paged, k_scale=k_scale, v_scale=v_scale[:, :1])
    with pytest.raises(TypeError, match="k_scale has element type bfloat16"):
        append(k, v, **paged, k_scale=k_scale.astype(jnp.bfloat16), v_scale=v_scale)
    rows = [draw(1, *k.shape, dtype=DTYPE)] * 2
    with pytest.raises(TypeError, match="k_cache has element type .*, expected float8_e4m3fn"):
        append(*rows, **paged, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(ValueError, match="scale_per_token needs"):
        bj.attention_decode(q, k, v, **paged, k_scale=k_scale, v_scale=v_scale)


def test_targets_refuse() -> None:
    """Calls past the functions of the package."""
    q, (k, k_scale) = draw(1, 2, 1, 4, 16), cache_of(jnp.int8, 4)
    k, k_scale = k[:2], k_scale[:2]
    new = draw(2, 2, 1, 2, 16)

    def call(operands: str, *arrays: jax.Array, results: int, aliases: Any = None) -> None:
        shapes = [(q.shape, q.dtype), ((2, 4, 1), jnp.float32)] + [(k.shape, k.dtype)] * 2
        shapes += [(k_scale.shape, k_scale.dtype)] * 2
        shapes = [jax.ShapeDtypeStruct(*shape) for shape in shapes[:results]]
        compute = jax.ffi.ffi_call(
            "blockflash_attention_decode", shapes, input_output_aliases=aliases
        )
        jax.block_until_ready(compute(*arrays, operands=operands))

    written = "q,k_cache,v_cache,k_token_scale,v_token_scale"
    given = (q, k, k, k_scale, k_scale)
    with pytest.raises(jax.errors.JaxRuntimeError, match="come with k and v"):
        call(written, *given, results=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the results are not o, lse, k_cache, v_"):
        call(f"{written},k,v", *given, new, new, results=4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="k_token_scale is not in the memory"):
        call(f"{written},k,v", *given, new, new, results=6, aliases={1: 2, 2: 3})
    with pytest.raises(jax.errors.JaxRuntimeError, match="v_token_scale is needed"):
        call(
            "q,k_cache,v_cache,k_token_scale,k,v", *given[:4], new, new, results=6,
            aliases={1: 2, 2: 3, 3: 4},
        )  # fmt: skip
