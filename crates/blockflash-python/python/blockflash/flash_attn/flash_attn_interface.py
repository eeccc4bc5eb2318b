"""The functions of flash-attn 2 (2.8) under their names and with their signatures.

The conventions are flash-attn's: `[batch, seqlen, heads, head_dim]`, causal masks and windows
aligned at the bottom right, -1 for an unlimited side of a window, `softcap=0.0` for none.

Every function takes these arguments, apart from its tensors:

- `softmax_scale`: factor of the scores; `head_dim ** -0.5` if `None`.
- `causal`: query i attends to keys up to `i + seqlen_k - seqlen_q`. It sets the right side of
  `window_size` to 0.
- `window_size`: `(left, right)`: query i attends to keys from `i + seqlen_k - seqlen_q - left` to
  `i + seqlen_k - seqlen_q + right`.
- `softcap`: scores become `softcap * tanh(score / softcap)`; 0.0 is none.
- `deterministic`: outputs and gradients are deterministic in any case.
- `return_attn_probs`: returns `(out, softmax_lse, S_dmask)` instead of `out`: softmax_lse is f32,
  `[batch, heads, seqlen_q]` or `[heads, total_q]`; S_dmask is empty, as flash-attn's is without
  dropout.
- `alibi_slopes`: f32 `[heads]` or `[batch, heads]`: `-slope * |i + seqlen_k - seqlen_q - j|` is
  added to the score of query i and key j. They have no gradient.
- `dropout_p` raises `Unsupported` unless at its default.

A query without keys gives 0 and softmax_lse -inf (flash-attn: +inf). head_dim is any up to 512 (a
multiple of 8 spares a copy), and equal in q, k and v. Every call has gradients but those with a
cache: `flash_attn_with_kvcache`, and `flash_attn_varlen_func` with a `block_table`.

What is wrong raises a `ValueError` that is a `RuntimeError`, too, as flash-attn's errors are.

Calls with a cache copy the keys and values of all slots of each sequence (its columns of the table
times the slots of a page, however many are in use) before they attend, where no kernel takes the
cache as it is: with a `cache_leftpad`, and on a GPU with a head_dim that is no multiple of 8, or
pages whose number of slots (1, 4, 8, 24) is no multiple of 16. That is three times the traffic of
attending to full sequences, and memory for the copy: pass a table no wider than the longest
sequence needs. New keys and values still go into the caller's cache. Rotary embedding is applied by
the kernel where queries and new keys are equally many and stand at the same positions, else by a
few operations of torch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blockflash._flash import attend, conventions, refuse, unpack
from blockflash._flash_cache import check_pages, paged, refuse_with_table, with_kvcache
from blockflash._native import Unsupported

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False

_Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """Attention of a batch of sequences of equal length.

    Tensors:
        q: `[batch, seqlen_q, heads, head_dim]`.
        k: `[batch, seqlen_k, heads_k, head_dim]`; heads is a multiple of heads_k (GQA, MQA).
        v: as k.

    The other arguments are described at the top of this module.

    Returns:
        `[batch, seqlen_q, heads, head_dim]`, or a tuple with `return_attn_probs`.

    """
    refuse(dropout_p=dropout_p)
    scores = conventions(softmax_scale, causal, window_size, softcap, alibi_slopes)
    result = attend(q, k, v, scores, return_attn_probs)
    return (*result, q.new_empty(0)) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> _Result:
    """Attention of sequences of any lengths, packed one after another.

    Tensors:
        q: `[total_q, heads, head_dim]`.
        k: `[total_k, heads_k, head_dim]`; heads is a multiple of heads_k (GQA, MQA).
        v: as k.
        cu_seqlens_q: i32 `[batch + 1]`, first row of q of each sequence, and their end.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: the longest sequence of q.
        max_seqlen_k: the longest sequence of k.
        block_table: i32 `[batch, max_pages]`: the keys and values of each sequence are in these
            pages, and k and v are `[pages, page_size, heads_k, head_dim]`. cu_seqlens_k says only
            how many there are.

    The other arguments are described at the top of this module.

    Returns:
        `[total_q, heads, head_dim]`, or a tuple with `return_attn_probs`.

    """
    refuse(dropout_p=dropout_p)
    scores = conventions(softmax_scale, causal, window_size, softcap, alibi_slopes)
    packed: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q
    }  # fmt: skip
    if block_table is None:
        result = attend(q, k, v, scores, return_attn_probs, max_seqlen_k=max_seqlen_k, **packed)
    else:
        result = paged(q, k, v, scores, return_attn_probs, block_table=block_table, **packed)
    return (*result, q.new_empty(0)) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_func` of q, k and v in one tensor, `[batch, seqlen, 3, heads, head_dim]`."""
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(*unpack("qkv", qkv, 3), dropout_p, *options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_func` of k and v in one tensor, `[batch, seqlen_k, 2, heads_k, head_dim]`."""
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, *unpack("kv", kv, 2), dropout_p, *options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor, `[total, 3, heads, head_dim]`."""
    packed = (*unpack("qkv", qkv, 3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(*packed, dropout_p, *options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_varlen_func` of k and v in one tensor, `[total_k, 2, heads_k, head_dim]`."""
    packed = (*unpack("kv", kv, 2), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(q, *packed, dropout_p, *options, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache, to which new keys and values are appended first, if there are any.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`.
        k_cache: `[batch, capacity, heads_k, head_dim]`, or with a block_table
            `[pages, page_size, heads_k, head_dim]`. Written in place with `k`.
        v_cache: as k_cache.
        k: new keys, `[batch, seqlen_new, heads_k, head_dim]`. Those beyond the capacity are lost.
        v: as k.
        rotary_cos: `[positions, rotary_dim / 2]`, in the type of q or f32, with as many positions
            as the cache has slots: turns new keys by their positions, from cache_seqlens on, and
            query i by `cache_seqlens + i`, or by `cache_seqlens` without `causal` and
            `window_size`. Needs k.
        rotary_sin: as rotary_cos.
        cache_seqlens: how many keys each sequence had before this call, i32 `[batch]` or one
            number; needed with `k`. Without it, the cache is full.
        cache_batch_idx: i32 `[batch]`: the entry of the cache for each sequence. Not with a
            block_table.
        cache_leftpad: i32 `[batch]`: how many of the first slots of each sequence hold no key; they
            count in cache_seqlens. Not with a block_table.
        block_table: i32 `[batch, max_pages]`: the pages of each sequence. As in flash-attn, the
            call waits for the GPU to check that sequences are not longer, unless it is captured in
            a CUDA graph or compiled.
        softmax_scale: as for the other functions, like `causal`, `window_size` and `softcap`.
        causal: query i attends to keys up to `i + length - seqlen_q`.
        window_size: relative to the same position.
        softcap: 0.0 is none.
        rotary_interleaved: elements 2 i and 2 i + 1 are turned together, else i and
            i + rotary_dim / 2.
        alibi_slopes: as for the other functions.
        num_splits: any number is accepted and none changes anything: how keys are split follows
            from the length of a sequence alone, as with flash-attn's 0.
        return_softmax_lse: returns `(out, softmax_lse)`, with softmax_lse f32
            `[batch, heads, seqlen_q]`.

    Returns:
        `[batch, seqlen_q, heads, head_dim]`, or a pair with `return_softmax_lse`.

    """
    if block_table is not None:
        refuse_with_table(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
        check_pages(cache_seqlens, k, k_cache, block_table)
    elif cache_batch_idx is None and k_cache.dim() == 4 and k_cache.shape[0] > q.shape[0]:
        # flash-attn takes the first entries of a larger cache.
        k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    return with_kvcache(
        *(q, k_cache, v_cache, k, v),
        rotary=(rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        table=block_table,
        scores=conventions(softmax_scale, causal, window_size, softcap, alibi_slopes),
        return_lse=return_softmax_lse,
    )


def _get_block_size_n(device: object, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Raises: it describes the dropout masks of flash-attn's kernels, of which there are none."""
    raise Unsupported("blockflash does not have dropout, whose masks _get_block_size_n describes")
