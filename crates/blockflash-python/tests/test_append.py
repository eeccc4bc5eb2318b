"""New keys and values of caches, against assignments of slots."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from blockflash import Unsupported, append_kv, attention_decode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE, PAGES, COLUMNS = 16, 9, 3
TABLE = torch.tensor([[7, 2, 4], [0, 8, 1]], dtype=torch.int32)
LENGTHS = torch.tensor([37, 2], dtype=torch.int32)


def written(cache: Tensor, new: list[Tensor], table: Tensor | None) -> Tensor:
    """The cache with the new rows of each sequence as its last ones, without those before it."""
    expected = cache.clone()
    for entry, rows in enumerate(new):
        for i, row in enumerate(rows):
            at = int(LENGTHS[entry]) - len(rows) + i
            if at >= 0 and table is None:
                expected[entry, at] = row.to(cache.dtype)
            elif at >= 0:
                expected[int(table[entry, at // PAGE]), at % PAGE] = row.to(cache.dtype)
    return expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged", "interleaved"])
def test_last_rows_are_written(device: str, dtype: torch.dtype, kind: str) -> None:
    shape = (2, COLUMNS * PAGE) if kind == "contiguous" else (PAGES, PAGE)
    both = torch.randn(*shape, 2, 2, 24, dtype=dtype, device=device)
    k_cache, v_cache = both.unbind(2)
    if kind != "interleaved":
        k_cache, v_cache = k_cache.clone(), v_cache[..., :16].clone()
    table = None if kind == "contiguous" else TABLE
    for count, packed in itertools.product((1, 4), (False, True)):
        counts = (count, count) if not packed else (count, 3)
        new = [
            [torch.randn(n, *c.shape[2:], dtype=dtype) for n in counts] for c in (k_cache, v_cache)
        ]
        wanted = [written(c.cpu(), rows, table) for c, rows in zip((k_cache, v_cache), new)]
        k, v = (torch.cat(rows) if packed else torch.stack(rows) for rows in new)
        offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        append_kv(
            k.to(device),
            v.to(device),
            k_cache,
            v_cache,
            seqused_k=LENGTHS.to(device),
            block_table=None if table is None else table.to(device),
            cu_seqlens_k=offsets.to(device) if packed else None,
        )
        assert torch.equal(k_cache.cpu(), wanted[0]) and torch.equal(v_cache.cpu(), wanted[1])


@pytest.mark.parametrize("device", DEVICES)
def test_as_attention_appends(device: str) -> None:
    """Into caches of 8 bits, too, whose scales are given."""
    q = torch.randn(2, 1, 4, 32, dtype=torch.bfloat16, device=device)
    new = torch.randn(2, 2, 1, 2, 32, dtype=torch.bfloat16, device=device)
    given = {"seqused_k": LENGTHS.to(device), "block_table": TABLE.to(device)}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        scales = {}
        if dtype != torch.bfloat16:
            scales = {name: torch.full((1,), 0.5, device=device) for name in ("k_scale", "v_scale")}
        cache = torch.randn(2, PAGES, PAGE, 2, 32, device=device).to(dtype)
        other = cache.clone()
        o = attention_decode(q, *cache.unbind(), k=new[0], v=new[1], **given, **scales)
        append_kv(*new, *other.unbind(), **given, **scales)
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(attention_decode(q, *other.unbind(), **given, **scales), o)


def test_compiled() -> None:
    """The written caches are those of the caller."""
    k_cache, v_cache = torch.zeros(2, 2, 48, 2, 8)
    k, v = torch.randn(2, 2, 1, 2, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k: Tensor, v: Tensor) -> Tensor:
        append_kv(k, v, k_cache, v_cache, seqused_k=LENGTHS)
        return k_cache.sum()

    step(k, v)
    assert torch.equal(k_cache[0, 36], k[0, 0]) and torch.equal(v_cache[1, 1], v[1, 0])


def test_what_is_wrong_is_named() -> None:
    k_cache, v_cache = torch.zeros(2, PAGES, PAGE, 2, 8)
    k, v = torch.zeros(2, 2, 1, 2, 8)
    for changed, message in [
        ({"k": k[..., :4]}, "k has shape"),
        ({"v": v[:1]}, "v has shape"),
        ({"k": k.half()}, "k is f16"),
        ({"block_table": TABLE.long()}, "block_table"),
        ({"seqused_k": LENGTHS[:1]}, "seqused_k has shape"),
        ({"k_scale": torch.ones(1)}, "k_scale"),
        ({"k_cache": k_cache[0]}, "k_cache has shape"),
    ]:
        right = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "block_table": TABLE}
        with pytest.raises(ValueError, match=message):
            append_kv(**(right | {"seqused_k": LENGTHS} | changed))
    offsets = torch.tensor([0, 400, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        append_kv(
            *(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache),
            seqused_k=LENGTHS,
            block_table=TABLE,
            cu_seqlens_k=offsets,
        )
    with pytest.raises(ValueError, match="k_cache on meta"):
        append_kv(k, v, k_cache.to("meta"), v_cache, block_table=TABLE)
    with pytest.raises(Unsupported, match="gradient"):
        append_kv(k.requires_grad_(), v, k_cache, v_cache, block_table=TABLE)
