"""Rotary embedding: `flash_attn.layers.rotary`, by operations of torch.

Tables are `[positions, rotary_dim / 2]`, in any element type; the computation is in float32. The
first rotary_dim elements of a head are turned: 2 i with 2 i + 1 if `interleaved`, else i with
i + rotary_dim / 2. All functions have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockflash._flash import InvalidCall
from blockflash._rotary import positions_of, turn, turn_by


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns x by its positions.

    Args:
        x: `[batch, seqlen, heads, head_dim]`, or `[total, heads, head_dim]` with `cu_seqlens`.
        cos: `[positions, rotary_dim / 2]`.
        sin: As cos.
        interleaved: Which elements are turned together.
        inplace: Write the result into x, and return it.
        seqlen_offsets: The position of the first token, a number or int `[batch]`. Tokens at
            positions behind the tables are not turned.
        cu_seqlens: int32 `[batch + 1]`, where packed sequences start.
        max_seqlen: The longest sequence, needed with `cu_seqlens`.

    """
    turned = _turned(x, (cos, sin), interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    return _written(x, [turned], -1) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Turns x `[batch, seqlen, heads, head_dim]` by a row of the tables for each token.

    Tables are `[seqlen, rotary_dim / 2]` or `[batch, seqlen, rotary_dim / 2]`.
    """
    return turn_by(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turns the queries and keys in qkv in place, and returns it.

    Args:
        qkv: `[batch, seqlen, 3, heads, head_dim]`, or with `num_heads_q`
            `[batch, seqlen, num_heads_q + 2 * heads_k, head_dim]`.
        cos: `[positions, rotary_dim / 2]`.
        sin: As cos.
        cos_k: Other tables for the keys.
        sin_k: As cos_k.
        interleaved: Which elements are turned together.
        seqlen_offsets: The position of the first token, a number or int `[batch]`.
        num_heads_q: How many heads are queries.

    """
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise InvalidCall(f"qkv has shape {list(qkv.shape)}, not [.., .., 3, heads, head_dim]")
        q, k, v = qkv.unbind(2)
    else:
        rest = -1 if num_heads_q is None or qkv.dim() != 4 else qkv.shape[2] - num_heads_q
        if rest < 0 or rest % 2:
            shape = list(qkv.shape)
            raise InvalidCall(f"num_heads_q is {num_heads_q} with qkv of shape {shape}")
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    tables = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    turned = [
        _turned(part, pair, interleaved, seqlen_offsets)
        for part, pair in ((q, (cos, sin)), (k, tables))
    ]
    return _written(qkv, [*turned, v], 2)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Turns the keys in kv `[batch, seqlen, 2, heads, head_dim]` in place, and returns it."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise InvalidCall(f"kv has shape {list(kv.shape)}, not [.., .., 2, heads, head_dim]")
    k, v = kv.unbind(2)
    return _written(kv, [_turned(k, (cos, sin), interleaved, seqlen_offsets), v], 2)


def _turned(
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    interleaved: bool,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    cos, sin = tables
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise InvalidCall(f"x has shape {list(x.shape)}, with or without cu_seqlens")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise InvalidCall(
            f"cos and sin have shapes {list(cos.shape)} and {list(sin.shape)}, not both "
            f"[positions, up to {x.shape[-1] // 2}]"
        )
    if cu_seqlens is not None and max_seqlen is None:
        raise InvalidCall("max_seqlen is needed with cu_seqlens")
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    seqlen = x.shape[1] if max_seqlen is None or cu_seqlens is None else max_seqlen
    last = seqlen if isinstance(offsets, Tensor) else seqlen + offsets
    if last > cos.shape[0]:
        raise InvalidCall(f"cos has {cos.shape[0]} positions, but tokens stand at up to {last}")
    if isinstance(offsets, Tensor) and offsets.shape != (batch,):
        raise InvalidCall(f"seqlen_offsets has shape {list(offsets.shape)}, not [{batch}]")
    return turn(x, cos, sin, positions_of(x, offsets, cu_seqlens), interleaved)


def _written(whole: Tensor, parts: Sequence[Tensor], dim: int) -> Tensor:
    """`whole` with the parts of `[..., dim, ...]` written into it.

    torch lets nobody write into a leaf that needs a gradient. flash-attn does, and the gradient
    then goes through what it returns, as here.
    """
    if len(parts) == 1:
        result = parts[0]
    else:
        result = (torch.stack if whole.dim() == 5 else torch.cat)(list(parts), dim=dim)
    if whole.is_leaf and whole.requires_grad and torch.is_grad_enabled():
        with torch.no_grad():
            whole.copy_(result)
        return result
    return whole.copy_(result)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables of its own, which grow with the sequences; in place.

    Args:
        dim: How many elements of a head are turned.
        base: The wavelengths are 2 π base^(2 i / dim).
        interleaved: Which elements are turned together.
        scale_base: If given, queries and keys are scaled by their positions, too (XPos).
        device: Of the wavelengths.

    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: list[Tensor] = []

    def _grow(self, seqlen: int, like: Tensor) -> None:
        """Has `_tables`, cos and sin of queries and then of keys, reach so far."""
        if self._tables and not (self.training and self._tables[0].is_inference()):
            table = self._tables[0]
            if len(table) >= seqlen and (table.device, table.dtype) == (like.device, like.dtype):
                return
        position = torch.arange(seqlen, device=like.device, dtype=torch.float32)
        frequencies = self.inv_freq.to(like.device)
        if frequencies.dtype != torch.float32:  # It was rounded with the model.
            even = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float32)
            frequencies = self.base ** (-even / self.dim)
        angles = torch.outer(position, frequencies)
        cos, sin = angles.cos(), angles.sin()
        tables = [cos, sin, cos, sin]
        if self.scale is not None:
            power = (position - seqlen // 2)[:, None] / self.scale_base
            scale = self.scale.to(like.device, torch.float32) ** power
            tables = [cos * scale, sin * scale, cos / scale, sin / scale]
        self._tables = [table.to(like.dtype) for table in tables]

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Turns queries and keys in place.

        Args:
            qkv: As for `apply_rotary_emb_qkv_`, or with `kv` queries
                `[batch, seqlen, heads, head_dim]`.
            kv: `[batch, seqlen, 2, heads, head_dim]`.
            seqlen_offset: The position of the first token, a number or int `[batch]`.
            max_seqlen: How far the tables must reach, needed with a tensor of offsets.
            num_heads_q: How many heads of qkv are queries, if it has four dimensions.

        Returns:
            qkv, or with `kv` a pair.

        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._grow(max_seqlen, qkv)
        elif not self._tables:
            raise InvalidCall("max_seqlen is needed with a tensor of offsets")
        tables, of_keys = self._tables[:2], self._tables[2:]
        options = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *of_keys, num_heads_q=num_heads_q, **options)
        q = apply_rotary_emb(qkv, *tables, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, *of_keys, **options)
