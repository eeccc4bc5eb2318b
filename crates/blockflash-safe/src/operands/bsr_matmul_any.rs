//! BSR matmul whose operands lie in any layout.

use super::{BsrMatmulOperands, Fit, fits_row, optional, starts_last};
use crate::{Error, LaunchConfig, Result, Row, Stream, View};
use blockflash_sys::manifest::{BsrMatmulAny, BsrTile, Variant};
use blockflash_sys::params::blockflash_bsr_matmul_any_params;

impl Stream {
    /// Launches a kernel of [`Variant::BsrMatmulAny`]. The pointers in `params` are ignored: those
    /// of the operands are used.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_bsr_matmul_any(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_matmul_any_params,
        operands: BsrMatmulOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrMatmulAny(tile) = &row.variant else {
            return Err(failed("not a kernel of BSR matmul for any layout".to_owned()));
        };
        let views = operands.views();
        self.expect_all(&views)?;
        fit(row, tile, config, params, &operands).map_err(failed)?;
        let [_, _, _, block_idx, ..] = operands.indices.views();
        let params = blockflash_bsr_matmul_any_params {
            base: operands.pointers(&params.base),
            block_idx: optional(block_idx.as_ref()).cast(),
            ..*params
        };
        // SAFETY:
        // 1. The row is a variant of BSR matmul for any layout, whose parameter struct this is.
        // 2. As in `launch_bsr_matmul`, also for `block_idx`, which is there exactly where
        //    `a_transposed` says so (`fit`).
        // 3. `c` is borrowed exclusively.
        unsafe {
            self.launch_with(
                row,
                config,
                |_| params,
                views.iter().flatten().filter_map(View::owner),
            )
        }
    }
}

fn fit(
    row: &Row,
    tile: &BsrMatmulAny,
    config: &LaunchConfig,
    p: &blockflash_bsr_matmul_any_params,
    operands: &BsrMatmulOperands<'_>,
) -> Fit {
    let (a_transposed, b_column_major) = (p.a_transposed != 0, p.b_column_major != 0);
    let blocks = operands.fit(&BsrTile { a_transposed, b_column_major, ..tile.tile() }, &p.base)?;
    starts_last(config)?;
    fits_row(config, row, blocks..=blocks)
}

#[cfg(test)]
#[path = "bsr_matmul_any_tests.rs"]
mod tests;
