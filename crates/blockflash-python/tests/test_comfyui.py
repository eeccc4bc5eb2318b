"""The nodes of ComfyUI, with a stand-in for its functions; `engines/test_comfy.py` has its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import blockflash
from blockflash.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, Override
from blockflash.video import Dense, SlidingTile, TopK, video_attention

HEADS, DIM, GRID = 2, 16, (4, 6, 8)
TOKENS = 4 * 6 * 8
LAYOUTS = ["apart", "flat"]
SAMPLING = SimpleNamespace(percent_to_sigma=lambda percent: 10 * (1 - percent))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    blockflash.reset_stats()
    yield
    blockflash.reset_stats()


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """What ComfyUI's function on SDPA promises."""
    override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
    if override is not None and not kwargs.get("_inside_attn_wrapper"):
        options = {"attn_precision": attn_precision, "skip_reshape": skip_reshape}
        options |= {"skip_output_reshape": skip_output_reshape, "_inside_attn_wrapper": True}
        return override(stand_in, q, k, v, heads, mask, **options, **kwargs)
    if not skip_reshape:
        dim = q.shape[2] // heads
        q, k, v = (t.unflatten(2, (-1, dim)).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    options = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    o = F.scaled_dot_product_attention(q, k, v, mask, **options)
    return o if skip_output_reshape else o.transpose(1, 2).flatten(2)


def patcher(**options: Any) -> Any:
    """What a node sees of ComfyUI's ModelPatcher."""
    return SimpleNamespace(
        model_options={"transformer_options": options},
        clone=lambda: patcher(**options),
        get_model_object={"model_sampling": SAMPLING}.get,
    )


def node(name: str, model: Any = None, **given: Any) -> dict[str, Any]:
    """The options of a model behind a node, whose other inputs have their defaults."""
    made = NODE_CLASS_MAPPINGS[name]()
    inputs = made.INPUT_TYPES()["required"]
    for key, (kind, *options) in inputs.items():
        if key != "model":
            given.setdefault(key, kind[0] if isinstance(kind, list) else options[0]["default"])
    (patched,) = getattr(made, made.FUNCTION)(model or patcher(), **given)
    return patched.model_options["transformer_options"]


def tensors(
    layout: str, tokens: int = TOKENS, keys: int | None = None, heads_k: int = HEADS
) -> list[Tensor]:
    """q, k and v as `[B, H, N, D]`, or as `[B, N, H * D]`."""
    torch.manual_seed(0)
    shapes = [(HEADS, tokens), (heads_k, keys or tokens), (heads_k, keys or tokens)]
    made = [torch.randn(2, *shape, DIM) for shape in shapes]
    return made if layout == "apart" else [t.transpose(1, 2).flatten(2) for t in made]


def calls() -> tuple[int, int]:
    counted = blockflash.stats()["comfyui"]
    return counted.kernel, sum(counted.fallback.values())


MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(70, 50) > 0.3,
    "numbers": lambda: torch.randn(70, 50),
    "batch": lambda: torch.randn(2, 70, 50),
    "heads": lambda: torch.randn(2, HEADS, 70, 50),
    "keys": lambda: torch.randn(1, 1, 1, 50),
}


def check_dense(function: Callable[..., Tensor], mask: str, layout: str, skip: bool) -> None:
    """The node for dense attention gives what a function of ComfyUI does."""
    q, k, v = tensors(layout, 70, 50)
    options = {"skip_reshape": layout == "apart", "skip_output_reshape": skip}
    options |= {"mask": MASKS[mask](), "attn_precision": torch.float32}
    expected = function(q, k, v, HEADS, **options)
    assert calls() == (0, 0)
    options |= {"transformer_options": node("BlockflashAttention")}
    found = function(q, k, v, HEADS, low_precision_attention=False, **options)
    assert calls() == (1, 0)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def check_sparse(function: Callable[..., Tensor], layout: str) -> None:
    """The nodes for sparse attention are for the video alone."""
    apart, given = layout == "apart", tensors(layout)
    q, k, v = (t.transpose(1, 2) for t in tensors("apart"))
    for options, kind in (
        (node("BlockflashSlidingTile", window_frames=1, window_width=1), SlidingTile((1, 3, 1))),
        (node("BlockflashTopK", tile="1 x 8 x 8"), TopK(0.3, (1, 8, 8))),
    ):
        options["grid_sizes"] = torch.Size(GRID)
        found = function(*given, HEADS, skip_reshape=apart, transformer_options=options)
        torch.testing.assert_close(found, video_attention(q, k, v, GRID, kind).flatten(2))
        dense = function(*given, HEADS, skip_reshape=apart)
        assert (found - dense).abs().max() > 1e-2
        # Attention to a text is dense.
        text = tensors(layout, TOKENS, 7)
        found = function(*text, HEADS, skip_reshape=apart, transformer_options=options)
        dense = function(*text, HEADS, skip_reshape=apart)
        torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-5)
    assert calls() == (4, 0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skip", [False, True])
def test_dense(mask: str, layout: str, skip: bool) -> None:
    check_dense(stand_in, mask, layout, skip)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse(layout: str) -> None:
    check_sparse(stand_in, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_and_shared_keys(layout: str) -> None:
    q, k, v = tensors(layout, 70, 50, heads_k=1)
    override, apart = Override(Dense()), layout == "apart"
    options = {"scale": 0.7, "enable_gqa": True, "skip_reshape": apart}
    found = override(stand_in, q, k, v, HEADS, **options)
    assert calls() == (1, 0)
    torch.testing.assert_close(found, stand_in(q, k, v, HEADS, **options), atol=1e-5, rtol=1e-5)


def test_steps_before_the_start_are_dense() -> None:
    q, k, v = tensors("flat")
    options = node("BlockflashSlidingTile", start_percent=0.4, window_height=1, window_width=1)
    options["grid_sizes"] = GRID
    dense, found = stand_in(q, k, v, HEADS), []
    for sigma in (9.0, 6.5, 5.9):
        options = copy.deepcopy(options)  # as ComfyUI does
        options["sigmas"] = torch.tensor([sigma, sigma])
        for _ in range(2):
            found.append(stand_in(q, k, v, HEADS, transformer_options=options))
    sparse = [(o - dense).abs().max().item() > 1e-2 for o in found]
    assert sparse == [False] * 4 + [True] * 2


REFUSED = {
    "float64": ([t.double() for t in tensors("flat")], {}, "float64|f64"),
    "unknown": (tensors("flat"), {"sinks": torch.ones(2)}, "the argument sinks"),
    "heads": ([t[..., :-1] for t in tensors("flat")], {}, r"not \[batch, tokens, 2 \* dim\]"),
    "keys": (tensors("flat", heads_k=1), {}, r"k has shape .* 2 \* 16\]"),
    "apart": (tensors("apart"), {}, r"q has shape \(2, 2, 192, 16\)"),
    "empty": ([t[..., :0] for t in tensors("flat")], {}, "q has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_kernel_goes_on(case: str) -> None:
    given, options, reason = REFUSED[case]
    received = []

    def func(*args: Any, **kwargs: Any) -> str:
        received.append((args, kwargs))
        return "ComfyUI's"

    override = Override(Dense())
    with pytest.warns(UserWarning, match=reason):
        assert override(func, *given, HEADS, **options) == "ComfyUI's"
    assert override(func, *given, HEADS, **options) == "ComfyUI's"
    assert received == [((*given, HEADS), options)] * 2 and calls() == (0, 2)
    chained = Override(Dense(), previous=lambda *given, **options: ("before", given[0] is func))
    assert chained(func, *given, HEADS, **options) == ("before", True)
    with blockflash.strict(), pytest.raises(blockflash.Unsupported, match=reason):
        override(func, *given, HEADS, **options)


@pytest.mark.parametrize(
    ("options", "mask", "reason"),
    [
        ({}, None, "needs the grid_sizes of the model"),
        ({"grid_sizes": (4, 6, 7)}, None, r"192 tokens are not those of grid \(4, 6, 7\)"),
        ({"grid_sizes": (4, 48)}, None, "192 tokens are not those"),
        ({"grid_sizes": GRID}, torch.zeros(TOKENS, TOKENS), "does not go with a mask"),
    ],
)
def test_sparse_kinds_that_cannot_be(options: dict[str, Any], mask: Any, reason: str) -> None:
    q, k, v = tensors("flat")
    override = Override(SlidingTile(1))
    with pytest.warns(UserWarning, match=reason):
        found = override(stand_in, q, k, v, HEADS, mask, transformer_options=options)
    torch.testing.assert_close(found, stand_in(q, k, v, HEADS, mask))
    assert calls() == (0, 1)


def test_nodes() -> None:
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys()
    before = {"optimized_attention_override": "of another node"}
    model = patcher(**before)
    options = node("BlockflashTopK", model, share=0.5, tile="4 x 4 x 8")
    assert model.model_options == {"transformer_options": before}
    override = options["optimized_attention_override"]
    assert override.previous == "of another node" and override.sigma_start == 8
    assert override.kind == TopK(0.5, (4, 4, 8))
    for made in NODE_CLASS_MAPPINGS.values():
        assert made.RETURN_TYPES == ("MODEL",) and made.DESCRIPTION and made.CATEGORY


def test_compiled() -> None:
    q, k, v = tensors("flat")
    options = {**node("BlockflashSlidingTile", window_width=1), "grid_sizes": GRID}

    def twice(q: Tensor) -> Tensor:
        return stand_in(q * 2, k, v, HEADS, transformer_options=options) * 2

    expected = twice(q)
    torch.testing.assert_close(torch.compile(twice, backend="eager")(q), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Dense(), SlidingTile((1, 3, 1)), TopK(0.4)])
def test_on_gpu(kind: Any) -> None:
    given = [t.bfloat16() for t in tensors("flat")]
    options, override = {"transformer_options": {"grid_sizes": GRID}}, Override(kind)
    expected = override(stand_in, *given, HEADS, **options)
    found = override(stand_in, *(t.cuda() for t in given), HEADS, **options)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-2, rtol=2e-2)
    assert calls() == (2, 0)
