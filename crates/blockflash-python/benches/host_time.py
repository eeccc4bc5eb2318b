"""What an eager call of attention costs the host, in microseconds.

Prints a table of our ways to call attention beside torch's own, all in one process: thread CPU time
per call, in rounds with a changing order. On a GPU the queue is drained after each round, and a
round has fewer calls than the queue has places, so that no call waits for the GPU. The goals are
checked by the medians: an eager call costs at most as much as torch's SDPA on FlashAttention 2, and
a call into given outputs at most 10 µs.

    python benches/host_time.py [--device cuda] [--rounds 30] [--calls 300] [--out host.jsonl]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rounds import Records, interleaved, median
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs

import blockflash
from blockflash import _autograd, _native, _ops

# The same operators with kernels in Python.
_LIBRARY = _ops.register("blockflash_library", native=False)

FLASH = "torch SDPA, flash"
EAGER = [
    "blockflash.attention",
    "blockflash.attention, causal",
    "blockflash.scaled_dot_product_attention",
    "torch SDPA, blockflash",
]
GIVEN = ["operator attention_out", "blockflash.attention, out="]
# Batch, length, heads of queries and of keys, head_dim.
SHAPES = {
    "cuda": [(1, 64, 8, 8, 64), (1, 512, 8, 8, 64), (4, 128, 16, 16, 128), (2, 256, 32, 8, 128)],
    "cpu": [(1, 1, 1, 1, 8)],
}

Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def without_gradient(context: Context) -> Iterator[None]:
    """A context without autograd."""
    with torch.no_grad(), context():
        yield


def cases(
    device: str, shape: tuple[int, int, int, int, int]
) -> Iterator[tuple[str, Callable[[], object], Context]]:
    """Names and calls, and in which context they are called."""
    batch, seqlen, heads, heads_k, head_dim = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(batch, seqlen, count, head_dim, device=device, dtype=dtype)
        for count in (heads, heads_k, heads_k)
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, lse = torch.empty_like(q), _ops.empty_lse(q, None)
    qkv, by_head = (q, k, v), [t.transpose(1, 2) for t in (q, k, v)]
    leaves_by_head = [t.transpose(1, 2) for t in leaves]
    op, slow = torch.ops.blockflash, torch.ops.blockflash_library
    ours, decode = blockflash.scaled_dot_product_attention, blockflash.attention_decode
    one = q[:, :1].contiguous()
    used = torch.full((batch,), seqlen, device=device, dtype=torch.int32)
    gqa = {"enable_gqa": True} if heads != heads_k else {}
    # As the functions call them: below the steps of autograd.
    for name, call in (
        ("operator attention_out, in Python", lambda: slow.attention_out(*qkv, o)),
        ("operator attention_out", lambda: op.attention_out.default(*qkv, o)),
        ("operator attention_forward, in Python", lambda: slow.attention_forward(*qkv)),
        ("operator attention_forward", lambda: op.attention_forward.default(*qkv)),
        ("operator attention", lambda: op.attention.default(*qkv)),
    ):
        yield name, call, _autograd.below_writes
    for name, call in (
        ("torch.add", lambda: torch.add(q, q)),
        ("torch.empty_like", lambda: torch.empty_like(q)),
        ("native function, into o", lambda: _native.attention(*qkv, o)),
        ("native function, into o and lse", lambda: _native.attention(*qkv, o, lse)),
        ("blockflash.attention", lambda: blockflash.attention(q, k, v)),
        ("blockflash.attention, causal", lambda: blockflash.attention(q, k, v, causal=True)),
        ("blockflash.attention, out=", lambda: blockflash.attention(q, k, v, out=o)),
        ("blockflash.scaled_dot_product_attention", lambda: ours(*by_head, **gqa)),
        ("blockflash.attention_decode", lambda: decode(one, k, v, seqused_k=used)),
    ):
        yield name, call, torch.no_grad
    with_gradient = "blockflash.attention, with a gradient"
    yield with_gradient, lambda: blockflash.attention(*leaves), nullcontext
    backends: dict[str, Context] = {
        "flash": partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
        "blockflash": partial(blockflash.activate_sdpa, device),
        "its choice": nullcontext,
    }
    if device == "cuda":
        backends["cuDNN"] = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    for name, context in backends.items():
        inference = partial(without_gradient, context)
        yield f"torch SDPA, {name}", lambda: torchs(*by_head, **gqa), inference
        if name != "its choice":
            with_gradient = f"torch SDPA, {name}, with a gradient"
            yield with_gradient, lambda: torchs(*leaves_by_head, **gqa), context


def microseconds(call: Callable[[], object], context: Context, device: str, calls: int) -> float:
    """Thread CPU time of a call."""
    with context():
        call()
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        elapsed = time.thread_time_ns() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return elapsed / calls / 1e3


def measure(records: Records, device: str, shape: tuple[int, ...], rounds: int, calls: int) -> None:
    """One shape."""
    batch, seqlen, heads, heads_k, head_dim = shape
    print(f"\nbatch {batch}, length {seqlen}, heads {heads}/{heads_k}, head_dim {head_dim}\n")
    measures = {}
    for name, call, context in cases(device, shape):
        try:
            microseconds(call, context, device, 10)
        except RuntimeError as error:
            print(f"{name} does not run: {str(error).splitlines()[0]}")
            continue
        measures[name] = partial(microseconds, call, context, device, calls)
    found = interleaved(measures, rounds)
    middle = {name: median(times) for name, times in found.items()}
    print("| call | µs, median | µs, best |\n|---|---:|---:|")
    for name, times in found.items():
        records.add(shape=shape, call=name, microseconds=times)
        print(f"| {name} | {middle[name]:.2f} | {min(times):.2f} |")
    print()
    limits = [(name, middle[FLASH], FLASH) for name in EAGER if FLASH in middle]
    limits += [(name, 10.0, "the goal") for name in GIVEN]
    for name, limit, what in limits:
        reached = name in middle and middle[name] <= limit
        records.goal(
            f"{name}: {middle.get(name, float('nan')):.2f} µs, at most {limit:.2f} ({what})",
            reached,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    records = Records(args.out, args.device)
    for shape in SHAPES[args.device]:
        measure(records, args.device, shape, args.rounds, args.calls)


if __name__ == "__main__":
    main()
