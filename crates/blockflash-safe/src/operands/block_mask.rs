//! The block mask of attention: which key tiles each tile of queries visits.

use super::{Fit, ceil_div, fits, pointer, require};
use crate::{DType, View};
use blockflash_sys::manifest::AttentionTile;
use blockflash_sys::params::{blockflash_attention_fwd_params, blockflash_block_mask};

/// Index arrays of a block mask, contiguous. `batch` is 1 or that of q, `heads` divides that of q.
#[derive(Clone, Copy, Debug)]
pub struct BlockMaskOperands<'a> {
    /// i32 `[batch, heads, rows + 1]`. The caller knows that a head's entries ascend and stay within `col_idx`.
    pub row_ptr: View<'a>,
    /// i32 `[columns]`, at least as many as `row_ptr` asks for. The caller knows that those of a row ascend and exist.
    pub col_idx: View<'a>,
    /// i32 `[batch, heads, rows]`. The caller knows that each head has a permutation of its rows.
    pub row_order: View<'a>,
}

impl BlockMaskOperands<'_> {
    /// Checks the sizes in the parameters, those of the mask and those of the problem, against the arrays.
    pub(super) fn fit(&self, tile: &AttentionTile, p: &blockflash_attention_fwd_params) -> Fit {
        let m = &p.block_mask;
        let divides = |tile: u32, block: i32| block > 0 && i64::from(block) % i64::from(tile) == 0;
        require(
            divides(tile.block_q, m.block_q) && divides(tile.block_kv, m.block_kv),
            "the tile does not divide the blocks of the mask",
        )?;
        let rows = i64::from(m.rows);
        let block_rows = ceil_div(p.seqlen_q.into(), m.block_q.unsigned_abs());
        require(i128::from(rows) == block_rows, "the mask has another number of rows")?;
        // Tiles past the last query are numbered, too.
        require(rows * i64::from(m.block_q) <= i64::from(i32::MAX), "there are too many queries")?;
        self.fit_groups(m, p.batch, p.num_heads_q)
    }

    /// Checks the arrays of a mask with `m.rows` rows for so many batch entries and heads, which are positive.
    pub(super) fn fit_groups(&self, m: &blockflash_block_mask, batch: i32, heads: i32) -> Fit {
        require(
            m.heads_per_group > 0 && heads % m.heads_per_group == 0,
            "the heads of the mask do not divide those of q",
        )?;
        let heads = heads / m.heads_per_group;
        require([0, heads].contains(&m.groups_per_batch), "a batch entry of the mask has other heads")?;
        let batch = if m.groups_per_batch == 0 { 1 } else { i64::from(batch) };
        let (rows, heads) = (i64::from(m.rows), i64::from(heads));
        let per_row = |more| [(batch, heads * (rows + more)), (heads, rows + more), (rows + more, 1)];
        let columns = self.col_idx.shape().first().map_or(0, |&columns| columns as i64);
        fits("block_mask.row_ptr", &self.row_ptr, DType::I32, per_row(1))?;
        fits("block_mask.col_idx", &self.col_idx, DType::I32, [(columns, 1)])?;
        fits("block_mask.row_order", &self.row_order, DType::I32, per_row(0))
    }

    pub(super) fn views(&self) -> [Option<View<'_>>; 3] {
        [self.row_ptr, self.col_idx, self.row_order].map(Some)
    }

    /// The parameters with the pointers of the arrays.
    pub(super) fn pointers(&self, m: &blockflash_block_mask) -> blockflash_block_mask {
        let row_ptr = pointer(&self.row_ptr).cast();
        // To a kernel no list means that every key is visited. One without columns may have no address; it is never read.
        let col_idx = if self.col_idx.layout().is_empty() { row_ptr } else { pointer(&self.col_idx).cast() };
        blockflash_block_mask { row_ptr, col_idx, row_order: pointer(&self.row_order).cast(), ..*m }
    }
}

#[cfg(test)]
#[path = "block_mask_tests.rs"]
mod tests;
