"""Models of transformers over a `CodesCache`, beside a cache of what its codes stand for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from test_transformers import DECODERS, PADDED, check, model_of, tokens
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

import blockflash
from blockflash._transformers_cache import CodesLayer, widened
from blockflash.transformers import NAME, CodesCache

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
E4M3 = torch.float8_e4m3fn
WHERE = [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]


class WideLayer(CodesLayer):
    """Hands over numbers in place of codes, as transformers' own caches do."""

    def update(self, *states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Widens what the layer hands over."""
        found = super().update(*states, **kwargs)
        is_coded = found[0].dtype.itemsize == 1
        return tuple(widened(t, self.dtype) for t in found) if is_coded else found


def wide(config: Any, dtype: torch.dtype = E4M3) -> Cache:
    return Cache(layers=[WideLayer(dtype) for _ in range(config.num_hidden_layers)])


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """A warning, by which attention leaves the codes, is an error unless the test expects it."""
    blockflash.reset_stats()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=NAME)
        yield


def steps(model: Any, cache: Cache, sizes: tuple[int, ...] = (9, 1, 1, 4, 2)) -> Tensor:
    """Logits of the tokens, given in parts of these sizes."""
    parts = tokens().to(model.device).split(list(sizes), 1)
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", DECODERS)
def test_attends_to_codes(name: str, code: torch.dtype, device: str, dtype: torch.dtype) -> None:
    config = DECODERS[name]
    exact = steps(model_of(config), wide(config, code))
    model = model_of(config).to(device, dtype)
    same = steps(model, wide(config, code))
    blockflash.reset_stats()
    cache = CodesCache(config, code)
    found = steps(model, cache)
    assert blockflash.stats()["attention_decode"].kernel == 4 * config.num_hidden_layers
    assert cache.get_seq_length() == tokens().shape[1]
    check(found, exact, same)
    # Codes are close to what they stand for, and are not the same.
    model = model_of(config)
    rounded, plain = (steps(model, c) for c in (CodesCache(config, code), DynamicCache()))
    assert torch.equal(rounded[:, :9], plain[:, :9]), "a prompt is not rounded"
    error = (rounded[:, 9:] - plain[:, 9:]).norm() / plain[:, 9:].norm()
    assert 1e-4 < error < (0.3 if code == torch.float8_e5m2 else 0.15)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_generate(device: str, dtype: torch.dtype) -> None:
    config = DECODERS["llama"]
    model = model_of(config).to(device, dtype)
    how = {"max_new_tokens": 12, "do_sample": False}
    for beams in (1, 3) if device == "cpu" else (1,):
        found, expected = (
            model.generate(tokens().to(device), past_key_values=cache, num_beams=beams, **how)
            for cache in (CodesCache(config), wide(config))
        )
        assert device == "cuda" or torch.equal(found, expected)
        assert found.shape[1] == tokens().shape[1] + 12


def test_padding_runs_on_numbers() -> None:
    config = DECODERS["llama"]
    model = model_of(config)
    mask = torch.cat([PADDED, torch.ones(2, 1, dtype=torch.long)], 1)

    def two_steps(cache: Cache) -> Tensor:
        with torch.no_grad():
            model(tokens(), attention_mask=PADDED, past_key_values=cache)
            return model(tokens()[:, :1], attention_mask=mask, past_key_values=cache).logits

    expected = two_steps(wide(config))
    blockflash.reset_stats()
    with pytest.warns(UserWarning, match="a cache of 8 bits takes no padding"):
        found = two_steps(CodesCache(config))
    torch.testing.assert_close(found, expected)
    with pytest.raises(blockflash.Unsupported, match="takes no padding"), blockflash.strict():
        two_steps(CodesCache(config))


def test_what_generation_does_to_a_cache() -> None:
    config = DECODERS["llama"]
    model = model_of(config)
    found, expected = CodesCache(config), wide(config)
    more = tokens()[:, :1]
    for change in (
        lambda cache: cache.crop(-3),
        lambda cache: cache.crop(0),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([3, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
        lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers],
        lambda cache: cache.reset(),
    ):
        logits = []
        for cache in (found, expected):
            if cache.get_seq_length() == 0:
                steps(model, cache)
            change(cache)
            rows = cache.layers[0]._rows
            batch = rows[0].shape[0] if rows else 2
            with torch.no_grad():
                logits.append(model(more[:1].expand(batch, 1), past_key_values=cache).logits)
        assert found.get_seq_length() == expected.get_seq_length()
        torch.testing.assert_close(*logits)
    assert found.get_seq_length() == 1


def test_a_long_cache_grows() -> None:
    layer = CodesLayer(E4M3)
    states = torch.randn(1, 2, 700, 16)
    layer.update(states[:, :, :1], states[:, :, :1])
    for at in range(1, 700):
        k, v = layer.update(states[:, :, at : at + 1], states[:, :, at : at + 1])
    codes, scale = blockflash.quantize(states.transpose(1, 2), E4M3, per="token")
    assert torch.equal(k.transpose(1, 2).float(), codes.float())
    expected = (codes.float() * scale[..., None]).transpose(1, 2)
    assert torch.equal(widened(v, torch.float32), expected)
    assert layer._rows[0].shape[1] < 700 * 9 / 8 + 65


def test_what_is_refused() -> None:
    config = DECODERS["llama"]
    with pytest.raises(ValueError, match="dtype is torch.float16, but must be float8_e4m3fn"):
        CodesCache(config, torch.float16)
    mixed = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="layer_types has linear_attention, but a CodesCache"):
        CodesCache(mixed)
    model = model_of(config)
    with pytest.raises(blockflash.Unsupported, match="keeps no gradient"):
        model(tokens(), past_key_values=CodesCache(config))
    with pytest.raises(ValueError, match="tokens_to_remove is 3, expected minus"):
        CodesCache(config).crop(3)
    q = torch.randn(1, 4, 1, 16)
    codes = torch.randn(1, 2, 5, 16).to(E4M3)
    with pytest.raises(blockflash.Unsupported, match="float8_e4m3fn without scales"):
        blockflash.transformers.block_attention(model, q, codes, codes, None)
