//! The block mask of attention: which key tiles each tile of queries visits.

use super::fit::{Fit, ceil_div, fits, optional, require};
use crate::{BlockLists, DType};
use blockflash_sys::params::blockflash_block_mask;

impl BlockLists {
    /// Checks the sizes of a mask and of the problem, `lengths` of queries and keys and numbers of
    /// batch entries and heads, against the arrays, and returns the number of tiles of queries per
    /// head. Every block row has equally many, the last one included. For a transposed mask,
    /// queries and keys change places.
    pub(super) fn fit(
        &self,
        [tile_q, tile_kv]: [u32; 2],
        m: &blockflash_block_mask,
        [seqlen_q, seqlen_kv]: [i32; 2],
        [batch, heads]: [i32; 2],
    ) -> Fit<i128> {
        let divides = |tile: u32, block: i32| block > 0 && i64::from(block) % i64::from(tile) == 0;
        require(
            divides(tile_q, m.block_q) && divides(tile_kv, m.block_kv),
            format_args!(
                "tiles of {tile_q} × {tile_kv} do not divide blocks of {} × {}",
                m.block_q, m.block_kv
            ),
        )?;
        // For a packed batch, these are the block rows of the longest sequence.
        let rows = ceil_div(seqlen_q.into(), m.block_q.unsigned_abs());
        require(
            self.cu_rows().is_some() || i128::from(m.rows) == rows,
            format_args!(
                "the mask has {} block rows, expected {rows} for {seqlen_q} queries",
                m.rows
            ),
        )?;
        // Tiles past the last query are numbered as well.
        require(
            rows * i128::from(m.block_q) <= i128::from(i32::MAX),
            format_args!(
                "{rows} block rows of {} queries, the limit of queries is {}",
                m.block_q,
                i32::MAX
            ),
        )?;
        let cols = ceil_div(seqlen_kv.into(), m.block_kv.unsigned_abs());
        require(
            self.has_columns_below(cols),
            format_args!(
                "the mask is of {} block columns, beyond the {cols} of {seqlen_kv} keys",
                self.column_limit()
            ),
        )?;
        // The kernels count the key tiles of a row in 32 bits.
        let tiles = self.longest() * ceil_div(m.block_kv.into(), tile_kv);
        require(
            tiles <= i128::from(i32::MAX),
            format_args!("a row of the mask has {tiles} tiles of keys, the limit is {}", i32::MAX),
        )?;
        self.fit_groups(m, batch, heads)?;
        Ok(rows * ceil_div(m.block_q.into(), tile_q))
    }

    /// Checks the arrays of a mask with `m.rows` block rows against the numbers of batch entries
    /// and heads, which are positive.
    pub(super) fn fit_groups(&self, m: &blockflash_block_mask, batch: i32, heads: i32) -> Fit {
        require(
            m.heads_per_group > 0 && heads % m.heads_per_group == 0,
            format_args!(
                "q has {heads} heads, not divisible into groups of {} that share a list",
                m.heads_per_group
            ),
        )?;
        let heads = heads / m.heads_per_group;
        require(
            [0, heads].contains(&m.groups_per_batch),
            format_args!(
                "a batch entry of the mask has {} heads, expected {heads}",
                m.groups_per_batch
            ),
        )?;
        let (row_ptr, col_idx, row_order) =
            (self.row_ptr().view(), self.col_idx().view(), self.row_order().view());
        let columns = col_idx.shape().first().map_or(0, |&columns| columns as i64);
        fits("block_mask.col_idx", &col_idx, DType::I32, [(columns, 1)])?;
        let (rows, heads, entries) = (i64::from(m.rows), i64::from(heads), i64::from(batch));
        // The kernels count the entries of row_ptr in 32 bits.
        let counted = row_ptr.layout().elements() <= i32::MAX as usize;
        require(
            counted,
            format_args!(
                "row_ptr of the mask has {} entries, the limit is {}",
                row_ptr.layout().elements(),
                i32::MAX
            ),
        )?;
        let per_row = |more| [(heads, rows + more), (rows + more, 1)];
        if let Some(cu_rows) = self.cu_rows() {
            require(
                m.groups_per_batch == 0,
                format_args!(
                    "a packed mask has {} lists for a batch entry, expected 0",
                    m.groups_per_batch
                ),
            )?;
            fits("block_mask.cu_rows", &cu_rows.view(), DType::I32, [(entries + 1, 1)])?;
            fits("block_mask.row_ptr", &row_ptr, DType::I32, per_row(1))?;
            return fits("block_mask.row_order", &row_order, DType::I32, per_row(0));
        }
        let entries = if m.groups_per_batch == 0 { 1 } else { entries };
        let per_entry = |more| {
            let [of_heads, of_rows] = per_row(more);
            [(entries, heads * (rows + more)), of_heads, of_rows]
        };
        fits("block_mask.row_ptr", &row_ptr, DType::I32, per_entry(1))?;
        fits("block_mask.row_order", &row_order, DType::I32, per_entry(0))
    }
}

/// The parameters with the pointers of the arrays; without a mask they are null.
pub(super) fn pointers(
    lists: Option<&BlockLists>,
    m: &blockflash_block_mask,
) -> blockflash_block_mask {
    let views = lists.map_or([None; 4], BlockLists::views);
    let [row_ptr, col_idx, row_order, cu_rows] =
        views.each_ref().map(|view| optional(view.as_ref()).cast());
    // A null list tells the kernel to visit every key. The address of a list without columns may be
    // null, too, so `row_ptr` stands in for it; it is never read.
    let col_idx = if lists.is_some_and(|lists| lists.col_idx().layout().is_empty()) {
        row_ptr
    } else {
        col_idx
    };
    blockflash_block_mask { row_ptr, col_idx, row_order, cu_rows, ..*m }
}

#[cfg(test)]
#[path = "block_mask_tests.rs"]
mod tests;
