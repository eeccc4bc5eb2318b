"""What an eager call of attention costs the host, in microseconds.

Prints a table of our ways to call attention beside torch's own: thread CPU time per call, best of
`--rounds` rounds of `--calls` calls. On a GPU the queue is drained between rounds, so the kernels
must be shorter than the calls: the shape is small.

    python benches/host_time.py [--device cuda] [--rounds 25] [--calls 3000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import blockflash
from blockflash import _native, _ops

# The same operators with kernels in Python.
_LIBRARY = _ops.register("blockflash_library", native=False)


def best(call: Callable[[], object], device: str, rounds: int, calls: int) -> float:
    """Thread CPU time of a call in microseconds, the best of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        times.append((time.thread_time_ns() - start) / calls / 1e3)
        if device == "cuda":
            torch.cuda.synchronize()
    return min(times)


def cases(device: str) -> Iterator[tuple[str, Callable[[], object], SDPBackend | None]]:
    """Names and calls, and the backend to which torch is held."""
    shape, dtype = ((1, 64, 8, 64), torch.bfloat16) if device == "cuda" else ((1, 1, 1, 8), None)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    o, lse = torch.empty_like(q), _ops.empty_lse(q, None)
    qkv = (q, k, v)
    op, slow = torch.ops.blockflash, torch.ops.blockflash_library
    yield "torch.add", lambda: torch.add(q, k), None
    yield "torch.empty_like", lambda: torch.empty_like(q), None
    yield "native function, into o", lambda: _native.attention(*qkv, o), None
    yield "native function, into o and lse", lambda: _native.attention(*qkv, o, lse), None
    yield "operator attention_out, Library.impl", lambda: slow.attention_out(*qkv, o), None
    yield "operator attention_out, stable ABI", lambda: op.attention_out(*qkv, o), None
    yield "operator attention_forward, Library.impl", lambda: slow.attention_forward(*qkv), None
    yield "operator attention_forward, stable ABI", lambda: op.attention_forward(*qkv), None
    yield "operator attention", lambda: op.attention(*qkv), None
    yield "blockflash.attention", lambda: blockflash.attention(q, k, v), None
    yield "blockflash.attention, causal", lambda: blockflash.attention(q, k, v, causal=True), None
    yield "blockflash.attention, out=", lambda: blockflash.attention(q, k, v, out=o), None
    by_head = tuple(t.transpose(1, 2) for t in (q, k, v))
    backends = {"flash": SDPBackend.FLASH_ATTENTION}
    if device == "cuda":
        backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
    for name, backend in backends.items():
        yield f"torch SDPA, {name}", lambda: scaled_dot_product_attention(*by_head), backend
    yield "torch SDPA, its choice", lambda: scaled_dot_product_attention(*by_head), None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=3000)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU tensors"
    print(f"torch {torch.__version__}, {where}\n\n| call | µs |\n|---|---:|")
    for name, call, backend in cases(args.device):
        with torch.no_grad():
            if backend is None:
                found = best(call, args.device, args.rounds, args.calls)
            else:
                with sdpa_kernel(backend):
                    found = best(call, args.device, args.rounds, args.calls)
        print(f"| {name} | {found:.2f} |", flush=True)


if __name__ == "__main__":
    main()
