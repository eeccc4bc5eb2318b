"""The functions of FlashAttention 3 under their names and with their signatures.

`from blockflash.flash_attn_interface import flash_attn_func` replaces the same line for the module
`flash_attn_interface`. Signatures and results are the newest ones (since August 2025): `out`, or
`(out, softmax_lse)` with `return_attn_probs=True`. Releases before that always returned the pair.

The conventions are flash-attn's: `[batch, seqlen, heads, head_dim]`, causal masks and windows
aligned at the bottom right, -1 for an unlimited side of a window, `softcap=0.0` for none. Every
function takes these arguments, apart from its tensors:

- `softmax_scale`, `causal`, `window_size`, `softcap`, `deterministic`: as in
  `blockflash.flash_attn.flash_attn_interface`.
- `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`: steer only the speed of
  FlashAttention's own kernels. Any value is accepted and none changes anything here.
- `q_descale`, `k_descale`, `v_descale`: f32 `[batch, heads_k]`, what q, k and v of 8 bits are
  multiplied with; their output is bf16, and they have no gradient. They run on the CPU only so far,
  apart from caches of `flash_attn_with_kvcache`, whose q has 16 bits. Beside 16 bits they raise
  `Unsupported` unless at their defaults.
- `attention_chunk` raises `Unsupported` unless at its default, and so does `qv` but for
  `flash_attn_with_kvcache`.
- `return_attn_probs`: returns `(out, softmax_lse)`: softmax_lse is f32,
  `[batch, heads, seqlen_q]` or `[heads, total_q]`.

What `blockflash.flash_attn.flash_attn_interface` says about rows without keys, head_dim, errors,
caches and gradients holds here, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._decode import attention_merge
from ._flash import (
    InvalidCall,
    attend,
    conventions,
    refuse_of_3,
    scales_of_3,
    unpack,
    used_parts,
)
from ._flash_cache import with_kvcache
from ._flash_latent import joined

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """`blockflash.flash_attn.flash_attn_func` with the arguments of FlashAttention 3.

    Returns:
        `[batch, seqlen_q, heads, head_dim]`, or a pair with `return_attn_probs`.

    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    scales = scales_of_3(q, k, v, qv, attention_chunk, **descales)
    scores = conventions(softmax_scale, causal, window_size, softcap)
    return attend(q, k, v, scores, return_attn_probs, **scales)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """`blockflash.flash_attn.flash_attn_varlen_func` with the arguments of FlashAttention 3.

    Args that flash-attn 2 does not have:
        seqused_q: i32 `[batch]`: how many of the rows of each sequence are queries. The others get
            the output 0.
        seqused_k: the same for keys.

    Returns:
        `[total_q, heads, head_dim]`, or a pair with `return_attn_probs`.

    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    scales = scales_of_3(q, k, v, qv, attention_chunk, **descales)
    if seqused_q is not None or seqused_k is not None:
        cu_seqlens_q, cu_seqlens_k = used_parts(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    scores = conventions(softmax_scale, causal, window_size, softcap)
    return attend(
        *(q, k, v, scores, return_attn_probs),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **scales,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_func` of q, k and v in one tensor.

    qkv is `[batch, seqlen, 3, heads, head_dim]`, or with `num_heads_q`
    `[batch, seqlen, num_heads_q + 2 * heads_k, head_dim]`.

    """
    if qkv.dim() == 4:
        rest = 0 if num_heads_q is None else qkv.size(2) - num_heads_q
        if not 0 < rest < qkv.size(2) or rest % 2:
            raise InvalidCall(f"num_heads_q is {num_heads_q} with {qkv.size(2)} heads in qkv")
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    else:
        q, k, v = unpack("qkv", qkv, 3)
        if num_heads_q not in (None, q.size(-2)):
            raise InvalidCall(f"num_heads_q is {num_heads_q} with {q.size(-2)} heads of q in qkv")
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    scales = scales_of_3(q, k, v, None, attention_chunk, **descales)
    scores = conventions(softmax_scale, causal, window_size, softcap)
    return attend(q, k, v, scores, return_attn_probs, **scales)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> _Result:
    """Attention to a cache, to which new keys and values are appended first, if there are any.

    What `blockflash.flash_attn.flash_attn_with_kvcache` says holds here, with `page_table` for
    `block_table`. A page_table goes with `cache_batch_idx`, which chooses its rows, and with
    `cache_leftpad`; that sequences are not longer is not checked, and what is behind is lost.

    Args that flash-attn 2 does not have:
        qv: in the shape of q with the head_dim of v_cache: scores are `q @ k.T + qv @ v.T`, as of
            absorbed MLA, whose cache has 64 and 512 elements. k_cache and v_cache are views of one
            row, v_cache in front, which `blockflash.mla_decode` attends to; other ones raise
            `Unsupported`. Not with k, v and rotary_cos: `blockflash.mla_append` writes new rows.
        cu_seqlens_q: i32 `[batch + 1]`: q is packed, `[total_q, heads, head_dim]`.
        cu_seqlens_k_new: i32 `[batch + 1]`: k and v are packed, `[total_new, heads_k, head_dim]`.
        max_seqlen_q: the most queries of a sequence, needed with cu_seqlens_q.
        rotary_seqlens: i32 `[batch]`: positions count from here, not from cache_seqlens.
        k_descale: f32 `[batch, heads_k]`, with a cache of 8 bits beside q of 16: what its keys are
            multiplied with, and new keys divided by. FlashAttention 3 takes 8-bit queries only.
        v_descale: the same of the values.

    Returns:
        `[batch, seqlen_q, heads, head_dim]` or `[total_q, heads, head_dim]`, or a pair with
        `return_softmax_lse` (FlashAttention 3 adds the results of its splits to it).

    """
    refuse_of_3(None, q_descale, None, None, attention_chunk)
    if qv is not None:
        others = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        q, k_cache = joined(q, k_cache, v_cache, qv, **others)
    return with_kvcache(
        *(q, k_cache, v_cache, k, v),
        rotary=(rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        table=page_table,
        table_name="page_table",
        rotary_seqlens=rotary_seqlens,
        scores=conventions(softmax_scale, causal, window_size, softcap),
        return_lse=return_softmax_lse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        k_scale=k_descale,
        v_scale=v_descale,
    )


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to all keys from the attention to parts of the keys; without a gradient.

    Args:
        out_partial: f32 `[splits, batch, seqlen, heads, head_dim]`.
        lse_partial: f32 `[splits, batch, seqlen, heads]`; -inf where a query sees no key.
        out: `[batch, seqlen, heads, head_dim]`, where the output goes.
        out_dtype: The element type of the output, f32 by default: that of `out` if both are given.

    Returns:
        The output and `softmax_lse`, f32 `[batch, seqlen, heads]`.

    """
    dtype = torch.float32 if out_dtype is None else out_dtype
    if out_partial.dtype != torch.float32 or lse_partial.dtype != torch.float32:
        raise InvalidCall(
            f"out_partial and lse_partial are {out_partial.dtype} and {lse_partial.dtype}, not "
            "float32"
        )
    if out_partial.dim() != 5 or lse_partial.shape != out_partial.shape[:4]:
        raise InvalidCall(
            f"out_partial has shape {list(out_partial.shape)} and lse_partial "
            f"{list(lse_partial.shape)}, not [splits, batch, seqlen, heads, head_dim] and "
            "[splits, batch, seqlen, heads]"
        )
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidCall(f"out_dtype is {dtype}, not float32, float16 or bfloat16")
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        raise InvalidCall(
            f"out is {out.dtype} {list(out.shape)}, not {dtype} {list(out_partial.shape[1:])}"
        )
    head_dim = out_partial.shape[-1]
    if head_dim % 8:  # The kernel takes rows of whole 16 bytes.
        out_partial = torch.nn.functional.pad(out_partial, (0, -head_dim % 8))
    o, lse = attention_merge(out_partial, lse_partial.transpose(2, 3))
    o = o[..., :head_dim].to(dtype)
    return o if out is None else out.copy_(o), lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty i32 tensor on the device of `cache_seqlens`.

    FlashAttention 3 divides the work of `flash_attn_with_kvcache` in a call of its own, with what
    that call will get; here the call does it itself, and needs nothing.
    """
    if num_heads_kv < 1 or num_heads_q % num_heads_kv:
        raise InvalidCall(f"{num_heads_q} heads of q are no multiple of {num_heads_kv} of k")
    return cache_seqlens.new_empty(0, dtype=torch.int32)
