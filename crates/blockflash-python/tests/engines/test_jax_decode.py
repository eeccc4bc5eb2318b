"""`blockflash.jax` over caches, and what its functions refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine import needs

needs("jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_reference import DTYPE, assert_close, draw, qkv, reference  # noqa: E402

from blockflash import _native  # noqa: E402
from blockflash import jax as bj  # noqa: E402

LENGTHS = jnp.array([20, 33], jnp.int32)
TABLE = jnp.array([[4, 1, 7], [2, 0, 6]], jnp.int32)
"""Pages of 16 slots."""


def caches(pages: int = 8, head_dim: int = 16) -> tuple[jax.Array, jax.Array]:
    return draw(11, pages, 16, 2, head_dim), draw(12, pages, 16, 2, head_dim)


def rows_of(cache: jax.Array, table: jax.Array = TABLE) -> jax.Array:
    """The rows of each sequence, one after another."""
    return cache[table].reshape(table.shape[0], -1, *cache.shape[2:])


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (8, 0)},
    "scale and softcap": {"scale": 0.4, "softcap": 3.0, "causal": True},
    "sink": {"sink": draw(5, 4, dtype=jnp.float32), "causal": True},
    "alibi": {"alibi_slopes": draw(6, 4, dtype=jnp.float32)},
    "bias": {"bias": draw(7, 4, 1, 48, dtype=jnp.float32)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_over_pages(name: str) -> None:
    q, (k, v), options = draw(1, 2, 3, 4, 16), caches(), OPTIONS[name]
    found = jax.jit(partial(bj.attention_decode, return_lse=True, **options))(
        q, k, v, seqused_k=LENGTHS, block_table=TABLE
    )
    expected = jax.jit(partial(reference, lengths=LENGTHS, **options))(q, rows_of(k), rows_of(v))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_decode_without_pages() -> None:
    q, k, v = qkv(seqlens=(1, 48))
    found = bj.attention_decode(q, k, v, seqused_k=LENGTHS, batch_invariant=True)
    assert_close(found, reference(q, k, v, lengths=LENGTHS)[0])
    assert_close(bj.attention_decode(q, k, v), reference(q, k, v)[0])


def test_tail_mask() -> None:
    q, k, v = qkv(seqlens=(4, 48))
    tail = jnp.tril(jnp.ones((1, 4, 4), bool)).at[0, 3, 1].set(False)
    found = bj.attention_decode(q, k, v, tail_mask=tail)
    shown = jnp.ones((1, 1, 4, 48), bool).at[:, :, :, 44:].set(tail)
    assert_close(found, reference(q, k, v, visible=shown)[0])


def test_caches_of_8_bits() -> None:
    q, (k, v) = draw(1, 2, 1, 4, 16), caches()
    codes = [cache.astype(jnp.float8_e4m3fn) for cache in (k, v)]
    scale = jnp.full((1,), 0.5, jnp.float32)
    options = {"seqused_k": LENGTHS, "block_table": TABLE, "k_scale": scale, "v_scale": scale}
    found = bj.attention_decode(q, *codes, **options)
    k, v = (rows_of(cache.astype(jnp.float32)) * 0.5 for cache in codes)
    assert_close(found, reference(q, k, v, lengths=LENGTHS)[0])


def appended(cache: jax.Array, rows: jax.Array) -> jax.Array:
    """The cache with the last rows of each sequence replaced."""
    cache = np.array(cache)
    for sequence, length in enumerate(np.asarray(LENGTHS)):
        for at in range(rows.shape[1]):
            place = length - rows.shape[1] + at
            page = int(TABLE[sequence, place // 16])
            cache[page, place % 16] = rows[sequence, at]
    return jnp.asarray(cache)


@pytest.mark.parametrize("donate", [False, True])
def test_append(donate: bool) -> None:
    q, new_k, new_v = draw(1, 2, 2, 4, 16), draw(2, 2, 2, 2, 16), draw(3, 2, 2, 2, 16)
    k, v = caches()
    expected_k, expected_v = appended(k, new_k), appended(v, new_v)
    kept = [np.array(cache) for cache in (k, v)]
    step = jax.jit(
        partial(bj.attention_append, causal=True, seqused_k=LENGTHS, block_table=TABLE),
        donate_argnums=(3, 4) if donate else (),
    )
    o, found_k, found_v = step(q, new_k, new_v, k, v)
    assert np.array_equal(found_k, expected_k)
    assert np.array_equal(found_v, expected_v)
    options = {"causal": True, "lengths": LENGTHS}
    assert_close(o, reference(q, rows_of(expected_k), rows_of(expected_v), **options)[0])
    if not donate:
        # Arrays of JAX do not change.
        assert all(np.array_equal(a, b) for a, b in zip((k, v), kept, strict=True))
    o, lse, *_ = bj.attention_append(
        q, new_k, new_v, *caches(), seqused_k=LENGTHS, block_table=TABLE, return_lse=True
    )
    assert lse.shape == (2, 4, 2)


def test_generation_in_a_loop() -> None:
    """A cache that a scan carries, with one token in each step."""
    k, v = (jnp.zeros((2, 16, 2, 16), DTYPE) for _ in range(2))
    q, new_k, new_v = (draw(seed, 6, 2, 1, heads, 16) for seed, heads in ((1, 4), (2, 2), (3, 2)))

    @jax.jit
    def generate(k: jax.Array, v: jax.Array) -> jax.Array:
        def step(carry: Any, rows: Any) -> Any:
            k, v, lengths = carry
            o, k, v = bj.attention_append(*rows, k, v, seqused_k=lengths + 1)
            return (k, v, lengths + 1), o

        return jax.lax.scan(step, (k, v, jnp.zeros(2, jnp.int32)), (q, new_k, new_v))[1]

    found = generate(k, v)[:, :, 0]
    rows = [jnp.moveaxis(rows[:, :, 0], 0, 1) for rows in (q, new_k, new_v)]
    assert_close(jnp.moveaxis(found, 0, 1), reference(*rows, causal=True)[0])


def test_vmap_over_caches() -> None:
    q, (k, v) = draw(1, 3, 2, 1, 4, 16), caches()
    new = draw(2, 3, 2, 1, 2, 16)
    options = {"seqused_k": LENGTHS, "block_table": TABLE}
    # One cache that all entries read.
    found = jax.vmap(lambda q: bj.attention_decode(q, k, v, **options))(q)
    each = [bj.attention_decode(one, k, v, **options) for one in q]
    assert np.array_equal(found, jnp.stack(each))
    # Each entry writes into its own.
    found = jax.vmap(lambda q, new: bj.attention_append(q, new, new, k, v, **options))(q, new)
    each = [
        bj.attention_append(one, rows, rows, k, v, **options)
        for one, rows in zip(q, new, strict=True)
    ]
    for place, one in enumerate(found):
        assert np.array_equal(one, jnp.stack([results[place] for results in each]))


def test_hostile_tables_and_lengths_stay_inside() -> None:
    q, (k, v) = draw(1, 2, 1, 4, 16), caches()
    table = jnp.array([[2**31 - 1, -5, 99], [-(2**31), 8, 1000]], jnp.int32)
    for lengths in ([2**31 - 1, -7], [48, 0]):
        options = {"seqused_k": jnp.array(lengths, jnp.int32), "block_table": table}
        try:
            bj.attention_decode(q, k, v, **options).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            assert "block_table" in str(error) or "seqused" in str(error)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 3}, TypeError, "q is int, expected an array"),
    ({"q": draw(1, 2, 24, 4, 16, dtype=jnp.int32)}, TypeError, "q has element type int32"),
    ({"k": draw(1, 2, 40, 2, 16, dtype=jnp.float16)}, TypeError, "k has element type float16"),
    ({"k": draw(1, 3, 40, 2, 16)}, ValueError, r"k has shape \(3, 40, 2, 16\), expected .* \(2, _"),
    ({"v": draw(1, 2, 39, 2, 16)}, ValueError, r"v has shape .* expected \[B, Sk, Hk, Dv\]"),
    ({"k": draw(1, 2, 40, 3, 16), "v": draw(1, 2, 40, 3, 16)}, ValueError, "q has 4 heads"),
    ({"window": (-1, 0)}, ValueError, r"window is \(-1, 0\)"),
    ({"window": (1, 2), "causal": True}, ValueError, "expected no later keys"),
    ({"softcap": 0.0}, ValueError, "softcap is 0.0, expected a positive number"),
    ({"scale": float("nan")}, ValueError, "scale is nan"),
    ({"sink": draw(1, 3, dtype=jnp.float32)}, ValueError, r"sink has shape \(3,\)"),
    ({"sink": draw(1, 4, dtype=jnp.bfloat16)}, TypeError, "sink has element type bfloat16"),
    ({"bias": draw(1, 24, 39)}, ValueError, r"bias has shape \(1, 1, 24, 39\), expected \(2, 4"),
    ({"bias": jnp.ones((24, 40), bool)}, TypeError, "bias has element type bool"),
    ({"alibi_slopes": draw(1, 2, 3, dtype=jnp.float32)}, ValueError, "alibi_slopes has shape"),
    ({"block_mask": jnp.ones((1, 1, 1, 1), bool)}, TypeError, "expected blockflash.jax.BlockMask"),
    ({"block_mask": bj.BlockMask(jnp.ones((1, 1, 2, 1), bool), 64)}, ValueError, "blocks has sha"),
    ({"block_mask": bj.BlockMask(jnp.ones((3, 1, 1, 1), bool), 64)}, ValueError, "expected 1 or 2"),
    ({"block_mask": bj.BlockMask(jnp.ones((1, 1, 1, 1), bool), 0)}, ValueError, "block is 0"),
    ({"block_mask": bj.BlockMask(jnp.ones((1, 1, 1, 1)), 64)}, TypeError, "expected bool"),
]


@pytest.mark.parametrize(("changes", "kind", "match"), WRONG, ids=[wrong[2] for wrong in WRONG])
def test_attention_refuses(changes: dict[str, Any], kind: Any, match: str) -> None:
    given = dict(zip("qkv", qkv(), strict=True)) | changes
    with pytest.raises(kind, match=match):
        bj.attention(**given)


def test_decode_refuses() -> None:
    q, (k, v) = draw(1, 2, 1, 4, 16), caches()
    paged = partial(bj.attention_decode, q, k, v)
    with pytest.raises(ValueError, match=r"k_cache has shape \(8, 16, 2, 16\), expected \[B, cap"):
        paged()
    with pytest.raises(TypeError, match="block_table has element type float32"):
        paged(block_table=TABLE.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"seqused_k has shape \(3,\)"):
        paged(block_table=TABLE, seqused_k=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin come together"):
        paged(block_table=TABLE, rotary_cos=draw(1, 48, 8))
    with pytest.raises(ValueError, match=r"k has shape .* expected \[B, Sn, Hk, D\]"):
        bj.attention_append(q, draw(1, 2, 1, 1, 16), v, k, v, block_table=TABLE)
    with pytest.raises(ValueError, match="attention_decode` cannot be differentiated"):
        jax.grad(lambda q: bj.attention_decode(q, k, v, block_table=TABLE).sum())(q)
    # What only the target sees.
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*k_scale"):
        paged(block_table=TABLE, k_scale=draw(1, 1, dtype=jnp.float32)).block_until_ready()


def call(attributes: dict[str, Any], *operands: jax.Array, results: int = 2) -> None:
    """A custom call past the functions of the package."""
    q = operands[0]
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    shapes += [jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)]
    compute = jax.ffi.ffi_call("blockflash_attention", (shapes * 2)[:results])
    jax.block_until_ready(compute(*operands, **attributes))


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({}, "0 operands are named, but there are 3"),
    ({"operands": "q,k"}, "2 operands are named"),
    ({"operands": "q,k,w"}, "w is no operand"),
    ({"operands": "q,k,k"}, "k is no operand of this call, or twice"),
    ({"operands": "q,k,sink"}, "v is needed"),
    ({"operands": np.int64(3)}, "operands is of another type, expected a string"),
    ({"operands": "q,k,v", "colour": np.int64(3)}, "colour is no attribute"),
    ({"operands": "q,k,v", "left": np.float64(3)}, "left is of another type, expected an integer"),
    ({"operands": "q,k,v", "left": np.int64(-2)}, "left"),
    ({"operands": "q,k,v", "scale": True}, "scale is of another type, expected a float"),
    ({"operands": "q,k,v", "block_mask": np.int64(1)}, "block_mask is a number"),
    ({"operands": "q,k,v", "left": np.ones(2)}, "left is an attribute of an unknown type"),
]


@pytest.mark.parametrize(("attributes", "match"), BAD_CALLS, ids=[bad[1] for bad in BAD_CALLS])
def test_targets_refuse(attributes: dict[str, Any], match: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        call(attributes, *qkv(seqlens=(24, 24), heads=(2, 2)))


def test_targets_refuse_wrong_buffers() -> None:
    q, k, v = qkv(seqlens=(24, 24), heads=(2, 2))
    given = {"operands": "q,k,v"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="there are 3 results, expected o and lse"):
        call(given, q, k, v, results=3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="k has shape|k has|expected"):
        call(given, q, k[:, :5, :1], v)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        call(given, q, k.astype(jnp.int32), v)


def test_every_target_is_registered_on_both_platforms() -> None:
    names = {"attention", "attention_backward", "attention_decode"}
    rows = {(name, platform) for name, platform, address in _native.xla_targets() if address}
    assert rows == {(f"blockflash_{name}", on) for name in names for on in ("cpu", "CUDA")}


def test_examples_of_the_guide() -> None:
    page = Path(__file__).parents[4] / "docs/src/jax.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    assert len(examples) == 5
    for example in examples:
        exec(compile(example, "jax.md", "exec"), {})


def test_an_old_jax_is_refused() -> None:
    code = (
        "import jax; jax.__version_info__, jax.__version__ = (0, 9, 2), '0.9.2'\n"
        "try:\n    import blockflash.jax\nexcept ImportError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    assert said.stdout.decode() == "blockflash.jax needs JAX 0.10 or newer, not 0.9.2\n"


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import jax.numpy as jnp; "
        "from blockflash import jax as bj; q = jnp.ones((1, 8, 1, 8), jnp.bfloat16); "
        "assert bj.attention(q, q, q).shape == q.shape"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
