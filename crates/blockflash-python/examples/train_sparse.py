"""Training a small transformer whose queries choose the blocks of keys that they attend to.

Its attention is a simple form of native sparse attention (NSA): three kinds of attention to the
same keys and values, added up by gates that each token computes.

    compressed   to the mean key and value of each block that ends before the query
    chosen       to the keys of the few blocks with the largest scores for the query, by their means
                 as in NSA, or by the best of their keys as in MiniMax-M3: `block_scores` and
                 `top_k` choose them, `index_attention` has the gradient
    window       to the last keys

It learns the guide and the sources, in rows whose second half quotes their first half. Beside it,
on the same rows and from the same weights, learn a model with attention to all keys and one with
the window alone, out of whose reach most quotations are. Printed are how many keys a query attends
to at most, the last losses and the time of a step. A mean says little of a single key at first: a
choice by means has to learn what one by keys has at once, but reads a key for each block alone.

    python train_sparse.py --small                                    # a few seconds
    python train_sparse.py                                            # a minute without a GPU
    python train_sparse.py --device cuda --length 8192 --block 128    # in bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import byte_model
import plot
import torch
from byte_model import Model, Sizes, dense
from torch import Tensor, nn

import blockflash
from blockflash import BlockMask, block_scores, index_attention, top_k

SMOOTH = 10
"""Steps whose losses are averaged."""


@dataclass
class Reach:
    """Which keys a query attends to."""

    block: int
    """Keys of a block."""
    chosen: int
    """Blocks: the first one, the query's own, and those with the largest scores."""
    window: int
    """The last keys."""


class NativeSparse(nn.Module):
    """The three kinds of attention and their gates."""

    def __init__(self, sizes: Sizes, reach: Reach, by_means: bool, device: str) -> None:
        super().__init__()
        self.reach, self.length, self.by_means = reach, sizes.length, by_means
        self.gates = nn.Linear(sizes.width, 3 * sizes.heads, device=device)
        # The mean of a block tells of its last key, so queries see those of earlier blocks alone.
        ends = (torch.arange(sizes.length) + 1) // reach.block
        intervals = torch.stack([torch.zeros_like(ends), ends], -1).int()[None, None, :, None]
        blocks = sizes.length // reach.block
        mask = BlockMask.from_intervals(intervals, seqlen_k=blocks, block=64)
        self.earlier = mask.to(device)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What `Layer.attend` is, for rows of the length."""
        block, chosen = self.reach.block, self.reach.chosen
        k_means, v_means = (t.unflatten(1, (-1, block)).mean(2) for t in (k, v))
        compressed = blockflash.attention(q, k_means, v_means, block_mask=self.earlier)
        with torch.no_grad():
            if self.by_means:
                # Scores of blocks that a query does not see are not read below.
                scores = block_scores(q, k_means, 1)
            else:
                scores = block_scores(q, k, block, causal=True)
            rows = {"batch": len(q), "capacity": self.length, "causal": True}
            lists = top_k(scores, chosen, block, first=1, last=1, **rows)
        selected = index_attention(q, k, v, lists, block, causal=True)
        local = blockflash.attention(q, k, v, causal=True, window=(self.reach.window - 1, 0))
        gates = self.gates(x).sigmoid().unflatten(-1, (3, -1, 1)).unbind(2)
        return sum(gate * o for gate, o in zip(gates, (compressed, selected, local)))


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    byte_model.add_arguments(parser, "train_sparse.svg")
    parser.add_argument("--length", type=int, default=None, help="bytes of a row")
    parser.add_argument("--block", type=int, default=None, help="keys; on a GPU 16, 64 or 128")
    parser.add_argument("--chosen", type=int, default=None, help="blocks of a query")
    parser.add_argument("--window", type=int, default=None, help="last keys of a query")
    arguments = parser.parse_args()
    sizes = byte_model.sizes_of(arguments)
    on_gpu = arguments.device != "cpu"
    sizes = replace(sizes, length=arguments.length or sizes.length)
    block, chosen, window = (64, 16, 512) if on_gpu else (16, 6, 32)
    reach = Reach(arguments.block or block, arguments.chosen or chosen, arguments.window or window)
    if sizes.length % reach.block:
        parser.error(f"--length is {sizes.length}, not a multiple of the block of {reach.block}")

    text = byte_model.read_text(arguments.text, arguments.device)
    local, means = (reach.window - 1, 0), sizes.length // reach.block
    most = means + reach.chosen * reach.block + reach.window

    def native(by_means: bool) -> NativeSparse:
        return NativeSparse(sizes, reach, by_means, arguments.device)

    def of_window(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blockflash.attention(q, k, v, causal=True, window=local)

    ways: list[tuple[str, int, Callable[[], Callable[..., Tensor]]]] = [
        ("all keys", sizes.length, lambda: dense),
        ("chosen by keys", most, lambda: native(by_means=False)),
        ("chosen by means", most, lambda: native(by_means=True)),
        ("window alone", reach.window, lambda: of_window),
    ]
    print(
        f"{len(text)} bytes of text, {arguments.device}, rows of {sizes.length}, "
        f"{sizes.steps} steps, the last {SMOOTH} with these losses:"
    )
    print(f"{'attention':>15} {'keys':>6} {'new bytes':>10} {'quoted':>8} {'ms/step':>9}")
    curves = {}
    for name, keys, attention in ways:
        torch.manual_seed(0)
        model = Model(sizes).to(arguments.device)
        for layer in model.layers:
            layer.attend = attention()
        course = byte_model.train(model, text, sizes.steps)
        plain, quoted = (smooth(losses) for losses in (course.plain, course.quoted))
        elapsed = sorted(course.times)[len(course.times) // 2]
        print(f"{name:>15} {keys:6} {plain[-1]:10.3f} {quoted[-1]:8.3f} {elapsed:9.2f}")
        curves[name] = (plain, quoted)
    steps = range(1, sizes.steps + 1)
    charts = [
        plot.Chart(title, "step", {name: (steps, both[at]) for name, both in curves.items()})
        for at, title in enumerate(("loss of new bytes", "loss of quoted bytes"))
    ]
    plot.write(arguments.plot, charts)
    print(f"The plot is in {arguments.plot}.")


def smooth(losses: list[float]) -> list[float]:
    """The mean of each loss and those of the steps before it."""
    parts = [losses[max(0, end - SMOOTH) : end] for end in range(1, len(losses) + 1)]
    return [sum(part) / len(part) for part in parts]


if __name__ == "__main__":
    main()
