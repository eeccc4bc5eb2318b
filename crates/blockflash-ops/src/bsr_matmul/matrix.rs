use super::grouping;
use super::parts::Lengths;
use super::stages::{Groups, Stages};
use super::transpose::pattern_hash;
use super::validate::{EdgeBlock, Shape};
use crate::Result;
use blockflash_safe::{BsrIndexArrays, BsrIndices, Device, Stream, Tensor};
use blockflash_sys::DType;

/// A block-sparse matrix in BSR format: square blocks of `block_size`, stored by block row, on the
/// CPU or a GPU.
///
/// Every constructor validates the index arrays and copies them, and nothing changes them later, so
/// the kernels need not check them. `rows` and `cols` need not be multiples of `block_size`: the
/// blocks at the edge are padded with zeros. Any block size from 1 to
/// [`MAX_BLOCK_SIZE`](Self::MAX_BLOCK_SIZE) is a valid matrix and works on the CPU; the kernels
/// take 16, 32, 64 and 128.
///
/// Values may change, for example weights in training, by [`set_values`](Self::set_values),
/// [`values_mut`](Self::values_mut) and
/// [`BsrSddmm::sddmm_into_matrix`](crate::BsrSddmm::sddmm_into_matrix), all of which keep the zeros
/// at the edge.
#[derive(Debug)]
pub struct BsrMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) block_size: usize,
    pub(super) indices: BsrIndices,
    pub(super) values: Tensor,
    /// The lengths of the block rows in their order.
    pub(super) lengths: Lengths,
    /// How block rows share B, if the kernels for the block size need to know it.
    pub(super) groups: Option<Groups>,
    /// Hash of the index arrays, which tells whether a `BsrTranspose` belongs to this matrix.
    pub(super) pattern_hash: u64,
    /// The blocks that reach beyond the matrix; on the host even if the matrix is on a GPU.
    pub(super) edge_blocks: Vec<EdgeBlock>,
}

impl BsrMatrix {
    /// Largest block size.
    pub const MAX_BLOCK_SIZE: usize = 1024;

    /// Makes a matrix from indices, values and edge blocks that have passed validation. The index
    /// arrays and the plans made from them are uploaded to the stream's device, where the values
    /// are.
    pub(super) fn of_pattern(
        shape: &Shape,
        row_ptr: &[i32],
        col_idx: &[i32],
        values: Tensor,
        edge_blocks: Vec<EdgeBlock>,
        stream: &Stream,
    ) -> Result<Self> {
        let Shape { rows, cols, block_size, block_cols, .. } = *shape;
        let order = grouping::row_order(block_size, block_cols, row_ptr, col_idx);
        let stages = Stages::new(block_size, row_ptr, col_idx, &order);
        let arrays = BsrIndexArrays {
            block_cols,
            row_ptr,
            col_idx,
            row_order: &order,
            block_idx: None,
            stages: stages.as_ref().map(Stages::arrays),
        };
        Ok(Self {
            rows,
            cols,
            block_size,
            indices: BsrIndices::new(&arrays, stream)?,
            values,
            lengths: Lengths::of_rows(row_ptr, &order),
            groups: stages.as_ref().map(Stages::groups),
            pattern_hash: pattern_hash(row_ptr, col_idx),
            edge_blocks,
        })
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows and columns of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Element type of the values.
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// Where the matrix is.
    pub fn device(&self) -> Device {
        self.values.device()
    }

    /// Number of block rows, `ceil(rows / block_size)`.
    pub fn block_rows(&self) -> usize {
        self.rows.div_ceil(self.block_size)
    }

    /// Number of block columns, `ceil(cols / block_size)`.
    pub fn block_cols(&self) -> usize {
        self.cols.div_ceil(self.block_size)
    }

    /// Number of stored blocks.
    pub fn nnz_blocks(&self) -> usize {
        self.values.shape().first().copied().unwrap_or(0)
    }

    /// Stored blocks per block of the matrix, 0 to 1; 0 for a matrix without blocks.
    pub fn density(&self) -> f64 {
        let blocks = self.block_rows() as f64 * self.block_cols() as f64;
        if blocks == 0.0 { 0.0 } else { self.nnz_blocks() as f64 / blocks }
    }

    /// i32 `[block_rows + 1]`: the blocks of block row `i` are `row_ptr[i]..row_ptr[i + 1]`.
    pub fn row_ptr(&self) -> &Tensor {
        self.indices.row_ptr()
    }

    /// i32 `[nnz_blocks]`: the block column of each block, ascending and unique within a block row.
    pub fn col_idx(&self) -> &Tensor {
        self.indices.col_idx()
    }

    /// `[nnz_blocks, block_size, block_size]`: the blocks, each row-major; zero beyond `rows` and
    /// `cols`.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// i32 `[block_rows]`: the order in which a kernel takes the block rows. The longest come
    /// first; where neighbours share B, rows that need similar parts of it are adjacent.
    pub fn row_order(&self) -> &Tensor {
        self.indices.row_order()
    }

    pub(crate) fn indices(&self) -> &BsrIndices {
        &self.indices
    }

    /// Number of stored blocks of the longest block row; 0 for a matrix without block rows.
    pub fn longest_row(&self) -> usize {
        self.lengths.longest()
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Out of memory, or a failing device.
    pub fn to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            rows: self.rows,
            cols: self.cols,
            block_size: self.block_size,
            indices: self.indices.copy_to(stream)?,
            values: self.values.copy_to(stream)?,
            lengths: self.lengths.clone(),
            groups: self.groups.clone(),
            pattern_hash: self.pattern_hash,
            edge_blocks: self.edge_blocks.clone(),
        })
    }
}
