//! Block-sparse values in larger blocks.

use super::{Fit, fits, fits_row, pointer, pointer_mut, require, starts_last};
use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
use blockflash_sys::BsrReblockKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::blockflash_bsr_reblock_params;

/// What a thread copies at a time.
const CHUNK_BYTES: i64 = 16;

/// Tensors of [`Variant::BsrReblock`](crate::manifest::Variant).
#[derive(Debug)]
pub struct BsrReblockOperands<'a> {
    /// i32 `[large_blocks, factor, factor]`: which block lies there. The caller knows that all are below the number of blocks; those below
    /// 0 are none.
    pub block_idx: View<'a>,
    /// `[blocks, block, block]`, contiguous.
    pub from: View<'a>,
    /// `[large_blocks, factor * block, factor * block]` of the same type, contiguous.
    pub to: ViewMut<'a>,
}

impl BsrReblockOperands<'_> {
    fn fit(
        &self,
        row: &Row,
        kernel: &BsrReblockKernel,
        config: &LaunchConfig,
        p: &blockflash_bsr_reblock_params,
    ) -> Fit {
        let [large_blocks, factor, block, row_chunks] =
            [p.large_blocks, p.factor, p.block, p.row_chunks].map(i64::from);
        require(
            [large_blocks, factor, block, row_chunks].iter().all(|&size| size > 0),
            "a size is not positive",
        )?;
        let (dtype, to) = (self.from.dtype(), self.to.as_view());
        require(
            row_chunks * CHUNK_BYTES == block * dtype.size() as i64,
            "row_chunks are not those of a row",
        )?;
        let blocks = self.from.shape().first().map_or(0, |&blocks| blocks as i64);
        let square = |count: i64, size: i64| [(count, size * size), (size, size), (size, 1)];
        // The kernel counts the chunks of a large block in 32 bits; neither factor is beyond that.
        let chunks = i128::from(factor * block) * i128::from(factor * row_chunks);
        require(chunks <= i128::from(i32::MAX) / 2, "a large block is too large")?;
        fits("block_idx", &self.block_idx, DType::I32, square(large_blocks, factor))?;
        fits("from", &self.from, dtype, square(blocks, block))?;
        fits("to", &to, dtype, square(large_blocks, factor * block))?;
        require(self.from.is_aligned(16) && to.is_aligned(16), "an address is no multiple of 16")?;
        let parts = (chunks + i128::from(kernel.block_chunks()) - 1) / i128::from(kernel.block_chunks());
        let grid = i128::from(large_blocks) * parts;
        starts_last(config)?;
        fits_row(config, row, grid..=grid)
    }
}

impl Stream {
    /// Launches [`Variant::BsrReblock`](crate::manifest::Variant). The pointers in `params` are ignored: those of the operands are used.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_bsr_reblock(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_reblock_params,
        operands: BsrReblockOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrReblock(kernel) = &row.variant else {
            return Err(failed("not a kernel that makes blocks larger".to_owned()));
        };
        let BsrReblockOperands { block_idx, from, to } = &operands;
        let views = [*block_idx, *from, to.as_view()].map(Some);
        self.expect_all(&views)?;
        operands.fit(row, kernel, config, params).map_err(failed)?;
        let params = blockflash_bsr_reblock_params {
            block_idx: pointer(block_idx).cast(),
            from: pointer(from),
            to: pointer_mut(to),
            ..*params
        };
        // SAFETY:
        // 1. The row is the variant whose parameter struct this is.
        // 2. As in `launch_attention_fwd`; blocks of `from` are read by the entries of `block_idx`, which the caller knows to be in range,
        //    and what is written is all of `to`, whose shape `fit` found to be that of the parameters.
        // 3. `to` is borrowed exclusively.
        unsafe { self.launch_with(row, config, |_| params, views.iter().flatten().filter_map(View::owner)) }
    }
}

#[cfg(test)]
#[path = "bsr_reblock_tests.rs"]
mod tests;
