use super::block_bits::BlockBits;
use super::tensor::{IndexTensor, as_i64, check_length, check_permutation, invalid, used, views};
use crate::view::Used;
use crate::{DType, Device, Result, Stream, Tensor, View};

/// The lists of a block mask on the host, which [`BlockLists::new`] checks and uploads.
#[derive(Clone, Copy, Debug)]
pub struct BlockListArrays<'a> {
    /// `[batch, heads]`, or `[heads]` for a packed batch.
    pub groups: &'a [usize],
    /// Block rows of a group. In a packed batch, a head has the block rows of all sequences, one
    /// sequence after another.
    pub rows: usize,
    /// Number of block columns; in a packed batch, of the longest sequence.
    pub cols: usize,
    /// `[groups, rows + 1]`: row `r` of group `g` lists `col_idx[row_ptr[g, r]..row_ptr[g, r +
    /// 1]]`.
    pub row_ptr: &'a [i32],
    /// Block columns, ascending within each row; otherwise results are wrong.
    pub col_idx: &'a [i32],
    /// `[groups, rows]`: the order in which kernels take the rows of a group. In a packed batch,
    /// each sequence of the group has an order of its own.
    pub row_order: &'a [i32],
    /// Packed only: `[batch + 1]`, the first block row of each sequence.
    pub cu_rows: Option<&'a [i32]>,
}

/// The lists of a block mask on a device: which key blocks each block of queries visits.
///
/// Kernels rely on the range of every entry, so that they read nothing outside of the arrays:
/// `row_ptr` stays within `col_idx`, and the columns and the rows in the order exist. `cu_rows`
/// starts with 0, ascends, and ends with the number of rows. The bits of partial blocks, where
/// there are any, are within their array. Lists that were uploaded from the host never change.
/// Lists from [`with_capacity`](Self::with_capacity) are written by launches of `BlockMaskBuild`
/// and `BlockMaskTranspose`, and a reader on another stream may see half of an update: the result
/// of attention is unspecified then, but the entries are in range at all times.
///
/// Safe code reads the lists but cannot write them, neither directly nor through a graph:
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
    bits: Option<BlockBits>,
    /// The largest number of columns in a row.
    longest: i64,
    /// Whether a kernel may write the lists; then only the ranges of the entries are known.
    fillable: bool,
}

impl BlockLists {
    /// Checks the arrays and uploads them to the stream's device.
    ///
    /// # Errors
    /// [`Error::Indices`](crate::Error::Indices) names the first entry that a kernel must not
    /// follow; also the errors of [`Tensor::from_slice`].
    pub fn new(arrays: &BlockListArrays<'_>, stream: &Stream) -> Result<Self> {
        let BlockListArrays { groups, rows, cols, row_ptr, col_idx, row_order, cu_rows } = *arrays;
        if groups.len() != if cu_rows.is_some() { 1 } else { 2 } {
            let expected = if cu_rows.is_some() { "[heads]" } else { "[batch, heads]" };
            return invalid(format!("groups are {groups:?}, expected {expected}"));
        }
        let cu_rows_tensor = cu_rows
            .map(|entries| IndexTensor::offsets("cu_rows", entries, &[entries.len()], rows, stream))
            .transpose()?;
        let entries = groups.iter().fold(rows, |entries, &count| entries.saturating_mul(count));
        check_length("row_order", row_order, entries)?;
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
            bits: None,
            longest: longest.unwrap_or(0),
            fillable: false,
        })
    }

    /// Empty lists that launches of `BlockMaskBuild` and `BlockMaskTranspose` may fill with up to
    /// `capacity` columns.
    ///
    /// # Errors
    /// The errors of [`Tensor::zeros`].
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
            // A kernel chooses columns in words of 32 bits and cuts off the columns that do not
            // exist last.
            col_idx: IndexTensor::zeros(&[capacity], cols.next_multiple_of(32), stream)?,
            row_order: IndexTensor::new("row_order", &order, &[batch, heads, rows], rows, stream)?,
            cu_rows: None,
            bits: None,
            longest: as_i64(capacity),
            fillable: true,
        })
    }

    /// The same lists with bits for partial blocks, in place of those that they have. `block_bits`
    /// `[columns]` holds, for each entry of [`col_idx`](Self::col_idx), the first of its
    /// `block_tiles` tiles of 64 × 64 bits in `words` `[tiles, 128]`, or −1 for a block that is
    /// full. Blocks may share tiles, all or none: their first tiles are multiples of `block_tiles`.
    ///
    /// # Errors
    /// [`Error::Indices`](crate::Error::Indices) names the first entry that a kernel must not
    /// follow, or lists that kernels fill; also the errors of [`Tensor::from_slice`].
    pub fn with_bits(
        self,
        block_tiles: usize,
        block_bits: &[i32],
        words: &[u32],
        stream: &Stream,
    ) -> Result<Self> {
        if self.fillable {
            return invalid("the lists are for kernels to fill, and cannot be given bits".into());
        }
        self.device().expect(stream.device())?;
        let columns = self.col_idx.shape().iter().product();
        let bits = BlockBits::new(columns, block_tiles, block_bits, words, stream)?;
        Ok(Self { bits: Some(bits), ..self })
    }

    /// The same lists, which kernels fill, with room for `tiles` of bits: a positive multiple of
    /// the `block_tiles` of a block.
    ///
    /// # Errors
    /// [`Error::Indices`](crate::Error::Indices) for another number of tiles, or lists that kernels
    /// do not fill; the errors of [`Tensor::zeros`].
    pub fn with_bit_capacity(
        self,
        block_tiles: usize,
        tiles: usize,
        stream: &Stream,
    ) -> Result<Self> {
        if !self.fillable {
            return invalid("the lists are not for kernels to fill".into());
        }
        self.device().expect(stream.device())?;
        let columns = self.col_idx.shape().iter().product();
        let bits = BlockBits::with_capacity(columns, block_tiles, tiles, stream)?;
        Ok(Self { bits: Some(bits), ..self })
    }

    /// A copy on the stream's device.
    ///
    /// # Errors
    /// The errors of [`Tensor::copy_to`].
    pub fn copy_to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            row_ptr: self.row_ptr.copy_to(stream)?,
            col_idx: self.col_idx.copy_to(stream)?,
            row_order: self.row_order.copy_to(stream)?,
            cu_rows: self.cu_rows.as_ref().map(|rows| rows.copy_to(stream)).transpose()?,
            bits: self.bits.as_ref().map(|bits| bits.copy_to(stream)).transpose()?,
            longest: self.longest,
            fillable: self.fillable,
        })
    }

    /// i32 `[batch, heads, rows + 1]`, packed `[heads, rows + 1]`.
    pub fn row_ptr(&self) -> &Tensor {
        &self.row_ptr
    }

    /// i32 `[columns]`, or `[capacity]` for lists that a kernel fills.
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

    /// Of masks with partial blocks: i32 `[columns]`, the first tile of each block or −1 where it
    /// is full, and the words of the tiles, i32 `[tiles, 128]`.
    pub fn bits(&self) -> Option<[&Tensor; 2]> {
        self.bits.as_ref().map(|bits| [&*bits.block_bits, &bits.words])
    }

    /// Of masks with partial blocks: tiles of bits of a block.
    pub(crate) fn tiles_of_block(&self) -> Option<i64> {
        self.bits.as_ref().map(|bits| as_i64(bits.block_tiles))
    }

    /// The device that holds the lists.
    pub fn device(&self) -> Device {
        self.row_ptr.device()
    }

    /// Whether every column is valid for a mask with this many columns. Lists that a kernel fills
    /// may reach up to the next multiple of 32.
    pub(crate) fn has_columns_below(&self, cols: i128) -> bool {
        self.col_idx.limit() <= if self.fillable { in_words(cols) } else { cols }
    }

    /// All columns are below this.
    pub(crate) fn column_limit(&self) -> i128 {
        self.col_idx.limit()
    }

    /// Why [`may_be_filled`](Self::may_be_filled) says no.
    pub(crate) fn fill_refusal(&self, cols: i128) -> String {
        let filled = if self.fillable { "for kernels to fill" } else { "not for kernels to fill" };
        let (found, expected) = (self.column_limit(), in_words(cols));
        format!("{filled}, with up to {found} columns; expected lists to fill with {expected}")
    }

    /// The largest number of columns that a row may have. For lists that a kernel fills, this is
    /// their capacity.
    pub(crate) fn longest(&self) -> i128 {
        self.longest.into()
    }

    /// `row_ptr`, `col_idx`, `row_order` and `cu_rows`.
    pub(crate) fn views(&self) -> [Option<View<'_>>; 4] {
        views(self.arrays())
    }

    /// The memory of the same arrays.
    pub(crate) fn used(&self) -> [Option<Used<'_>>; 4] {
        used(self.arrays())
    }

    /// The memory of the bits.
    pub(crate) fn used_bits(&self) -> [Option<Used<'_>>; 2] {
        let bits = self.bits.as_ref();
        [bits.map(|bits| bits.block_bits.used()), bits.map(|bits| bits.words.used())]
    }

    fn arrays(&self) -> [Option<&IndexTensor>; 4] {
        let arrays = [&self.row_ptr, &self.col_idx, &self.row_order].map(Some);
        let [row_ptr, col_idx, row_order] = arrays;
        [row_ptr, col_idx, row_order, self.cu_rows.as_ref()]
    }

    /// Tiles of bits that kernels may fill, and tiles of a block.
    pub(crate) fn room_for_bits(&self) -> Option<[i64; 2]> {
        self.bits.as_ref().filter(|_| self.fillable).map(BlockBits::room)
    }

    /// Whether a kernel may fill the lists for a mask with this many columns.
    pub(crate) fn may_be_filled(&self, cols: i128) -> bool {
        self.fillable && self.col_idx.limit() == in_words(cols)
    }
}

/// The number of columns rounded up to whole words of 32 bits, one bit per column.
fn in_words(cols: i128) -> i128 {
    (cols + 31) / 32 * 32
}

/// What the first step of building lists leaves for the second one. Nothing else can write this
/// memory, and it begins as zeros, so the second step adds up lengths that are never negative,
/// whatever ran before.
#[derive(Debug)]
pub struct BlockListScratch {
    /// i32 `[batch, heads, rows, ceil(cols / 32)]`.
    bits: Tensor,
    /// i32 `[batch, heads, rows]`, and `[batch, heads, ceil(rows / slab_rows)]`.
    lengths: Tensor,
    slab_lengths: Tensor,
}

impl BlockListScratch {
    /// Allocates for lists of this size and for a kernel with `slab_rows` rows per CTA, which must
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
