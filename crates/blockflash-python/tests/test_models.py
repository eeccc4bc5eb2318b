"""The tables of docs/src/models/ say what of each family of transformers runs on our kernels.

Each row is one small model, run here in five ways; a cell says where its attention ran.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import blockflash
from blockflash.transformers import NAME

PAGES = Path(__file__).parents[3] / "docs/src/models"
COLUMNS = ("forward", "padded batch", "generation", "static cache", "training")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = SMALL | {"image_size": 16, "patch_size": 8}
TEXT = SMALL | {"intermediate_size": 96} | VOCABULARY
GROUPED = TEXT | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 16}
WINDOW = {"sliding_window": 8}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **TEXT, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
PAIR = {
    **VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1,
}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "LlamaConfig": GROUPED,
    "Llama4TextConfig": HEADS | {"num_local_experts": 2, "attention_chunk_size": 8},
    "MistralConfig": HEADS | WINDOW,
    "MixtralConfig": HEADS | {"num_local_experts": 2},
    "MinistralConfig": HEADS | MIXED,
    "Qwen2Config": GROUPED,
    "Qwen3Config": HEADS,
    "Qwen3MoeConfig": HEADS | EXPERTS,
    "Qwen3NextConfig": HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "GemmaConfig": HEADS,
    "Gemma2Config": HEADS | MIXED,
    "Gemma3TextConfig": HEADS | MIXED,
    "Gemma4TextConfig": HEADS | MIXED,
    "GptOssConfig": HEADS | MIXED | {"num_local_experts": 2, "num_experts_per_tok": 2},
    "DeepseekV2Config": LATENT,
    "DeepseekV3Config": LATENT,
    "PhiConfig": GROUPED,
    "Phi3Config": GROUPED | WINDOW,
    "PhimoeConfig": GROUPED | {"num_local_experts": 2},
    "Cohere2Config": GROUPED | MIXED,
    "Ernie4_5Config": HEADS,
    "Glm4Config": HEADS,
    "GPT2Config": VOCABULARY | {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "GPTNeoXConfig": TEXT,
    "GraniteConfig": GROUPED,
    "HunYuanDenseV1Config": HEADS,
    "MiniMaxConfig": HEADS | LINEAR | {"num_local_experts": 2, "block_size": 8},
    "Olmo2Config": GROUPED,
    "OPTConfig": SMALL | VOCABULARY | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "SmolLM3Config": GROUPED,
    "Starcoder2Config": GROUPED | WINDOW,
    "BloomConfig": VOCABULARY | {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "FalconConfig": TEXT,
    "BertConfig": TEXT,
    "DebertaV2Config": TEXT,
    "DistilBertConfig": {
        "vocab_size": 64, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
    },
    "ElectraConfig": TEXT,
    "ModernBertConfig": TEXT | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "RobertaConfig": TEXT,
    "BartConfig": PAIR,
    "T5Config": VOCABULARY
    | {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    | {"decoder_start_token_id": 0},
    "WhisperConfig": PAIR | {"max_source_positions": 64},
    "CLIPVisionConfig": VISION | {"intermediate_size": 96},
    "Dinov2Config": VISION,
    "SiglipVisionConfig": VISION | {"intermediate_size": 96},
    "SwinConfig": {
        "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4,
    },
    "ViTConfig": VISION | {"intermediate_size": 96},
}  # fmt: skip
GENERATE = list(CONFIGURATIONS)[: list(CONFIGURATIONS).index("BertConfig")]
TOKENS = torch.arange(3, 35).view(2, 16)
PADDED = torch.ones(2, 16, dtype=torch.long)
PADDED[0, :3] = 0


def rows() -> dict[str, tuple[str, ...]]:
    """The rows of the tables, by their configurations."""
    found: dict[str, tuple[str, ...]] = {}
    for page in sorted(PAGES.glob("*.md")):
        for line in re.findall(r"^\| `\w+Config` \|.*\|$", page.read_text("utf-8"), re.MULTILINE):
            name, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
            assert name not in found, f"{name} is in two tables"
            found[name] = tuple(cells)
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    blockflash.reset_stats()
    with warnings.catch_warnings(), blockflash.strict(False):
        warnings.simplefilter("ignore")
        yield
    blockflash.reset_stats()


def where(call: Callable[[], Any]) -> str:
    """Where attention ran in a call."""
    blockflash.reset_stats()
    try:
        call()
    except TypeError:  # The model adds the mask to scores of its own.
        return "error"
    counted = blockflash.stats()["transformers"]
    if counted.kernel and counted.fallback:
        return "both"
    return "kernels" if counted.kernel else "SDPA" if counted.fallback else "own code"


def inputs(config: Any) -> dict[str, Tensor]:
    """What the model of a configuration takes."""
    torch.manual_seed(0)
    if hasattr(config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    decoder = {"decoder_input_ids": TOKENS[:, :9]} if config.is_encoder_decoder else {}
    if config.model_type == "whisper":
        return {"input_features": torch.randn(2, 80, 128), **decoder}
    return {"input_ids": TOKENS, **decoder}


def cells(name: str) -> tuple[str, ...]:
    """The row of a configuration, by trying it."""
    config = getattr(transformers, name)(**CONFIGURATIONS[name])
    generates = name in GENERATE
    auto = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
    torch.manual_seed(0)
    try:
        model = auto.from_config(config, attn_implementation=NAME).eval()
    except KeyError:  # It has classes by the name of the implementation, and none of ours.
        return ("error",) * len(COLUMNS)
    taken = inputs(config)

    def forward(**more: Any) -> Any:
        return model(**taken, **more)

    def generate(**more: Any) -> Any:
        return model.generate(TOKENS, max_new_tokens=2, do_sample=False, **more)

    row = dict.fromkeys(COLUMNS, "–")
    with torch.no_grad():
        row["forward"] = where(forward)
        if "input_ids" in taken:
            row["padded batch"] = where(lambda: forward(attention_mask=PADDED))
    if generates:
        row["generation"] = where(generate)
        static = {"cache_implementation": "static", "disable_compile": True}
        row["static cache"] = where(lambda: generate(**static))
    model.train()
    row["training"] = where(lambda: forward()[0].float().sum().backward())
    return tuple(row.values())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_row(name: str) -> None:
    assert rows()[name] == cells(name)


def test_rows_are_all_tested() -> None:
    assert set(rows()) == set(CONFIGURATIONS)
