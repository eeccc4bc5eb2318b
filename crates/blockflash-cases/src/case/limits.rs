//! Limits on the sizes of cases. An id or a suite may name any number, and neither counting the
//! work nor drawing lists may overflow or take all memory.

use blockflash_ops::attention::MAX_SEQLEN;
use blockflash_sys::HeadDims;

/// Most sequences of a batch.
pub(super) const SEQUENCES: usize = 1 << 16;
/// Most heads, and elements of a row.
const WIDTH: usize = 1 << 16;
/// Most elements of a tensor.
const ELEMENTS: usize = 1 << 40;
/// Most pairs of queries and keys, over all heads.
const PAIRS: usize = 1 << 60;

/// A named size is at least 1 and within its limit.
pub(super) fn size(what: &str, size: usize, limit: usize) -> Result<(), String> {
    match size {
        0 => Err(format!("{what} has a size of 0")),
        size if size > limit => Err(format!("{what} is {size}, the limit is {limit}")),
        _ => Ok(()),
    }
}

/// Attention of `[batch, seqlen_q, heads]` to `[batch, seqlen_kv, heads_kv]`.
pub(super) fn attention(
    batch: usize,
    [seqlen_q, seqlen_kv]: [usize; 2],
    [heads_q, heads_kv]: [usize; 2],
    head_dims: HeadDims,
) -> Result<(), String> {
    size("batch", batch, SEQUENCES)?;
    size("seqlen_q", seqlen_q, MAX_SEQLEN)?;
    size("seqlen_kv", seqlen_kv, MAX_SEQLEN)?;
    size("num_heads_q", heads_q, WIDTH)?;
    size("num_heads_kv", heads_kv, WIDTH)?;
    let HeadDims { qk, v } = head_dims;
    size("head_dim", qk, WIDTH)?;
    size("head_dim of v", v, WIDTH)?;
    elements("q", &[batch, seqlen_q, heads_q, head_dims.max()])?;
    elements("k", &[batch, seqlen_kv, heads_kv, head_dims.max()])?;
    product("pairs of queries and keys", &[batch, heads_q, seqlen_q, seqlen_kv], PAIRS)
}

/// The elements of a tensor can be counted and addressed.
pub(super) fn elements(what: &str, shape: &[usize]) -> Result<(), String> {
    product(&format!("the elements of {what}"), shape, ELEMENTS)
}

/// A product of `[m, k]` and `[k, n]`.
pub(super) fn matmul(m: usize, n: usize, k: usize) -> Result<(), String> {
    size("m", m, MAX_SEQLEN)?;
    size("n", n, MAX_SEQLEN)?;
    size("k", k, MAX_SEQLEN)?;
    [("A", [m, k]), ("B", [k, n]), ("C", [m, n])]
        .iter()
        .try_for_each(|(what, shape)| elements(what, shape))
}

/// Stored blocks are counted in 32 bits.
pub(super) fn blocks(stored: usize) -> Result<(), String> {
    size("the number of stored blocks", stored, i32::MAX as usize)
}

/// Stored blocks with their values.
pub(super) fn stored(blocks: usize, block_size: usize) -> Result<(), String> {
    self::blocks(blocks)?;
    elements("the stored blocks", &[blocks, block_size, block_size])
}

fn product(what: &str, factors: &[usize], limit: usize) -> Result<(), String> {
    let count = factors.iter().try_fold(1usize, |count, &factor| count.checked_mul(factor));
    match count {
        Some(count) if count <= limit => Ok(()),
        _ => Err(format!("{what} are too many: {factors:?}, the limit is {limit}")),
    }
}
