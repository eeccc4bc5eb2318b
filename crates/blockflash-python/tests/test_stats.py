"""What is counted, when a drop-in falls back, and that strict mode raises instead."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs

import blockflash
from blockflash import _stats, flash_attn
from blockflash.transformers import NAME, block_attention

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONVOLUTIONS = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 4}
CONVOLUTIONS |= {"num_conv_pos_embedding_groups": 2}
ENCODER_DECODER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
ENCODER_DECODER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
ENCODER_DECODER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS, AUDIO = torch.arange(2, 34).view(2, 16), torch.randn(2, 4000)
BOTH = {"decoder_input_ids": TOKENS[:, :9]}
MEL = {"input_features": torch.randn(2, 80, 128), **BOTH}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Tensor], int]] = {
    "llama": (transformers.LlamaConfig(**SIZES), {"input_ids": TOKENS}, 2),
    "bert": (transformers.BertConfig(**SIZES), {"input_ids": TOKENS}, 2),
    "whisper": (transformers.WhisperConfig(**ENCODER_DECODER, max_source_positions=64), MEL, 6),
    "bart": (transformers.BartConfig(**ENCODER_DECODER), {"input_ids": TOKENS, **BOTH}, 6),
    "wav2vec2": (
        transformers.Wav2Vec2Config(**SIZES, **CONVOLUTIONS), {"input_values": AUDIO}, 2,
    ),
    "hubert": (transformers.HubertConfig(**SIZES, **CONVOLUTIONS), {"input_values": AUDIO}, 2),
    "unispeech": (
        transformers.UniSpeechConfig(**SIZES, **CONVOLUTIONS), {"input_values": AUDIO}, 2,
    ),
    "vit": (
        transformers.ViTConfig(**SIZES, image_size=16, patch_size=8),
        {"pixel_values": torch.randn(2, 3, 16, 16)}, 2,
    ),
    # The values have a smaller head_dim than queries and keys.
    "deepseek_v3": (
        transformers.DeepseekV3Config(
            **SIZES, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
            n_group=1, topk_group=1, first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, num_key_value_heads=4,
        ),
        {"input_ids": TOKENS}, 2,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    blockflash.reset_stats()
    with blockflash.strict(False):
        yield
    blockflash.restore_sdpa()
    blockflash.reset_stats()


def qkv(*, lengths: int = 7, dim: int = 16, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors `[B, H, S, D]`."""
    return tuple(torch.randn(2, 4, lengths, dim, **options) for _ in range(3))


def calls(path: str) -> tuple[int, dict[str, int]]:
    found = blockflash.stats()[path]
    return found.kernel, found.fallback


@pytest.mark.parametrize("options", [{}, {"output_attentions": False}], ids=["plain", "explicit"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_reach_the_kernels(name: str, options: dict[str, Any]) -> None:
    """Each of their calls, also where a model passes arguments at their defaults."""
    config, inputs, attentions = ARCHITECTURES[name]
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME).eval()
    with torch.no_grad(), blockflash.strict():
        found = model(**inputs, **options)[0]
        assert calls("transformers") == (attentions, {})
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(**inputs, **options)[0], rtol=1e-4, atol=1e-4)
    assert calls("transformers") == (attentions, {})


MODULE = SimpleNamespace(is_causal=False, num_key_value_groups=1)


def test_what_counts_as_used() -> None:
    q, k, v = qkv()
    unused = {"output_attentions": False, "position_bias": None, "cache": None, "softcap": 0.0}
    expected = torchs(q, k, v).transpose(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, _ = block_attention(MODULE, q, k, v, None, dropout=0.0, **unused)
    torch.testing.assert_close(o, expected)
    assert calls("transformers") == (1, {})
    with pytest.warns(UserWarning, match="the model uses output_attentions"):
        o, _ = block_attention(MODULE, q, k, v, None, output_attentions=True, softcap=1e6)
    torch.testing.assert_close(o, expected)
    with pytest.warns(UserWarning, match="the model uses cache"):
        block_attention(MODULE, q, k, v, None, cache=(k, v))
    with blockflash.strict():
        o, _ = block_attention(MODULE, q, k, v, None, position_bias=torch.zeros(1, 4, 7, 7))
    torch.testing.assert_close(o, expected)
    assert calls("transformers") == (
        2, {"the model uses output_attentions": 1, "the model uses cache": 1}
    )  # fmt: skip


CASES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", CASES)
def test_transformers_falls_back(device: str) -> None:
    """For every call that no kernel takes, with the result of SDPA and one warning per reason."""
    q, k, v = qkv(device=device, dtype=torch.float64 if device == "cpu" else torch.float32)
    few = (k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1))
    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    tall = qkv(dim=520, device=device, dtype=torch.bfloat16)
    tensors = [
        ((q, k, v), {}, "there is no kernel for torch.float"),
        ((q[:1], *few), {}, "there is no kernel|different batches"),
        ((*half,), {"scaling": -1.0}, "scale"),
    ]
    if device == "cuda":
        tensors.append((tall, {}, "head_dim 520, which is above 512"))
    for inputs, options, reason in tensors:
        expected = torchs(*inputs, scale=options.get("scaling")).transpose(1, 2)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                blockflash._stats._warned.clear()
                o, _ = block_attention(MODULE, *inputs, None, **options)
                block_attention(MODULE, *inputs, None, **options)
            # On a GPU torch's own flash kernel gives NaN for a negative scale.
            torch.testing.assert_close(o, expected, equal_nan=True)
            texts = [str(warning.message) for warning in caught]
            assert len([text for text in texts if "runs without blockflash" in text]) == 1, texts
        with blockflash.strict(), pytest.raises(blockflash.Unsupported, match=reason):
            block_attention(MODULE, *inputs, None, **options)
        if inputs[0] is q:  # by plain torch, and while a graph is traced
            block_attention(MODULE, *inputs, None, softcap=2.0)
            torch.compiler.reset()
            compiled = torch.compile(block_attention, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(MODULE, *inputs, None)[0], expected)
    assert calls("transformers")[0] == 0


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), pytest.param(
    "cuda", torch.float32, marks=pytest.mark.gpu)])  # fmt: skip
def test_a_model_falls_back(device: str, dtype: torch.dtype) -> None:
    config, inputs, _ = ARCHITECTURES["llama"]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    model, ids = model.to(device, dtype).eval(), inputs["input_ids"].to(device)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    for mask in (None, padding):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = model(ids, attention_mask=mask).logits
            model.set_attn_implementation("sdpa")
            expected = model(ids, attention_mask=mask).logits
            model.set_attn_implementation(NAME)
        assert len([w for w in caught if NAME in str(w.message)]) == (mask is None)
        torch.testing.assert_close(found, expected)
    ((reason, count),) = calls("transformers")[1].items()
    assert f"no kernel for {dtype} on {device}" in reason and count == 4
    if device == "cuda":  # autocast lowers it to a type that has kernels
        blockflash.reset_stats()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            model(ids)
        assert calls("transformers") == (2, {})


def test_a_dense_mask_is_no_reason_to_fall_back() -> None:
    config, inputs, _ = ARCHITECTURES["llama"]
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME).eval()
    padding = torch.ones_like(inputs["input_ids"])
    padding[0, 3] = 0
    with torch.no_grad(), blockflash.strict():
        model(**inputs, attention_mask=padding)
    assert calls("transformers") == (2, {})


def with_gradients(inputs: Any, **options: Any) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    o = torchs(*leaves, **options)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


def test_sdpa_on_the_cpu_falls_back() -> None:
    inputs, double = qkv(), qkv(dtype=torch.float64)
    q, k, v = inputs
    cases = [
        ((q, k[:1], v[:1]), {"attn_mask": torch.randn(7, 7)}, "batches"),
        (double, {"is_causal": True}, "float64"),
        (inputs, {"scale": -0.5}, "scale"),
    ]
    expected = [with_gradients(tensors, **options) for tensors, options, _ in cases]
    with blockflash.activate_sdpa("cpu"):
        for (tensors, options, reason), wanted in zip(cases, expected, strict=True):
            with pytest.warns(UserWarning, match=reason):
                found = with_gradients(tensors, **options)
            assert all(map(torch.equal, found, wanted))
            with blockflash.strict(), pytest.raises(blockflash.Unsupported, match=reason):
                torchs(*tensors, **options)
        assert calls("sdpa")[0] == 0 and sum(calls("sdpa")[1].values()) == 3
        with blockflash.strict():
            with_gradients(inputs, is_causal=True)
            torch.compiler.reset()
            compiled = torch.compile(torchs, backend="aot_eager", fullgraph=True)
            for _ in range(3):
                compiled(*inputs)
        assert calls("sdpa")[0] == 4  # also each call of compiled code


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_sdpa_on_a_gpu_falls_back(compiled: bool) -> None:
    """With dropout, forward and backward are those of torch's own flash kernel."""
    torch.compiler.reset()
    call = torch.compile(torchs, backend="aot_eager", fullgraph=True) if compiled else torchs
    inputs = qkv(device="cuda", dtype=torch.float16, lengths=130, dim=64)

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        o = call(*leaves, **options)
        return [o, *torch.autograd.grad(o.float().square().sum(), leaves)]

    cases = ({"dropout_p": 0.5, "is_causal": True}, {"scale": -0.5})
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = [run(**options) for options in cases]
    with blockflash.activate_sdpa(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for options, wanted in zip(cases, expected, strict=True):
            with pytest.warns(UserWarning, match="dropout|scale"):
                found = run(**options)
            # A negative scale gives NaN there, and so the same NaN here.
            same = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(found[0], wanted[0], **same)
            for ours, right in zip(found[1:], wanted[1:], strict=True):
                torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-3, equal_nan=True)
            with blockflash.strict(), pytest.raises(blockflash.Unsupported, match="dropout|scale"):
                torchs(*inputs, **options)
        assert calls("sdpa")[0] == 0 and sum(calls("sdpa")[1].values()) == 2
        run(is_causal=True)
        assert calls("sdpa")[0] == 1


def test_functions_called_by_name() -> None:
    """They count what they computed, and raise what they do not take."""
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv())
    blockflash.attention(q, k, v)
    flash_attn.flash_attn_func(q, k, v)
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths)
    blockflash.attention_decode(q[:, :1], k, v)
    blockflash.scaled_dot_product_attention(*qkv())
    kernel = {path: found.kernel for path, found in blockflash.stats().items() if found.kernel}
    assert kernel == {"attention": 3, "attention_decode": 2, "flash_attn": 2}
    with pytest.raises(blockflash.Unsupported, match="leave it at 0"):
        flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    with pytest.raises(blockflash.Unsupported, match="dropout_p is 0.5, .*set it to 0"):
        blockflash.scaled_dot_product_attention(*qkv(), dropout_p=0.5)
    found = blockflash.stats().items()
    assert {path: calls.kernel for path, calls in found if calls.kernel} == kernel
    blockflash.reset_stats()
    assert all(found == _stats.Calls(0, {}) for found in blockflash.stats().values())


def test_compiled_calls_count_when_they_are_traced() -> None:
    torch.compiler.reset()
    compiled = torch.compile(blockflash.attention, backend="aot_eager", fullgraph=True)
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv())
    for _ in range(3):
        compiled(q, k, v)
    assert calls("attention")[0] == 1


def test_threads_lose_no_count() -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [_stats.count("sdpa") for _ in range(2000)], range(4)))
    assert calls("sdpa")[0] == 8000


def test_reasons_are_bounded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in range(300):
            _stats.fall_back("sdpa", f"q has {size} rows")
    reasons = calls("sdpa")[1]
    assert len(reasons) == _stats._REASONS_MAX + 1 and reasons["further reasons"] == 200


def test_strict_mode_is_restored() -> None:
    with blockflash.strict():
        with blockflash.strict(False), pytest.warns(UserWarning, match="known"):
            _stats.fall_back("sdpa", "known", unless_known=True)
        with pytest.raises(blockflash.Unsupported, match="BLOCKFLASH_STRICT"):
            _stats.fall_back("sdpa", "a reason")
    _stats.fall_back("sdpa", "known")
    assert calls("sdpa")[1] == {"known": 2}


@pytest.mark.parametrize(("value", "expected"), [("1", "True"), ("0", "False"), ("", "False")])
def test_environment(value: str, expected: str) -> None:
    code = "from blockflash import _stats; print(_stats._strict)"
    environment = os.environ | {"BLOCKFLASH_STRICT": value}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == expected


def test_environment_of_another_value() -> None:
    command = [sys.executable, "-c", "import blockflash; blockflash.stats()"]
    environment = os.environ | {"BLOCKFLASH_STRICT": "yes"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "ValueError: BLOCKFLASH_STRICT is 'yes', not 0 or 1" in found.stderr
