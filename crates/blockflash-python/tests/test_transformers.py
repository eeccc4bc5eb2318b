"""Small models of transformers with `attn_implementation="block_attention"` against eager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

import blockflash
from blockflash import _stats
from blockflash.transformers import NAME

WINDOW, TOKENS = 5, 17
LAYERS = ["sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODERS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": transformers.Gemma2Config(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=LAYERS,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=16,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=LAYERS,
        num_local_experts=2,
        num_experts_per_tok=2,  # all of them, so that rounding does not choose others
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
PADDED = torch.ones(2, TOKENS, dtype=torch.long)
PADDED[0, : WINDOW - 1] = 0  # with more of it, rows in a window would see padding only
PACKED = torch.cat([torch.arange(7), torch.arange(4), torch.arange(6)])[None].expand(2, -1)
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without a cache": {"use_cache": False},
    "left-padded": {"attention_mask": PADDED},
    "right-padded": {"attention_mask": PADDED.flip(1)},
    "packed": {"position_ids": PACKED, "use_cache": False},
}
HALF = [pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.bfloat16, torch.float16)]
WHERE = [("cpu", torch.float32), *HALF]


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """A warning, by which attention leaves our kernels, is an error unless the test expects it."""
    blockflash.reset_stats()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=NAME)
        yield


def model_of(config: Any, auto: Any = transformers.AutoModelForCausalLM, std: float = 0.2) -> Any:
    """A model with large weights, so that each token depends on all that it attends."""
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=NAME).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=std)
    return model


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(2, 64, (2, TOKENS))


def run(model: Any, implementation: str, **inputs: Any) -> Any:
    """The outputs of the model, on its device."""
    model.set_attn_implementation(implementation)
    move = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with torch.no_grad():
        return model(**move)


def check(actual: Tensor, expected: Tensor, same: Tensor, kept: Tensor | None = None) -> None:
    """In float32 within 1e-5 of `expected`, below that at most twice as far as eager is.

    `same` is eager in the element type of `actual`, `kept` where there is no padding.
    """
    kept = torch.ones(actual.shape[:2], dtype=torch.bool) if kept is None else kept.bool()
    actual, expected, same = (t.float().cpu()[kept] for t in (actual, expected, same))
    error = (actual - expected).abs().max()
    allowed = 2 * (same - expected).abs().max()
    assert error <= max(1e-5, allowed), f"{error} > {allowed}"


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_logits(name: str, inputs: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    model, ids = model_of(DECODERS[name]), tokens()
    expected = run(model, "eager", input_ids=ids, **inputs).logits
    kept = inputs.get("attention_mask")
    # The mask matters: without it the logits differ. (gpt-oss of transformers does not pass the
    # positions on to its masks: with every implementation but FlashAttention it is not packed.)
    causal = torch.ones(2, 1, TOKENS, TOKENS).tril().log().clamp(-1e30)
    if inputs is INPUTS["left-padded"] or (inputs is INPUTS["packed"] and name == "llama"):
        wrong = run(model, "eager", input_ids=ids, **(inputs | {"attention_mask": causal})).logits
        assert (wrong - expected)[PADDED.bool()].abs().max() > 1e-2
    model.to(device, dtype)
    same = run(model, "eager", input_ids=ids, **inputs).logits
    check(run(model, NAME, input_ids=ids, **inputs).logits, expected, same, kept)


@pytest.mark.parametrize("field", ["sliding_window", "attn_logit_softcapping", "sinks"])
def test_features_matter(field: str) -> None:
    """Window, softcap and sinks of the models above are not lost on both sides."""
    name = {"sliding_window": "mistral", "sinks": "gpt_oss"}.get(field, "gemma2")
    model, ids = model_of(DECODERS[name]), tokens()
    expected = run(model, NAME, input_ids=ids).logits
    with torch.no_grad():
        for layer in model.model.layers:
            if field == "sinks":
                layer.self_attn.sinks.fill_(-50.0)
            elif field == "attn_logit_softcapping":
                layer.self_attn.attn_logit_softcapping = None
    if field == "sliding_window":
        model.config.sliding_window = 100
    assert (run(model, NAME, input_ids=ids).logits - expected).abs().max() > 1e-3
    model.config.sliding_window = WINDOW


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("padding", [None, PADDED, PADDED.flip(1)], ids=["none", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(
    name: str, cache: str, padding: Tensor | None, device: str, dtype: torch.dtype
) -> None:
    """The same tokens and logits as eager; one token in half precision, where rounding decides."""
    model, where = model_of(DECODERS[name]), {"device": device, "dtype": dtype}
    mask = torch.ones_like(PADDED) if padding is None else padding
    results = []
    for implementation, place in (("eager", {"device": "cpu"}), ("eager", where), (NAME, where)):
        model.to(**place).set_attn_implementation(implementation)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NAME)
            result = model.generate(
                tokens().to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=8 if dtype == torch.float32 else 1,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
        results.append((result.sequences, torch.stack(result.logits)))
    (_, expected), (eager, same), (ours, actual) = results
    assert dtype != torch.float32 or torch.equal(eager, ours)
    check(actual, expected, same)
    if padding is None:
        assert not _stats._warned


@pytest.mark.parametrize("padding", [None, PADDED], ids=["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_continued(name: str, padding: Tensor | None) -> None:
    """A prompt in two parts, the second of which attends the cache of the first."""
    model, ids = model_of(DECODERS[name]), tokens()
    mask = torch.ones_like(ids) if padding is None else padding
    results = []
    for implementation in ("eager", NAME):
        first = run(model, implementation, input_ids=ids[:, :10], attention_mask=mask[:, :10])
        second = {"input_ids": ids[:, 10:], "attention_mask": mask}
        second["past_key_values"] = first.past_key_values
        results.append(run(model, implementation, **second).logits)
    check(results[1], results[0], results[0])


def test_static_cache_with_gradients() -> None:
    """Attention over a cache has no gradient: a warning, and SDPA's."""
    model, ids = model_of(DECODERS["llama"]), tokens()
    logits = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        run(model, implementation, input_ids=ids[:, :-1], past_key_values=cache)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = model(input_ids=ids[:, -1:], past_key_values=cache)
        output.logits.sum().backward()
        logits.append(output.logits.detach())
    assert any("no gradient" in str(warning.message) for warning in caught)
    check(logits[1], logits[0], logits[0])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_decoding(name: str) -> None:
    """A compiled step of generation with a static cache, masks and lengths in the graph."""
    torch._dynamo.reset()
    model, ids = model_of(DECODERS[name]), tokens()
    logits = []
    for implementation in ("eager", NAME):
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        run(model, implementation, input_ids=ids[:, :-3], past_key_values=cache)
        step = model.forward
        if implementation == NAME:
            step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            rows = [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(-3, -1)]
        logits.append(torch.cat(rows, 1))
    check(logits[1], logits[0], logits[0])
    assert not _stats._warned


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_generation(name: str) -> None:
    """`generate` compiles its steps and makes the masks outside: the graph serves all lengths."""
    model, results = model_of(DECODERS[name]), []
    model.set_attn_implementation("eager")
    for implementation in ("eager", NAME):
        torch._dynamo.reset()
        counters.clear()
        config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
        config._compile_all_devices = True
        result = model.generate(
            tokens(),
            attention_mask=torch.ones_like(PADDED),
            max_new_tokens=8,
            do_sample=False,
            cache_implementation="static",
            compile_config=config,
            disable_compile=implementation == "eager",
            output_logits=True,
            return_dict_in_generate=True,
        )
        results.append(torch.stack(result.logits))
        model.set_attn_implementation(NAME)
    check(results[1], results[0], results[0])
    # Windows make two graphs: before and after the cache of the window is full.
    assert counters["stats"]["unique_graphs"] == (1 if name == "llama" else 2)
    assert not _stats._warned


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compile(name: str) -> None:
    model, ids = model_of(DECODERS[name]), tokens()
    expected = run(model, "eager", input_ids=ids).logits
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits
    check(actual, expected, expected)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_compile_with_padding(device: str, dtype: torch.dtype) -> None:
    """Padding cannot be read in a graph: it is added to the scores."""
    model, ids = model_of(DECODERS["llama"]), tokens()
    expected = run(model, "eager", input_ids=ids, attention_mask=PADDED).logits
    model.to(device, dtype)
    same = run(model, "eager", input_ids=ids, attention_mask=PADDED).logits
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        actual = compiled(ids.to(device), attention_mask=PADDED.to(device)).logits
    assert not _stats._warned
    check(actual, expected, same, PADDED)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_layers(name: str) -> None:
    """The mask is made outside of the graphs, which take every kind of it."""
    model, ids = model_of(DECODERS[name]), tokens()
    cases = [INPUTS[kind] | {"use_cache": False} for kind in INPUTS]
    torch._dynamo.reset()  # the layers of all models share one function, and its limit of graphs
    expected = [run(model, "eager", input_ids=ids, **inputs).logits for inputs in cases]
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    for inputs, eager in zip(cases, expected, strict=True):
        actual = run(model, NAME, input_ids=ids, **inputs).logits
        check(actual, eager, eager, inputs.get("attention_mask"))


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_training(name: str, kind: str, device: str, dtype: torch.dtype) -> None:
    model, ids = model_of(DECODERS[name]).to(device, dtype).train(), tokens().to(device)
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in INPUTS[kind].items()}
    # What follows padding is predicted from it, where outputs may differ.
    kept = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    labels = ids.masked_fill(~(kept & kept.roll(1, 1)), -100)
    gradients = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=labels, **inputs).loss.backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert difference < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_dropout(name: str) -> None:
    """Dropout is left to SDPA, or to plain torch where SDPA would lose the sinks."""
    model, ids = model_of(DECODERS[name]).train(), tokens()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.warns(UserWarning, match="dropout"):
        first = run(model, NAME, input_ids=ids).logits
    assert (run(model, NAME, input_ids=ids).logits - first).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_mask_of_the_caller(name: str) -> None:
    """A 4-D mask runs on our kernels, also with a softcap, whether of booleans or numbers."""
    model, ids = model_of(DECODERS[name]), tokens()
    mask = (torch.rand(2, 1, TOKENS, TOKENS) < 0.5) | torch.eye(TOKENS, dtype=torch.bool)
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = run(model, "eager", input_ids=ids, attention_mask=added).logits
    for given in (mask, added):
        blockflash.reset_stats()
        actual = run(model, NAME, input_ids=ids, attention_mask=given).logits
        check(actual, expected, expected)
        assert blockflash.stats()["transformers"] == _stats.Calls(2, {})


ENCODERS = {
    "bert": transformers.BertConfig(**SIZES),
    "modernbert": transformers.ModernBertConfig(
        **SIZES, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=1
    ),
}


@pytest.mark.parametrize("padding", [None, PADDED, PADDED.flip(1)], ids=["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, padding: Tensor | None) -> None:
    model, ids = model_of(ENCODERS[name], transformers.AutoModel), tokens()
    inputs = {"input_ids": ids, "attention_mask": padding}
    expected = run(model, "eager", **inputs).last_hidden_state
    actual = run(model, NAME, **inputs).last_hidden_state
    check(actual, expected, expected, padding)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_cross_attention(name: str) -> None:
    if name == "bart":
        sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        config = transformers.BartConfig(**sizes, **heads, encoder_ffn_dim=96, decoder_ffn_dim=96)
    else:
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(**sizes, vocab_size=64)
        warnings.filterwarnings("ignore", message=NAME)  # it has position_bias
    model, ids = model_of(config, transformers.AutoModel, std=0.1), tokens()
    for padding in (PADDED.flip(1), PADDED):
        inputs = {"input_ids": ids, "attention_mask": padding, "decoder_input_ids": ids[:, :9]}
        expected = run(model, "eager", **inputs).last_hidden_state
        actual = run(model, NAME, **inputs).last_hidden_state
        check(actual, expected, expected)
