//! What a case has to do: operations, exponentials and bytes, counted from the problem and not from
//! a kernel.

use super::{AttentionShape, BlockSparseShape, BsrShape, Case, VarlenShape};
use blockflash_ops::{attention_flops, bsr_flops};
use serde::Serialize;

/// Counted work of one launch; the same for ours and for every rival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    /// Useful floating-point operations: nothing that is masked or not stored counts.
    pub flops: f64,
    /// Exponentials: one per visited query-key pair and head.
    pub exps: f64,
    /// Bytes of device memory: every input read once, every output written once.
    pub bytes: f64,
    /// Bytes of operands that multiprocessors fetch from L2 when a tile of rows shares each fetch:
    /// [`TILE_ROWS`] query rows (a block of queries if the mask has smaller ones), or one row of
    /// blocks of a sparse matrix. Query heads that share keys share a tile. A kernel that shares
    /// more can beat the time that follows from this count.
    pub l2_bytes: f64,
}

/// Query rows, of all the heads that share keys, for which keys and values are fetched once.
pub const TILE_ROWS: usize = 128;
/// Columns of a dense operand for which a stored block is fetched once.
pub const TILE_COLUMNS: usize = 256;

impl Case {
    /// What a launch has to do.
    pub fn work(&self) -> Work {
        match self {
            Case::AttentionFwd(shape) => attention(shape),
            Case::VarlenFwd(shape) => varlen(shape),
            Case::BlockSparseFwd(shape) => block_sparse(shape),
            Case::BlockMaskBuild(shape) => shape.work(),
            Case::BsrMatmul(shape) => bsr(shape),
            Case::BsrSddmm(shape) => shape.work(),
        }
    }
}

/// Bytes of q, k, v, o and lse.
fn operands(batch: usize, [q, kv]: [usize; 2], [heads_q, heads_kv]: [usize; 2], row: usize) -> f64 {
    let rows_q = (batch * q * heads_q) as f64;
    let rows_kv = (batch * kv * heads_kv) as f64;
    (2.0 * rows_q + 2.0 * rows_kv) * row as f64 + 4.0 * rows_q
}

fn attention(shape: &AttentionShape) -> Work {
    let AttentionShape {
        batch,
        seqlen_q,
        seqlen_kv,
        num_heads_q,
        num_heads_kv,
        head_dim,
        dtype,
        ..
    } = *shape;
    let problem = shape.problem();
    // Only a variable-length problem has no count.
    let flops = attention_flops(&problem).unwrap_or(0) as f64;
    let row = head_dim * dtype.size();
    let group = num_heads_q / num_heads_kv.max(1);
    let positions = (TILE_ROWS / group.max(1)).max(1);
    let tiles_of_heads = group.div_ceil(TILE_ROWS).max(1);
    // The last query of a tile sees the most keys.
    let keys = |tile: usize| {
        let last = ((tile + 1) * positions).min(seqlen_q) - 1;
        let first = last.min(tile * positions);
        let seen = |query: usize| problem.mask.visible(query, seqlen_q, seqlen_kv);
        seen(last).end.saturating_sub(seen(first).start)
    };
    let keys: usize = (0..seqlen_q.div_ceil(positions)).map(keys).sum();
    Work {
        flops,
        exps: flops / (4 * head_dim) as f64,
        bytes: operands(batch, [seqlen_q, seqlen_kv], [num_heads_q, num_heads_kv], row),
        l2_bytes: (batch * num_heads_kv * tiles_of_heads * keys * 2 * row) as f64
            + (batch * seqlen_q * num_heads_q * row) as f64,
    }
}

/// Every sequence for itself, and the offsets.
fn varlen(shape: &VarlenShape) -> Work {
    let offsets = 4.0 * (shape.lengths.batch() + 1) as f64;
    let start = Work { bytes: offsets, ..Work::default() };
    shape.sequences().map(|sequence| attention(&sequence)).fold(start, |sum, one| Work {
        flops: sum.flops + one.flops,
        exps: sum.exps + one.exps,
        bytes: sum.bytes + one.bytes,
        l2_bytes: sum.l2_bytes + one.l2_bytes,
    })
}

fn block_sparse(shape: &BlockSparseShape) -> Work {
    let BlockSparseShape {
        batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, ..
    } = *shape;
    let row = head_dim * shape.dtype.size();
    let pairs = (batch * shape.visited_pairs()) as f64;
    let sharing = shape.sharing_heads();
    // Tiles of the query rows that share a block of keys.
    let tiles = (sharing * shape.block_q).div_ceil(TILE_ROWS);
    let fetches = (batch * shape.nnz_blocks() / sharing * tiles) as f64;
    Work {
        flops: 4.0 * pairs * head_dim as f64,
        exps: pairs,
        bytes: operands(batch, [seqlen_q, seqlen_kv], [num_heads_q, num_heads_kv], row),
        l2_bytes: fetches * (shape.block_kv * 2 * row) as f64
            + (batch * seqlen_q * num_heads_q * row) as f64,
    }
}

fn bsr(shape: &BsrShape) -> Work {
    let BsrShape { m, n, k, block_size, dtype, .. } = *shape;
    let blocks = shape.nnz_blocks();
    let values = blocks * block_size * block_size * dtype.size();
    Work {
        flops: bsr_flops(&shape.problem()) as f64,
        exps: 0.0,
        bytes: (values + 4 * (blocks + shape.block_rows() + 1) + (k * n + m * n) * dtype.size())
            as f64,
        l2_bytes: (blocks * block_size * n * dtype.size() + values * n.div_ceil(TILE_COLUMNS))
            as f64,
    }
}
