"""Training a small GPT on bytes, dense and with block-sparse linear layers.

Both models start from the same dense weights, trained for a while. One goes on as it is; in the
other, each linear layer of the blocks keeps the tenth of its blocks with the largest norms. Printed
are losses, the time of a step and the memory of weights, gradients and optimizer.

    python finetune_sparse.py --small     # a few seconds, no GPU
    python finetune_sparse.py             # on a GPU, where the time of a step counts
    python finetune_sparse.py --text FILE [FILE ...]
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import plot
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import blockflash
from blockflash.sparse import sparsify_


class Block(nn.Module):
    """A transformer block of `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, width]` to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(blockflash.attention(q, k, v, causal=True).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes `[batch, length]` to logits `[batch, length, 256]`."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places(places))))


def train(
    model: nn.Module, text: Tensor, steps: int, batch: int, length: int, rate: float
) -> tuple[list[float], float, int]:
    """Losses, milliseconds of a step, and bytes of weights, gradients and optimizer states."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, times = [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch,), generator=generator)
        rows = torch.stack([text[at : at + length + 1] for at in starts.tolist()]).long()
        wait(text)
        begin = time.perf_counter()
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            logits = model(rows[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wait(text)
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return losses, sorted(times)[len(times) // 2] * 1e3, 4 * parameters


def wait(text: Tensor) -> None:
    """Waits for the GPU of the text."""
    if text.is_cuda:
        torch.cuda.synchronize(text.device)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", nargs="+", help="files to learn; the Markdown files around here")
    parser.add_argument("--density", type=float, default=0.1, help="share of blocks that is kept")
    parser.add_argument("--block", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--plot", default="finetune_sparse.svg")
    parser.add_argument("--small", action="store_true", help="a size for a machine without a GPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not arguments.small else "cpu"
    width, layers, heads, length, batch = (
        (128, 2, 4, 32, 8) if arguments.small else (2048, 8, 16, 512, 16)
    )
    steps = arguments.steps or (40 if arguments.small else 300)
    block = arguments.block or (16 if arguments.small else 64)
    if arguments.small:
        torch.set_num_threads(1)  # Further threads would only wait for each other.

    root = Path(__file__).resolve().parents[1]
    files = [Path(file) for file in arguments.text or []] or sorted(
        file for folder in (root, root.parent, root.parents[1]) for file in folder.glob("*.md")
    )
    files = files or [Path(__file__)]
    data = b"".join(file.read_bytes() for file in files)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)

    torch.manual_seed(0)
    model = Model(width, layers, heads, length).to(device)
    sizes = (steps, batch, length, 2e-3 if arguments.small else 2e-4)
    first, _, _ = train(model, text, *sizes)
    print(f"{len(text)} bytes of text, {device}, {steps} steps to {first[-1]:.2f}, then:")
    print(
        f"{'model':>8} {'blocks':>7} {'first loss':>11} {'last loss':>10} {'ms/step':>8} {'MB':>7}"
    )
    curves = {}
    for name in ("dense", "sparse"):
        trained = copy.deepcopy(model)
        if name == "sparse":
            sparsify_(trained, block, arguments.density, include=("blocks.*",))
        losses, elapsed, memory = train(trained, text, *sizes)
        last = sum(losses[-10:]) / len(losses[-10:])
        kept = arguments.density if name == "sparse" else 1.0
        print(
            f"{name:>8} {kept:7.0%} {losses[0]:11.3f} {last:10.3f} {elapsed:8.2f} "
            f"{memory / 1e6:7.1f}"
        )
        curves[name] = (range(steps), losses)
    plot.write(arguments.plot, [plot.Chart("loss", "step", curves)])
    print(f"The plot is in {arguments.plot}.")


if __name__ == "__main__":
    main()
