"""A training step of `BlockSparseLinear` beside one of `torch.nn.Linear`: time and memory.

A step is the forward, the backward with the gradient of the input, and SGD. The layers have the
sizes of the MLP of Llama 3 8B, and the weights keep the blocks with the largest norms. Peak memory
is counted for a layer alone: parameters, gradients, output and temporaries, without the operands.

    python benches/sparse_linear.py [--density 0.1] [--blocks 64 128 32 16] [--out linear.jsonl]
    python benches/sparse_linear.py --small      # a few seconds, no GPU
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rounds import Records, interleaved, median
from torch import Tensor, nn
from torch.nn.functional import linear

from blockflash import sparse

WIDE, NARROW = 14336, 4096


class Step:
    """A layer, its optimizer and the operands of a training step."""

    def __init__(self, layer: nn.Module, x: Tensor, grad: Tensor) -> None:
        """Takes x `[tokens, in]`, which requires a gradient, and the gradient of the output."""
        self.layer, self.x, self.grad = layer, x, grad
        self.optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)

    def __call__(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self.x.grad = None
        self.layer(self.x).backward(self.grad)
        self.optimizer.step()

    def milliseconds(self, steps: int) -> float:
        """Time of a step on the GPU, or on the CPU."""
        if not self.x.is_cuda:
            start = time.perf_counter()
            for _ in range(steps):
                self()
            return 1e3 * (time.perf_counter() - start) / steps
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            self()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps


def error(step: Step) -> float:
    """The largest relative error of output and gradients, against the same blocks in a dense W."""
    layer = step.layer
    if not isinstance(layer, sparse.BlockSparseLinear):
        return 0.0
    found, expected = [], []
    for results, forward in (
        (found, layer),
        (expected, lambda x: linear(x, layer.to_dense())),
    ):
        layer.zero_grad()
        step.x.grad = None
        y = forward(step.x)
        y.backward(step.grad)
        results += [y.detach(), step.x.grad, layer.values.grad]
    step.x.grad = None
    layer.zero_grad()
    errors = [(a.double() - b).norm() / b.double().norm() for a, b in zip(found, expected)]
    return max(errors).item()


def peak_mib(make: Callable[[], Step], x: Tensor) -> float:
    """Peak memory of two steps of a layer that is alone, without its operands."""
    if not torch.cuda.is_available():
        return 0.0
    gc.collect()
    x.grad = None
    before = torch.cuda.memory_allocated()
    step = make()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    records: Records, sizes: tuple[int, int, int], blocks: list[int], density: float, rounds: int
) -> dict[str, tuple[bool, bool]]:
    """One shape: tokens, inputs and outputs. Whether each layer is faster and smaller."""
    tokens, inputs, outputs = sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = {"device": device, "dtype": dtype}
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, **made).requires_grad_()
    grad = torch.randn(tokens, outputs, **made)
    dense = nn.Linear(inputs, outputs, bias=False, **made)
    makers: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: nn.Linear(inputs, outputs, bias=False, **made)
    }
    for block in blocks:
        makers[f"block {block}"] = lambda block=block: sparse.BlockSparseLinear.from_linear(
            dense, block=block, density=density
        )
    steps, memory, errors = {}, {}, {}
    for name, maker in makers.items():
        memory[name] = peak_mib(lambda maker=maker: Step(maker(), x, grad), x)
        steps[name] = Step(maker(), x, grad)
        errors[name] = error(steps[name])
        steps[name].milliseconds(3)
    repeats = 10 if device == "cuda" else 1
    found = interleaved(
        {name: lambda step=step: step.milliseconds(repeats) for name, step in steps.items()}, rounds
    )
    base = median(found["dense"])
    for name, times in found.items():
        records.add(
            tokens=tokens, inputs=inputs, outputs=outputs, density=density, layer=name,
            milliseconds=times, peak_mib=memory[name], relative_error=errors[name],
        )  # fmt: skip
        print(
            f"| {tokens} | {inputs} → {outputs} | {name} | {median(times):.3f} "
            f"| {base / median(times):.2f} | {memory[name]:.0f} "
            f"| {memory[name] / max(memory['dense'], 1e-9):.2f} | {errors[name]:.1e} |",
            flush=True,
        )
    return {
        name: (median(times) < base, memory[name] < memory["dense"])
        for name, times in found.items()
        if name != "dense"
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 4096])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 32, 16])
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--small", action="store_true", help="small layers, also without a GPU")
    args = parser.parse_args()
    records = Records(args.out, "cuda" if torch.cuda.is_available() else "cpu")
    wide, narrow = (512, 256) if args.small else (WIDE, NARROW)
    print(
        f"Density {args.density:.0%}, {args.rounds} rounds, median.\n\n"
        "| tokens | layer | weight | ms per step | × dense | peak MiB | of dense | error |\n"
        "|---:|---|---|---:|---:|---:|---:|---:|"
    )
    found = [
        measure(records, (tokens, *sizes), args.blocks, args.density, args.rounds)
        for tokens in ([128] if args.small else args.tokens)
        for sizes in ((narrow, wide), (wide, narrow))
    ]
    print()
    for name in found[0] if torch.cuda.is_available() else ():
        for i, goal in enumerate(("faster", "less memory")):
            reached = all(shape[name][i] for shape in found)
            records.goal(f"{name}: {goal} than dense in every shape", reached)


if __name__ == "__main__":
    main()
