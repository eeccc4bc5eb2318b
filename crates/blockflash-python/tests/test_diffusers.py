"""diffusers calls SDPA, so `activate_sdpa` is all that it needs; the README shows it."""

from __future__ import annotations

import pytest
import torch

import blockflash

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_transformer(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from blockflash import sdpa

    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    model = model.to(device, dtype).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8, device=device, dtype=dtype),
        "timestep": torch.tensor([3], device=device),
        "class_labels": torch.tensor([1], device=device),
    }
    calls = []
    original = sdpa._forward
    monkeypatch.setattr(sdpa, "_forward", lambda *a, **k: calls.append(1) or original(*a, **k))
    with torch.no_grad():
        expected = model(**inputs).sample
        with blockflash.activate_sdpa(device):
            actual = model(**inputs).sample
    assert len(calls) == 2  # layers
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
