"""A model in vLLM on blockflash beside FLASH_ATTN: the same greedy tokens, and tokens a second.

Each backend has an engine in a process of its own, one after the other, with vLLM's CUDA graphs.
Tokens that differ are no error by themselves: two kernels round differently, and where two logits
are nearly equal, the other one wins; from there on texts differ. An error differs at the first
tokens of most prompts.

    python serve_check.py meta-llama/Llama-3.1-8B-Instruct
    python serve_check.py MODEL --batch 1 16 128 --prompt 2048 --new 256 -- --kv-cache-dtype fp8

What follows `--` are arguments of `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXTS = [
    "The three laws of thermodynamics say that",
    "def quicksort(values):",
    "Dear Sir or Madam, I am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "In a hole in the ground there lived",
    "La capitale de la France est",
    "The kernel of a linear map is",
    "Once the water boils, add",
]


def measure(args: argparse.Namespace) -> dict:
    """Tokens of the texts, and for each size of the batch tokens a second."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()  # The parser knows the backend then.
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = ["--model", args.model, "--attention-backend", args.run, *args.engine]
    engine = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(given)))
    greedy = {"temperature": 0.0, "max_tokens": args.new}
    texts = engine.generate(TEXTS, SamplingParams(**greedy))
    speed = []
    for batch in args.batch:
        # Other tokens for each request: no prefix is shared, and none is cached.
        prompts = [
            {"prompt_token_ids": [1 + (7 * place + 13 * request) % 997 for place in range(length)]}
            for request, length in enumerate([args.prompt] * batch)
        ]
        forced = SamplingParams(**greedy, ignore_eos=True)
        seconds = []
        for _ in range(3):
            engine.reset_prefix_cache()
            start = time.perf_counter()
            engine.generate(prompts, forced)
            seconds.append(time.perf_counter() - start)
        speed.append(batch * args.new / min(seconds))
    return {"tokens": [list(text.outputs[0].token_ids) for text in texts], "speed": speed}


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The place of the first token that differs."""
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The arguments, of which those behind `--` are for vLLM."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--beside", default="FLASH_ATTN", help="the other backend")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments[:split])
    if min(*args.batch, args.prompt, args.new) < 1:
        parser.error("--batch, --prompt and --new are at least 1")
    args.engine = arguments[split + 1 :]
    return args


def main() -> None:
    """Run both backends, each in a process, and print what they did."""
    args = parse(sys.argv[1:])
    if args.run:
        args.out.write_text(json.dumps(measure(args)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("BLOCKFLASH", args.beside):
            out = Path(folder) / f"{backend}.json"
            more = ["--run", backend, "--out", str(out)]
            command = [sys.executable, __file__, *more, *sys.argv[1:]]
            subprocess.run(command, check=True)
            found[backend] = json.loads(out.read_text())
    ours, theirs = found.values()
    print(f"{'batch':>6} {'BLOCKFLASH':>14} {args.beside:>14}  tokens/s, best of 3")
    for batch, a, b in zip(args.batch, ours["speed"], theirs["speed"]):
        print(f"{batch:>6} {a:>14.1f} {b:>14.1f}")
    places = [first_difference(*pair) for pair in zip(ours["tokens"], theirs["tokens"])]
    print(f"{places.count(None)} of {len(places)} prompts have the same greedy tokens")
    for text, place in zip(TEXTS, places):
        if place is not None:
            print(f"  {text!r} differs from token {place} on")


if __name__ == "__main__":
    main()
