//! What a case has to do: operations, exponentials and bytes, counted from the problem and not from
//! a kernel.

use serde::Serialize;
use std::ops::Add;

/// Counted work of one launch; the same for ours and for every competitor.
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

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            flops: self.flops + other.flops,
            exps: self.exps + other.exps,
            bytes: self.bytes + other.bytes,
            l2_bytes: self.l2_bytes + other.l2_bytes,
        }
    }
}
