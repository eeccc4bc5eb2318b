"""torch's `scaled_dot_product_attention` as a function that is called by name."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import renamed
from ._attention import attention
from ._flash import contiguous_rows, refuse_8_bits
from ._native import Unsupported

_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask"}
"""What torch calls parameters of ours."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` that runs here or raises.

    Its meaning is torch's: `is_causal` aligns the first query with the first key, also when the
    lengths differ, and a query without keys gives 0.

    Args:
        query: `[B, Hq, Sq, D]`, or `[Hq, Sq, D]`.
        key: `[B, Hk, Sk, D]`, or `[Hk, Sk, D]`.
        value: as key, with a head_dim of its own.
        attn_mask: broadcast to `[B, Hq, Sq, Sk]`, of any strides: bool, true where a query sees a
            key, or what is added to the scores, float32 or in the type of query, which has a
            gradient. Not with `is_causal`.
        dropout_p: must be 0.
        is_causal: query i attends to keys 0 to i.
        scale: factor of the scores, positive; `D ** -0.5` if `None`.
        enable_gqa: allows that Hk is a divisor of Hq.

    Returns:
        The shape and type of query, with the head_dim of value.

    Raises:
        Unsupported: where torch has a backend and blockflash none: dropout, heads or batches that
            are broadcast; and for 8-bit elements.
        ValueError: for arguments that torch refuses, too.

    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other")
    q, k, v = operands(query, key, value, dropout_p, enable_gqa)
    options = {"causal": is_causal, "top_left": True, "scale": scale}
    if attn_mask is not None:
        if not 2 <= attn_mask.dim() <= query.dim():
            raise ValueError(f"attn_mask has {attn_mask.dim()} dimensions, and query {query.dim()}")
        options["bias"] = bias_of(attn_mask, q.dtype)
    try:
        o = attention(q, k, v, **options).transpose(1, 2)
    except (Unsupported, ValueError) as error:
        raise type(error)(renamed(error, _NAMES)) from None
    return o if query.dim() == 4 else o.squeeze(0)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask of torch adds to scores, for attention of this element type."""
    if mask.dtype != torch.bool:
        if mask.dtype not in (torch.float32, dtype):
            raise ValueError(f"attn_mask is {mask.dtype}, not bool, float32 or {dtype}")
        return mask
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, min(mask.shape[dim], 1))
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `blockflash.attention` takes for these arguments of torch, or their error."""
    if dropout_p != 0.0:
        raise Unsupported(f"dropout_p is {dropout_p}, but blockflash has no dropout: set it to 0")
    refuse_8_bits(query, key, value, ("query", "key", "value"))
    dims = {query.dim(), key.dim(), value.dim()}
    if dims not in ({3}, {4}):
        raise Unsupported(f"tensors have {sorted(dims)} dimensions; all must have 3 or all 4")
    batched = [
        tensor if tensor.dim() == 4 else tensor.unsqueeze(0) for tensor in (query, key, value)
    ]
    (batches, heads) = ({tensor.size(dim) for tensor in batched} for dim in (0, 1))
    if len(batches) > 1:
        raise Unsupported(f"batches of {sorted(batches)} are not broadcast: expand the tensors")
    if key.size(-3) != value.size(-3) or (len(heads) > 1 and not enable_gqa):
        kind = Unsupported if enable_gqa or 1 in heads else ValueError
        sizes = ", ".join(str(tensor.size(1)) for tensor in batched)
        raise kind(
            f"query, key and value have {sizes} heads; key and value must agree, "
            "and fewer of them than of query need enable_gqa=True"
        )
    q, k, v = (contiguous_rows(tensor).transpose(1, 2) for tensor in batched)
    return q, k, v
