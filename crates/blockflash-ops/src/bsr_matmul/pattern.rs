use super::grouping;
use super::parts::Lengths;
use super::stages::{Groups, Stages};
use super::validate::{EdgeBlock, MAX_BLOCK_SIZE, Shape, VALUE_TYPES, invalid};
use crate::check::{Operand, contiguous};
use crate::{Error, Result};
use blockflash_safe::{BsrIndexArrays, BsrIndices, Device, Stream, Tensor, View};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Which blocks of a block-sparse matrix are stored, and the plans that kernels make of it, on the
/// CPU or a GPU: a [`BsrMatrix`](super::BsrMatrix) without its values.
///
/// Every constructor validates the index arrays and copies them, and nothing changes them later, so
/// the kernels need not check them. `rows` and `cols` need not be multiples of `block_size`. Any
/// block size from 1 to [`MAX_BLOCK_SIZE`](Self::MAX_BLOCK_SIZE) works on the CPU; the kernels take
/// 16, 32, 64 and 128.
///
/// Planning is the expensive part of a block-sparse matrix. Matrices share a pattern by an `Arc`
/// ([`BsrMatrix::new`](super::BsrMatrix::new)), and values that another library owns are multiplied
/// with it through a [`BsrView`](super::BsrView):
///
/// ```
/// # use blockflash_ops::{BsrMatmul, BsrPattern, BsrView, DType, Device, View};
/// let stream = Device::cpu().stream()?; // or of a GPU, for which pattern.to(&stream) is a copy
/// let pattern = BsrPattern::from_blocks(4, 4, 2, &[(0, 1), (1, 0)])?;
/// let parameter = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]; // memory of the caller
/// let values = View::from_slice(&parameter, &pattern.values_shape())?;
/// let ones = View::from_slice(&[1f32; 4], &[4, 1])?;
/// let c = BsrMatmul::new(BsrView::new(&pattern, values)?, ones).matmul(DType::F32, &stream)?;
/// assert_eq!(c.to_vec::<f32>(&stream)?, [3.0, 7.0, 11.0, 15.0]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Debug)]
pub struct BsrPattern {
    shape: Shape,
    indices: BsrIndices,
    /// The lengths of the block rows in their order.
    lengths: Lengths,
    /// How block rows share B, if the kernels for the block size need to know it.
    groups: Option<Groups>,
    /// Hash of the index arrays, which distinguishes patterns of equal size.
    hash: u64,
    /// The blocks that reach beyond the matrix; on the host even if the pattern is on a GPU.
    edge_blocks: Vec<EdgeBlock>,
}

impl BsrPattern {
    /// Largest block size.
    pub const MAX_BLOCK_SIZE: usize = MAX_BLOCK_SIZE;

    /// From the two index arrays of the format, fully validated; on the CPU. `row_ptr` has
    /// `block_rows + 1` entries, `col_idx` one per block, ascending and unique within a block row.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] names the first bad entry; [`Error::TooLarge`].
    pub fn from_parts(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: &[i32],
        col_idx: &[i32],
    ) -> Result<Self> {
        let stream = Device::cpu().stream()?;
        Self::of(&Shape::new(rows, cols, block_size)?, row_ptr, col_idx, &stream)
    }

    /// Validates the index arrays, plans them, and uploads both to the stream's device.
    pub(super) fn of(
        shape: &Shape,
        row_ptr: &[i32],
        col_idx: &[i32],
        stream: &Stream,
    ) -> Result<Self> {
        shape.check_indices(row_ptr, col_idx, col_idx.len())?;
        let Shape { block_size, block_cols, .. } = *shape;
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
            shape: *shape,
            indices: BsrIndices::new(&arrays, stream)?,
            lengths: Lengths::of_rows(row_ptr, &order),
            groups: stages.as_ref().map(Stages::groups),
            hash: hash(row_ptr, col_idx),
            edge_blocks: shape.edge_blocks(row_ptr, col_idx),
        })
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// Rows and columns of a block.
    pub fn block_size(&self) -> usize {
        self.shape.block_size
    }

    /// Where the pattern is.
    pub fn device(&self) -> Device {
        self.indices.device()
    }

    /// Number of block rows, `ceil(rows / block_size)`.
    pub fn block_rows(&self) -> usize {
        self.shape.block_rows
    }

    /// Number of block columns, `ceil(cols / block_size)`.
    pub fn block_cols(&self) -> usize {
        self.shape.block_cols
    }

    /// Number of stored blocks.
    pub fn nnz_blocks(&self) -> usize {
        self.indices.blocks()
    }

    /// The shape of values of this pattern, `[nnz_blocks, block_size, block_size]`: the blocks in
    /// the order of [`col_idx`](Self::col_idx), each row-major.
    pub fn values_shape(&self) -> [usize; 3] {
        [self.nnz_blocks(), self.block_size(), self.block_size()]
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

    /// i32 `[block_rows]`: the order in which a kernel takes the block rows. The longest come
    /// first; where neighbours share B, rows that need similar parts of it are adjacent.
    pub fn row_order(&self) -> &Tensor {
        self.indices.row_order()
    }

    /// Number of stored blocks of the longest block row; 0 for a matrix without block rows.
    pub fn longest_row(&self) -> usize {
        self.lengths.longest()
    }

    /// Whether a stored block reaches beyond the matrix, where values have to be zero. False if
    /// both sizes are multiples of `block_size`.
    pub fn has_edge_blocks(&self) -> bool {
        !self.edge_blocks.is_empty()
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Out of memory, or a failing device.
    pub fn to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            shape: self.shape,
            indices: self.indices.copy_to(stream)?,
            lengths: self.lengths.clone(),
            groups: self.groups.clone(),
            hash: self.hash,
            edge_blocks: self.edge_blocks.clone(),
        })
    }

    pub(crate) fn indices(&self) -> &BsrIndices {
        &self.indices
    }

    pub(super) fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    pub(super) fn groups(&self) -> Option<&Groups> {
        self.groups.as_ref()
    }

    pub(super) fn edge_blocks(&self) -> &[EdgeBlock] {
        &self.edge_blocks
    }

    pub(super) fn identity(&self) -> Identity {
        let Shape { rows, cols, block_size, .. } = self.shape;
        Identity { rows, cols, block_size, nnz_blocks: self.nnz_blocks(), hash: self.hash }
    }

    /// Checks that sizes and block positions equal the ones of `other`; devices may differ.
    pub(crate) fn has_pattern_of(&self, other: &Self) -> Result<()> {
        let (found, expected) = (self.identity(), other.identity());
        if found == expected {
            return Ok(());
        }
        invalid(format!("the matrix has another pattern, {found}; expected {expected}"))
    }

    /// Checks type and layout of values for this pattern.
    pub(super) fn check_values(&self, values: &View<'_>) -> Result<()> {
        Operand::new("values", values).dtype_in(&VALUE_TYPES)?;
        contiguous("values", values, values.dtype(), &self.values_shape())
    }

    /// Refuses values whose zeros beyond the matrix nobody could check.
    pub(super) fn no_edge_blocks(&self, what: &'static str) -> Result<()> {
        let Shape { rows, cols, .. } = self.shape;
        if self.has_edge_blocks() {
            Err(Error::UncheckedPadding { what, rows, cols })
        } else {
            Ok(())
        }
    }
}

/// What tells patterns apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    rows: usize,
    cols: usize,
    block_size: usize,
    nnz_blocks: usize,
    hash: u64,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cols, block_size, nnz_blocks, .. } = self;
        write!(f, "{rows} x {cols} with {nnz_blocks} blocks of {block_size}")
    }
}

pub(super) fn hash(row_ptr: &[i32], col_idx: &[i32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (row_ptr, col_idx).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
#[path = "pattern_tests.rs"]
mod tests;
