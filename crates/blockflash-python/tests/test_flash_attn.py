"""`blockflash.flash_attn` and `blockflash.flash_attn_interface`: results, signatures, refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import plain
import pytest
import torch
from torch import Tensor

import blockflash
from blockflash import flash_attn as fa2
from blockflash import flash_attn_interface as fa3
from blockflash.flash_attn import flash_attn_interface as fa2_interface


def small(*shape: int) -> Tensor:
    return torch.randn(*shape)


def qkv(heads_k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return small(2, 5, 4, 16), small(2, 9, heads_k, 16), small(2, 9, heads_k, 16)


def test_returned_tuples() -> None:
    q, k, v = qkv()
    o = fa2.flash_attn_func(q, k, v)
    out, lse, s_dmask = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    third, lse3 = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    visible = torch.ones(2, 5, 9, dtype=torch.bool)
    expected, expected_lse = plain.attention(q.double(), k.double(), v.double(), visible)
    for each in (o, out, third):
        torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-5)
    for each in (lse, lse3):
        assert each.dtype == torch.float32 and each.shape == (2, 4, 5)
        torch.testing.assert_close(each.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert s_dmask.numel() == 0


def test_softmax_scale_and_strides() -> None:
    q, k, v = qkv(2)
    expected = fa2.flash_attn_func(q * 3, k, v, softmax_scale=0.1)
    apart = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in (q, k, v)]
    for module in (fa2, fa3):
        o = module.flash_attn_func(*apart, softmax_scale=0.3)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


def test_causal_window_has_no_right_side() -> None:
    q, k, v = qkv()
    expected = fa2.flash_attn_func(q, k, v, window_size=(2, 0))
    for window in ((2, 5), (2, -1), torch.tensor([2, 5])):
        assert torch.equal(fa2.flash_attn_func(q, k, v, causal=True, window_size=window), expected)
    causal = fa2.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa2.flash_attn_func(q, k, v, causal=True, window_size=(-1, 5)), causal)
    assert torch.equal(fa2.flash_attn_func(q, k, v, window_size=(-1, 0)), causal)


def test_rows_without_keys() -> None:
    q, k, v = small(1, 9, 2, 16), small(1, 5, 2, 16), small(1, 5, 2, 16)
    o, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (o[:, :4] == 0).all() and (lse[..., :4] == -torch.inf).all()
    assert (o[:, 4:] != 0).all() and lse[..., 4:].isfinite().all()


def test_packed_forms() -> None:
    packed = small(2, 7, 3, 4, 16)
    q, k, v = packed.unbind(2)
    expected = fa2.flash_attn_func(q, k, v, causal=True)
    same = [
        fa2.flash_attn_qkvpacked_func(packed, causal=True),
        fa2.flash_attn_kvpacked_func(q, packed[:, :, 1:], causal=True),
        fa3.flash_attn_func(q, k, v, causal=True),
        fa3.flash_attn_qkvpacked_func(packed, causal=True),
        fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4),
        fa3.flash_attn_qkvpacked_func(packed.flatten(2, 3), causal=True, num_heads_q=4),
    ]
    rows, cu = packed.flatten(0, 1), torch.tensor([0, 7, 14], dtype=torch.int32)
    q, k, v = rows.unbind(1)
    same += [
        fa2.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True),
        fa2.flash_attn_varlen_qkvpacked_func(rows, cu, 7, causal=True),
        fa2.flash_attn_varlen_kvpacked_func(q, rows[:, 1:], cu, cu, 7, 7, causal=True),
        fa3.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True),
    ]
    for o in same:
        torch.testing.assert_close(o.view_as(expected), expected)


def test_gradient_of_packed_tensor() -> None:
    packed = small(2, 7, 3, 4, 16).requires_grad_()
    apart = [tensor.detach().requires_grad_() for tensor in packed.unbind(2)]
    fa2.flash_attn_qkvpacked_func(packed, causal=True).square().sum().backward()
    fa2.flash_attn_func(*apart, causal=True).square().sum().backward()
    expected = torch.stack([tensor.grad for tensor in apart], dim=2)
    torch.testing.assert_close(packed.grad, expected)


def test_compiles() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(2))
    compiled = torch.compile(fa2.flash_attn_func, backend="aot_eager", fullgraph=True)
    o, expected = compiled(q, k, v, causal=True), fa2.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(o, expected)
    for ours, grad in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, expected)),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(ours, grad)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head_dim", [16, 13])
def test_combine(head_dim: int, device: str) -> None:
    """Parts of float32 with any strides, and rows that see no key in some part, or in none."""
    o = torch.randn(3, 2, 4, 5, head_dim, device=device).transpose(2, 3)
    lse = torch.randn(3, 2, 4, 5, device=device).transpose(2, 3)
    lse[1, 0], lse[:, 1, 2] = -torch.inf, -torch.inf
    merged = lse.double().logsumexp(0)
    weights = (lse - merged).exp().nan_to_num()
    expected = (weights[..., None] * o).sum(0)
    out = torch.empty(2, 5, 4, head_dim, device=device, dtype=torch.float16)
    for dtype, given in ((None, None), (torch.bfloat16, None), (torch.float16, out)):
        found, found_lse = fa3.flash_attn_combine(o, lse, given, dtype)
        assert found.dtype == (dtype or torch.float32) and (given is None or found is out)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found_lse.double(), merged)
    with pytest.raises(ValueError, match=r"not \[splits, batch"):
        fa3.flash_attn_combine(o, lse[:2])
    with pytest.raises(ValueError, match="out is torch.float16"):
        fa3.flash_attn_combine(o, lse, out)


def test_scheduler_metadata_is_accepted() -> None:
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, lengths, causal=True)
    q, cache = small(2, 1, 4, 16), small(2, 64, 2, 16)
    call = {"cache_seqlens": lengths, "causal": True}
    expected = fa3.flash_attn_with_kvcache(q, cache, cache, **call)
    call["scheduler_metadata"] = metadata
    assert torch.equal(fa3.flash_attn_with_kvcache(q, cache, cache, **call), expected)
    with pytest.raises(ValueError, match="no multiple"):
        fa3.get_scheduler_metadata(2, 1, 64, 4, 3, 16, lengths)


def test_arguments_that_steer_speed() -> None:
    q, k, v = qkv()
    expected = fa3.flash_attn_func(q, k, v)
    speed = {"num_splits": 3, "pack_gqa": True, "sm_margin": 4, "deterministic": True}
    assert torch.equal(fa3.flash_attn_func(q, k, v, **speed), expected)
    assert torch.equal(fa2.flash_attn_func(q, k, v, deterministic=True), expected)


CU = torch.tensor([0, 5], dtype=torch.int32)
REFUSED = [
    (fa2.flash_attn_func, {"dropout_p": 0.1}),
    (fa2.flash_attn_varlen_func, {"dropout_p": 0.1}),
    *(
        (function, {name: value})
        for function in (fa3.flash_attn_func, fa3.flash_attn_varlen_func)
        for name, value in (
            ("qv", torch.ones(1)),
            ("q_descale", torch.ones(1)),
            ("k_descale", torch.ones(1)),
            ("v_descale", torch.ones(1)),
            ("attention_chunk", 128),
        )
    ),
]


@pytest.mark.parametrize(("function", "argument"), REFUSED, ids=[str(*name) for _, name in REFUSED])
def test_refused_arguments(function: Callable[..., Any], argument: dict[str, Any]) -> None:
    lengths = [CU, CU, 5, 5] if "varlen" in function.__name__ else []
    q = small(5, 4, 16) if lengths else small(1, 5, 4, 16)
    with pytest.raises(blockflash.Unsupported, match=f"^{next(iter(argument))}: .* leave it at"):
        function(q, q, q, *lengths, **argument)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_8_bit_elements(which: str, dtype: torch.dtype) -> None:
    """Every function says that it does not take them, and what to do, before it computes.

    FlashAttention 3's take q, k and v that all have 8 bits (test_quantized.py).
    """

    def three(*shape: int) -> list[Tensor]:
        return [small(*shape).to(dtype if name == which else torch.float32) for name in "qkv"]

    same, one = three(1, 16, 4, 16), torch.tensor([3], dtype=torch.int32)
    rows, table = [t[0] for t in same], torch.zeros(1, 1, dtype=torch.int32)
    cos = torch.ones(16, 8)
    qkv = same[0][:, :, None].expand(-1, -1, 3, -1, -1)
    paged = [rows[0], *same[1:], CU, CU, 5, 5]
    append = [*same, *same[1:], cos, cos]
    calls: list[Callable[[], Any]] = [
        lambda: blockflash.scaled_dot_product_attention(*same),
        lambda: fa2.flash_attn_varlen_func(*paged, block_table=table),
        lambda: fa2.flash_attn_with_kvcache(*append, cache_seqlens=one),
        lambda: fa3.flash_attn_with_kvcache(*append[:5], None, cos, cos, one),
    ]
    for module in (fa2, fa3):
        calls += [
            partial(module.flash_attn_func, *same),
            partial(module.flash_attn_varlen_func, *rows, CU, CU, 5, 5),
        ]
        if which == "q":
            # A cache may be of 8 bits.
            calls.append(partial(module.flash_attn_with_kvcache, *same, cache_seqlens=one))
            if module is fa2:
                calls.append(partial(module.flash_attn_qkvpacked_func, qkv))
    for call in calls:
        with pytest.raises(blockflash.Unsupported, match=f"{dtype}: .* converted to bfloat16"):
            call()


def test_wrong_arguments() -> None:
    """All are a `ValueError`, and a `RuntimeError` as in flash-attn."""
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="heads"):
        fa2.flash_attn_func(q, k[:, :, :3], v[:, :, :3])
    with pytest.raises(NotImplementedError, match="dropout"):
        fa2_interface._get_block_size_n("cpu", 64, False, True)
    for module in (fa2, fa3):
        with pytest.raises(ValueError, match="^softmax_scale is 0"):
            module.flash_attn_func(q, k, v, softmax_scale=0.0)
    with pytest.raises(ValueError, match="softcap"):
        fa2.flash_attn_func(q, k, v, softcap=-1.0)
    with pytest.raises(ValueError, match="window"):
        fa2.flash_attn_func(q, k, v, window_size=(-2, 0))
    with pytest.raises(ValueError, match=r"kv has shape .*, not \[..., 2, heads, head_dim\]"):
        fa2.flash_attn_kvpacked_func(q, small(2, 9, 3, 4, 16))
    for heads in (None, 0, 3, 12):
        with pytest.raises(ValueError, match=f"num_heads_q is {heads} with 12 heads"):
            fa3.flash_attn_qkvpacked_func(small(2, 7, 12, 16), num_heads_q=heads)
    with pytest.raises(ValueError, match="num_heads_q is 2 with 4 heads of q"):
        fa3.flash_attn_qkvpacked_func(small(2, 7, 3, 4, 16), num_heads_q=2)


@pytest.mark.gpu
def test_deterministic_gradient() -> None:
    q, k, v = (tensor.cuda().half().requires_grad_() for tensor in qkv())
    outputs = (fa2.flash_attn_func(q, k, v, deterministic=True) for _ in range(20))
    first, *others = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in outputs)
    for again in others:
        assert all(map(torch.equal, first, again))


_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_FA2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_FA3 = (
    f"softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
_VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    (fa2, "flash_attn_func"): f"(q, k, v, {_FA2})",
    (fa2, "flash_attn_qkvpacked_func"): f"(qkv, {_FA2})",
    (fa2, "flash_attn_kvpacked_func"): f"(q, kv, {_FA2})",
    (fa2, "flash_attn_varlen_func"): f"(q, k, v, {_VARLEN}, {_FA2}, block_table=None)",
    (fa2, "flash_attn_varlen_qkvpacked_func"): f"(qkv, cu_seqlens, max_seqlen, {_FA2})",
    (fa2, "flash_attn_varlen_kvpacked_func"): f"(q, kv, {_VARLEN}, {_FA2})",
    (fa3, "flash_attn_func"): f"(q, k, v, {_FA3})",
    (fa3, "flash_attn_varlen_func"): (
        f"(q, k, v, {_VARLEN}, seqused_q=None, seqused_k=None, {_FA3})"
    ),
    (fa3, "flash_attn_qkvpacked_func"): (
        f"(qkv, softmax_scale=None, causal=False, {_DESCALES}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
        "return_attn_probs=False)"
    ),
    (fa3, "flash_attn_combine"): "(out_partial, lse_partial, out=None, out_dtype=None)",
    (fa3, "get_scheduler_metadata"): (
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
        "pack_gqa=None, sm_margin=0)"
    ),
    (fa2, "flash_attn_with_kvcache"): (
        "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False)"
    ),
    (fa3, "flash_attn_with_kvcache"): (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{_DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False)"
    ),
}


def test_signatures() -> None:
    """flash-attn 2.8.4, and its FlashAttention 3 interface of the same day."""
    for (module, name), expected in SIGNATURES.items():
        signature = inspect.signature(getattr(module, name))
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == expected, name
    for module in (fa2, fa3):
        assert sorted(name for of, name in SIGNATURES if of is module) == module.__all__
