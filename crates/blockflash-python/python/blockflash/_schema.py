"""The operators of attention as torch knows them.

Each is what it takes, with `(a!)` where it writes, and its results. The options, which several
operators have in common, are a table of the native module: nothing here or elsewhere repeats their
order, their types or their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _native


class Options:
    """The options of an operator, in the order in which it takes them."""

    def __init__(self, operator: str) -> None:
        """Reads the table of the native module."""
        table = _native.options(operator)
        self.defaults: dict[str, Any] = {name: default for name, _, default in table}
        self.places = {name: place for place, name in enumerate(self.defaults)}
        self.tensors = [name for name, kind, _ in table if kind == "Tensor?"]
        """The names of the tensors, which come first."""
        self.text = ", ".join(f"{kind} {name}={default}" for name, kind, default in table)

    def value(self, options: Sequence[Any], name: str) -> Any:
        """One of the options of a call, whose last ones may be left out."""
        place = self.places[name]
        return options[place] if place < len(options) else self.defaults[name]

    def named(self, options: Sequence[Any]) -> dict[str, Any]:
        """All options of a call by their names."""
        return self.defaults | dict(zip(self.places, options, strict=False))

    def ordered(self, options: dict[str, Any]) -> tuple[Any, ...]:
        """All options in their order, from those that differ from their defaults."""
        return tuple((self.defaults | options).values())

    def leading(self, options: dict[str, Any]) -> Sequence[Any]:
        """The same up to the last of these: what is passed costs the host time."""
        if not options:
            return ()
        values, places, count = [*self.defaults.values()], self.places, 0
        for name, value in options.items():
            place = places[name]
            values[place] = value
            count = max(count, place + 1)
        return values[:count]


ATTENTION = Options("attention")
DECODE = Options("attention_decode")

_QKV = "Tensor q, Tensor k, Tensor v"
_CACHE = "Tensor q, Tensor k_cache, Tensor v_cache"
_WRITTEN_CACHE = "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache"
_TOKEN_SCALES = "Tensor(c!) k_token_scale, Tensor(d!) v_token_scale"
_RESULTS = "(Tensor o, Tensor lse)"
_PAGES = "Tensor block_table, Tensor? seqused_k"
_LENGTHS = "Tensor? seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_ROWS = "SymInt max_q, SymInt max_k, int left, int right"
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor d_sink, Tensor d_bias)"
_GIVEN = f"Tensor grad_o, Tensor? grad_lse, {_QKV}, Tensor o, Tensor lse, bool of_bias=False"

SCHEMAS = {
    "attention": f"({_QKV}, {ATTENTION.text}) -> {_RESULTS}",
    "attention_forward": f"({_QKV}, {ATTENTION.text}) -> Tensor",
    "attention_out": f"({_QKV}, Tensor(a!) o, Tensor(b!)? lse=None, {ATTENTION.text}) -> ()",
    "attention_backward": f"({_GIVEN}, {ATTENTION.text}) -> {_GRADIENTS}",
    "attention_decode": f"({_CACHE}, {DECODE.text}) -> {_RESULTS}",
    "attention_append": f"({_WRITTEN_CACHE}, Tensor k, Tensor v, {DECODE.text}) -> {_RESULTS}",
    "attention_append_scales": f"({_WRITTEN_CACHE}, {_TOKEN_SCALES}, Tensor k, Tensor v, "
    f"{DECODE.text}) -> {_RESULTS}",
    "append_kv": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor? block_table=None, Tensor? seqused_k=None, Tensor? cu_seqlens_k=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    "mla_append": "(Tensor kv_latent, Tensor? k_rope, Tensor(a!) cache, Tensor? block_table=None, "
    "Tensor? seqused_k=None, Tensor? cu_seqlens=None) -> ()",
    "mla_decode": f"(Tensor q, Tensor cache, SymInt head_dim_v, {DECODE.text}) -> {_RESULTS}",
    "mla_decode_out": "(Tensor q, Tensor cache, Tensor(a!) o, Tensor(b!)? lse=None, "
    f"{DECODE.text}) -> ()",
    "quantize": "(Tensor x, Tensor? scale, Tensor? cu_seqlens, int code, int per, "
    "bool subtract_mean, bool rotate, SymInt max_seqlen) -> "
    "(Tensor codes, Tensor scale, Tensor mean)",
    "index_attention": f"({_QKV}, Tensor lists, SymInt granularity, SymInt max_k, {DECODE.text}) "
    f"-> {_RESULTS}",
    "index_attention_backward": f"(Tensor grad_o, Tensor? grad_lse, {_QKV}, Tensor lists, "
    f"Tensor o, Tensor lse, SymInt granularity, SymInt max_k, {DECODE.text}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor d_sink)",
    "block_scores": f"(Tensor q, Tensor k, Tensor? weights, {_LENGTHS}, Tensor? block_table, "
    f"SymInt granularity, SymInt groups, {_ROWS}, bool mean, bool relu, float scale) -> Tensor",
    "top_k": f"(Tensor scores, SymInt k, {_LENGTHS}, SymInt granularity, SymInt batch, "
    f"SymInt capacity, {_ROWS}, SymInt first, SymInt last) -> Tensor",
    "attention_merge": f"(Tensor parts_o, Tensor parts_lse) -> {_RESULTS}",
    "summarize_pages": f"(Tensor k_cache, Tensor(a!) summaries, {_PAGES}, SymInt tokens) -> ()",
    "choose_pages": f"(Tensor q, Tensor k_cache, Tensor summaries, {_PAGES}, "
    "Tensor? cu_seqlens_q, SymInt max_q, SymInt room) -> (Tensor lists, Tensor counts)",
}
