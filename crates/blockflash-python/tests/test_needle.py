"""One key among thousands is found by attention of 8 bits as by that of 16.

Keys are random unit vectors. The key of a needle is aligned with its query by a cosine, its
strength, and stands at some depth; the value of each key carries the number of its place in the
signs of its elements. A needle is found if the signs of the output are those of its place. The
strengths reach from needles that nobody finds to needles that everybody must find.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blockflash

STRENGTHS = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
DEPTHS = 16
"""Needles of a strength and head, from the first key to the last one."""
HEADS, HEADS_K = 4, 2
SHARPNESS = 22.0
"""Factor of the cosine of query and key in the score."""
CUDA = pytest.param("cuda", 131_072, 128, marks=pytest.mark.gpu)
SIZES = [("cpu", 2048, 64), ("cpu", 8192, 64), CUDA]


def directions(*shape: int, device: str) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1)


def haystack(device: str, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values `[1, needles or keys, heads, D]`, and the places of needles."""
    torch.manual_seed(0)
    strengths = torch.tensor(STRENGTHS, device=device).repeat_interleave(DEPTHS)
    needles = len(strengths)
    q = directions(needles, HEADS, dim, device=device)
    k = directions(keys, HEADS_K, dim, device=device)
    # Each needle has a place of its own, and all strengths have all depths.
    depth = torch.arange(needles * HEADS, device=device).reshape(needles, HEADS)
    share = (depth % DEPTHS + torch.rand(depth.shape, device=device) * 0.9) / DEPTHS
    order = (share.flatten() * (keys - share.numel())).long().sort()
    apart = order.values + torch.arange(share.numel(), device=device)
    at = torch.empty_like(apart).scatter_(0, order.indices, apart).reshape(needles, HEADS)
    aside = directions(needles, HEADS, dim, device=device)
    aside = aside - (aside * q).sum(-1, keepdim=True) * q
    aside = torch.nn.functional.normalize(aside, dim=-1)
    cosine = strengths[:, None, None]
    of_needles = cosine * q + (1 - cosine**2).sqrt() * aside
    heads_k = torch.arange(HEADS, device=device) // (HEADS // HEADS_K)
    k[at, heads_k] = of_needles
    # The number of a place in as many signs, further signs by chance, and magnitudes of all kinds.
    signs = torch.randint(0, 2, (keys, HEADS_K, dim), device=device)
    signs[..., : bits(keys)] = numbers(torch.arange(keys, device=device), keys)[:, None]
    v = (signs * 2 - 1) * (0.5 + torch.rand(keys, HEADS_K, dim, device=device))
    return q[None], k[None], v[None], at


def bits(keys: int) -> int:
    return (keys - 1).bit_length()


def numbers(places: Tensor, keys: int) -> Tensor:
    """Their bits."""
    return places[..., None] >> torch.arange(bits(keys), device=places.device) & 1


def found(o: Tensor, at: Tensor, keys: int) -> Tensor:
    """The share of needles of each strength whose places are read from the output."""
    read = (o[0, ..., : bits(keys)] > 0).long()
    return (read == numbers(at, keys)).all(-1).float().reshape(len(STRENGTHS), -1).mean(1).cpu()


@pytest.mark.parametrize(("device", "keys", "dim"), SIZES)
def test_needles(device: str, keys: int, dim: int) -> None:
    q, k, v, at = haystack(device, keys, dim)
    half = [t.bfloat16() for t in (q, k, v)]
    expected = found(blockflash.attention(*half, scale=SHARPNESS), at, keys)
    rates = {"bf16": expected}

    for name, code, per in (
        ("e4m3 cache, a scale per token", torch.float8_e4m3fn, "token"),
        ("e4m3 cache, a scale per head", torch.float8_e4m3fn, "head"),
        ("int8 cache, a scale per token", torch.int8, "token"),
    ):
        (k_codes, k_scale), (v_codes, v_scale) = (
            blockflash.quantize(t, code, per=per) for t in half[1:]
        )
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        o = blockflash.attention_decode(half[0], k_codes, v_codes, scale=SHARPNESS, **scales)
        rates[name] = found(o, at, keys)

    for name, options in (("e4m3", {}), ("e4m3, rotated", {"rotate": True})):
        (q8, q_scale), (k8, k_scale) = (blockflash.quantize(t, **options) for t in half[:2])
        v8, v_scale = blockflash.quantize(half[2])
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
            with pytest.raises(blockflash.Unsupported, match="kernels of Hopper take"):
                blockflash.attention(q8, k8, v8, scale=SHARPNESS, **scales)
            continue
        o = blockflash.attention(q8, k8, v8, scale=SHARPNESS, **scales)
        rates[name] = found(o, at, keys)

    print(f"{keys} keys on {device}: needles found by strength {STRENGTHS}")
    for name, rate in rates.items():
        print(f"{name:>30}", " ".join(f"{share:5.0%}" for share in rate.tolist()))
    # The weakest needles are lost and the strongest ones are found, so the strengths tell.
    assert expected[0] < 0.5
    assert (expected[-2:] == 1).all()
    for name, rate in rates.items():
        assert (rate[expected == 1] >= 0.98).all(), name
        assert (rate - expected).abs().max() <= 0.15, name
        assert abs(float((rate - expected).mean())) <= 0.03, name
