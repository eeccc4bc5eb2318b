"""What the modules `flash_attn` and `flash_attn_interface` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._attention import attention
from ._native import Unsupported

_REFUSED: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.0, "dropout"),
    "alibi_slopes": (None, "ALiBi"),
    "block_table": (None, "a paged cache"),
    "qv": (None, "a second query for the values"),
    "q_descale": (None, "8-bit queries"),
    "k_descale": (None, "8-bit keys"),
    "v_descale": (None, "8-bit values"),
    "attention_chunk": (0, "chunked attention"),
    "seqused_q": (None, "sequences that use a part of their rows"),
    "seqused_k": (None, "sequences that use a part of their rows"),
}
"""Arguments that must keep their default, with the feature that is missing."""


def refuse(**arguments: Any) -> None:
    """Raises `Unsupported` for the first argument that differs from its default."""
    for name, value in arguments.items():
        default, feature = _REFUSED[name]
        if value is None or (default is not None and value == default):
            continue
        raise Unsupported(f"{name}: blockflash does not have {feature}; leave it at {default}")


def unpack(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that are stacked along the third dimension from the end."""
    if packed.dim() < 3 or packed.size(-3) != count:
        raise ValueError(
            f"{name} has shape {list(packed.shape)}, not [..., {count}, heads, head_dim]"
        )
    return packed.unbind(-3)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    return_lse: bool,
    **packed: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`blockflash.attention` with flash-attn's conventions.

    `packed` are `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q` and `max_seqlen_k`.
    """
    if q.size(-1) != v.size(-1):
        raise Unsupported(f"head_dim of v is {v.size(-1)}, of q {q.size(-1)}; they must agree")
    left, right = (None if size == -1 else size for size in map(int, window_size))
    return attention(
        *map(contiguous_rows, (q, k, v)),
        causal=causal,
        window=(left, None if causal else right),
        scale=softmax_scale,
        softcap=softcap if softcap != 0.0 else None,
        return_lse=return_lse,
        **packed,
    )


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension, copied if need be."""
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def no_decoding(module: str, name: str) -> AttributeError:
    """The error for a name that is looked up in one of the two modules and is not there."""
    if name == "flash_attn_with_kvcache":
        return AttributeError(
            f"{module}.{name} is not there: blockflash has no decoding kernel yet"
        )
    return AttributeError(f"module {module!r} has no attribute {name!r}")
