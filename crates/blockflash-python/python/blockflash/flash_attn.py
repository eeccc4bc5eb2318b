"""The functions of flash-attn 2 (2.8) under their names and with their signatures.

`from blockflash.flash_attn import flash_attn_func` replaces the same line for `flash_attn`. The
conventions are flash-attn's: `[batch, seqlen, heads, head_dim]`, causal masks and windows aligned
at the bottom right, -1 for an unlimited side of a window, `softcap=0.0` for none.

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
- `dropout_p`, `alibi_slopes` and `block_table` raise `Unsupported` unless at their defaults.

A query without keys gives 0 and softmax_lse -inf (flash-attn: +inf). head_dim is any up to 256 (a
multiple of 8 spares a copy), and equal in q, k and v. Every call has gradients.
"""

from __future__ import annotations

from torch import Tensor

from ._flash import attend, no_decoding, refuse, unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

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
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    result = attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
    )
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

    The other arguments are described at the top of this module.

    Returns:
        `[total_q, heads, head_dim]`, or a tuple with `return_attn_probs`.

    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    result = attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
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
    q, k, v = unpack("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


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
    k, v = unpack("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


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
    q, k, v = unpack("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


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
    k, v = unpack("kv", kv, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def __getattr__(name: str) -> Tensor:
    raise no_decoding(__name__, name)
