"""Prefill of a model in the shape of Llama 3 8B, end to end, by the implementation of attention.

The model is transformers' own, with random weights. A prompt runs through all layers and fills the
cache; logits are computed for its last token. `block_attention` is compared with SDPA on cuDNN, on
FlashAttention 2 and on blockflash, in rounds with a changing order. The last logits of each are
compared with those of SDPA on FlashAttention 2.

    python benches/prefill.py [--tokens 8192 32768] [--rounds 7] [--out prefill.jsonl]
    python benches/prefill.py --small            # a few seconds, no GPU
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rounds import Records, interleaved, median
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import blockflash
from blockflash.transformers import NAME

REFERENCE = "sdpa, flash"


def implementations(device: str) -> dict[str, tuple[str, Any]]:
    """Names, with `attn_implementation` and what makes a context for the call."""
    cudnn = {"sdpa, cuDNN": ("sdpa", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))}
    return {
        NAME: (NAME, nullcontext),
        "sdpa, blockflash": ("sdpa", lambda: blockflash.activate_sdpa(device)),
        **(cudnn if device == "cuda" else {}),
        REFERENCE: ("sdpa", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    }


def make_model(device: str, small: bool, tokens: int) -> LlamaForCausalLM:
    """A model with random weights, made where it runs."""
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if small:
        sizes |= {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 448}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, max_position_embeddings=tokens, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    return model.eval()


def wait(device: str) -> None:
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


class Prefill:
    """A prompt through the model."""

    def __init__(self, model: LlamaForCausalLM, prompt: Tensor) -> None:
        """Takes the tokens of the prompt, `[1, S]`."""
        self.model, self.prompt, self.device = model, prompt, prompt.device.type
        self.logits: Tensor | None = None

    def seconds(self, name: str, context: Any) -> float:
        """Time from the call to the end of its last kernel; keeps the logits."""
        self.model.set_attn_implementation(name)
        entered: AbstractContextManager[Any] = context()
        with torch.no_grad(), entered:
            wait(self.device)
            start = time.perf_counter()
            logits = self.model(self.prompt, logits_to_keep=1).logits
            wait(self.device)
            elapsed = time.perf_counter() - start
        self.logits = logits.flatten().double()
        return elapsed


def measure(prefill: Prefill, records: Records, rounds: int) -> None:
    """One length of the prompt."""
    tokens, logits, memory, measures = prefill.prompt.shape[1], {}, {}, {}
    for name, (attention, context) in implementations(prefill.device).items():
        if prefill.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            prefill.seconds(attention, context)
        except (RuntimeError, ValueError) as error:
            print(f"{name} does not run: {str(error).splitlines()[0]}")
            records.add(tokens=tokens, implementation=name, error=str(error))
            continue
        logits[name] = prefill.logits
        if prefill.device == "cuda":
            memory[name] = torch.cuda.max_memory_allocated() / 2**30
        measures[name] = lambda attention=attention, context=context: prefill.seconds(
            attention, context
        )
    found = interleaved(measures, rounds)
    ours, reference = median(found[NAME]), logits.get(REFERENCE, logits[NAME])
    errors = {
        name: ((values - reference).norm() / reference.norm()).item()
        for name, values in logits.items()
    }
    print(f"{tokens} tokens, {rounds} rounds\n")
    print(
        "| attention | ms, median | ms, best | tokens/s | × ours | error of logits | token | GiB |"
    )
    print("|---|---:|---:|---:|---:|---:|---|---:|")
    for name, times in found.items():
        milliseconds = 1e3 * median(times)
        same = bool(logits[name].argmax() == reference.argmax())
        records.add(
            tokens=tokens, implementation=name, seconds=times, relative_error=errors[name],
            same_token=same, peak_gib=memory.get(name),
        )  # fmt: skip
        print(
            f"| {name} | {milliseconds:.1f} | {1e3 * min(times):.1f} "
            f"| {tokens / median(times):.0f} | {median(times) / ours:.3f} | {errors[name]:.1e} "
            f"| {'same' if same else 'other'} | {memory.get(name, 0):.1f} |"
        )
    print()
    others = [median(times) for name, times in found.items() if name in (REFERENCE, "sdpa, cuDNN")]
    if prefill.device != "cuda" or not others:
        return
    records.goal(f"{tokens} tokens: faster than SDPA", ours < min(others))
    if "sdpa, cuDNN" in errors:
        agree = errors[NAME] <= 2 * errors["sdpa, cuDNN"]
        records.goal(f"{tokens} tokens: at most twice the difference of cuDNN", agree)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=8, help="half as many from 16384 tokens on")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    args = parser.parse_args()
    device = "cpu" if args.small else "cuda"
    lengths = [64] if args.small else args.tokens
    records = Records(args.out, device)
    model = make_model(device, args.small, max(lengths))
    for tokens in lengths:
        prompt = torch.randint(model.config.vocab_size, (1, tokens), device=device)
        gc.collect()
        rounds = args.rounds if tokens < 16384 else args.rounds // 2
        measure(Prefill(model, prompt), records, max(rounds, 1))


if __name__ == "__main__":
    main()
