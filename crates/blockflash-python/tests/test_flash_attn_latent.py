"""`qv` of FlashAttention 3, against torch's math of both products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_close
from test_mla import WHERE, Case
from torch import Tensor

import blockflash
from blockflash.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def plain(
    q: Tensor, qv: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`q [Sq, H, 64]`, `qv [Sq, H, 512]`, `k [S, 64]`, `v [S, 512]`: o and lse in float64."""
    q, qv, k, v = (t.cpu().double() for t in (q, qv, k, v))
    scores = (torch.einsum("qhd,kd->hqk", q, k) + torch.einsum("qhd,kd->hqk", qv, v)) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("hqk,kd->qhd", weights, v), scores.logsumexp(-1)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_both_products(kind: str, queries: int, device: str, dtype: torch.dtype) -> None:
    case = Case(kind, device, dtype, 576, queries)
    rows = case.cache.unsqueeze(2)
    q, qv, k, v = case.q[..., 512:], case.q[..., :512], rows[..., 512:], rows[..., :512]
    options: dict[str, Any] = {"cache_seqlens": case.options["seqlens"]}
    if kind == "paged":
        options["page_table"] = case.options["block_table"]
    packed = {
        "cu_seqlens_q": torch.arange(5, dtype=torch.int32, device=device) * queries,
        "max_seqlen_q": queries,
    }
    for causal, scale in ((True, None), (False, 0.03)):
        call = {**options, "qv": qv, "softmax_scale": scale, "causal": causal}
        o, lse = flash_attn_with_kvcache(q, k, v, **call, return_softmax_lse=True)
        for entry in range(4):
            keys = case.rows(entry)[0, :, 0]
            given = (q[entry], qv[entry], keys[:, 512:], keys[:, :512])
            expected, logs = plain(*given, 576**-0.5 if scale is None else scale, causal)
            assert_close(o[entry].cpu(), expected, dtype)
            assert_close(lse[entry].cpu(), logs, torch.float32 if device == "cpu" else dtype)
        call |= {**packed, "qv": qv.flatten(0, 1)}
        assert_close(
            flash_attn_with_kvcache(q.flatten(0, 1), k, v, **call), o.flatten(0, 1).double(), dtype
        )


def test_a_choice_of_sequences_is_a_table() -> None:
    rows, queries = torch.randn(5, 40, 1, 36), torch.randn(2, 3, 8, 36)
    chosen, lengths = torch.tensor([4, 1]).int(), torch.tensor([33, 40]).int()
    call: dict[str, Any] = {"qv": queries[..., :32], "cache_seqlens": lengths, "causal": True}
    o = flash_attn_with_kvcache(
        queries[..., 32:], rows[..., 32:], rows[..., :32], cache_batch_idx=chosen, **call
    )
    expected = blockflash.mla_decode(
        queries, None, rows[chosen.long()], seqlens=lengths, scale=1 / 6, head_dim_v=32
    )
    torch.testing.assert_close(o, expected)


def parts() -> dict[str, Tensor]:
    rows, queries = torch.randn(2, 40, 1, 36), torch.randn(2, 1, 8, 36)
    return {
        "q": queries[..., 32:],
        "k_cache": rows[..., 32:],
        "v_cache": rows[..., :32],
        "qv": queries[..., :32],
    }


ONE_ROW = "qv: .* views of one row, v_cache = rows.*, :32. and k_cache = rows.*, 32:."


@pytest.mark.parametrize("name", ["apart", "order", "rows", "gap", "strides"])
def test_other_caches_raise(name: str) -> None:
    given = parts()
    rows, wide = torch.randn(2, 40, 1, 36), torch.randn(2, 40, 1, 80)
    given |= {
        "apart": {"k_cache": given["k_cache"].clone()},
        "order": {"k_cache": rows[..., :4], "v_cache": rows[..., 4:]},
        "rows": {"k_cache": given["k_cache"].roll(1, 1)},
        "gap": {"k_cache": wide[..., 40:44], "v_cache": wide[..., :32]},
        "strides": {"k_cache": wide[:, ::2, :, 32:36], "v_cache": wide[:, :20, :, :32]},
    }[name]
    with pytest.raises(NotImplementedError, match=ONE_ROW):
        flash_attn_with_kvcache(**given)


def test_what_does_not_go_with_it_raises() -> None:
    given = parts()
    new = torch.randn(2, 1, 1, 4)
    for others in ({"k": new, "v": new}, {"rotary_cos": new, "rotary_sin": new}):
        with pytest.raises(blockflash.Unsupported, match="is given beside qv: .*mla_append"):
            flash_attn_with_kvcache(**given, **others)
    for changes, text in (
        ({"qv": given["qv"][:1]}, "qv is torch.float32 .1, 1, 8, 32., expected .* as q"),
        ({"qv": given["qv"].double()}, "qv is torch.float64"),
        ({"qv": given["q"]}, "q and qv have 4 and 4 elements, expected 4 and 32"),
        ({"v_cache": given["v_cache"][:1]}, "v_cache is .* as k_cache"),
    ):
        with pytest.raises(ValueError, match=text):
            flash_attn_with_kvcache(**(given | changes))
    q, starts = torch.randn(1, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(blockflash.Unsupported, match="qv: "):
        flash_attn_func(q, q, q, qv=q)
    with pytest.raises(blockflash.Unsupported, match="qv: "):
        flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 3, 3, qv=q[0])


def test_compiles_with_a_break() -> None:
    given = parts()
    call = torch.compile(flash_attn_with_kvcache, backend="aot_eager")
    torch.testing.assert_close(call(**given), flash_attn_with_kvcache(**given))
