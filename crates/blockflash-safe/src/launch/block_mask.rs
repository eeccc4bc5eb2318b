//! The block mask of attention: which key tiles each tile of queries visits.

use super::fit::{Fit, ceil_div, narrow, optional, require};
use crate::BlockLists;
use blockflash_sys::params::blockflash_block_mask;
use std::ptr::null;

/// The argument of kernels without a mask.
pub const NO_MASK: blockflash_block_mask = blockflash_block_mask {
    row_ptr: null(),
    col_idx: null(),
    row_order: null(),
    cu_rows: null(),
    rows: 0,
    block_q: 0,
    block_kv: 0,
    groups_per_batch: 0,
    heads_per_group: 0,
};

impl BlockLists {
    /// Checks the lists against `lengths` of queries and keys, numbers of batch entries and heads,
    /// and the queries and keys of blocks and of a kernel's tiles. Returns the number of tiles of
    /// queries per head, and writes the argument. Every block row has equally many tiles, the last
    /// one included. For a transposed mask, queries and keys change places.
    pub(super) fn fit(
        &self,
        [tile_q, tile_kv]: [u32; 2],
        [block_q, block_kv]: [i32; 2],
        [seqlen_q, seqlen_kv]: [i64; 2],
        groups: [i64; 2],
        params: &mut blockflash_block_mask,
    ) -> Fit<i128> {
        let divides = |tile: u32, block: i32| block > 0 && i64::from(block) % i64::from(tile) == 0;
        require(
            divides(tile_q, block_q) && divides(tile_kv, block_kv),
            format_args!(
                "tiles of {tile_q} × {tile_kv} do not divide blocks of {block_q} × {block_kv}"
            ),
        )?;
        self.write([block_q, block_kv], groups, params)?;
        // For a packed batch, these are the block rows of the longest sequence.
        let rows = ceil_div(seqlen_q, block_q.unsigned_abs());
        require(
            self.cu_rows().is_some() || i128::from(params.rows) == rows,
            format_args!(
                "the mask has {} block rows, expected {rows} for {seqlen_q} queries",
                params.rows
            ),
        )?;
        // Tiles past the last query are numbered as well.
        require(
            rows * i128::from(block_q) <= i128::from(i32::MAX),
            format_args!(
                "{rows} block rows of {block_q} queries, the limit of queries is {}",
                i32::MAX
            ),
        )?;
        let cols = ceil_div(seqlen_kv, block_kv.unsigned_abs());
        require(
            self.has_columns_below(cols),
            format_args!(
                "the mask is of {} block columns, beyond the {cols} of {seqlen_kv} keys",
                self.column_limit()
            ),
        )?;
        // The kernels count the key tiles of a row in 32 bits.
        let tiles = self.longest() * ceil_div(block_kv.into(), tile_kv);
        require(
            tiles <= i128::from(i32::MAX),
            format_args!("a row of the mask has {tiles} tiles of keys, the limit is {}", i32::MAX),
        )?;
        Ok(rows * ceil_div(block_q.into(), tile_q))
    }

    /// Writes the argument for blocks of this many queries and keys, and checks the lists against
    /// the numbers of batch entries and heads.
    pub(super) fn write(
        &self,
        [block_q, block_kv]: [i32; 2],
        [batch, heads]: [i64; 2],
        params: &mut blockflash_block_mask,
    ) -> Fit {
        let views = self.views();
        let [row_ptr, col_idx, row_order, cu_rows] =
            views.each_ref().map(|view| optional(view.as_ref()).cast());
        // `BlockLists` keeps row_ptr and row_order in the same groups.
        let (entries, groups, rows) = match *self.row_order().shape() {
            [entries, groups, rows] => (entries as i64, groups as i64, rows as i64),
            [groups, rows] => (1, groups as i64, rows as i64),
            ref shape => return Err(format!("row_order of the mask has the shape {shape:?}")),
        };
        let packed = self.cu_rows().map(|rows| rows.layout().elements() as i64 - 1);
        require(
            packed.unwrap_or(if entries == 1 { batch } else { entries }) == batch,
            format_args!(
                "the mask has {} batch entries, expected {batch}",
                packed.unwrap_or(entries)
            ),
        )?;
        require(
            groups > 0 && heads > 0 && heads % groups == 0,
            format_args!("q has {heads} heads, not a multiple of the {groups} of the mask"),
        )?;
        // The kernels count the entries of row_ptr in 32 bits.
        let counted = self.row_ptr().layout().elements() as i64;
        narrow("number of entries of row_ptr of the mask", counted)?;
        // A null list tells the kernel to visit every key. The address of a list without columns
        // may be null, too, so `row_ptr` stands in for it; it is never read.
        let col_idx = if self.col_idx().layout().is_empty() { row_ptr } else { col_idx };
        *params = blockflash_block_mask {
            row_ptr,
            col_idx,
            row_order,
            cu_rows,
            rows: narrow("block rows of the mask", rows)?,
            block_q,
            block_kv,
            groups_per_batch: if entries == 1 { 0 } else { narrow("heads of the mask", groups)? },
            heads_per_group: narrow("heads of a list", heads / groups)?,
        };
        Ok(())
    }
}

#[cfg(test)]
#[path = "block_mask_tests.rs"]
mod tests;
