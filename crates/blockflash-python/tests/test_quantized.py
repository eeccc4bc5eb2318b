"""Attention over q, k and v of 8 bits, and how tensors become such codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blockflash
from blockflash import flash_attn_interface as fa3

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
GREATEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
OPS = torch.ops.blockflash


def made(code: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(shape)
    return (
        (numbers * 40).round().clamp(-127, 127).to(code) if code == torch.int8 else numbers.to(code)
    )


def wide(codes: Tensor, scale: Tensor | None, heads: int) -> Tensor:
    """What codes `[B, S, H, D]` and scales `[1]` or `[B, H]` stand for."""
    if scale is None:
        return codes.float()
    if scale.dim() == 2:
        repeats = heads // scale.shape[1] if scale.shape[1] > 1 else 1
        scale = scale.repeat_interleave(repeats, 1)[:, None, :, None]
    return codes.float() * scale


SCALES: dict[str, tuple[tuple[int, ...] | None, ...]] = {
    "none": (None, None, None),
    "one": ((1,), (1,), (1,)),
    "heads": ((2, 4), (2, 2), (2, 2)),
    "heads of keys": ((2, 2), (2, 1), (1, 2)),
}


@pytest.mark.parametrize("shapes", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("code", CODES)
def test_codes_times_scales(code: torch.dtype, shapes: tuple[Any, ...]) -> None:
    q, k, v = made(code, 2, 9, 4, 16), made(code, 2, 30, 2, 16), made(code, 2, 30, 2, 16)
    unit = 0.03 if code == torch.int8 else 1.0
    scales = [None if s is None else unit * (torch.rand(s) + 0.5) for s in shapes]
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    how = {"causal": True, "return_lse": True, "softcap": 9.0, "sink": torch.randn(4)}
    o, lse = blockflash.attention(q, k, v, out_dtype=torch.float32, **given, **how)
    rows = [wide(t, s, t.shape[2]) for t, s in zip((q, k, v), scales, strict=True)]
    expected, expected_lse = blockflash.attention(*rows, **how)
    most = float(expected.abs().max())
    torch.testing.assert_close(o, expected, atol=1e-4 * most, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
    rounded = blockflash.attention(q, k, v, **given, causal=True, softcap=9.0, sink=how["sink"])
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, o.bfloat16())
    # Into a given tensor, and by the operators of torch.
    out = torch.empty(q.shape, dtype=torch.float16)
    blockflash.attention(q, k, v, **given, out_dtype=torch.float16, causal=True, softcap=9.0,
                         sink=how["sink"], out=out)  # fmt: skip
    assert torch.equal(out, o.half())


def test_scales_may_be_numbers() -> None:
    q = made(torch.float8_e4m3fn, 1, 5, 2, 16)
    one = torch.full((1,), 0.5)
    found = blockflash.attention(q, q, q, q_scale=0.5, v_scale=2)
    assert torch.equal(found, blockflash.attention(q, q, q, q_scale=one, v_scale=one * 4))
    for number in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="k_scale is .* finite and greater than 0"):
            blockflash.attention(q, q, q, k_scale=number)
        with pytest.raises(ValueError, match="scale is .* finite and greater than 0"):
            blockflash.quantize(torch.ones(1, 1, 1, 4), scale=number)


def test_out_dtype_of_16_bits() -> None:
    q = torch.randn(1, 5, 2, 16, dtype=torch.bfloat16)
    exact = blockflash.attention(q, q, q, out_dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert torch.equal(exact.bfloat16(), blockflash.attention(q, q, q))
    assert torch.equal(exact.half(), blockflash.attention(q, q, q, out_dtype=torch.float16))


def test_what_is_wrong_is_named() -> None:
    q = made(torch.float8_e4m3fn, 2, 5, 4, 16)
    with pytest.raises(ValueError, match=r"k_scale has shape \[2, 3\], expected \[1\] or \[2 or"):
        blockflash.attention(q, q, q, k_scale=torch.ones(2, 3))
    with pytest.raises(ValueError, match="k is e5m2, expected e4m3"):
        blockflash.attention(q, q.to(torch.float8_e5m2), q)
    with pytest.raises(ValueError, match="since v_scale is given"):
        blockflash.attention(*(q.float() for _ in range(3)), v_scale=1.5)
    with pytest.raises(ValueError, match="out_dtype is torch.int32"):
        blockflash.attention(q, q, q, out_dtype=torch.int32)
    with pytest.raises(TypeError, match=r"q_scale must be a torch.Tensor, not str"):
        blockflash.attention(q, q, q, q_scale="1")
    for of in ({"q_scale": torch.ones(1, requires_grad=True)}, {"out_dtype": torch.float16}):
        rows = (q.float().requires_grad_(),) * 3 if "out_dtype" in of else (q, q, q)
        with pytest.raises(blockflash.Unsupported, match="no gradient"):
            blockflash.attention(*rows, **of)
    x = torch.ones(1, 2, 3, 12)
    for options, why in (
        ({"rotate": True}, "a head_dim that is a power of 2"),
        ({"per": "row"}, "per is 'row'"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"scale": torch.ones(2)}, r"scale has shape \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32), "max_seqlen": 2}, r"x has shape"),
        ({"max_seqlen": 2}, "come together"),
    ):
        with pytest.raises(ValueError, match=why):
            blockflash.quantize(x, **options)
    _, scale = blockflash.quantize(x.requires_grad_())
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        scale.sum().backward()


@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("code", CODES)
def test_quantize(code: torch.dtype, per: str) -> None:
    x = torch.randn(2, 70, 3, 16, dtype=torch.bfloat16)
    codes, scale = blockflash.quantize(x, code, per=per)
    dims = {"tensor": (0, 1, 2, 3), "head": (1, 3), "token": (3,)}[per]
    most = x.float().abs().amax(dims, keepdim=True)
    shape = {"tensor": (1,), "head": (2, 3), "token": (2, 70, 3)}[per]
    assert torch.equal(scale, (most / GREATEST[code]).reshape(shape))
    numbers = x.float() / (most / GREATEST[code])
    expected = numbers.round() if code == torch.int8 else numbers.to(code).float()
    assert torch.equal(codes.float(), expected)
    again, given = blockflash.quantize(x, code, scale=scale if per != "token" else 0.25)
    assert per == "token" or (torch.equal(again.float(), codes.float()) and given is scale)


def test_mean_and_rotation() -> None:
    x = torch.randn(2, 70, 3, 16) + torch.randn(16)
    codes, scale, mean = blockflash.quantize(x, torch.int8, subtract_mean=True)
    torch.testing.assert_close(mean, x.mean(1))
    back = codes.float() * scale[:, None, :, None] + mean[:, None]
    torch.testing.assert_close(back, x, atol=float(scale.max()) * 0.51, rtol=0)
    rotated, scale = blockflash.quantize(x, torch.int8, rotate=True)
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    back = rotated.float() * scale[:, None, :, None] @ matrix / 4
    torch.testing.assert_close(back, x, atol=float(scale.max()) * 4, rtol=0)


def test_packed() -> None:
    x, offsets = torch.randn(9, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    codes, scale = blockflash.quantize(x, torch.int8, cu_seqlens=offsets, max_seqlen=4)
    for entry, (start, end) in enumerate(((0, 3), (3, 7))):
        alone, of_alone = blockflash.quantize(x[None, start:end], torch.int8)
        assert torch.equal(codes[start:end], alone[0])
        assert torch.equal(scale[entry], of_alone[0])
    assert not codes[7:].any()
    v = codes.float() * torch.cat([scale[:1].expand(3, 2), scale[1:].expand(6, 2)])[..., None]
    packed = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    scales = {"q_scale": scale, "k_scale": scale, "v_scale": scale}
    o = blockflash.attention(codes, codes, codes, **packed, **scales, out_dtype=torch.float32)
    torch.testing.assert_close(o, blockflash.attention(v, v, v, **packed), atol=1e-4, rtol=1e-4)


def test_flash_attn_3() -> None:
    x = torch.randn(3, 2, 20, 4, 16)
    (q, q_scale), (k, k_scale), (v, v_scale) = (blockflash.quantize(t) for t in x)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    descales = {name.replace("scale", "descale"): scale for name, scale in scales.items()}
    expected = blockflash.attention(q, k, v, causal=True, **scales)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True, **descales), expected)
    qkv = torch.stack([t.view(torch.uint8) for t in (q, k, v)], 2).view(q.dtype)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, causal=True, **descales), expected)
    offsets = torch.tensor([0, 20, 40], dtype=torch.int32)
    rows = (t.flatten(0, 1) for t in (q, k, v))
    found = fa3.flash_attn_varlen_func(*rows, offsets, offsets, 20, 20, causal=True, **descales)
    assert torch.equal(found, expected.flatten(0, 1))
    for name in descales:
        with pytest.raises(ValueError, match=rf"^{name} has shape \[2, 3\]"):
            fa3.flash_attn_func(q, k, v, **descales | {name: torch.ones(2, 3)})


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 40, 64, 100, 128, 256])
def test_on_a_gpu(head_dim: int) -> None:
    """Kernels of Hopper round probabilities, to four significant bits."""
    x = torch.randn(3, 2, 150, 4, head_dim)
    (q, q_scale), (k, k_scale), (v, v_scale) = (blockflash.quantize(t) for t in x)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    given = {name: scale.cuda() for name, scale in scales.items()}
    rows = [t.cuda() for t in (q, k, v)]
    if torch.cuda.get_device_capability()[0] != 9:
        with pytest.raises(blockflash.Unsupported, match="kernels of Hopper take: convert"):
            blockflash.attention(*rows, **given)
        return
    for code in (torch.float8_e5m2, torch.int8):
        with pytest.raises(blockflash.Unsupported, match="for Hopper also to e4m3"):
            blockflash.attention(*(t.float().to(code) for t in rows), **given)
    for out_dtype in (None, torch.float16):
        how = {"causal": True, "out_dtype": out_dtype, "return_lse": True}
        expected, expected_lse = blockflash.attention(q, k, v, **scales, **how)
        found, lse = blockflash.attention(*rows, **given, **how)
        assert found.dtype == expected.dtype
        error = (found.cpu().float() - expected.float()).norm() / expected.float().norm()
        assert float(error) < 0.05
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=0.02, rtol=0.01)
    descales = {name.replace("scale", "descale"): scale for name, scale in given.items()}
    again = fa3.flash_attn_func(*rows, causal=True, **descales)
    plain = blockflash.attention(*rows, causal=True, **given)
    assert torch.equal(again, plain)
    compiled = torch.compile(blockflash.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*rows, causal=True, **given), plain)
    graph, o = torch.cuda.CUDAGraph(), torch.zeros_like(plain)
    with torch.cuda.graph(graph):
        o.copy_(blockflash.attention(*rows, causal=True, **given))
    graph.replay()
    assert torch.equal(o, plain)


def test_compiled() -> None:
    x = torch.randn(1, 20, 2, 16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        codes, scale = blockflash.quantize(x, torch.float8_e4m3fn)
        return blockflash.attention(
            codes, codes, codes, q_scale=scale, k_scale=scale, v_scale=scale
        )

    codes, scale = blockflash.quantize(x)
    scales = {"q_scale": scale, "k_scale": scale, "v_scale": scale}
    expected = blockflash.attention(codes, codes, codes, **scales)
    with torch.no_grad():
        found = compiled(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_operators() -> None:
    """Torch's own check of schemas, fakes and autograd."""
    x = torch.randn(1, 6, 2, 8)
    torch.library.opcheck(OPS.quantize.default, (x, None, None, 2, 1, True, True, 0))
    codes, scale = blockflash.quantize(x, torch.int8)
    options = {"q_scale": scale, "k_scale": scale, "out_dtype": 1}
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.attention.default, (codes,) * 3, options, test_utils=tests)
