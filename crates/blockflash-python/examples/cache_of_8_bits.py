"""A Llama on bytes with a KV cache of 8 bits beside one of bf16: perplexity, speed and memory.

A model of Llama's shape (RMSNorm, rotary embedding, grouped heads, SwiGLU) learns the first nine
tenths of a text. The last tenth then goes through a cache in parts, so that every query reads keys
and values as the cache holds them: in bf16, or as codes of e4m3 or int8 with one scale for each
tensor, which a pass over learned text finds, or one for each token and head, which the append
chooses. A perplexity that is further from that of bf16 than its bound is an error. The speed is
that of steps of one token over a full cache, on a GPU in a CUDA graph.

    python cache_of_8_bits.py --small     # a few seconds, no GPU
    python cache_of_8_bits.py             # on a GPU, where tokens per second count
    python cache_of_8_bits.py --text FILE [FILE ...]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import blockflash

GREATEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
TENSOR, TOKEN = "tensor", "token and head"
# The cache, what has a scale of its own, and by how much its perplexity may differ from bf16's.
KINDS = [
    ("bf16", torch.bfloat16, "", 0.0),
    ("e4m3", torch.float8_e4m3fn, TENSOR, 0.01),
    ("e4m3", torch.float8_e4m3fn, TOKEN, 0.01),
    ("int8", torch.int8, TENSOR, 0.01),
    ("int8", torch.int8, TOKEN, 0.005),
]


@dataclass
class Sizes:
    """Of the model, its training and what is measured."""

    width: int
    layers: int
    heads: int
    heads_k: int
    head_dim: int
    length: int
    batch: int
    steps: int
    rows: int
    """Sequences that are generated at the same time."""
    capacity: int
    """Tokens of the cache in which they are."""


SMALL = Sizes(128, 2, 4, 2, 32, 128, 8, 120, 2, 256)
LARGE = Sizes(1024, 8, 16, 4, 64, 1024, 8, 400, 32, 16_384)


class Cache:
    """The keys and values of a layer, and the options by which attention reads and writes them."""

    def __init__(self, sizes: Sizes, rows: int, capacity: int, like: Tensor, kind: Any) -> None:
        _, dtype, per, *scales = kind
        shape = (rows, capacity, sizes.heads_k)
        self.k, self.v = (like.new_zeros(*shape, sizes.head_dim, dtype=dtype) for _ in range(2))
        self.options: dict[str, Any] = {}
        if per == TENSOR:
            self.options = dict(zip(("k_scale", "v_scale"), scales))
        elif per == TOKEN:
            k_scale, v_scale = (like.new_ones(shape, dtype=torch.float32) for _ in range(2))
            self.options = {"k_scale": k_scale, "v_scale": v_scale, "scale_per_token": True}

    def bytes(self) -> int:
        """What it occupies."""
        tensors = [self.k, self.v, *self.options.values()]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


class Layer(nn.Module):
    """A layer of a Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        heads = sizes.heads + 2 * sizes.heads_k
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, heads * sizes.head_dim, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.head_dim, width, bias=False)
        self.up = nn.Linear(width, 2 * 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], cache: Cache | None, lengths: Tensor | None
    ) -> Tensor:
        """`[batch, tokens, width]` to the same; with a cache, tokens are the last of `lengths`."""
        sizes, (cos, sin) = self.sizes, angles
        rows = self.qkv(self.norm1(x)).unflatten(-1, (-1, sizes.head_dim))
        q, k, v = rows.split([sizes.heads, sizes.heads_k, sizes.heads_k], 2)
        if cache is None:
            q, k = (turned(t, cos[: x.shape[1]], sin[: x.shape[1]]) for t in (q, k))
            o = blockflash.attention(q, k, v, causal=True)
        else:
            q, k, v = (t.bfloat16() for t in (q, k, v))
            o = blockflash.attention_decode(
                q, cache.k, cache.v, k=k, v=v, seqused_k=lengths, causal=True, rotary_cos=cos,
                rotary_sin=sin, **cache.options,
            ).to(x.dtype)  # fmt: skip
        x = x + self.out(o.flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows `[batch, tokens, heads, head_dim]` turned by their positions."""
    cos, sin = cos[:, None], sin[:, None]
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.bytes = nn.Embedding(256, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, float32 `[positions, head_dim / 2]`."""
        half, device = self.sizes.head_dim // 2, self.head.weight.device
        rates = 10_000.0 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(positions, device=device)[:, None] * rates
        return angles.cos(), angles.sin()

    def forward(
        self,
        text: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: list[Cache] | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Bytes `[batch, tokens]` to logits `[batch, tokens, 256]`."""
        x = self.bytes(text)
        for at, layer in enumerate(self.layers):
            x = layer(x, angles, caches[at] if caches else None, lengths)
        return self.head(self.norm(x))


def train(model: Model, text: Tensor, steps: int) -> float:
    """The last loss."""
    sizes, generator = model.sizes, torch.Generator().manual_seed(1)
    rate = 2e-3 if sizes is SMALL else 3e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    angles = model.angles(sizes.length)
    for step in range(steps):
        # Warms up and cools down.
        share = min((step + 1) / 20, (steps - step) / (steps / 2), 1.0)
        optimizer.param_groups[0]["lr"] = rate * share
        starts = torch.randint(len(text) - sizes.length, (sizes.batch,), generator=generator)
        rows = torch.stack([text[at : at + sizes.length + 1] for at in starts.tolist()]).long()
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            logits = model(rows[:, :-1], angles)
        loss = cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: Model, text: Tensor, kinds: list[Any]) -> tuple[float, list[Cache]]:
    """The perplexity of a text with a kind of cache for each layer, and the caches at its end."""
    sizes = model.sizes
    rows = text[: len(text) // (sizes.length + 1) * (sizes.length + 1)].long()
    rows = rows.unflatten(0, (-1, sizes.length + 1))[:32]
    angles = model.angles(sizes.length)
    like = model.head.weight
    caches = [Cache(sizes, len(rows), sizes.length, like, kind) for kind in kinds]
    losses, part = [], sizes.length // 16
    for start in range(0, sizes.length, part):
        lengths = torch.full((len(rows),), start + part, dtype=torch.int32, device=text.device)
        logits = model(rows[:, start : start + part], angles, caches, lengths)
        wanted = rows[:, start + 1 : start + part + 1]
        losses.append(cross_entropy(logits.float().flatten(0, 1), wanted.flatten()).item())
    return math.exp(sum(losses) / len(losses)), caches


@torch.no_grad()
def generate(model: Model, kinds: list[Any]) -> tuple[float, int]:
    """Tokens per second over a cache that is almost full, and its bytes."""
    sizes, like = model.sizes, model.head.weight
    angles, steps = model.angles(sizes.capacity), 64 if like.is_cuda else 16
    caches = [Cache(sizes, sizes.rows, sizes.capacity, like, kind) for kind in kinds]
    tokens = like.new_zeros(sizes.rows, 1, dtype=torch.long)
    lengths = like.new_full((sizes.rows,), sizes.capacity - 2 * steps, dtype=torch.int32)

    def step() -> None:
        lengths.add_(1)
        tokens.copy_(model(tokens, angles, caches, lengths).argmax(-1))

    run = step
    if like.is_cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    run()
    wait(like)
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    wait(like)
    seconds = time.perf_counter() - begin
    return sizes.rows * steps / seconds, sum(cache.bytes() for cache in caches)


def wait(tensor: Tensor) -> None:
    """Waits for the GPU of a tensor."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def main() -> None:
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", nargs="+", help="files to learn; the Markdown files around here")
    parser.add_argument("--steps", type=int, default=None, help="of training")
    parser.add_argument("--small", action="store_true", help="a size for a machine without a GPU")
    arguments = parser.parse_args()
    small = arguments.small or not torch.cuda.is_available()
    device, sizes = ("cpu", SMALL) if small else ("cuda", LARGE)
    if small:
        torch.set_num_threads(1)  # Further threads would only wait for each other.

    root = Path(__file__).resolve().parents[1]
    folders = (root, root.parent, root.parents[1], root.parents[1] / "docs" / "src")
    files = [Path(file) for file in arguments.text or []] or sorted(
        file for folder in folders for file in folder.glob("*.md")
    )
    files = files or [Path(__file__)]
    data = b"".join(file.read_bytes() for file in files)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    learned, held_out = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])

    torch.manual_seed(0)
    model = Model(sizes).to(device)
    loss = train(model, learned, arguments.steps or sizes.steps)
    print(f"{len(text)} bytes of text, {device}, trained to a loss of {loss:.2f}, then:")
    if device == "cuda":
        model = model.bfloat16()

    _, caches = evaluate(model, learned, [KINDS[0]] * sizes.layers)
    most = [[t.abs().amax().float().reshape(1) for t in (cache.k, cache.v)] for cache in caches]
    print(f"{'cache':>5} {'a scale for each':>17} {'perplexity':>11} {'than bf16':>10} "
          f"{'tokens/s':>9} {'MB':>8}")  # fmt: skip
    exact, wrong = 0.0, []
    for kind in KINDS:
        name, dtype, per, bound = kind
        greatest = GREATEST.get(dtype, 1.0)
        kinds = [(name, dtype, per, *(t / greatest for t in layer)) for layer in most]
        perplexity, _ = evaluate(model, held_out, kinds)
        exact = exact or perplexity
        more = perplexity / exact - 1
        rate, size = generate(model, kinds)
        print(f"{name:>5} {per:>17} {perplexity:11.4f} {more:+10.3%} {rate:9.0f} {size / 1e6:8.2f}")
        if not abs(more) <= bound:
            wrong.append(f"{name} with a scale for each {per}: {more:+.3%}, at most {bound:.1%}")
    if wrong:
        raise SystemExit("perplexity is too far from that of bf16: " + "; ".join(wrong))
    print("Every perplexity is within its bound.")


if __name__ == "__main__":
    main()
