"""`flash_attn_with_kvcache` and paged sequences of flash-attn, by `blockflash.attention_decode`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _flash_gather, _stats
from ._arguments import UNLIMITED
from ._decode import attention_decode
from ._flash import InvalidCall, contiguous_rows, conventional, refuse_8_bits
from ._native import Unsupported
from ._rotary import positions_of, turn


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    rotary: tuple[Tensor | None, Tensor | None],
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    table: Tensor | None,
    scores: dict[str, Any],
    table_name: str = "block_table",
    rotary_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache` of both versions.

    `table` is the parameter `table_name`, `scores` are flash-attn's `conventions`, `options` are
    `return_lse`, `max_seqlen_q`, `k_scale` and `v_scale`.
    """
    refuse_8_bits(q, q if k is None else k, q if v is None else v)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    numbers = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "rotary_seqlens": rotary_seqlens,
    }
    for name, tensor in numbers.items():
        if isinstance(tensor, Tensor):
            _check_numbers(name, tensor, batch, q.device)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_batch_idx is not None:
        if table is None:
            table = cache_batch_idx[:, None]  # Each sequence of the cache is a page.
        elif table.dim() != 2 or table.shape[0] == 0:
            raise InvalidCall(
                f"{table_name} has shape {list(table.shape)}, not [entries, max_pages]"
            )
        else:
            table = table[cache_batch_idx.clamp(0, table.shape[0] - 1)]
    if k is None and v is None:
        if rotary[0] is not None or rotary[1] is not None:
            raise InvalidCall("rotary_cos and rotary_sin are for calls with k and v only")
        cu_seqlens_k_new = None  # It means nothing here, but SGLang passes it.
        lengths = cache_seqlens
    else:
        lengths = _appended(q, k_cache, k, v, cache_seqlens, table, cu_seqlens_q, cu_seqlens_k_new)
    if rotary[0] is not None and rotary[1] is not None and k is not None:
        starts = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        moving = scores["causal"] or scores["window"] != UNLIMITED
        same = cu_seqlens_q is cu_seqlens_k_new and q.shape[:-2] == k.shape[:-2]
        same = same and (moving or (cu_seqlens_q is None and q.shape[1] == 1))
        if same and starts is cache_seqlens and cache_leftpad is None:
            # The kernel turns queries and new keys by the positions of the last keys.
            cos, sin = rotary
            options |= {
                "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary_interleaved
            }  # fmt: skip
        else:
            _check_rotary(q, *rotary, _capacity(k_cache, table))
            at = positions_of(q, starts, cu_seqlens_q, moving)
            q = turn(q, *rotary, at, rotary_interleaved)
            k = turn(k, *rotary, positions_of(k, starts, cu_seqlens_k_new), rotary_interleaved)
    elif rotary[0] is not rotary[1]:
        raise InvalidCall("rotary_cos and rotary_sin come together")
    return _attend(
        q,
        k_cache,
        v_cache,
        k=None if k is None else contiguous_rows(k),
        v=None if v is None else contiguous_rows(v),
        starts=cache_seqlens,
        seqused_k=lengths,
        leftpad=cache_leftpad,
        block_table=table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k_new,
        scores=scores,
        names={"seqused_k": "cache_seqlens", "block_table": table_name},
        **options,
    )


def check_pages(
    cache_seqlens: int | Tensor | None, k: Tensor | None, k_cache: Tensor, table: Tensor | None
) -> None:
    """Raises for a sequence that is longer than its pages, as flash-attn 2 does.

    The host waits for the lengths, so not while a graph is captured or the call is traced.
    """
    if table is None or cache_seqlens is None or table.dim() != 2 or k_cache.dim() != 4:
        return
    if not isinstance(cache_seqlens, int):
        traced = torch.compiler.is_compiling() or type(cache_seqlens) is not Tensor
        captured = k_cache.is_cuda and torch.cuda.is_current_stream_capturing()
        if traced or captured or cache_seqlens.numel() == 0:
            return
        cache_seqlens = int(cache_seqlens.max())
    longest = cache_seqlens + (0 if k is None else k.shape[1])
    room = table.shape[1] * k_cache.shape[1]
    if longest > room:
        raise InvalidCall(
            f"block_table: a sequence has {longest} keys, with new ones, but room for {room}: "
            f"{table.shape[1]} pages of {k_cache.shape[1]}"
        )


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: dict[str, Any],
    return_lse: bool,
    *,
    cu_seqlens_k: Tensor,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed queries whose keys are in pages, `[pages, page_size, heads_k, head_dim]`."""
    refuse_8_bits(q, k, v)
    options |= {"seqused_k": cu_seqlens_k.diff(), "return_lse": return_lse}
    names = {"seqused_k": "cu_seqlens_k"}
    return _attend(q, k, v, scores=scores, names=names, **options)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scores: dict[str, Any],
    return_lse: bool,
    names: dict[str, str],
    block_table: Tensor | None,
    starts: Tensor | None = None,
    leftpad: Tensor | None = None,
    k: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`blockflash.attention_decode` with flash-attn's conventions; errors have the `names`."""
    options |= {**scores, "k": k, "block_table": block_table}
    q = contiguous_rows(q)
    try:
        if leftpad is None and not _flash_gather.is_needed(q, k_cache, v_cache, block_table):
            result = attention_decode(q, k_cache, v_cache, return_lse=return_lse, **options)
        else:
            if block_table is not None:
                _check_numbers("block_table", block_table, _batch(q, options), q.device, 2)
            options = {"v": None, "cu_seqlens_k": None} | options
            found = _flash_gather.attend(
                q, k_cache, v_cache, starts=starts, leftpad=leftpad, **options
            )
            result = found if return_lse else found[0]
    except (Unsupported, ValueError) as error:
        raise conventional(error, **names) from None
    _stats.count("flash_attn")
    return result


def refuse_with_table(**others: Tensor | None) -> None:
    """Raises for what flash-attn 2 has for contiguous caches alone."""
    for name, other in others.items():
        if other is not None:
            raise InvalidCall(f"{name} is for caches without a block_table")


def _appended(
    q: Tensor,
    k_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_new: Tensor | None,
) -> Tensor:
    """The lengths with the new keys."""
    if k is None or v is None:
        raise InvalidCall(f"k, v come together, but {'k' if k is None else 'v'} is None")
    if cache_seqlens is None:
        raise InvalidCall("k and v are appended behind cache_seqlens, which is needed")
    if (k.dim() == 3) != (cu_seqlens_new is not None):
        raise InvalidCall("packed k and v, [total, heads_k, head_dim], come with cu_seqlens_k_new")
    if cu_seqlens_q is None and q.dim() == 4 and q.shape[1] > _capacity(k_cache, table):
        raise InvalidCall(
            f"q has {q.shape[1]} tokens, more than the {_capacity(k_cache, table)} slots for k"
        )
    return cache_seqlens + (k.shape[1] if cu_seqlens_new is None else cu_seqlens_new.diff())


def _capacity(k_cache: Tensor, table: Tensor | None) -> int:
    """Slots of a sequence."""
    return k_cache.shape[1] * (1 if table is None else table.shape[-1])


def _batch(q: Tensor, options: dict[str, Any]) -> int:
    cu_seqlens = options.get("cu_seqlens_q")
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _check_numbers(
    name: str, tensor: Tensor, batch: int, device: torch.device, dims: int = 1
) -> None:
    if tensor.dtype != torch.int32 or tensor.device != device:
        raise InvalidCall(f"{name} is {tensor.dtype} on {tensor.device}, not int32 on {device}")
    if tensor.dim() != dims or tensor.shape[0] != batch:
        expected = ", ".join([str(batch), "max_pages"][:dims])
        raise InvalidCall(f"{name} has shape {list(tensor.shape)}, not [{expected}]")


def _check_rotary(q: Tensor, cos: Tensor, sin: Tensor, positions: int) -> None:
    half = q.shape[-1] // 2
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < cos.shape[1] <= half:
        raise InvalidCall(
            f"rotary_cos and rotary_sin have shapes {list(cos.shape)} and {list(sin.shape)}, not "
            f"both [positions, up to {half}]"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype not in (q.dtype, torch.float32) or table.device != q.device:
            raise InvalidCall(
                f"{name} is {table.dtype} on {table.device}, not {q.dtype} or float32 on {q.device}"
            )
    if cos.shape[0] < positions:
        raise InvalidCall(f"rotary_cos has {cos.shape[0]} positions, not {positions} as the cache")
