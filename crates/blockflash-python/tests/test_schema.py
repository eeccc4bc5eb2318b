"""One table of options: torch's schemas, defaults, calls and stubs follow from it."""

from __future__ import annotations

import ast
import inspect
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import blockflash
from blockflash import _codes, _decode, _index, _index_choice, _mla, _native, _pages  # noqa: F401
from blockflash._schema import ATTENTION, DECODE, SCHEMAS, Options

OPS = _decode._OPS
# Arguments before the options, and those that are written.
OPERATORS = {
    "attention": (["q", "k", "v"], []),
    "attention_forward": (["q", "k", "v"], []),
    "attention_out": (["q", "k", "v", "o", "lse"], ["o", "lse"]),
    "attention_backward": (["grad_o", "grad_lse", "q", "k", "v", "o", "lse", "of_bias"], []),
    "attention_decode": (["q", "k_cache", "v_cache"], []),
    "attention_append": (["q", "k_cache", "v_cache", "k", "v"], ["k_cache", "v_cache"]),
    "attention_append_scales": (
        ["q", "k_cache", "v_cache", "k_token_scale", "v_token_scale", "k", "v"],
        ["k_cache", "v_cache", "k_token_scale", "v_token_scale"],
    ),
    "attention_merge": (["parts_o", "parts_lse"], []),
    "index_attention": (["q", "k", "v", "lists", "granularity", "max_k"], []),
    "index_attention_backward": (
        ["grad_o", "grad_lse", "q", "k", "v", "lists", "o", "lse", "granularity", "max_k"], [],
    ),
    "block_scores": (
        [
            "q", "k", "weights", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "block_table",
            "granularity", "groups", "max_q", "max_k", "left", "right", "mean", "relu", "scale",
        ],
        [],
    ),
    "top_k": (
        [
            "scores", "k", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "granularity", "batch",
            "capacity", "max_q", "max_k", "left", "right", "first", "last",
        ],
        [],
    ),
    "append_kv": (
        [
            "k", "v", "k_cache", "v_cache", "block_table", "seqused_k", "cu_seqlens_k", "k_scale",
            "v_scale",
        ],
        ["k_cache", "v_cache"],
    ),
    "mla_append": (
        ["kv_latent", "k_rope", "cache", "block_table", "seqused_k", "cu_seqlens"], ["cache"],
    ),
    "mla_decode": (["q", "cache", "head_dim_v"], []),
    "mla_decode_out": (["q", "cache", "o", "lse"], ["o", "lse"]),
    "quantize": (
        ["x", "scale", "cu_seqlens", "code", "per", "subtract_mean", "rotate", "max_seqlen"], [],
    ),
    "summarize_pages": (
        ["k_cache", "summaries", "block_table", "seqused_k", "tokens"], ["summaries"],
    ),
    "choose_pages": (
        [
            "q", "k_cache", "summaries", "block_table", "seqused_k", "cu_seqlens_q", "max_q",
            "room",
        ],
        [],
    ),
}  # fmt: skip


def table_of(operator: str) -> Options | None:
    decoding = ("attention_decode", "attention_append", "attention_append_scales")
    if (
        operator in decoding
        or operator.startswith("index_attention")
        or operator.startswith("mla_decode")
    ):
        return DECODE
    return ATTENTION if operator.startswith("attention") and operator != "attention_merge" else None


def test_every_operator_is_here() -> None:
    assert SCHEMAS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_has_the_options_in_their_order(name: str) -> None:
    (before, written), table = OPERATORS[name], table_of(name)
    arguments = getattr(OPS, name).default._schema.arguments
    found = [argument.name for argument in arguments]
    assert found == before + (list(table.places) if table else [])
    assert [a.name for a in arguments if a.alias_info and a.alias_info.is_write] == written
    if table is None:
        return
    options = arguments[len(before) :]
    assert {a.name: a.default_value for a in options} == table.defaults
    assert [a.name for a in options if "Tensor" in str(a.type)] == table.tensors
    assert list(table.places)[: len(table.tensors)] == table.tensors, "tensors come first"


def test_options_are_found_by_their_names() -> None:
    given = ("a sink", None, "offsets", None, "slopes", None, None, None, 7)
    assert ATTENTION.value(given, "sink") == "a sink"
    assert ATTENTION.value(given, "max_q") == 7
    assert ATTENTION.value(given, "softcap") == 0.0
    named = ATTENTION.named(given)
    some = {"sink": "a sink", "cu_seqlens_k": "offsets", "alibi_slopes": "slopes", "max_q": 7}
    assert named == ATTENTION.defaults | some
    assert ATTENTION.ordered(named) == (*given, *list(ATTENTION.defaults.values())[9:])
    assert ATTENTION.leading({}) == ()
    leading = ATTENTION.leading({"max_q": 7, "sink": "a sink"})
    assert tuple(leading) == ("a sink", *[None] * 7, 7)
    with pytest.raises(TypeError, match="mistake"):
        _native.options("mistake")


class Seen(TorchDispatchMode):
    """What operators are called with, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        arguments = operator._schema.arguments
        values = {a.name: value for a, value in zip(arguments, given, strict=False)}
        self.calls[operator._schema.name] = values | (named or {})
        return operator(*given, **(named or {}))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_each_argument_of_decoding_reaches_its_option() -> None:
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 4, 16, 1, 16)
    positions, used = torch.randn(48, 8), ints(20, 17)
    table, lists, counts = ints(0, 1, 2, 3).view(2, 2), ints(0, 1, 0, 1).view(2, 1, 2), ints(1, 2)
    sink, slopes, bias = torch.zeros(2), torch.ones(2), torch.zeros(1, 2, 1, 32)
    new, k_scale, v_scale = torch.randn(2, 1, 16), torch.ones(1), torch.ones(2, 1)
    tail = torch.ones(2, 3, dtype=torch.uint8)
    packed = {"cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1, "cu_seqlens_k": ints(0, 1, 2)}
    given: dict[str, Any] = {
        "seqused_k": used, "block_table": table, "sink": sink, "rotary_cos": positions,
        "rotary_sin": positions + 1, "pages": (lists, counts), "scale": 0.3, "softcap": 9.0,
        "window": (5, 2), "rotary_interleaved": True, "batch_invariant": True,
        "alibi_slopes": slopes, "k_scale": k_scale, "v_scale": v_scale,
        "tail_mask": tail,
    }  # fmt: skip
    expected = {
        "seqused_k": used, "block_table": table, "cu_seqlens_q": packed["cu_seqlens_q"],
        "cu_seqlens_k": packed["cu_seqlens_k"], "sink": sink, "rotary_cos": positions,
        "rotary_sin": given["rotary_sin"], "page_lists": lists, "page_counts": counts, "bias": None,
        "alibi_slopes": slopes, "k_scale": k_scale, "v_scale": v_scale, "tail_mask": tail,
        "max_q": 1,
        "left": 5, "right": 2, "scale": 0.3, "softcap": 9.0, "interleaved": True,
        "batch_invariant": True,
    }  # fmt: skip
    assert expected.keys() == DECODE.places.keys()
    with Seen() as seen, torch.no_grad():
        codes = (rows.to(torch.float8_e4m3fn) for rows in cache)
        blockflash.attention_decode(q[:, 0], *codes, k=new, v=new, **packed, **given)
        append = seen.calls["blockflash::attention_append"]
        # Without numbers, tensors at the end are left out.
        blockflash.attention_decode(q, *cache[:, :2], seqused_k=used, sink=sink)
        added = cache[:, :2].flatten(1, 2).unsqueeze(1).expand(2, 2, 32, 1, 16).contiguous()
        blockflash.attention_decode(q, *added, bias=bias)
        assert seen.calls["blockflash::attention_decode"]["bias"] is bias
        blockflash.attention_decode(q, *cache[:, :2], seqused_k=used, sink=sink)
        decode = seen.calls["blockflash::attention_decode"]
    for name, value in expected.items():
        found = append[name]
        assert found is value if isinstance(value, Tensor) else found == value, name
    assert decode["seqused_k"] is used and decode["sink"] is sink
    assert list(decode) == ["q", "k_cache", "v_cache", *list(DECODE.places)[:5]]
    assert decode["block_table"] is decode["cu_seqlens_q"] is decode["cu_seqlens_k"] is None


def test_native_functions_read_options_as_torch_passes_them() -> None:
    q = torch.randn(1, 3, 2, 16)
    o = torch.empty_like(q)
    for wrong, why in (
        ({"max_q": "many"}, "max_q: "),
        ({"top_left": 2}, "top_left: "),
        ({"scale": "large"}, "scale: "),
        ({"sink": 1}, "sink must be a torch.Tensor, not int"),
        ({"mistake": 1}, "18 options are given, but there are 17"),
    ):
        with pytest.raises(TypeError, match=why):
            _native.attention(q, q, q, o, None, *ATTENTION.ordered(wrong))


def stubs() -> dict[str, ast.FunctionDef]:
    text = resources.files(blockflash).joinpath("_native.pyi").read_text()
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_stubs_have_the_native_functions_and_their_parameters() -> None:
    functions = {name: value for name, value in vars(_native).items() if inspect.isbuiltin(value)}
    assert functions.keys() == stubs().keys()
    for name, stub in stubs().items():
        parameters = inspect.signature(functions[name]).parameters.values()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        arguments = stub.args
        assert [p.name for p in parameters if p.kind not in kinds] == [
            a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ], name
        assert [p.name for p in parameters if p.kind in kinds] == [
            a.arg for a in (arguments.vararg, arguments.kwarg) if a
        ], name
        defaults = [p.default for p in parameters if p.default is not p.empty]
        stubbed = (*arguments.defaults, *filter(None, arguments.kw_defaults))
        assert defaults == [ast.literal_eval(default) for default in stubbed], name
