use crate::{DType, Result, Stream, Tensor, View};

/// What the first step of transposing a block mask leaves for the second one. Nothing else can
/// write this memory, and it begins as zeros, so the second step adds up numbers of blocks that are
/// never negative, and lists rows that exist, whatever ran before.
#[derive(Debug)]
pub struct BlockTransposeScratch {
    /// i32 `[batch, heads, ceil(rows / 32), cols rounded up to 32]`.
    bits: Tensor,
    /// i32 `[batch, heads, ceil(cols / 32), ceil(rows / slab_rows)]`.
    counts: Tensor,
}

impl BlockTransposeScratch {
    /// Allocates for a mask of this size and for a kernel with `slab_rows` rows per CTA, which must
    /// be positive.
    ///
    /// # Errors
    /// The errors of [`Tensor::zeros`].
    pub fn new(
        [batch, heads]: [usize; 2],
        rows: usize,
        cols: usize,
        slab_rows: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let zeros = |shape: &[usize]| Tensor::zeros(stream, DType::I32, shape);
        let slabs = rows.div_ceil(slab_rows.max(1));
        Ok(Self {
            bits: zeros(&[batch, heads, rows.div_ceil(32), cols.next_multiple_of(32)])?,
            counts: zeros(&[batch, heads, cols.div_ceil(32), slabs])?,
        })
    }

    /// `bits` and `counts`.
    pub(crate) fn views(&self) -> [View<'_>; 2] {
        [&self.bits, &self.counts].map(Tensor::view)
    }
}
