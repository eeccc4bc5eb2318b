"""Masks that programs write for flex_attention, as functions of batch entry, head, query and key.

They are the kinds of examples that come with flex_attention, each by its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FlexCase:
    """A mask, and the sizes that it is for; sizes of 1 are for all."""

    mod: Mod
    lengths: tuple[int, int] = (300, 300)
    batch: int = 1
    heads: int = 1


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0


def keys_back(count: int) -> Mod:
    return lambda b, h, q, k: (q >= k) & (q - k <= count)


def prefix(length: int) -> Mod:
    return or_masks(causal, lambda b, h, q, k: k < length)


def documents(inner: Mod, *lengths: int) -> Mod:
    """The inner mask in each document, by positions in it."""
    ends = torch.tensor(lengths).cumsum(0)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = (ends - torch.tensor(lengths))[numbers]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = numbers[q] == numbers[k]
        return same & inner(b, h, q - starts[q], k - starts[k])

    return mod


def groups(inner: Mod, size: int) -> Mod:
    same: Mod = lambda b, h, q, k: q // size == k // size  # noqa: E731
    return and_masks(same, lambda b, h, q, k: inner(b, h, q % size, k % size))


def dilated(count: int, step: int) -> Mod:
    return lambda b, h, q, k: (q >= k) & (q - k < count) & ((q - k) % step == 0)


def neighbourhood(places: Callable[[Tensor], list[Tensor]], canvas: list[int], size: int) -> Mod:
    """Keys in the square around a query, which is moved inside at the edges of the canvas."""
    half = size // 2

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= 0
        for at, key, length in zip(places(q), places(k), canvas, strict=True):
            seen = seen & ((at.clamp(half, length - 1 - half) - key).abs() <= half)
        return seen

    return mod


def by_rows(width: int) -> Callable[[Tensor], list[Tensor]]:
    return lambda at: [at // width, at % width]


def by_tiles(width: int, tile: int) -> Callable[[Tensor], list[Tensor]]:
    """Tokens are in tiles, which are by rows, as those of each tile are."""

    def places(at: Tensor) -> list[Tensor]:
        number, inside = at // tile**2, at % tile**2
        across = width // tile
        return [
            number // across * tile + inside // tile, number % across * tile + inside % tile
        ]  # fmt: skip

    return places


def by_curve(at: Tensor) -> list[Tensor]:
    """Tokens along Morton's curve: every other bit is one of the row."""
    row = sum((at >> 2 * bit + 1 & 1) << bit for bit in range(8))
    return [row, sum((at >> 2 * bit & 1) << bit for bit in range(8))]


def sliding_tiles(tiles: list[int], inside: int, size: int, text: int) -> Mod:
    """Tiles of tokens see tiles around their own, and all see the text at the end."""
    count = 1
    for length in tiles:
        count *= length
    half = size // 2

    def places(at: Tensor) -> list[Tensor]:
        at, found = at // inside, []
        for length in reversed(tiles):
            found.append(at % length)
            at = at // length
        return found[::-1]

    near = neighbourhood(places, tiles, 2 * half + 1)
    images = count * inside

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        both = (q < images) & (k < images)
        return (both & near(b, h, q, k)) | ((k >= images) & (k < images + text)) | (q >= images)

    return mod


def frames(prompt: int, frame: int, reach: int, *, across: bool) -> Mod:
    """The prompt, and tokens near in all frames, or near at the same place of any frame."""

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, second = (q - prompt, k - prompt)
        if across:
            first, second = first % frame, second % frame
        return (q < prompt) | (k < prompt) | ((first - second).abs() < reach)

    return mod


def images(*ranges: tuple[int, int]) -> Mod:
    """Causal text with images whose tokens see each other."""
    starts, ends = (torch.tensor(of) for of in zip(*ranges, strict=True))

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = [(t >= starts) & (t < ends) for t in (q, k)]
        return (q >= k) | (inside[0] & inside[1]).any(-1)

    return mod


def shown_images(*seen: tuple[int, int], tokens: int) -> Mod:
    """Texts that see images from one token on to another one: queries and keys are not the same."""
    intervals = torch.tensor(seen)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, last = intervals[k // tokens].unbind(-1)
        return (q >= first) & (q < last)

    return mod


def padded(*lengths: int) -> Mod:
    counts = torch.tensor(lengths)
    return and_masks(causal, lambda b, h, q, k: k < counts[b])


def of_heads(*counts: int) -> Mod:
    windows = torch.tensor(counts)
    return lambda b, h, q, k: (q >= k) & (q - k <= windows[h])


def with_sinks(count: int, first: int) -> Mod:
    return and_masks(causal, or_masks(keys_back(count), lambda b, h, q, k: k < first))


CASES: dict[str, FlexCase] = {
    "everything": FlexCase(everything),
    "causal": FlexCase(causal),
    "sliding window": FlexCase(keys_back(70)),
    "prefix": FlexCase(prefix(150)),
    "documents": FlexCase(documents(everything, 37, 101, 90, 72)),
    "causal documents": FlexCase(documents(causal, 37, 101, 90, 72)),
    "documents with prefixes": FlexCase(documents(prefix(20), 37, 101, 90, 72)),
    "groups": FlexCase(groups(everything, 50)),
    "causal groups": FlexCase(groups(causal, 50)),
    "dilated window": FlexCase(dilated(120, 4)),
    "neighbourhood": FlexCase(neighbourhood(by_rows(16), [16, 16], 7), (256, 256)),
    "neighbourhood of tiles": FlexCase(neighbourhood(by_tiles(16, 4), [16, 16], 5), (256, 256)),
    "neighbourhood on a curve": FlexCase(neighbourhood(by_curve, [16, 16], 5), (256, 256)),
    "sliding tiles": FlexCase(sliding_tiles([4, 4], 16, 3, 20), (290, 290)),
    "sliding tiles of a video": FlexCase(sliding_tiles([3, 3, 3], 8, 3, 10), (240, 240)),
    "near frames": FlexCase(frames(20, 28, 56, across=False)),
    "places of frames": FlexCase(frames(20, 28, 5, across=True)),
    "images in text": FlexCase(images((30, 90), (130, 155), (260, 290))),
    "images for a text": FlexCase(
        shown_images((0, 130), (60, 130), (130, 200), tokens=40), (200, 120)
    ),
    "padded": FlexCase(padded(300, 170), batch=2),
    "windows of heads": FlexCase(of_heads(10, 64, 200, 300), heads=4),
    "sinks": FlexCase(with_sinks(40, 4)),
}
