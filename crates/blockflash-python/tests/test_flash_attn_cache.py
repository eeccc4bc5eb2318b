"""flash-attn's functions with a cache, pages or rows out of use, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_close, reference
from test_decode import turned
from torch import Tensor

import blockflash
from blockflash import flash_attn as fa2
from blockflash import flash_attn_interface as fa3

BATCH, CAPACITY, HEADS, HEADS_K, DIM = 3, 64, 4, 2, 32
LENGTHS = torch.tensor([9, 50, 0], dtype=torch.int32)
HALF = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)
WHERE = pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), HALF])
MODULES = pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])


def operands(seqlen: int, device: str, dtype: torch.dtype, entries: int = BATCH) -> list[Tensor]:
    """q, caches with NaN beyond the lengths and the new tokens, and these."""
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    q = torch.randn(BATCH, seqlen, HEADS, DIM, **place)
    cache = torch.randn(2, entries, CAPACITY, HEADS_K, DIM, **place)
    return [q, *cache, *torch.randn(2, BATCH, seqlen, HEADS_K, DIM, **place)]


def check(q: Tensor, k: list[Tensor], v: list[Tensor], o: Tensor, lse: Tensor, **call: Any) -> None:
    """Each sequence with its own keys and values."""
    for entry in range(BATCH):
        one = slice(entry, entry + 1)
        expected = reference(q[one], k[entry][None], v[entry][None], **call)
        assert_close(o[one].cpu(), expected[0], q.dtype)
        assert_close(lse[one].cpu(), expected[1], torch.float32 if q.is_cpu else q.dtype)


@MODULES
@WHERE
@pytest.mark.parametrize("seqlen", [1, 4])
def test_cache_alone(module: Any, seqlen: int, device: str, dtype: torch.dtype) -> None:
    q, k_cache, v_cache, *_ = operands(seqlen, device, dtype)
    options: dict[str, Any] = {"softmax_scale": 0.2, "softcap": 5.0, "window_size": (11, 0)}
    for lengths in (LENGTHS.to(device), 33, None):
        count = torch.full((BATCH,), CAPACITY) if lengths is None else torch.as_tensor(lengths)
        k, v = ([row[:n] for row, n in zip(cache, count.expand(BATCH).tolist(), strict=True)]
                for cache in (k_cache, v_cache))  # fmt: skip
        found = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, **options, return_softmax_lse=True
        )
        check(q, k, v, *found, scale=0.2, softcap=5.0, window=(11, 0))
        again = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, **options, num_splits=7
        )
        assert torch.equal(again, found[0])


@MODULES
@WHERE
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("kind", ["contiguous", "chosen", "paged"])
def test_append(
    module: Any, kind: str, interleaved: bool | None, device: str, dtype: torch.dtype
) -> None:
    """New keys behind `cache_seqlens`, in entries of the cache that are chosen, or in pages."""
    new, page = 3, 16
    q, k_cache, v_cache, k, v = operands(new, device, dtype, entries=5)
    lengths, options = LENGTHS.to(device), {}
    entries = torch.arange(BATCH)
    if kind == "contiguous":
        k_cache, v_cache = k_cache[:BATCH], v_cache[:BATCH]
    elif kind == "chosen":
        entries = torch.tensor([4, 0, 2])
        options["cache_batch_idx"] = entries.int().to(device)
    before = [t.clone().cpu() for t in (k_cache, v_cache)]
    pages = torch.randperm(5 * CAPACITY // page).int()[: BATCH * 4].view(BATCH, 4)
    if kind == "paged":
        k_cache, v_cache = (t.view(-1, page, HEADS_K, DIM).contiguous() for t in (k_cache, v_cache))
        options["block_table" if module is fa2 else "page_table"] = pages.to(device)
        before = [t.cpu()[pages.long()].flatten(1, 2) for t in (k_cache, v_cache)]
    expected_q, expected_k = q.cpu().double(), k.cpu().double()
    if interleaved is not None:
        angles = torch.rand(CAPACITY, DIM // 4) * 6
        cos, sin = (t.to(device, dtype) for t in (angles.cos(), angles.sin()))
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        expected_q, expected_k = (
            torch.cat([turned(t[i : i + 1], cos, sin, n, interleaved)
                       for i, n in enumerate(LENGTHS.tolist())])
            for t in (q, k)
        )  # fmt: skip
    keys, values = [], []
    for i, n in enumerate(LENGTHS.tolist()):
        keys.append(torch.cat([before[0][entries[i]][:n], expected_k[i].to(dtype)]))
        values.append(torch.cat([before[1][entries[i]][:n], v[i].cpu()]))
    o, lse = module.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True,
        **options,
    )  # fmt: skip
    expected_q = expected_q.to(q)
    check(expected_q, keys, values, o, lse, causal=True)
    written = (
        t.cpu()[pages.long()].flatten(1, 2) if kind == "paged" else t.cpu()[entries]
        for t in (k_cache, v_cache)
    )
    for cache, rows in zip(written, (keys, values), strict=True):
        for entry, row in zip(cache, rows, strict=True):
            torch.testing.assert_close(entry[: len(row)], row, rtol=2e-2, atol=1e-5)


@WHERE
def test_packed(device: str, dtype: torch.dtype) -> None:
    """FlashAttention 3 with packed queries and packed new keys of other numbers."""
    _, k_cache, v_cache, *_ = operands(1, device, dtype)
    counts, news = [2, 1, 3], [1, 4, 2]
    q = torch.randn(sum(counts), HEADS, DIM, device=device, dtype=dtype)
    k, v = torch.randn(2, sum(news), HEADS_K, DIM, device=device, dtype=dtype)
    cu_q, cu_new = (torch.tensor([0, *each]).cumsum(0).int() for each in (counts, news))
    before = [t.clone().cpu() for t in (k_cache, v_cache)]
    o, lse = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS.to(device), causal=True,
        cu_seqlens_q=cu_q.to(device), cu_seqlens_k_new=cu_new.to(device), max_seqlen_q=3,
        return_softmax_lse=True,
    )  # fmt: skip
    for i, n in enumerate(LENGTHS.tolist()):
        rows, new = slice(cu_q[i], cu_q[i + 1]), slice(cu_new[i], cu_new[i + 1])
        keys, values = (
            torch.cat([cache[i, :n], t[new].cpu()]) for cache, t in zip(before, (k, v), strict=True)
        )
        expected = reference(q[rows][None], keys[None], values[None], causal=True)
        assert_close(o[rows][None].cpu(), expected[0], dtype)
        assert_close(lse[None, :, rows].cpu(), expected[1], torch.float32 if q.is_cpu else dtype)


@WHERE
def test_varlen_with_pages(device: str, dtype: torch.dtype) -> None:
    """A `block_table` of packed sequences is the same as their keys one after another."""
    table = torch.tensor([[5, 1, -1], [2, 7, 0], [9, 9, 9]], dtype=torch.int32, device=device)
    k, v = torch.randn(2, 8, 16, HEADS_K, DIM, device=device, dtype=dtype)
    cu_q, cu_k = (
        torch.tensor(each, device=device).int() for each in ([0, 4, 5, 7], [0, 20, 68, 68])
    )
    q = torch.randn(7, HEADS, DIM, device=device, dtype=dtype)
    lengths, options = [4, 48], {"causal": True, "return_attn_probs": True}
    o, lse, empty = fa2.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *lengths, **options, block_table=table
    )
    packed = [
        torch.cat([t[row.clamp(0, 7).long()].flatten(0, 1)[:n]
                   for row, n in zip(table, (20, 48, 0), strict=True)])
        for t in (k, v)
    ]  # fmt: skip
    expected = fa2.flash_attn_varlen_func(q, *packed, cu_q, cu_k, *lengths, **options)
    for ours, theirs in zip((o, lse), expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2 if q.is_cuda else 1e-5)
    assert empty.numel() == 0
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        fa2.flash_attn_varlen_func(
            q.requires_grad_(), k, v, cu_q, cu_k, *lengths, block_table=table
        )


@WHERE
@pytest.mark.parametrize("used", [("q", "k"), ("q",), ("k",)])
def test_rows_out_of_use(used: tuple[str, ...], device: str, dtype: torch.dtype) -> None:
    """`seqused_q` and `seqused_k`: the same as without the other rows, gradients included."""
    cu_q = torch.tensor([0, 6, 9, 9, 14], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 20, 30, 40, 60], dtype=torch.int32, device=device)
    used_q = torch.tensor([4, 3, 0, 99], dtype=torch.int32, device=device)
    used_k = torch.tensor([7, 0, 10, 20], dtype=torch.int32, device=device)
    counts_q = used_q.minimum(cu_q.diff()) if "q" in used else cu_q.diff()
    counts_k = used_k if "k" in used else cu_k.diff()
    inputs = [torch.randn(n, HEADS, DIM, device=device, dtype=dtype) for n in (14, 60, 60)]
    q, k, v = (t.requires_grad_() for t in inputs)
    rows_q, rows_k = (
        torch.cat([torch.arange(a, a + n) for a, n in zip(cu.tolist(), count.tolist())]).to(device)
        for cu, count in ((cu_q, counts_q), (cu_k, counts_k))
    )
    given = {f"seqused_{name}": {"q": used_q, "k": used_k}[name] for name in used}
    o = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 20, **given, causal=True)
    short = [torch.cat([t.new_zeros(1), t.cumsum(0).int()]) for t in (counts_q, counts_k)]
    expected = fa3.flash_attn_varlen_func(
        q[rows_q], k[rows_k], v[rows_k], *short, 6, 20, causal=True
    )
    torch.testing.assert_close(o[rows_q], expected)
    unused = torch.ones(14, dtype=torch.bool, device=device).index_fill(0, rows_q, False)
    assert not o[unused].any()
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def refused() -> list[tuple[Any, dict[str, Any], str]]:
    one = torch.ones(1)
    return [
        (fa3, {"q_descale": one}, "q_descale: .* leave it at"),
        (fa3, {"attention_chunk": 8}, "attention_chunk: .* leave it at"),
    ]


@pytest.mark.parametrize(("module", "arguments", "text"), refused())
def test_refused(module: Any, arguments: dict[str, Any], text: str) -> None:
    q, k_cache, v_cache, *_ = operands(1, "cpu", torch.float32)
    with pytest.raises(blockflash.Unsupported, match=text):
        module.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)


@MODULES
def test_wrong(module: Any) -> None:
    """flash-attn raises for all of these, too; nothing is written."""
    call: Callable[..., Any] = module.flash_attn_with_kvcache
    q, k_cache, v_cache, k, v = operands(2, "cpu", torch.float32)
    before = k_cache.clone()
    cos = torch.ones(CAPACITY, 8)
    name = "block_table" if module is fa2 else "page_table"
    table = torch.zeros(3, 1).int()
    new = {"k": k, "v": v, "cache_seqlens": LENGTHS}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": k}, "k, v come together, but v is None"),
        ({"k": k, "v": v}, "cache_seqlens"),
        ({"rotary_cos": cos, "rotary_sin": cos}, "with k and v only"),
        (new | {"rotary_cos": cos, "causal": True}, "rotary_sin"),
        (new | {"rotary_cos": cos[:9], "rotary_sin": cos[:9], "causal": True}, "positions|rows|9"),
        (new | {"rotary_cos": cos[:9], "rotary_sin": cos[:9]}, "9 positions"),
        (new | {"rotary_cos": cos.double(), "rotary_sin": cos}, "float64"),
        (new | {"k": k[:2], "v": v[:2]}, "shape"),
        (new | {"k": k[..., :1, :], "v": v[..., :1, :]}, "shape|heads"),
        ({"cache_seqlens": LENGTHS.long()}, "int64"),
        ({"cache_seqlens": LENGTHS[:2]}, "cache_seqlens has shape"),
        ({"cache_batch_idx": LENGTHS.long()}, "cache_batch_idx is torch.int64"),
        ({"cache_leftpad": LENGTHS[None]}, "cache_leftpad has shape"),
        ({name: table.long()}, f"{name}.* int64"),
        ({name: table[:2]}, "shape"),
        ({name: table[0]}, f"{name} has .*(shape|dimension)"),
        ({"softmax_scale": 0.0}, "^softmax_scale is 0"),
    ]
    if module is fa2:
        paged = {"block_table": table}
        wrong += [
            (paged | {"cache_batch_idx": LENGTHS}, "cache_batch_idx is for"),
            (paged | {"cache_leftpad": LENGTHS}, "cache_leftpad is for"),
            (paged | {"cache_seqlens": CAPACITY + 1}, "block_table"),
            (paged | {"cache_seqlens": LENGTHS + 60}, "block_table: .* 110 keys"),
            (paged | new | {"cache_seqlens": LENGTHS + 13}, "block_table: .* 65 keys"),
        ]
        assert call(q, k_cache, v_cache, **paged, cache_seqlens=CAPACITY).shape == q.shape
    for arguments, text in wrong:
        with pytest.raises(ValueError, match=text) as error:
            call(q, k_cache, v_cache, **arguments)
        assert isinstance(error.value, RuntimeError)
    assert torch.equal(k_cache, before)
    with pytest.raises(ValueError, match="more than the 64 slots"):
        long = torch.randn(2, BATCH, 65, HEADS_K, DIM)
        call(torch.randn(BATCH, 65, HEADS, DIM), k_cache, v_cache, *long, cache_seqlens=0)
