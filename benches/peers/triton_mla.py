"""Attention of one query of each sequence to latent rows in Triton, the kernels of the competitor
`triton_mla`: heads in groups of at most 16 share what they read, keys are split among CTAs, and a
second kernel combines the splits, as the Triton backends of vLLM and SGLang do."""

import torch
import triton
import triton.language as tl


@triton.jit
def partial(
    q, rows, table, lengths, parts, scale, heads, columns, stride_page, splits,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BEHIND: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """A split of the keys of a sequence, for HEADS heads. `scale` includes log2(e). A row has WIDTH
    elements of values and BEHIND more, both powers of two. Parts end with their log-sum-exp, of
    base 2."""
    entry, first, split = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    row: tl.constexpr = WIDTH + BEHIND
    head = first + tl.arange(0, HEADS)
    held = (head < heads)[:, None]
    values, behind = tl.arange(0, WIDTH)[None, :], tl.arange(0, max(BEHIND, 16))[None, :]
    of_q = q + (entry * heads + head)[:, None] * row
    q_values = tl.load(of_q + values, mask=held, other=0)
    if BEHIND > 0:
        q_behind = tl.load(of_q + WIDTH + behind, mask=held, other=0)
    length = tl.load(lengths + entry)
    each = tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS
    start, end = split * each, tl.minimum(split * each + each, length)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    for at in range(start, end, KEYS):
        key = at + tl.arange(0, KEYS)
        there = key < end
        if columns > 0:
            page = tl.load(table + entry * columns + key // PAGE, mask=there, other=0)
        else:
            page = entry + 0 * key
        slot = page.to(tl.int64) * stride_page + (key % PAGE) * row
        v = tl.load(rows + slot[:, None] + values, mask=there[:, None], other=0)
        scores = tl.dot(q_values, v.T)
        if BEHIND > 0:
            k = tl.load(rows + slot[:, None] + WIDTH + behind, mask=there[:, None], other=0)
            scores += tl.dot(q_behind, k.T)
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.math.exp2(scores - new_peak[:, None])
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        peak = new_peak
    to = parts + ((entry * heads + head) * splits + split) * (WIDTH + 1)
    tl.store(to[:, None] + values, acc / tl.maximum(total, 1e-30)[:, None], mask=held)
    tl.store(to + WIDTH, peak + tl.math.log2(total), mask=head < heads)


@triton.jit
def combine(parts, out, splits, WIDTH: tl.constexpr):
    """The splits of a head of a sequence."""
    row, values = tl.program_id(0), tl.arange(0, WIDTH)
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for split in range(splits):
        part = parts + (row * splits + split) * (WIDTH + 1)
        lse = tl.load(part + WIDTH)
        if lse > float("-inf"):
            new_peak = tl.maximum(peak, lse)
            shrink, weight = tl.math.exp2(peak - new_peak), tl.math.exp2(lse - new_peak)
            acc = acc * shrink + tl.load(part + values) * weight
            total, peak = total * shrink + weight, new_peak
    tl.store(out + row * WIDTH + values, acc / tl.maximum(total, 1e-30))


def decode(
    q: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor | None,
    lengths: torch.Tensor,
    page: int,
    parts: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    tile: tuple[int, int, int, int],
) -> None:
    """q `[batch, heads, row]` and rows `[pages, slots, 1, row]` into out `[batch, heads, width]`,
    all contiguous; a tile is heads, keys, warps and stages."""
    (batch, heads, row), (held, keys, warps, stages) = q.shape, tile
    splits, width = parts.shape[2], out.shape[-1]
    partial[batch, triton.cdiv(heads, held), splits](
        q, rows, q if table is None else table, lengths, parts, scale * 1.4426950408889634, heads,
        0 if table is None else table.shape[1], rows.stride(0), splits, page, width, row - width,
        max(held, 16), keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    combine[(batch * heads,)](parts, out, splits, width, num_warps=4)
