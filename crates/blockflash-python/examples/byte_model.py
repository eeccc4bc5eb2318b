"""A small transformer on bytes and the text that it learns, shared by the other examples.

Text is learned in rows whose second half quotes their first half, so that far keys matter: the
model learns to find what a quotation repeats. Positions are told by the last bytes alone, so
nothing that is learned depends on a distance, and a document may be longer than what was trained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu

import blockflash

SEEN = 4
"""The last bytes whose embeddings a token has."""
QUOTE = 32
"""Bytes of a quotation."""
STEADY = 8
"""Its first bytes, which cannot be known yet."""


@dataclass
class Sizes:
    """Of the model and its training."""

    width: int
    layers: int
    heads: int
    heads_k: int
    head_dim: int
    length: int
    """Bytes of a row."""
    batch: int
    steps: int
    rate: float


TINY = Sizes(64, 1, 4, 2, 16, 128, 4, 20, 3e-3)
SMALL = Sizes(128, 2, 4, 2, 32, 256, 8, 120, 3e-3)
LARGE = Sizes(1024, 8, 16, 4, 64, 4096, 8, 600, 4e-4)


def dense(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to all keys."""
    return blockflash.attention(q, k, v, causal=True)


class Layer(nn.Module):
    """A layer of a Llama without positions; `attend(x, q, k, v)` is its attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, dim = sizes.width, sizes.head_dim
        self.heads = [sizes.heads, sizes.heads_k, sizes.heads_k]
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * dim, bias=False)
        self.out = nn.Linear(sizes.heads * dim, width, bias=False)
        self.up = nn.Linear(width, 2 * 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.attend: Callable[..., Tensor] = dense
        # At first a query asks for keys one byte behind those whose last bytes are its own. That
        # is where a quotation goes on, and learning it from nothing takes thousands of steps.
        with torch.no_grad():
            q, k, _ = self.qkv.weight.unflatten(0, (-1, dim)).split(self.heads)
            k.copy_(behind(q[:: sizes.heads // sizes.heads_k]))
            q.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        y = self.norm1(x)
        q, k, v = self.qkv(y).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)
        x = x + self.out(self.attend(y, q, k, v).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


def behind(x: Tensor, count: int = 1) -> Tensor:
    """An embedding as it is when `count` further bytes have followed."""
    return x.roll(count * x.shape[-1] // (2 * SEEN), -1)


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.bytes = nn.Embedding(256, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.5)

    def forward(self, text: Tensor, last: int | None = None) -> Tensor:
        """Bytes `[batch, tokens]` to logits `[batch, last, 256]` of the last tokens, else of all.

        The bytes before the last tokens are looked at, but caches must have them already.
        """
        count = text.shape[1] if last is None else last
        text = pad(text, (SEEN - 1, 0))[:, -(count + SEEN - 1) :]
        seen = text.unfold(1, SEEN, 1).flip(-1).unbind(-1)
        x = sum(behind(self.bytes(part), at) for at, part in enumerate(seen))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Course:
    """What was measured in each step of training."""

    plain: list[float] = field(default_factory=list)
    """Losses of bytes that nothing foretells."""
    quoted: list[float] = field(default_factory=list)
    """Losses of bytes inside of quotations."""
    times: list[float] = field(default_factory=list)
    """Milliseconds."""


def train(model: Model, text: Tensor, steps: int) -> Course:
    """Trains a model on rows of the text, the same ones for every model."""
    sizes, generator, course = model.sizes, torch.Generator().manual_seed(1), Course()
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.rate, betas=(0.9, 0.95))
    for step in range(steps):
        # Warms up and cools down.
        share = min((step + 1) / 20, (steps - step) / (steps / 2), 1.0)
        optimizer.param_groups[0]["lr"] = sizes.rate * share
        rows = quoting(text, sizes.batch, sizes.length, generator)
        wait(text)
        begin = time.perf_counter()
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            logits = model(rows[:, :-1])
        losses = cross_entropy(logits.float().mT, rows[:, 1:], reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        wait(text)
        course.times.append((time.perf_counter() - begin) * 1e3)
        plain, quoted = losses.detach().split(sizes.length // 2, 1)
        course.plain.append(plain.mean().item())
        quoted = quoted.unflatten(1, (-1, QUOTE))[..., STEADY:]
        course.quoted.append(quoted.mean().item())
    return course


def quoting(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Rows `[batch, length + 1]` of the text whose second half are quotations of the first."""
    half = length // 2
    starts = torch.randint(len(text) - half - 1, (batch,), generator=generator)
    first = torch.stack([text[at : at + half + 1] for at in starts.tolist()]).long()
    quotes = torch.randint(half - QUOTE, (batch, half // QUOTE, 1), generator=generator)
    places = (quotes + torch.arange(QUOTE)).flatten(1).to(text.device)
    return torch.cat([first, first.gather(1, places)], 1)


def wait(tensor: Tensor) -> None:
    """Waits for the GPU of a tensor."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def add_arguments(parser: argparse.ArgumentParser, plot: str) -> None:
    """The options that the examples share."""
    parser.add_argument("--text", nargs="+", help="files to learn; the guide and the sources")
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one, but not if --small")
    parser.add_argument("--steps", type=int, default=None, help="of training")
    parser.add_argument("--plot", default=plot)
    parser.add_argument("--small", action="store_true", help="a few seconds without a GPU")


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """The sizes for the device, which is set if it was not given, and for the steps."""
    has_gpu = torch.cuda.is_available() and not arguments.small
    arguments.device = arguments.device or ("cuda" if has_gpu else "cpu")
    on_gpu = arguments.device != "cpu"
    if not on_gpu:
        torch.set_num_threads(1)  # Further threads would only wait for each other.
    sizes = TINY if arguments.small else LARGE if on_gpu else SMALL
    return replace(sizes, steps=arguments.steps or sizes.steps)


def read_text(files: list[str] | None, device: str) -> Tensor:
    """The bytes of these files, or of the guide and the package around here."""
    package = Path(__file__).resolve().parents[1]
    guide, sources = package.parents[1] / "docs" / "src", package / "python" / "blockflash"
    paths = [Path(file) for file in files or []] or [
        *sorted(guide.rglob("*.md")), *sorted(sources.rglob("*.py"))
    ]  # fmt: skip
    data = b"".join(path.read_bytes() for path in paths or [Path(__file__)])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
