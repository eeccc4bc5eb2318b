"""A long prompt through a transformers model that attends only to chosen blocks of keys.

Each layer scores every block of queries against every block of keys by their mean vectors and keeps
the best blocks of each row, besides the diagonal and the first block. The prefill is then timed
against dense attention, and the logits are compared with those of dense attention.

    python long_context.py --small                       # a few seconds, no GPU
    python long_context.py --tokens 32768                # Llama-shaped, random weights
    python long_context.py --model some/checkpoint       # its own weights; needs its tokenizer

Random weights attend to almost everything alike, so they show the time, but the error of a trained
model, which attends to few blocks, is what counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import plot
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
)

import blockflash
from blockflash import BlockMask
from blockflash.transformers import NAME, block_attention, block_attention_mask

CHOSEN = "chosen_blocks"
settings = {"block": 128, "keep": 1.0}


def choose_blocks(q: Tensor, k: Tensor) -> BlockMask:
    """The mask of the best blocks; q is [B, S, H, D] and k is [B, S, Hkv, D]."""
    block, length = settings["block"], q.shape[1]
    sizes = {"seqlens": (length, length), "block": block}
    always = BlockMask.window(0, 0, **sizes) | BlockMask.sink(1, **sizes)
    kept = max(2, round(settings["keep"] * length / block))
    return BlockMask.top_k_means(q, k, kept, block=block, causal=True, always=always)


def chosen_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: chosen blocks for the prompt, all for the rest."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return block_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    mask = choose_blocks(q, k)
    return blockflash.attention(q, k, v, causal=True, scale=scaling, block_mask=mask), None


AttentionInterface.register(CHOSEN, chosen_blocks)
AttentionMaskInterface.register(CHOSEN, block_attention_mask)


def load(arguments: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The model and the tokens of the prompt."""
    torch.manual_seed(0)
    if arguments.model is not None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
        with open(arguments.text or __file__, encoding="utf-8") as file:
            tokens = AutoTokenizer.from_pretrained(arguments.model)(file.read())["input_ids"]
        tokens = torch.tensor([tokens]).repeat(1, -(-arguments.tokens // len(tokens)))
        return model, tokens[:, : arguments.tokens]
    width, layers = (128, 2) if arguments.small else (4096, 8)
    config = LlamaConfig(
        vocab_size=512 if arguments.small else 32000,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 128 if not arguments.small else 4,
        num_key_value_heads=max(2, width // 512),
        head_dim=32 if arguments.small else 128,
        max_position_embeddings=arguments.tokens,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=arguments.dtype)
    return model, torch.randint(config.vocab_size, (1, arguments.tokens))


@torch.no_grad()
def prefill(model: Any, tokens: Tensor, implementation: str, repeats: int) -> tuple[Tensor, float]:
    """The logits of the last 128 tokens in float32, and the best time in milliseconds."""
    model.set_attn_implementation(implementation)
    best = float("inf")
    for _ in range(repeats + 1):  # the first run loads kernels
        wait(tokens)
        begin = time.perf_counter()
        logits = model(tokens, use_cache=False, logits_to_keep=128).logits
        wait(tokens)
        best = min(best, time.perf_counter() - begin)
    return logits.float(), best * 1e3


def wait(tokens: Tensor) -> None:
    """Waits for the GPU of the tokens."""
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint; Llama-shaped random weights without it")
    parser.add_argument("--text", help="the file of the prompt, for a checkpoint")
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--block", type=int, default=None)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", default="long_context.svg")
    parser.add_argument("--small", action="store_true", help="a size for a machine without a GPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not arguments.small else "cpu"
    arguments.dtype = torch.bfloat16 if device == "cuda" else torch.float32
    arguments.tokens = arguments.tokens or (512 if arguments.small else 16384)
    settings["block"] = arguments.block or (64 if arguments.small else 128)
    if arguments.tokens % settings["block"]:
        parser.error("--tokens must be a multiple of the block")

    model, tokens = load(arguments)
    model, tokens = model.to(device).eval(), tokens.to(device)
    dense, dense_time = prefill(model, tokens, NAME, arguments.repeats)
    rows = [(1.0, dense_time, 0.0)]
    print(f"{tokens.shape[1]} tokens, blocks of {settings['block']}, {device}")
    print(f"{'kept':>6} {'ms':>10} {'speedup':>8} {'error':>10} {'same token':>11}")
    print(f"{'dense':>6} {dense_time:10.1f} {1:8.2f} {0:10.2e} {1:11.0%}")
    for settings["keep"] in arguments.keep:
        logits, elapsed = prefill(model, tokens, CHOSEN, arguments.repeats)
        error = ((logits - dense).norm() / dense.norm()).item()
        same = (logits.argmax(-1) == dense.argmax(-1)).float().mean().item()
        rows.append((settings["keep"], elapsed, error))
        print(
            f"{settings['keep']:6.1%} {elapsed:10.1f} {dense_time / elapsed:8.2f} {error:10.2e} "
            f"{same:11.0%}"
        )
    kept, times, errors = zip(*rows)
    charts = [
        plot.Chart("prefill, ms", "blocks kept in a row", {"": (kept, times)}),
        plot.Chart("relative error of the logits", "blocks kept in a row", {"": (kept, errors)}),
    ]
    plot.write(arguments.plot, charts)
    print(f"The plot is in {arguments.plot}.")


if __name__ == "__main__":
    main()
