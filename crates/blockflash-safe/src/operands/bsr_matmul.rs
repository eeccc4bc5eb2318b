//! BSR matmul.

use super::{BsrParts, Fit, ceil_div, fits, fits_row, optional, pointer, pointer_mut, require, starts_last};
use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
use blockflash_sys::manifest::{BsrTile, Variant};
use blockflash_sys::params::blockflash_bsr_matmul_params;

/// Tensors of the BSR matmul kernels.
#[derive(Debug)]
pub struct BsrMatmulOperands<'a> {
    /// i32 `[ceil(m / block_size) + 1]`. The caller knows that it ascends from 0 to the number of blocks.
    pub row_ptr: View<'a>,
    /// i32 `[nnz_blocks]`. The caller knows that all are below `ceil(k / block_size)`.
    pub col_idx: View<'a>,
    /// i32 `[nnz_blocks]`, for kernels that transpose A and only for them: which of the values each block is. The caller knows that all
    /// are below the number of blocks.
    pub block_idx: Option<View<'a>>,
    /// `[nnz_blocks, block_size, block_size]`.
    pub values: View<'a>,
    /// i32 `[ceil(m / block_size)]`. The caller knows that it is a permutation.
    pub row_order: Option<View<'a>>,
    /// i32 `[stages, 32, 2]` and `[groups + 1]`: how block rows share B, for kernels that gather it. The caller knows that they are the
    /// plan of this pattern in this order.
    pub stages: Option<[View<'a>; 2]>,
    /// For kernels that compute long tiles in parts; `None`: tiles are whole.
    pub parts: Option<BsrParts<'a>>,
    /// `[k, n]`.
    pub b: View<'a>,
    /// `[m, n]`.
    pub c: ViewMut<'a>,
    /// `[m]` or `[n]`.
    pub bias: Option<View<'a>>,
}

impl BsrMatmulOperands<'_> {
    /// Checks sizes and strides against the tensors, and says how many tiles of C there are.
    pub(super) fn fit(
        &self,
        tile: &BsrTile,
        p: &blockflash_bsr_matmul_params,
    ) -> std::result::Result<i128, String> {
        require(p.m > 0 && p.n > 0 && p.k >= 0, "a size is not positive")?;
        let block = i64::from(tile.block_size);
        let block_rows = ceil_div(p.m, tile.block_size);
        let rows = i64::try_from(block_rows).map_err(|_| "m is too large".to_owned())?;
        let blocks = self.col_idx.shape().first().map_or(0, |&blocks| blocks as i64);
        fits("row_ptr", &self.row_ptr, DType::I32, [(rows + 1, 1)])?;
        fits("col_idx", &self.col_idx, DType::I32, [(blocks, 1)])?;
        fits("values", &self.values, tile.dtype, [(blocks, block * block), (block, block), (block, 1)])?;
        self.row_order.map_or(Ok(()), |order| fits("row_order", &order, DType::I32, [(rows, 1)]))?;
        require(self.block_idx.is_some() == tile.a_transposed, "block_idx is for kernels that transpose a")?;
        self.block_idx.map_or(Ok(()), |index| fits("block_idx", &index, DType::I32, [(blocks, 1)]))?;
        fits("b", &self.b, tile.dtype, dims([p.k, p.n], p.ldb, tile.b_column_major))?;
        let c = self.c.as_view();
        require(p.c_dtype == c.dtype() as i32 && c.dtype() != DType::I32, "c_dtype is not the type of c")?;
        fits("c", &c, c.dtype(), dims([p.m, p.n], p.ldc, p.c_column_major != 0))?;
        let entries = if p.bias_per_row != 0 { p.m } else { p.n };
        self.bias.map_or(Ok(()), |bias| fits("bias", &bias, tile.dtype, [(entries, 1)]))?;
        Ok(i128::from(tile.tiles_n(p.n as u64)) * ceil_div(rows, tile.block_rows))
    }

    /// Every tensor, read-only.
    pub(super) fn views(&self) -> [Option<View<'_>>; 11] {
        let [row_ptr, col_idx, values, b] = [self.row_ptr, self.col_idx, self.values, self.b].map(Some);
        let [stages, group_stages] = [0, 1].map(|i| self.stages.map(|stages| stages[i]));
        let parts = self.parts.map(|parts| parts.memory.view());
        let c = Some(self.c.as_view());
        let (block_idx, row_order, bias) = (self.block_idx, self.row_order, self.bias);
        [row_ptr, col_idx, block_idx, values, row_order, stages, group_stages, parts, b, c, bias]
    }

    /// The parameters with the pointers of the tensors.
    pub(super) fn pointers(&self, p: &blockflash_bsr_matmul_params) -> blockflash_bsr_matmul_params {
        blockflash_bsr_matmul_params {
            row_ptr: pointer(&self.row_ptr).cast(),
            col_idx: pointer(&self.col_idx).cast(),
            values: pointer(&self.values),
            row_order: optional(self.row_order.as_ref()).cast(),
            b: pointer(&self.b),
            c: pointer_mut(&self.c),
            bias: optional(self.bias.as_ref()),
            ..*p
        }
    }
}

/// Sizes and strides of a matrix whose rows or columns are contiguous and so many elements apart.
fn dims([rows, columns]: [i64; 2], leading: i64, column_major: bool) -> [(i64, i64); 2] {
    if column_major { [(rows, 1), (columns, leading)] } else { [(rows, leading), (columns, 1)] }
}

/// Checks that the kernel is one that writes C row by row, or that C has such rows.
pub(super) fn writes(rows_only: bool, p: &blockflash_bsr_matmul_params) -> Fit {
    require(!rows_only || p.c_column_major == 0, "the kernel writes rows of c, not columns")
}

impl Stream {
    /// Launches a kernel of [`Variant::BsrMatmul`]. The pointers in `params` are ignored: those of the operands are used.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_bsr_matmul(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_matmul_params,
        operands: BsrMatmulOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrMatmul(tile) = &row.variant else {
            return Err(failed("not a portable kernel of BSR matmul".to_owned()));
        };
        let views = operands.views();
        self.expect_all(&views)?;
        let fit = || -> Fit {
            let blocks = operands.fit(&tile.tile(), params)?;
            writes(true, params)?;
            starts_last(config)?;
            fits_row(config, row, blocks..=blocks)
        };
        fit().map_err(failed)?;
        let params = operands.pointers(params);
        // SAFETY:
        // 1. The row is a variant of BSR matmul, whose parameter struct this is.
        // 2. As in `launch_attention_fwd`; the contents of `row_ptr`, `col_idx` and `row_order` are the promise of whoever
        //    built them.
        // 3. `c` is borrowed exclusively.
        unsafe { self.launch_with(row, config, |_| params, views.iter().flatten().filter_map(View::owner)) }
    }
}
