"""Transformers of diffusers: by `activate_sdpa` as they are, and with `set_attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockflash
from blockflash.diffusers import Dense, SlidingTile, TopK, set_attention
from blockflash.video import Kind, _order

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

GRID, TEXT = (5, 6, 8), 7
PLACES = [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    blockflash.reset_stats()
    yield
    blockflash.reset_stats()


def dit() -> nn.Module:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2}
    return diffusers.DiTTransformer2DModel(**sizes, sample_size=8, num_embeds_ada_norm=10).eval()


@cache
def wan() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "num_layers": 2}
    sizes |= {"out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
    model = diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), **sizes)
    for parameter in model.parameters():  # weights that make attention uneven
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.4)
    return model.eval()


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    frames, height, width = GRID
    given = {
        "hidden_states": torch.randn(2, 4, frames, 2 * height, 2 * width),
        "encoder_hidden_states": torch.randn(2, TEXT, 16),
    }
    given = {name: t.to(device, dtype) for name, t in given.items()}
    return {**given, "timestep": torch.tensor([3, 700], device=device)}


@torch.no_grad()
def run(model: nn.Module, **given: Any) -> Tensor:
    return model(**inputs(), **given).sample


def calls() -> tuple[int, int]:
    """How many calls ran on the kernels, and how many did not."""
    counted = blockflash.stats()["diffusers"]
    return counted.kernel, sum(counted.fallback.values())


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_activate_sdpa(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = dit().to(device, dtype)
    given = {
        "hidden_states": torch.randn(1, 4, 8, 8, device=device, dtype=dtype),
        "timestep": torch.tensor([3], device=device),
        "class_labels": torch.tensor([1], device=device),
    }
    with torch.no_grad():
        expected = model(**given).sample
        with blockflash.activate_sdpa(device):
            found = model(**given).sample
    assert blockflash.stats()["sdpa"].kernel == 2, "one call for each layer"
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", [None, Dense(), SlidingTile(99), TopK(1.0), TopK(1.0, (2, 8, 8))])
@pytest.mark.parametrize("fused", [False, True])
def test_everything_visited_is_unpatched(kind: Kind | None, fused: bool) -> None:
    model = wan()
    if fused:
        model.fuse_qkv_projections()
    try:
        expected = run(model)
        with set_attention(model, kind):
            found = run(model)
        assert calls() == (4, 0), "two layers, to itself and to the text"
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(run(model), expected), "the end restores what was before"
        assert calls() == (4, 0)
    finally:
        model.unfuse_qkv_projections()


def masked(visible: Tensor) -> Callable[..., Tensor]:
    """The reference: attention under an explicit mask of tokens."""
    inner = wan().blocks[0].attn1.processor

    def processor(attn: nn.Module, x: Tensor, text: Any, mask: Any, rotary: Any) -> Tensor:
        return inner(attn, x, text, visible, rotary)

    return processor


@pytest.mark.parametrize("dense_layers", [(), [1], {0, 1}])
@pytest.mark.parametrize("kind", [SlidingTile(1), SlidingTile((3, 1, 2), (1, 8, 8))])
def test_sliding_tile(kind: SlidingTile, dense_layers: Any) -> None:
    model = wan()
    order, _, _ = _order(GRID, kind.tile, torch.device("cpu"))
    blocks = kind.block_mask(torch.empty(0), torch.empty(0), GRID)
    assert 0 < blocks.density < 1
    visible = blocks.to_token_mask()[0, 0][order.argsort()][:, order.argsort()]
    with set_attention(model, kind, dense_layers=dense_layers):
        found = run(model)
    before = [block.attn1.processor for block in model.blocks]
    for i, block in enumerate(model.blocks):
        if i not in dense_layers:
            block.attn1.set_processor(masked(visible))
    expected = run(model)
    for block, processor in zip(model.blocks, before):
        block.attn1.set_processor(processor)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    differs = (found - run(model)).abs().max() > 1e-3
    assert differs == (len(dense_layers) < 2)


def test_top_k_makes_a_difference_that_shrinks() -> None:
    model, errors = wan(), []
    expected = run(model)
    for share in (0.2, 0.5, 1.0):
        with set_attention(model, TopK(share)):
            errors.append((run(model) - expected).norm().item())
    assert errors[0] > errors[1] > 10 * errors[2]


def test_gradient() -> None:
    model, given = wan(), inputs()
    x = given["hidden_states"].requires_grad_()
    with set_attention(model, SlidingTile(99)):
        model(**given).sample.square().sum().backward()
    found, x.grad = x.grad, None
    model(**given).sample.square().sum().backward()
    torch.testing.assert_close(found, x.grad, atol=1e-3, rtol=1e-3)


def test_compiled() -> None:
    model = wan()
    with set_attention(model, SlidingTile(1)):
        expected = run(model)
        torch.testing.assert_close(run(torch.compile(model, backend="eager")), expected)


def test_a_call_without_a_kernel_is_left_to_torch() -> None:
    model = dit().double()
    given = {
        "hidden_states": torch.randn(1, 4, 8, 8, dtype=torch.float64),
        "timestep": torch.tensor([3]),
        "class_labels": torch.tensor([1]),
    }
    with torch.no_grad(), set_attention(model), pytest.warns(UserWarning, match="blockflash.diff"):
        found = model(**given).sample
    assert calls() == (0, 2)
    with torch.no_grad():
        assert torch.equal(found, model(**given).sample)
    with blockflash.strict(), set_attention(model), pytest.raises(blockflash.Unsupported):
        model(**given)


def test_what_is_refused() -> None:
    model = wan()
    with pytest.raises(TypeError, match="kind must be Dense, SlidingTile or TopK, not str"):
        set_attention(model, "dense")
    with pytest.raises(blockflash.Unsupported, match="no Conv3d named patch_embedding"):
        set_attention(dit(), SlidingTile(3))
    with pytest.raises(blockflash.Unsupported, match="Linear has no processors"):
        set_attention(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="dense_layers has 2, but .* has the layers 0 to 1"):
        set_attention(model, TopK(0.5), dense_layers=[2])
    with pytest.raises(ValueError, match=r"dense_layers is \[0\], but kind is Dense"):
        set_attention(model, dense_layers=[0])
    with set_attention(model), pytest.raises(ValueError, match="is set already: restore"):
        set_attention(model, TopK(0.5))


def test_a_processor_that_does_not_ask_torch() -> None:
    model = wan()
    with set_attention(model, SlidingTile(3)) as patch:
        model.blocks[0].attn1.processor._attention_backend = "_native_math"
        assert run(model) is not None, "another backend that calls torch's function"
        processor = model.blocks[0].attn1.processor
        vars(processor)["inner"] = lambda attn, x, *rest: x
        with pytest.raises(blockflash.Unsupported, match="did not call torch's"):
            run(model)
        patch.restore()
    assert model.blocks[0].attn1.processor._attention_backend == "_native_math"
    model.blocks[0].attn1.processor._attention_backend = None


def test_a_sparse_kind_is_never_dropped() -> None:
    model, visible = wan(), torch.ones(240, 240, dtype=torch.bool)
    with set_attention(model, SlidingTile(3)):
        attn = model.blocks[0].attn1
        x = torch.randn(1, 240, 48)
        with pytest.raises(blockflash.Unsupported, match="is for None tokens, and .* 240 queries"):
            attn(x)
        run(model)
        assert attn(x).shape == x.shape
        with pytest.raises(blockflash.Unsupported, match="does not go with an attn_mask"):
            attn(x, attention_mask=visible)
        with pytest.raises(blockflash.Unsupported, match=r"\(5, 6, 8\) tokens, .* 239 queries"):
            attn(x[:, 1:])
        attn.processor._parallel_config = object()
        with pytest.raises(blockflash.Unsupported, match="several GPUs share"):
            attn(x)
        attn.processor._parallel_config = None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Dense(), SlidingTile(1), SlidingTile(1, (1, 8, 8)), TopK(1.0)])
def test_on_gpu(kind: Kind) -> None:
    """Of some blocks bfloat16 may choose others than float32 does."""
    with set_attention(wan(), kind):
        expected = run(wan())
    model = diffusers.WanTransformer3DModel.from_config(wan().config)
    model.load_state_dict(wan().state_dict())
    model = model.cuda().eval()
    with torch.no_grad(), set_attention(model, kind), torch.autocast("cuda", torch.bfloat16):
        found = model(**inputs("cuda")).sample
    assert ((found.cpu().float() - expected).norm() / expected.norm()).item() < 5e-2
