"""Decoding of multi-head latent attention, against float64 by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close, reference
from test_fakes import check as check_fake
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import blockflash
from blockflash import attention_decode, attention_merge, mla_decode

HALF = [pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.bfloat16, torch.float16)]
WHERE = [("cpu", torch.float32), ("cpu", torch.bfloat16), *HALF]
PAGE, PAGES, SCALE = 16, 12, 192**-0.5
LENGTHS = torch.tensor([37, 0, 48, 5], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 9], [-5, 99, 0], [4, 11, 0], [6, -1, 99]]).int()
CAPACITY = PAGE * TABLE.shape[1]
ROWS = {"576/512": (576, 512), "512/512": (512, 512)}


class Case:
    """Queries, a cache with NaN in slots that nobody may read, and what each sequence has."""

    def __init__(
        self, kind: str, device: str, dtype: torch.dtype, row: int, queries: int, heads: int = 16
    ) -> None:
        torch.manual_seed(0)
        # Scores of up to 4, as of a model.
        self.q = torch.randn(4, queries, heads, row, device=device).to(dtype) / 2
        self.options: dict[str, Any] = {"seqlens": LENGTHS.to(device)}
        if kind == "paged":
            self.cache = torch.randn(PAGES, PAGE, row, device=device, dtype=dtype)
            self.options["block_table"] = TABLE.to(device)
            self.cache[10] = torch.nan
            self.cache[9, 5:] = torch.nan
        else:
            self.cache = torch.randn(4, CAPACITY, row, device=device, dtype=dtype)
            for entry, length in enumerate(LENGTHS):
                self.cache[entry, length:] = torch.nan

    def rows(self, entry: int) -> Tensor:
        """The rows of a sequence as keys of one head, `[1, length, 1, row]`."""
        length, cache = int(LENGTHS[entry]), self.cache.cpu()
        if "block_table" in self.options:
            return cache[TABLE[entry].clamp(0, PAGES - 1)].flatten(0, 1)[None, :length, None]
        return cache[entry, :length][None, :, None]

    def check(self, o: Tensor, lse: Tensor, columns: int, causal: bool) -> None:
        """Each sequence against float64."""
        for entry in range(4):
            one, k = slice(entry, entry + 1), self.rows(entry)
            given: dict[str, Any] = {"causal": causal, "scale": SCALE}
            expected_o, expected_lse = reference(self.q[one], k, k[..., :columns], **given)
            assert_close(o[one].cpu(), expected_o, self.q.dtype)
            of_lse = torch.float32 if self.q.is_cpu else self.q.dtype
            assert_close(lse[one].cpu(), expected_lse, of_lse)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize(("row", "columns"), ROWS.values(), ids=ROWS)
def test_decode(
    row: int, columns: int, kind: str, queries: int, device: str, dtype: torch.dtype
) -> None:
    case = Case(kind, device, dtype, row, queries)
    whole = {**case.options, "scale": SCALE, "head_dim_v": columns}
    for causal in (True, False):
        call = {**whole, "causal": causal}
        o, lse = mla_decode(case.q, None, case.cache, **call, return_lse=True)
        assert o.shape == (4, queries, 16, columns) and lse.shape == (4, 16, queries)
        case.check(o, lse, columns, causal)
    # A dimension of one head, queries in two parts, and a given output.
    cache, parts = case.cache.unsqueeze(2), (case.q[..., :columns], case.q[..., columns:])
    call = {**case.options, "scale": SCALE, "causal": False}
    if row > columns:
        assert torch.equal(mla_decode(*parts, cache, **call), o)
    out = torch.full_like(o, torch.nan)
    found, of_out = mla_decode(case.q, None, cache, **whole, causal=False, out=out, return_lse=True)
    assert found is out and torch.equal(out, o) and torch.equal(of_out, lse)
    assert mla_decode(case.q, None, cache, **whole, causal=False, out=out.zero_()) is out
    assert torch.equal(out, o)
    # The same cache, as attention_decode has it.
    used = {"seqused_k": case.options["seqlens"], "block_table": case.options.get("block_table")}
    given = {**used, "scale": SCALE, "return_lse": True}
    same, same_lse = attention_decode(case.q, cache, cache[..., :columns], **given)
    assert torch.equal(same, o) and torch.equal(same_lse, lse)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_packed_queries(device: str, dtype: torch.dtype) -> None:
    """Numbers of queries that differ, and two rows of no sequence."""
    case, counts = Case("paged", device, dtype, 576, 1), (1, 0, 9, 3)
    q = torch.randn(sum(counts) + 2, 16, 576, device=device).to(dtype) / 2
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    packed = {"cu_seqlens_q": starts.to(device), "max_seqlen_q": 9, "scale": SCALE}
    o, lse = mla_decode(
        q[..., :512], q[..., 512:], case.cache, **case.options, **packed, return_lse=True
    )
    for entry, rows in enumerate(map(slice, starts[:-1], starts[1:])):
        k = case.rows(entry)
        expected, expected_lse = reference(q[rows][None], k, k[..., :512], causal=True, scale=SCALE)
        assert_close(o[rows].cpu(), expected[0], dtype)
        of_lse = torch.float32 if device == "cpu" else dtype
        assert_close(lse[:, rows].cpu(), expected_lse[0], of_lse)
    assert not o[sum(counts) :].any() and not lse[:, sum(counts) :].any()


def test_parts_of_the_keys_are_merged() -> None:
    q, cache = torch.randn(2, 1, 8, 36), torch.randn(2, 40, 36)
    call = {"scale": 0.3, "head_dim_v": 32, "return_lse": True}
    whole, lse = mla_decode(q, None, cache, **call)
    parts = [mla_decode(q, None, cache[:, part], **call) for part in (slice(0, 13), slice(13, 40))]
    merged, merged_lse = attention_merge(*zip(*parts, strict=True))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)


def test_what_is_wrong_is_named() -> None:
    q, cache = torch.randn(2, 1, 8, 36), torch.randn(2, 40, 36)
    nope, rope = q[..., :32], q[..., 32:]
    call = {"scale": 0.3}
    for given, text in (
        ((nope, rope[:1], cache), "q_rope is torch.float32 \\[1, 1, 8, 4\\], expected"),
        ((nope, rope.double(), cache), "q_rope is torch.float64"),
        ((nope, q, cache), "q_nope and q_rope have 32 and 36 elements, expected 36 together"),
        ((q, None, cache), "head_dim_v is 512, but a row has 36 elements"),
        ((nope, rope, cache.view(2, 20, 2, 36)), "cache has shape \\[2, 20, 2, 36\\], expected"),
        ((nope, rope, cache[0]), "cache has shape \\[40, 36\\]"),
    ):
        with pytest.raises(ValueError, match=text):
            mla_decode(*given, **call)
    with pytest.raises(TypeError, match="cache must be a torch.Tensor"):
        mla_decode(nope, rope, None, **call)
    for out, text in (
        (q, "out has shape \\[2, 1, 8, 36\\], expected \\[2, 1, 8, 32\\]"),
        (torch.empty(2, 2, 8, 32), "out has shape"),
        (torch.empty(2, 1, 8, 32, dtype=torch.bfloat16), "out is bf16"),
        (cache.view(-1)[:512].view(2, 1, 8, 32), "out shares memory with cache"),
    ):
        with pytest.raises(ValueError, match=text):
            mla_decode(nope, rope, cache, **call, out=out)
    with pytest.raises(ValueError, match="come together"):
        mla_decode(nope, rope, cache, **call, max_seqlen_q=1)


USED, PAGED = torch.tensor([20, 17], dtype=torch.int32), torch.tensor([[0], [1]]).int()
WRONG_IN_A_KERNEL: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (
        {"q_nope": torch.randn(3, 1, 8, 36)},
        "^q_nope has shape \\[3, 1, 8, 36\\], expected",
    ),
    "type": ({"q_nope": torch.randn(2, 1, 8, 36).half()}, "^q_nope is f16, expected f32"),
    "width": ({"q_nope": torch.randn(2, 1, 8, 40)}, "^q_nope has shape"),
    "cache": ({"cache": torch.zeros(2, 40, 36, dtype=torch.int32)}, "^cache is i32"),
    "stride": ({"cache": torch.zeros(2, 36, 40).mT}, "^cache .*contiguous"),
    "number of lengths": ({"seqlens": USED[:1]}, "^seqlens has shape \\[1\\], expected \\[2\\]"),
    "type of lengths": ({"seqlens": USED.float()}, "^seqlens is f32, expected i32"),
    "table": ({"block_table": PAGED[0]}, "^block_table has shape \\[1\\]"),
    "type of the table": ({"block_table": PAGED.float()}, "^block_table is f32"),
    "rank": ({"cu_seqlens_q": USED, "max_seqlen_q": 1}, "^q_nope has shape"),
    "offsets": (
        {"q_nope": torch.randn(2, 8, 36), "cu_seqlens_q": USED.float(), "max_seqlen_q": 1},
        "^cu_seqlens_q is f32",
    ),
    "maximum": (
        {"q_nope": torch.randn(2, 8, 36), "cu_seqlens_q": USED[:1], "max_seqlen_q": -1},
        "^max_seqlen_q is -1",
    ),
    "scale": ({"scale": 0.0}, "^scale is 0"),
}


@pytest.mark.parametrize("how", ["called", "compiled", "out"])
@pytest.mark.parametrize("name", WRONG_IN_A_KERNEL)
def test_kernels_name_what_the_caller_has_passed(name: str, how: str) -> None:
    changes, text = WRONG_IN_A_KERNEL[name]
    given = {"q_nope": torch.randn(2, 1, 8, 36), "q_rope": None, "cache": torch.randn(2, 40, 36)}
    given |= {"scale": 0.3, "head_dim_v": 32} | changes
    call = torch.compile(mla_decode, backend="aot_eager") if how == "compiled" else mla_decode
    if how == "out":
        given["out"] = torch.empty(*given["q_nope"].shape[:-1], 32, dtype=given["q_nope"].dtype)
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        call(**given)


def test_queries_of_two_parts_are_named() -> None:
    q, cache = torch.randn(3, 1, 8, 36), torch.randn(2, 40, 36)
    text = "^torch.cat\\(\\[q_nope, q_rope\\], -1\\) has shape \\[3, 1, 8, 36\\], expected \\[2"
    with pytest.raises(ValueError, match=text):
        mla_decode(q[..., :32], q[..., 32:], cache, scale=0.3)


@pytest.mark.parametrize("of", ["q", "cache"])
def test_a_gradient_raises(of: str) -> None:
    q, cache = torch.randn(2, 1, 8, 36), torch.randn(2, 40, 36)
    {"q": q, "cache": cache}[of].requires_grad_()
    with pytest.raises(blockflash.Unsupported, match="no gradient"):
        mla_decode(q, None, cache, scale=0.3, head_dim_v=32)
    with torch.no_grad():
        mla_decode(q, None, cache, scale=0.3, head_dim_v=32)


def test_what_torch_sees() -> None:
    ops, used = torch.ops.blockflash, torch.tensor([20, 17], dtype=torch.int32)
    q, cache = torch.randn(2, 3, 8, 36), torch.randn(2, 40, 1, 36)
    for columns in (32, 36):
        check_fake(lambda *t, n=columns: ops.mla_decode(*t[:2], n, t[2]), q, cache, used)
    with FlopCounterMode(display=False) as counter:
        mla_decode(q, None, cache, scale=0.3, head_dim_v=32)
        mla_decode(q, None, cache, scale=0.3, head_dim_v=32, out=torch.empty(2, 3, 8, 32))
    assert counter.get_total_flops() == 2 * 2 * (2 * 3 * 8) * 40 * (36 + 32)
    blockflash.reset_stats()
    mla_decode(q, None, cache, scale=0.3, head_dim_v=32)
    assert blockflash.stats()["mla_decode"].kernel == 1

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, cache: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        mla_decode(q, None, cache, None, used, scale=0.3, head_dim_v=32, out=out)
        return mla_decode(q, None, cache, None, used, scale=0.3, head_dim_v=32, return_lse=True)

    out = torch.empty(2, 3, 8, 32)
    o, lse = mla_decode(q, None, cache, None, used, scale=0.3, head_dim_v=32, return_lse=True)
    found, found_lse = compiled(q, cache, out)
    assert torch.equal(found, o) and torch.equal(found_lse, lse) and torch.equal(out, o)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8, 16, 128])
def test_graphs_follow_lengths(heads: int) -> None:
    case = Case("paged", "cuda", torch.bfloat16, 576, 1, heads)
    call = {**case.options, "scale": SCALE}
    out, lengths = torch.empty(4, 1, heads, 512, **_like(case.q)), case.options["seqlens"]
    mla_decode(case.q, None, case.cache, **call, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(case.q, None, case.cache, **call, out=out)
    for used in ([37, 0, 48, 5], [1, 0, 16, 4], [2**31 - 1, -7, 3, 0]):
        lengths.copy_(torch.tensor(used))
        # Slots that were never written are NaN, so a length beyond them is left out of the table.
        case.cache.nan_to_num_()
        graph.replay()
        assert torch.equal(out, mla_decode(case.q, None, case.cache, **call))


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"device": tensor.device, "dtype": tensor.dtype}
