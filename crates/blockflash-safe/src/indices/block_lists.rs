use super::tensor::{IndexTensor, as_i64, check_permutation, invalid, views};
use crate::{DType, Device, Result, Stream, Tensor, View};

/// The lists of a block mask on the host: what [`BlockLists::new`] checks and uploads.
#[derive(Clone, Copy, Debug)]
pub struct BlockListArrays<'a> {
    /// `[batch, heads]`, and `[heads]` of a packed batch.
    pub groups: &'a [usize],
    /// Block rows of a group. A head of a packed batch has those of all sequences, one sequence
    /// after another.
    pub rows: usize,
    /// Block columns; those of the longest sequence.
    pub cols: usize,
    /// `[groups, rows + 1]`: row `r` of group `g` lists `col_idx[row_ptr[g, r]..row_ptr[g, r +
    /// 1]]`.
    pub row_ptr: &'a [i32],
    /// Block columns. Those of a row ascend, or results are wrong.
    pub col_idx: &'a [i32],
    /// `[groups, rows]`: the order in which the rows of a group, packed of each sequence of it, are
    /// taken.
    pub row_order: &'a [i32],
    /// Packed only: `[batch + 1]`, the first row of each sequence.
    pub cu_rows: Option<&'a [i32]>,
}

/// The lists of a block mask on a device, which key blocks each block of queries visits.
///
/// Kernels rely on the range of each entry, and read nothing outside of the arrays: `row_ptr` stays
/// within `col_idx`, columns and rows in the order exist. `cu_rows` starts with 0, ascends, and
/// ends with the number of rows. Lists that come from the host never change; those
/// [`with_capacity`](Self::with_capacity) are written by launches of `BlockMaskBuild`, and a reader
/// on another stream may see a half of an update: then what attention computes is unspecified,
/// but the entries are in range at all times.
///
/// Safe code reads them, but never writes them, neither now nor by a graph:
/// ```compile_fail,E0596
/// # use blockflash_safe::{BlockLists, Result, Stream, Tensor};
/// fn spoil(lists: &mut BlockLists, bad: &Tensor, stream: &Stream) -> Result<()> {
///     lists.row_ptr().copy_from(stream, bad) // a shared reference
/// }
/// ```
#[derive(Debug)]
pub struct BlockLists {
    row_ptr: IndexTensor,
    col_idx: IndexTensor,
    row_order: IndexTensor,
    cu_rows: Option<IndexTensor>,
    /// No row has more columns.
    longest: i64,
    /// Whether a kernel may write them: nothing relies on more than ranges then.
    fillable: bool,
}

impl BlockLists {
    /// Checks the arrays and uploads them to the stream's device.
    ///
    /// # Errors
    /// [`Error::Indices`](crate::Error::Indices) names what kernels may not follow; those of
    /// [`Tensor::from_slice`].
    pub fn new(arrays: &BlockListArrays<'_>, stream: &Stream) -> Result<Self> {
        let BlockListArrays { groups, rows, cols, row_ptr, col_idx, row_order, cu_rows } = *arrays;
        if groups.len() != if cu_rows.is_some() { 1 } else { 2 } {
            return invalid(format!("a block mask has {} dimensions of groups", groups.len()));
        }
        let cu_rows_tensor = cu_rows
            .map(|entries| IndexTensor::offsets("cu_rows", entries, &[entries.len()], rows, stream))
            .transpose()?;
        let entries = groups.iter().fold(rows, |entries, &count| entries.saturating_mul(count));
        if row_order.len() != entries {
            return invalid(format!(
                "row_order has {} entries, expected {entries}",
                row_order.len()
            ));
        }
        for order in row_order.chunks(rows.max(1)) {
            match cu_rows {
                None => check_permutation("row_order", order)?,
                Some(cu_rows) => cu_rows.windows(2).try_for_each(|pair| {
                    check_permutation("row_order", &order[pair[0] as usize..pair[1] as usize])
                })?,
            }
        }
        let shape = |more| [groups, &[rows + more]].concat();
        let longest = row_ptr.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0])).max();
        let row_ptr = IndexTensor::offsets("row_ptr", row_ptr, &shape(1), col_idx.len(), stream)?;
        Ok(Self {
            row_ptr,
            col_idx: IndexTensor::new("col_idx", col_idx, &[col_idx.len()], cols, stream)?,
            row_order: IndexTensor::new("row_order", row_order, &shape(0), rows, stream)?,
            cu_rows: cu_rows_tensor,
            longest: longest.unwrap_or(0),
            fillable: false,
        })
    }

    /// Lists without columns that launches of `BlockMaskBuild` may fill with up to `capacity` of
    /// them.
    ///
    /// # Errors
    /// Those of [`Tensor::zeros`].
    pub fn with_capacity(
        [batch, heads]: [usize; 2],
        rows: usize,
        cols: usize,
        capacity: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let groups = batch.saturating_mul(heads);
        let order: Vec<i32> = (0..groups).flat_map(|_| (0..rows as i32).rev()).collect();
        let limit = capacity.saturating_add(1);
        Ok(Self {
            row_ptr: IndexTensor::zeros(&[batch, heads, rows + 1], limit, stream)?,
            // A kernel chooses columns by words of 32 bits, in which those that do not exist are
            // cut off last.
            col_idx: IndexTensor::zeros(&[capacity], cols.next_multiple_of(32), stream)?,
            row_order: IndexTensor::new("row_order", &order, &[batch, heads, rows], rows, stream)?,
            cu_rows: None,
            longest: as_i64(capacity),
            fillable: true,
        })
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// Those of [`Tensor::copy_to`].
    pub fn copy_to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            row_ptr: self.row_ptr.copy_to(stream)?,
            col_idx: self.col_idx.copy_to(stream)?,
            row_order: self.row_order.copy_to(stream)?,
            cu_rows: self.cu_rows.as_ref().map(|rows| rows.copy_to(stream)).transpose()?,
            longest: self.longest,
            fillable: self.fillable,
        })
    }

    /// i32 `[batch, heads, rows + 1]`, packed `[heads, rows + 1]`.
    pub fn row_ptr(&self) -> &Tensor {
        &self.row_ptr
    }

    /// i32 `[columns]`, for lists that are filled by a kernel `[capacity]`.
    pub fn col_idx(&self) -> &Tensor {
        &self.col_idx
    }

    /// i32 `[batch, heads, rows]`, packed `[heads, rows]`.
    pub fn row_order(&self) -> &Tensor {
        &self.row_order
    }

    /// Packed only: i32 `[batch + 1]`.
    pub fn cu_rows(&self) -> Option<&Tensor> {
        self.cu_rows.as_deref()
    }

    /// Where the lists are.
    pub fn device(&self) -> Device {
        self.row_ptr.device()
    }

    /// Whether the columns exist where there are so many; of lists that a kernel fills, up to whole
    /// words of 32.
    pub(crate) fn has_columns_below(&self, cols: i128) -> bool {
        self.col_idx.limit() <= if self.fillable { in_words(cols) } else { cols }
    }

    /// As many columns as a row may have; of lists that a kernel fills, all that there is room for.
    pub(crate) fn longest(&self) -> i128 {
        self.longest.into()
    }

    /// `row_ptr`, `col_idx`, `row_order` and `cu_rows`.
    pub(crate) fn views(&self) -> [Option<View<'_>>; 4] {
        views([
            Some(&self.row_ptr),
            Some(&self.col_idx),
            Some(&self.row_order),
            self.cu_rows.as_ref(),
        ])
    }

    /// Whether a kernel may write columns below this.
    pub(crate) fn may_be_filled(&self, cols: i128) -> bool {
        self.fillable && self.col_idx.limit() == in_words(cols)
    }
}

/// As many columns as words of 32 bits have that hold a bit for each of these.
fn in_words(cols: i128) -> i128 {
    (cols + 31) / 32 * 32
}

/// What the first step of building lists leaves for the second one. Nothing else can write it, and
/// it begins as zeros, so whatever ran before, the second step adds up lengths that are not
/// negative.
#[derive(Debug)]
pub struct BlockListScratch {
    /// i32 `[batch, heads, rows, ceil(cols / 32)]`.
    bits: Tensor,
    /// i32 `[batch, heads, rows]`, and `[batch, heads, ceil(rows / slab_rows)]`.
    lengths: Tensor,
    slab_lengths: Tensor,
}

impl BlockListScratch {
    /// For lists of this size, and a kernel whose blocks of threads have `slab_rows` rows each,
    /// which is positive.
    ///
    /// # Errors
    /// Those of [`Tensor::zeros`].
    pub fn new(
        [batch, heads]: [usize; 2],
        rows: usize,
        cols: usize,
        slab_rows: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let zeros = |shape: &[usize]| Tensor::zeros(stream, DType::I32, shape);
        Ok(Self {
            bits: zeros(&[batch, heads, rows, cols.div_ceil(32)])?,
            lengths: zeros(&[batch, heads, rows])?,
            slab_lengths: zeros(&[batch, heads, rows.div_ceil(slab_rows.max(1))])?,
        })
    }

    /// `bits`, `lengths` and `slab_lengths`.
    pub(crate) fn views(&self) -> [View<'_>; 3] {
        [&self.bits, &self.lengths, &self.slab_lengths].map(Tensor::view)
    }
}
