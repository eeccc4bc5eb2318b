"""Flash-attention forward in Triton, the kernel of the competitor `triton_flash`."""

import triton
import triton.language as tl


@triton.jit
def tile_at(
    source, row, column, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """Rows [row, row + ROWS) of a row-major matrix from `column` on: `source` is its
    descriptor, or without TMA its pointer."""
    if TMA:
        return source.load([row, column])
    else:
        start = source + row.to(tl.int64) * stride + column
        return tl.load(
            start + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
        )


@triton.jit
def attend(
    acc, total, peak, q, k, v, row, column, stride, queries, first, last, scale,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, TMA: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [first, last). MASKED compares each key's position with the
    queries'."""
    for start in tl.range(first, last, BLOCK_N, warp_specialize=SPECIALIZE):
        keys = tile_at(k, row + start, column, stride, BLOCK_N, HEAD_DIM, TMA)
        scores = tl.dot(q, keys.T)
        if MASKED:
            visible = queries[:, None] >= (start + tl.arange(0, BLOCK_N))[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new_peak[:, None])
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        values = tile_at(v, row + start, column, stride, BLOCK_N, HEAD_DIM, TMA)
        acc = tl.dot(weights.to(values.dtype), values, acc)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=["batch", "heads", "group", "seqlen_q", "seqlen_kv"])
def flash_forward(
    q, k, v, out, scale, batch, heads, group, seqlen_q, seqlen_kv,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, SPECIALIZE: tl.constexpr, HEADS_FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of one head.

    A [batch, seqlen, heads, HEAD_DIM] tensor is read as a matrix of batch·seqlen rows, in which
    a head is a band of
    HEAD_DIM columns. q, k, v and out are its descriptors; its pointers without TMA, and with
    SPECIALIZE, where the
    compiler has to split the tiles of the descriptors between warp groups. `scale` includes
    log2(e). Lengths must be
    multiples of the tiles. A causal diagonal ends at the last key. DEPENDENT waits itself for the
    kernel before it on the stream, and lets the next one start when it has read everything.
    """
    stride_q, stride_kv = heads * HEAD_DIM, heads // group * HEAD_DIM
    if SPECIALIZE:
        q = tl.make_tensor_descriptor(
            q, [batch * seqlen_q, stride_q], [stride_q, 1], [BLOCK_M, HEAD_DIM]
        )
        k = tl.make_tensor_descriptor(
            k, [batch * seqlen_kv, stride_kv], [stride_kv, 1], [BLOCK_N, HEAD_DIM]
        )
        v = tl.make_tensor_descriptor(
            v, [batch * seqlen_kv, stride_kv], [stride_kv, 1], [BLOCK_N, HEAD_DIM]
        )
        out = tl.make_tensor_descriptor(
            out, [batch * seqlen_q, stride_q], [stride_q, 1], [BLOCK_M, HEAD_DIM]
        )

    tiles = seqlen_q // BLOCK_M
    if HEADS_FIRST:
        index, tile = tl.program_id(0) % (batch * heads), tl.program_id(0) // (batch * heads)
    else:
        index, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first, so that the short ones fill the end
    head = index % heads
    row_q, row_kv = index // heads * seqlen_q + tile * BLOCK_M, index // heads * seqlen_kv
    column_q, column_kv = head * HEAD_DIM, head // group * HEAD_DIM

    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    query = tile_at(q, row_q, column_q, stride_q, BLOCK_M, HEAD_DIM, TMA)
    diagonal = seqlen_kv - seqlen_q + tile * BLOCK_M
    queries = diagonal + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if not CAUSAL:
        acc, total, peak = attend(
            acc, total, peak, query, k, v, row_kv, column_kv, stride_kv, queries, 0, seqlen_kv,
            scale,
            False, BLOCK_N, HEAD_DIM, TMA, SPECIALIZE,
        )  # fmt: skip
    elif SPECIALIZE:  # only one loop can be specialized, so every tile is masked
        acc, total, peak = attend(
            acc, total, peak, query, k, v, row_kv, column_kv, stride_kv, queries, 0,
            diagonal + BLOCK_M, scale,
            True, BLOCK_N, HEAD_DIM, TMA, True,
        )  # fmt: skip
    else:
        unmasked = diagonal // BLOCK_N * BLOCK_N
        acc, total, peak = attend(
            acc, total, peak, query, k, v, row_kv, column_kv, stride_kv, queries, 0, unmasked,
            scale,
            False, BLOCK_N, HEAD_DIM, TMA, False,
        )  # fmt: skip
        acc, total, peak = attend(
            acc, total, peak, query, k, v, row_kv, column_kv, stride_kv, queries, unmasked,
            diagonal + BLOCK_M, scale,
            True, BLOCK_N, HEAD_DIM, TMA, False,
        )  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    result = (acc / total[:, None]).to(query.dtype)
    if TMA:
        out.store([row_q, column_q], result)
    else:
        start = out + row_q.to(tl.int64) * stride_q + column_q
        tl.store(
            start + tl.arange(0, BLOCK_M)[:, None] * stride_q + tl.arange(0, HEAD_DIM)[None, :],
            result,
        )
