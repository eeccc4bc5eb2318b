//! BSR matmul.

use super::BsrParts;
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, array, ceil_div, fits, given, optional, pointer, pointer_mut, require, starts_at,
};
use crate::view::Used;
use crate::{BsrIndices, DType, Kernel, Tensor, View, ViewMut};
use blockflash_sys::manifest::{BsrMatmul, BsrMatmulTile, Variant};
use blockflash_sys::params::{blockflash_bsr_matmul_params, blockflash_bsr_matmul_portable_params};

/// Tensors of the BSR matmul kernels.
#[derive(Debug)]
pub struct BsrMatmulOperands<'a> {
    /// The pattern of the block-sparse matrix. Kernels that transpose A need the pattern of the
    /// transpose, with `block_idx`; all others need a pattern without it.
    pub indices: &'a BsrIndices,
    /// `[nnz_blocks, block_size, block_size]`.
    pub values: View<'a>,
    /// Memory for kernels that compute long tiles in parts; with `None`, tiles are whole.
    pub parts: Option<BsrParts<'a>>,
    /// `[k, n]`.
    pub b: View<'a>,
    /// `[m, n]`.
    pub c: ViewMut<'a>,
    /// `[m]` or `[n]`.
    pub bias: Option<View<'a>>,
}

impl BsrMatmulOperands<'_> {
    /// Checks sizes and strides against the tensors, and returns the number of tiles of C. Writes
    /// the argument with the pointers of the tensors.
    pub(super) fn fit(
        &self,
        tile: &BsrMatmulTile,
        p: &blockflash_bsr_matmul_params,
        params: &mut blockflash_bsr_matmul_params,
    ) -> Fit<i128> {
        require(
            p.m > 0 && p.n > 0 && p.k >= 0,
            format_args!("m, n and k are {}, {} and {}: a size is not positive", p.m, p.n, p.k),
        )?;
        let block = i64::from(tile.block_size);
        let block_rows = ceil_div(p.m, tile.block_size);
        let rows = i64::try_from(block_rows)
            .map_err(|_| format!("m is {}, the limit is {}", p.m, i64::MAX))?;
        let blocks = self.indices.blocks() as i64;
        fits("row_ptr", &self.indices.row_ptr().view(), DType::I32, [(rows + 1, 1)])?;
        let block_cols = ceil_div(p.k, tile.block_size);
        require(
            self.indices.has_columns_below(block_cols),
            format_args!(
                "the pattern is of {} block columns, beyond the {block_cols} of k",
                self.indices.column_limit()
            ),
        )?;
        // The kernels count the depth of a block row in 32 bits.
        let depth = i64::from(self.indices.longest_from(0, false)) * block;
        require(
            depth <= i64::from(i32::MAX),
            format_args!("a block row has {depth} columns, the limit is {}", i32::MAX),
        )?;
        fits(
            "values",
            &self.values,
            tile.dtype,
            [(blocks, block * block), (block, block), (block, 1)],
        )?;
        starts_at(16, "values", &self.values)?;
        let transposed = self.indices.block_idx().is_some();
        require(
            transposed == tile.a_transposed,
            format_args!(
                "block_idx is {}, expected {}: it is for kernels that transpose a",
                given(transposed),
                given(tile.a_transposed)
            ),
        )?;
        fits("b", &self.b, tile.dtype, dims([p.k, p.n], p.ldb, tile.b_column_major))?;
        let c = self.c.as_view();
        require(
            p.c_dtype == c.dtype() as i32 && c.dtype() != DType::I32,
            format_args!("c_dtype is {}, and c has {}", p.c_dtype, c.dtype()),
        )?;
        fits("c", &c, c.dtype(), dims([p.m, p.n], p.ldc, p.c_column_major != 0))?;
        let entries = if p.bias_per_row != 0 { p.m } else { p.n };
        self.bias.map_or(Ok(()), |bias| fits("bias", &bias, tile.dtype, [(entries, 1)]))?;
        let [row_ptr, col_idx, row_order, ..] = self.indices.arrays();
        *params = blockflash_bsr_matmul_params {
            row_ptr: array(row_ptr).cast(),
            col_idx: array(col_idx).cast(),
            values: pointer(&self.values),
            row_order: array(row_order).cast(),
            b: pointer(&self.b),
            c: pointer_mut(&self.c),
            bias: optional(self.bias.as_ref()),
            ..*p
        };
        Ok(i128::from(tile.tiles_n(p.n as u64)) * ceil_div(rows, tile.block_rows))
    }
}

impl Operands for BsrMatmulOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        // Arrays that are mapped are not always inlined, which takes the host 0.05 µs.
        let [row_ptr, col_idx, row_order, block_idx, stages, group_stages, rows] =
            self.indices.arrays();
        let (row_ptr, col_idx) = (row_ptr.map(Tensor::used), col_idx.map(Tensor::used));
        let rows = rows.map(Tensor::used);
        let (row_order, block_idx) = (row_order.map(Tensor::used), block_idx.map(Tensor::used));
        let (stages, group_stages) = (stages.map(Tensor::used), group_stages.map(Tensor::used));
        let parts = self.parts.map(|parts| parts.memory.used());
        let [values, b, c] = [self.values.used(), self.b.used(), self.c.used()].map(Some);
        let bias = self.bias.as_ref().map(View::used);
        [
            row_ptr,
            col_idx,
            row_order,
            block_idx,
            stages,
            group_stages,
            rows,
            values,
            parts,
            b,
            c,
            bias,
        ]
    }
}

/// Sizes and strides of a matrix whose rows or columns are contiguous and `stride` elements apart.
fn dims([rows, columns]: [i64; 2], leading: i64, column_major: bool) -> [(i64, i64); 2] {
    if column_major { [(rows, 1), (columns, leading)] } else { [(rows, leading), (columns, 1)] }
}

/// Checks that C is row-major if the kernel writes nothing else.
pub(super) fn writes(rows_only: bool, p: &blockflash_bsr_matmul_params) -> Fit {
    require(
        !rows_only || p.c_column_major == 0,
        format_args!("c_column_major is {}, expected 0: the kernel writes rows", p.c_column_major),
    )
}

// SAFETY:
// 1. This is the parameter struct of the portable kernels of BSR matmul.
// 2. As for attention forward; where addresses follow from index arrays, `BsrIndices` has checked
//    their entries.
// 3. `c` is a `ViewMut`.
unsafe impl Launch for BsrMatmul {
    type Operands<'a> = BsrMatmulOperands<'a>;
    type Plan = blockflash_bsr_matmul_params;
    type Params = blockflash_bsr_matmul_portable_params;
    const FAMILY: &'static str = "portable BSR matmul";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::BsrMatmul(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        writes(true, plan)?;
        let [.., rows] = operands.indices.arrays();
        params.rows = array(rows).cast();
        params.values_settled = operands.values.is_settled().into();
        operands.fit(&self.tile(), plan, &mut params.base)
    }
}
