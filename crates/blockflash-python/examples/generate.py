"""Text generation by a transformers model with a static cache, on blockflash beside SDPA.

transformers compiles each step of a static cache on a GPU into a CUDA graph. SDPA gets a dense mask
over the whole cache there; blockflash reads the length on the device and visits only what is used,
so a step costs what its tokens cost and not what the cache could hold.

    python generate.py --small                      # a few seconds, no GPU
    python generate.py --prompt 512 --cache 32768   # Llama-shaped, random weights
    python generate.py --model some/checkpoint      # its own weights
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from blockflash.transformers import NAME


def small_model() -> nn.Module:
    """Two layers with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes, **heads))


def generate(model: nn.Module, prompt: Tensor, new: int, cache: int) -> tuple[Tensor, float]:
    """The new tokens, and the seconds for them."""
    model.generation_config.pad_token_id = 0
    start = time.perf_counter()
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=StaticCache(config=model.config, max_cache_len=cache),
        min_new_tokens=new,
        max_new_tokens=new,
        do_sample=False,
    )
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return found[:, prompt.shape[1] :], time.perf_counter() - start


def main() -> None:
    """Generate with both and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--model", help="a checkpoint")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--cache", type=int, default=8192, help="room for tokens")
    args = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if args.small else ("cuda", torch.bfloat16)
    if args.small:
        args.prompt, args.new, args.cache = 17, 16, 64
        model = small_model()
    elif args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    else:
        torch.set_default_dtype(dtype)
        config = LlamaConfig(num_hidden_layers=16, num_key_value_heads=8)
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(device, dtype).eval()
    vocabulary = model.config.vocab_size
    prompt = torch.randint(1, vocabulary, (args.batch, args.prompt), device=device)

    found = {}
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        generate(model, prompt, args.new, args.cache)  # compiles
        found[name], seconds = generate(model, prompt, args.new, args.cache)
        print(f"{name}: {args.batch * args.new / seconds:.0f} tokens per second")
    same = (found["sdpa"] == found[NAME]).float().mean().item()
    print(f"{same:.1%} of the tokens are the same")


if __name__ == "__main__":
    main()
