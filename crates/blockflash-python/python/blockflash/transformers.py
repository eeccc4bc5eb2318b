"""`attn_implementation="block_attention"` for Hugging Face transformers.

Importing this module registers two functions: one makes masks, the other computes attention.
The mask function takes the model's mask function apart. A pattern that it recognizes completely
becomes a `Mask`: causal and full attention, sliding windows, padding, static caches, and sequences
packed by `position_ids`. For every other pattern it makes the dense mask that SDPA takes, of which
the attention function makes a block mask with bits, or, if it is one of numbers, a bias. Calls that
no kernel takes are left to SDPA, or to plain torch with a softcap or sinks, with a warning once for
each reason: `blockflash.stats()` counts them, and `blockflash.strict()` makes them raise.

The attention function obeys the mask and nothing else. It does not read `sliding_window` among its
arguments, because a model may pass a window to a layer that has another mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import BlockMask, Unsupported, _stats, attention, attention_decode
from ._arguments import autocast_dtype
from ._transformers_cache import CodesCache, scale_of, widened
from ._transformers_mask import Mask, block_attention_mask, of_dense

__all__ = ["NAME", "CodesCache", "block_attention", "block_attention_mask"]

NAME = "block_attention"
"""The name to give as `attn_implementation`. Names with "flash" are reserved by transformers."""


_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k")
# Some models give these to attention functions of their own; SDPA would lose them silently, too.
_UNKNOWN = ("sinks", "indices", "block_indices")
_NOT_OURS = ("cache", "output_attentions")


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention; the signature is that of transformers' `sdpa_attention_forward`.

    `query` is `[B, H, Sq, D]`, `key` is `[B, Hkv, Sk, D]`, `value` is `[B, Hkv, Sk, Dv]` with
    `Dv <= D`, and both may be codes of a `CodesCache`. `s_aux` is the sink of each head, `[H]`, and
    `position_bias` is added to the scores.
    Without a mask, `is_causal` or else
    `module.is_causal` decides as it does for SDPA: query i sees the keys up to i, but a single
    query sees all of them.

    Returns the output, `[B, Sq, H, Dv]`, and None in place of the weights.

    Raises:
        Unsupported: for arguments that would be lost, and in strict mode for what no kernel takes.
        ValueError: if the mask was made for other lengths.

    """
    mask, softcap = attention_mask, softcap or None
    packed = isinstance(mask, Mask) and "cu_seqlens_q" in mask.options
    for name in _UNKNOWN if packed else _UNKNOWN + _VARLEN:
        if kwargs.get(name) is not None:
            hint = "; pass position_ids, by which packing is seen" if name in _VARLEN else ""
            raise Unsupported(f"{NAME} cannot obey `{name}` of {type(module).__name__}{hint}")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = is_causal and query.shape[2] > 1
    used = next((name for name in _NOT_OURS if kwargs.get(name)), None)
    if used or dropout:
        reason = f"the model uses {used or 'dropout'}"
    else:
        reason = _refusal(query, key, value, mask, s_aux, position_bias)
        if reason is None:
            added = (softcap, s_aux, position_bias)
            o = _by_kernels(query, key, value, mask, is_causal, scaling, *added)
            if isinstance(o, Tensor):
                _stats.count("transformers")
                return o, None
            reason = o
    _stats.fall_back("transformers", reason)
    if key.dtype.itemsize == 1:
        key, value = (widened(states, query.dtype) for states in (key, value))
        return block_attention(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux,
            position_bias, **kwargs,
        )  # fmt: skip
    dense = mask.dense() if isinstance(mask, Mask) else mask
    if softcap is None and s_aux is None:
        kwargs["position_bias"] = position_bias
        return sdpa_attention_forward(
            module, query, key, value, dense, dropout, scaling, is_causal, **kwargs
        )
    lost = "position_bias" if position_bias is not None else "cache"
    if position_bias is not None or kwargs.get("cache") is not None:
        raise Unsupported(f"{NAME} has no way to combine `{lost}` with a softcap or sinks")
    o = _explicit(query, key, value, dense, dropout, scaling, is_causal, softcap, s_aux)
    return o, None


_TYPES = {
    "cuda": (torch.float16, torch.bfloat16),
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
}


def _refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None,
    *others: Tensor | None,
) -> str | None:
    """Why no kernel takes these tensors, if that is known before a call, as compiled code needs."""
    device, dim = query.device.type, query.shape[3]
    dtype = query.dtype
    if dtype == torch.float32:
        dtype = autocast_dtype(query) or dtype
    if device != "meta" and device not in _TYPES:
        return f"there is no kernel for {device}"
    if dtype not in _TYPES.get(device, (dtype,)):
        return f"there is no kernel for {dtype} on {device}: load the model in bfloat16"
    widest = max(dim, value.shape[3])
    if device == "cuda" and widest > 512:
        return f"there is no kernel for head_dim {widest}, which is above 512"
    if key.shape[0] != query.shape[0]:
        return "queries and keys have different batches"
    if not (isinstance(mask, Mask) and mask.cached):
        return None
    tensors = (query, key, value, *others)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return "attention over a static cache has no gradient"
    odd = dim % 8 or value.shape[3] % 8
    return "attention over a cache needs a head_dim of a multiple of 8" if odd else None


def _by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
) -> Tensor | str:
    """Attention by blockflash, `[B, Sq, H, Dv]`, or why it does not take the call."""
    if bias is not None and isinstance(mask, Mask) and "cu_seqlens_q" in mask.options:
        mask = mask.dense()  # A bias does not go with packed sequences.
    if mask is None:
        options = {"causal": True, "top_left": True} if causal else {}
    elif isinstance(mask, Tensor):
        options = of_dense(mask)
    elif mask.shape[2:] == (query.shape[2], key.shape[2]):
        options = mask.options
    else:
        lengths = (query.shape[2], key.shape[2])
        raise ValueError(f"the mask is for lengths {mask.shape[2:]}, attention has {lengths}")

    coded = key.dtype.itemsize == 1
    if coded and not options.keys() <= {"causal", "window", "bias"}:
        return "a cache of 8 bits takes no padding, no packing and no hidden blocks"
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    packed = "cu_seqlens_q" in options
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    # A layer may be on another device than the mask.
    movable = (Tensor, BlockMask)
    options = {name: t.to(q.device) if isinstance(t, movable) else t for name, t in options.items()}
    options |= {"scale": scaling, "softcap": softcap}
    if bias is not None:
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    options["sink"] = None if sink is None else sink.float()
    if coded:
        options |= {"k_scale": scale_of(key), "v_scale": scale_of(value)}
    function = attention_decode if coded or "seqused_k" in options else attention
    if torch.compiler.is_compiling():
        o = function(q, k, v, **options)
    else:
        try:
            o = function(q, k, v, **options)
        except (Unsupported, ValueError) as error:
            return str(error)
    return o.unflatten(0, (query.shape[0], -1)) if packed else o


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attention in plain torch, `[B, Sq, H, Dv]`, for what SDPA would lose: softcap and sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sink is not None:
        column = sink.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(3)[..., : key.shape[2]].to(value.dtype)
    weights = F.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, block_attention)
AttentionMaskInterface.register(NAME, block_attention_mask)
