"""What the modules `flash_attn` and `flash_attn_interface` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _stats
from ._arguments import renamed
from ._attention import attention
from ._native import Unsupported

_CONVERT = "which are to be converted to bfloat16 or float16 before"

_REFUSED: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.0, "dropout"),
    "qv": (None, "a second query for the values"),
    "q_descale": (None, "scales of queries of 16 bits"),
    "k_descale": (None, "scales of keys of 16 bits"),
    "v_descale": (None, "scales of values of 16 bits"),
    "attention_chunk": (0, "chunked attention"),
}
"""Arguments that must keep their default, with the feature that is missing."""


class InvalidCall(ValueError, RuntimeError):
    """A wrong argument of a function of flash-attn, which raises `RuntimeError` itself."""


_NAMES = {
    "scale": "softmax_scale",
    "q_scale": "q_descale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
"""What flash-attn calls parameters of ours."""


def conventional(error: Exception, **names: str) -> Exception:
    """The error of a call with flash-attn's names, and those of a function, for our parameters."""
    kind = Unsupported if isinstance(error, Unsupported) else InvalidCall
    return kind(renamed(error, _NAMES | names))


def refuse(**arguments: Any) -> None:
    """Raises `Unsupported` for the first argument that differs from its default."""
    for name, value in arguments.items():
        default, feature = _REFUSED[name]
        if value is None or (default is not None and value == default):
            continue
        raise Unsupported(f"{name}: blockflash does not have {feature}; leave it at {default}")


def refuse_of_3(
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    attention_chunk: int,
) -> None:
    """Does the same for what all functions of FlashAttention 3 take."""
    if qv is q_descale is k_descale is v_descale is None and attention_chunk == 0:
        return
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse(qv=qv, **scales, attention_chunk=attention_chunk)


def scales_of_3(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, attention_chunk: int, **descales: Any
) -> dict[str, Any]:
    """Options of `attention` for `q_descale`, `k_descale` and `v_descale`, refusing the others."""
    if q.dtype.itemsize == k.dtype.itemsize == v.dtype.itemsize == 1:
        refuse_of_3(qv, None, None, None, attention_chunk)
        return {name.replace("descale", "scale"): scale for name, scale in descales.items()}
    refuse_of_3(qv, **descales, attention_chunk=attention_chunk)
    return {}


def refuse_8_bits(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = "qkv") -> None:
    """Raises `Unsupported` for elements of one byte or less, before anything computes with them."""
    if q.dtype.itemsize > 1 and k.dtype.itemsize > 1 and v.dtype.itemsize > 1:
        return
    for name, tensor in zip(names, (q, k, v), strict=True):
        if tensor.dtype.itemsize == 1:
            raise Unsupported(
                f"{name} is {tensor.dtype}: blockflash does not have attention of 8-bit elements, "
                f"{_CONVERT}"
            )


def unpack(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that are stacked along the third dimension from the end."""
    if packed.dim() < 3 or packed.size(-3) != count:
        raise InvalidCall(
            f"{name} has shape {list(packed.shape)}, not [..., {count}, heads, head_dim]"
        )
    return packed.unbind(-3)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: dict[str, Any],
    return_lse: bool,
    **packed: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`blockflash.attention` with flash-attn's conventions.

    `scores` are those `conventions`, `packed` are `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`
    and `max_seqlen_k`, and the scales of elements of 8 bits (`scales_of_3`).
    """
    if "q_scale" not in packed:
        refuse_8_bits(q, k, v)
    try:
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        result = attention(q, k, v, return_lse=return_lse, **scores, **packed)
    except (Unsupported, ValueError) as error:
        raise conventional(error) from None
    _stats.count("flash_attn")
    return result


def conventions(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None = None,
) -> dict[str, Any]:
    """What flash-attn's arguments say about scores, as our functions take it."""
    left, right = map(int, window_size)
    return {
        "causal": causal,
        "window": (None if left == -1 else left, None if causal or right == -1 else right),
        "scale": softmax_scale,
        "softcap": softcap if softcap != 0.0 else None,
        "alibi_slopes": alibi_slopes,
    }


def used_parts(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, used_q: Tensor | None, used_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Offsets of packed sequences of which only the first `used` rows count.

    Each sequence becomes three: the rows in use, the other queries, and the other keys.
    """
    queries, keys = ((cu[:-1], cu[1:]) for cu in (cu_seqlens_q, cu_seqlens_k))

    def end(rows: tuple[Tensor, Tensor], used: Tensor | None) -> Tensor:
        start, stop = rows
        return stop if used is None else (start + used.clamp(0)).minimum(stop)

    q = torch.stack([queries[0], end(queries, used_q), queries[1]], 1)
    k = torch.stack([keys[0], end(keys, used_k), end(keys, used_k)], 1)
    last = (cu_seqlens_q[-1:], cu_seqlens_k[-1:])
    q, k = (torch.cat([t.flatten(), end]) for t, end in zip((q, k), last, strict=True))
    return q, k


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension, copied if need be."""
    if tensor.is_contiguous() or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()
