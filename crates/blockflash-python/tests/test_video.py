"""Attention within tiles of a grid: orders, masks and values."""

from __future__ import annotations

from itertools import product
from math import ceil, prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockflash.video import Dense, Kind, Sizes, SlidingTile, TopK, _order, video_attention

# The second and the third are no multiples of their tiles, the last is smaller.
GRIDS = [
    ((8, 8, 8), (4, 4, 4)), ((5, 9, 7), (4, 4, 4)),
    ((1, 20, 24), (1, 8, 16)), ((2, 3, 5), (4, 4, 4)),
]  # fmt: skip


def operands(grid: Sizes, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 2, prod(grid), heads, 16).unbind()


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)


def of_blocks(blocks: Tensor, order: Tensor, block: int) -> Tensor:
    """Which pairs of tokens, in the order of the grid, are in visited blocks."""
    place = order.argsort() // block
    return blocks[..., place, :][..., place]


@pytest.mark.parametrize(("grid", "tile"), GRIDS)
def test_order(grid: Sizes, tile: Sizes) -> None:
    order, back, ranks = _order(grid, tile, torch.device("cpu"))
    assert torch.equal(order.sort().values, torch.arange(prod(grid)))
    assert torch.equal(order[back], torch.arange(prod(grid)))
    # Tiles follow each other, and each is next to the one before.
    places = torch.stack(torch.unravel_index(order, grid), 1) // torch.tensor(tile)
    steps = (places[1:] - places[:-1]).abs().sum(1)
    assert torch.equal(steps, (ranks[1:] - ranks[:-1])) and steps.max() <= 1


@pytest.mark.parametrize(("grid", "tile"), GRIDS)
@pytest.mark.parametrize(
    "kind", [lambda _: Dense(), lambda t: SlidingTile(99, t), lambda t: TopK(1, t)]
)
def test_everything_visited_is_dense(grid: Sizes, tile: Sizes, kind: type) -> None:
    q, k, v = operands(grid)
    o = video_attention(q, k, v, grid, kind(tile), scale=0.3)
    torch.testing.assert_close(o, plain(q * 0.3 * 4, k, v))


@pytest.mark.parametrize(("grid", "tile"), GRIDS)
@pytest.mark.parametrize("window", [(1, 1, 1), (3, 1, 2), (2, 3, 99)])
def test_sliding_tile(grid: Sizes, tile: Sizes, window: Sizes) -> None:
    tiles = [ceil(size / side) for size, side in zip(grid, tile)]
    tokens = [tuple(p // t for p, t in zip(place, tile)) for place in product(*map(range, grid))]

    def seen(at: tuple[int, ...], other: tuple[int, ...]) -> bool:
        for place, key, span, count in zip(at, other, window, tiles):
            first = min(max(place - span // 2, 0), max(count - span, 0))
            if not first <= key < first + span:
                return False
        return True

    known = {pair: seen(*pair) for pair in product(set(tokens), repeat=2)}
    exact = torch.tensor([[known[a, b] for b in tokens] for a in tokens])
    order, _, _ = _order(grid, tile, torch.device("cpu"))
    block = prod(tile)
    blocks = torch.stack(
        [
            torch.stack([part.any() for part in rows.split(block, 1)])
            for rows in exact[order][:, order].split(block)
        ]
    )
    visible = of_blocks(blocks, order, block)
    assert (visible | ~exact).all()
    if all(size % side == 0 for size, side in zip(grid, tile)):
        assert torch.equal(visible, exact)
    q, k, v = operands(grid)
    o = video_attention(q, k, v, grid, SlidingTile(window, tile))
    torch.testing.assert_close(o, plain(q, k, v, visible))


def test_top_k() -> None:
    grid, tile = (5, 9, 7), (4, 4, 4)
    q, k, v = operands(grid)
    order, _, _ = _order(grid, tile, torch.device("cpu"))
    means = [torch.stack([part.mean(1) for part in t[:, order].split(64, 1)], 2) for t in (q, k)]
    scores = means[0] @ means[1].transpose(2, 3)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(3, scores.topk(2).indices, True)
    chosen |= torch.eye(5, dtype=torch.bool)
    visible = of_blocks(chosen, order, 64)
    o = video_attention(q, k, v, grid, TopK(0.4, tile))
    torch.testing.assert_close(o, plain(q, k, v, visible))


@pytest.mark.parametrize("kind", [Dense(), SlidingTile(1), TopK(0.5)])
def test_gradient(kind: Kind) -> None:
    grid = (4, 4, 8)
    q, k, v = (t.requires_grad_() for t in operands(grid))
    with torch.inference_mode():  # what it keeps must serve a gradient later
        video_attention(q, k, v, grid, kind)
    video_attention(q, k, v, grid, kind).square().sum().backward()
    ours = [t.grad for t in (q, k, v)]
    visible = None
    if isinstance(kind, SlidingTile):
        order, _, _ = _order(grid, kind.tile, torch.device("cpu"))
        visible = of_blocks(torch.eye(2, dtype=torch.bool), order, 64)
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    plain(q, k, v, visible).square().sum().backward()
    for grad, t in zip(ours, (q, k, v)):
        # Half of two blocks and a block's own are both of them, or the own one alone.
        if not isinstance(kind, TopK):
            torch.testing.assert_close(grad, t.grad)
        assert grad.isfinite().all()


def test_threads_and_repeats_agree() -> None:
    q, k, v = operands((5, 9, 7))
    first, threads = video_attention(q, k, v, (5, 9, 7), TopK(0.4)), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert torch.equal(first, video_attention(q, k, v, (5, 9, 7), TopK(0.4)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SlidingTile(0), r"window is \(0, 0, 0\)"),
        (lambda: SlidingTile((3, 3)), r"window is \(3, 3\), not three"),
        (lambda: SlidingTile(3, (4, 4, 5)), "80 tokens, not a multiple of 64 up to 1024"),
        (lambda: SlidingTile(3, (8, 16, 16)), "2048 tokens"),
        (lambda: TopK(0.0), "share is 0.0, but must be above 0 and at most 1"),
        (lambda: TopK(1.5), "share is 1.5"),
        (lambda: TopK(float("nan")), "share is nan"),
        (lambda: TopK(0.5, (0, 4, 4)), r"tile is \(0, 4, 4\), not three positive"),
    ],
)
def test_wrong_kinds(make: type, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_wrong_calls() -> None:
    q, k, v = operands((4, 4, 4))
    with pytest.raises(ValueError, match=r"q has shape .* not \[batch, 128, heads, head_dim\]"):
        video_attention(q, k, v, (2, 8, 8), Dense())
    with pytest.raises(ValueError, match="k has shape"):
        video_attention(q, k[:, 1:], v, (4, 4, 4), SlidingTile(1))
    with pytest.raises(ValueError, match=r"grid is \(64,\)"):
        video_attention(q, k, v, (64,), Dense())
    with pytest.raises(TypeError, match="kind must be Dense, SlidingTile or TopK, not str"):
        video_attention(q, k, v, (4, 4, 4), "dense")


@pytest.mark.parametrize("kind", [Dense(), SlidingTile(1), TopK(0.4)])
def test_autocast(kind: Kind) -> None:
    """Blocks are chosen by what attention reads."""
    grid, given = (5, 9, 7), operands((5, 9, 7))
    expected = video_attention(*(t.bfloat16() for t in given), grid, kind)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(video_attention(*given, grid, kind), expected)


def test_compiled() -> None:
    q, k, v = operands((4, 4, 8))

    def twice(q: Tensor) -> Tensor:
        return video_attention(q * 2, k, v, (4, 4, 8), SlidingTile(1)) * 2

    torch.testing.assert_close(torch.compile(twice, backend="eager")(q), twice(q))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Dense(), SlidingTile(1), SlidingTile(1, (4, 4, 8)), TopK(0.3)])
def test_on_gpu(kind: Kind) -> None:
    grid = (5, 9, 15)
    q, k, v = (t.bfloat16() for t in operands(grid))
    expected = video_attention(q, k, v, grid, kind).float()
    o = video_attention(*(t.cuda() for t in (q, k, v)), grid, kind)
    torch.testing.assert_close(o.cpu().float(), expected, atol=2e-2, rtol=2e-2)
