use super::tensor::{IndexTensor, check_length, check_permutation, invalid};
use crate::{Device, Result, Stream, Tensor};
use blockflash_sys::manifest::BsrMatmulHopper;

/// The pattern of a block-sparse (BSR) matrix on the host, which [`BsrIndices::new`] checks and
/// uploads.
#[derive(Clone, Copy, Debug)]
pub struct BsrIndexArrays<'a> {
    /// Number of block columns.
    pub block_cols: usize,
    /// `[block rows + 1]`: the blocks of block row `i` are `row_ptr[i]..row_ptr[i + 1]`.
    pub row_ptr: &'a [i32],
    /// `[blocks]`: block columns.
    pub col_idx: &'a [i32],
    /// `[block rows]`: the order in which kernels take the block rows.
    pub row_order: &'a [i32],
    /// `[blocks]`: the position of each block among the values. Needed where the matrix is
    /// multiplied transposed; without it, the values are in the order of the blocks.
    pub block_idx: Option<&'a [i32]>,
    /// How block rows share B, for kernels that gather rows of B.
    pub stages: Option<BsrStageArrays<'a>>,
}

/// The rows of B that each group of block rows, neighbours in `row_order`, reads per pipeline
/// stage.
#[derive(Clone, Copy, Debug)]
pub struct BsrStageArrays<'a> {
    /// Rows and columns of a block: 16 or 32.
    pub block_size: u32,
    /// `[stages, 32, 2]`, laid out like `stages` in `params.h`.
    pub stages: &'a [i32],
    /// `[groups + 1]`: the stages of group `i` are `group_stages[i]..group_stages[i + 1]`.
    pub group_stages: &'a [i32],
}

/// The pattern of a block-sparse (BSR) matrix on a device: checked, and in memory that never
/// changes afterwards.
///
/// Kernels rely on the following and therefore read nothing outside of the arrays and the values of
/// the launch:
///
/// - `row_ptr` starts with 0, ascends and ends with the number of blocks. The sampled product
///   searches it.
/// - Entries of `col_idx` are below the number of block columns, entries of `block_idx` below the
///   number of blocks.
/// - `row_order` is a permutation.
/// - `stages`: every number is in its range, and the counts of a stage agree with its bits, since
///   consumers wait for as many bytes as the counts say; see [`BsrStageArrays`].
/// - The arrays are complete once the host has the type, so a kernel may read them while its
///   predecessors in the stream are still running (programmatic dependent launch).
/// - The host knows the lengths of the tiles in the order in which they are taken, so it can refuse
///   a launch that splits tiles into more parts than it has memory for.
///
/// ```
/// # use blockflash_safe::{BsrIndexArrays, BsrIndices, Device};
/// # let stream = Device::cpu().stream()?;
/// let (row_ptr, col_idx, row_order) = (&[0, 2, 3], &[0, 5, 1], &[0, 1]);
/// let pattern = BsrIndexArrays {
///     block_cols: 6, row_ptr, col_idx, row_order, block_idx: None, stages: None,
/// };
/// let indices = BsrIndices::new(&pattern, &stream)?;
/// assert_eq!(indices.col_idx().view().as_slice::<i32>()?, [0, 5, 1]);
/// assert!(BsrIndices::new(&BsrIndexArrays { block_cols: 5, ..pattern }, &stream).is_err());
/// # Ok::<(), blockflash_safe::Error>(())
/// ```
///
/// Nothing writes to the arrays afterwards, neither directly nor through a graph:
/// ```compile_fail,E0596
/// # use blockflash_safe::{BsrIndices, Result, Stream, Tensor};
/// fn spoil(indices: &mut BsrIndices, bad: &Tensor, stream: &Stream) -> Result<()> {
///     indices.row_ptr().copy_from(stream, bad) // a shared reference
/// }
/// ```
/// and unchecked arrays cannot take their place in a launch:
/// ```compile_fail,E0308
/// # use blockflash_safe::{BsrSddmmOperands, View, ViewMut};
/// fn operands<'a>(
///     row_ptr: &'a View<'a>, a: View<'a>, b: View<'a>, values: ViewMut<'a>,
/// ) -> BsrSddmmOperands<'a> {
///     BsrSddmmOperands { pattern: row_ptr, a, b, values } // not indices that were checked
/// }
/// ```
#[derive(Debug)]
pub struct BsrIndices {
    row_ptr: IndexTensor,
    col_idx: IndexTensor,
    row_order: IndexTensor,
    /// What a kernel needs of each block row in this order, as `params.h` says: i32 `[block rows,
    /// 4]`.
    rows: Tensor,
    block_idx: Option<IndexTensor>,
    stages: Option<Stages>,
    /// From each position of the order on, the number of blocks in the longest block row.
    longest: Vec<i32>,
}

#[derive(Debug)]
struct Stages {
    block_size: u32,
    stages: Tensor,
    group_stages: IndexTensor,
    /// From each group on, the number of stages in the longest group.
    longest: Vec<i32>,
}

impl BsrIndices {
    /// Checks the arrays and uploads them to the stream's device.
    ///
    /// # Errors
    /// [`Error::Indices`](crate::Error::Indices) names the first entry that a kernel must not
    /// follow; also the errors of [`Tensor::from_slice`].
    pub fn new(arrays: &BsrIndexArrays<'_>, stream: &Stream) -> Result<Self> {
        let BsrIndexArrays { block_cols, row_ptr, col_idx, row_order, block_idx, .. } = *arrays;
        let blocks = col_idx.len();
        check_length("row_ptr", row_ptr, row_order.len() + 1)?;
        block_idx.map_or(Ok(()), |index| check_length("block_idx", index, blocks))?;
        let row_ptr_tensor =
            IndexTensor::offsets("row_ptr", row_ptr, &[row_ptr.len()], blocks, stream)?;
        check_permutation("row_order", row_order)?;
        let array = |name, entries: &[i32], limit| {
            IndexTensor::new(name, entries, &[entries.len()], limit, stream)
        };
        let length = |&row: &i32| row_ptr[row as usize + 1] - row_ptr[row as usize];
        let rows: Vec<i32> = row_order
            .iter()
            .flat_map(|&row| {
                let (first, end) = (row_ptr[row as usize], row_ptr[row as usize + 1]);
                let column = if first < end { col_idx[first as usize] } else { 0 };
                [row, first, end, column]
            })
            .collect();
        Ok(Self {
            row_ptr: row_ptr_tensor,
            rows: Tensor::from_slice(stream, &rows, &[row_order.len(), 4])?,
            col_idx: array("col_idx", col_idx, block_cols)?,
            row_order: array("row_order", row_order, row_order.len())?,
            block_idx: block_idx.map(|index| array("block_idx", index, blocks)).transpose()?,
            stages: arrays
                .stages
                .as_ref()
                .map(|stages| Stages::new(stages, arrays, stream))
                .transpose()?,
            longest: longest_from(row_order.iter().map(length).collect()),
        })
    }

    /// A copy on the stream's device, which is waited for.
    ///
    /// # Errors
    /// The errors of [`Tensor::copy_to`].
    pub fn copy_to(&self, stream: &Stream) -> Result<Self> {
        let copy = Self {
            row_ptr: self.row_ptr.copy_to(stream)?,
            col_idx: self.col_idx.copy_to(stream)?,
            row_order: self.row_order.copy_to(stream)?,
            rows: self.rows.copy_to(stream)?,
            block_idx: self.block_idx.as_ref().map(|index| index.copy_to(stream)).transpose()?,
            stages: self.stages.as_ref().map(|stages| stages.copy_to(stream)).transpose()?,
            longest: self.longest.clone(),
        };
        stream.synchronize()?;
        Ok(copy)
    }

    /// i32 `[block rows + 1]`.
    pub fn row_ptr(&self) -> &Tensor {
        &self.row_ptr
    }

    /// i32 `[blocks]`.
    pub fn col_idx(&self) -> &Tensor {
        &self.col_idx
    }

    /// i32 `[block rows]`.
    pub fn row_order(&self) -> &Tensor {
        &self.row_order
    }

    /// i32 `[blocks]`, if the matrix is multiplied transposed.
    pub fn block_idx(&self) -> Option<&Tensor> {
        self.block_idx.as_deref()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.col_idx.layout().elements()
    }

    /// The device that holds the arrays.
    pub fn device(&self) -> Device {
        self.row_ptr.device()
    }

    /// Whether all block columns are below this.
    pub(crate) fn has_columns_below(&self, block_cols: i128) -> bool {
        self.col_idx.limit() <= block_cols
    }

    /// All block columns are below this.
    pub(crate) fn column_limit(&self) -> i128 {
        self.col_idx.limit()
    }

    /// Whether there are stages, made for blocks of this size.
    pub(crate) fn has_stages_of(&self, block_size: u32) -> bool {
        self.stages.as_ref().is_some_and(|stages| stages.block_size == block_size)
    }

    /// From this position of the order on, the number of blocks in the longest block row; for
    /// kernels that gather B, the number of stages in the longest group.
    pub(crate) fn longest_from(&self, position: usize, gathers: bool) -> i32 {
        let stages = self.stages.as_ref().map_or(&[][..], |stages| &stages.longest);
        let longest = if gathers { stages } else { &self.longest };
        longest.get(position).copied().unwrap_or(0)
    }

    /// `row_ptr`, `col_idx`, `row_order`, `block_idx`, `stages`, `group_stages` and `rows`.
    pub(crate) fn arrays(&self) -> [Option<&Tensor>; 7] {
        let stages = self.stages.as_ref();
        [
            Some(&self.row_ptr),
            Some(&self.col_idx),
            Some(&self.row_order),
            self.block_idx.as_deref(),
            stages.map(|stages| &stages.stages),
            stages.map(|stages| &*stages.group_stages),
            Some(&self.rows),
        ]
    }
}

/// Lanes of a stage, two numbers each; the lane with the first column, and the lane with the
/// counts.
const LANES: usize = 32;
const FIRST_COLUMN: usize = 16;
const COUNTS: usize = 24;

impl Stages {
    fn new(arrays: &BsrStageArrays<'_>, of: &BsrIndexArrays<'_>, stream: &Stream) -> Result<Self> {
        let BsrStageArrays { block_size, stages, group_stages } = *arrays;
        if ![16, 32].contains(&block_size) {
            return invalid(format!("stages are of blocks of {block_size}, expected 16 or 32"));
        }
        let groups = of.row_order.len().div_ceil(BsrMatmulHopper::group_rows(block_size) as usize);
        let (each, rest) = stages.as_chunks::<{ 2 * LANES }>();
        check_length("stages", stages, stages.len() - rest.len())?;
        check_length("group_stages", group_stages, groups + 1)?;
        let shape = [group_stages.len()];
        let groups =
            IndexTensor::offsets("group_stages", group_stages, &shape, each.len(), stream)?;
        for (at, stage) in each.iter().enumerate() {
            let checked = check_stage(stage, block_size, of.col_idx.len(), of.block_cols);
            checked.or_else(|what| invalid(format!("stage {at}: {what}")))?;
        }
        Ok(Self {
            block_size,
            stages: Tensor::from_slice(stream, stages, &[each.len(), LANES, 2])?,
            group_stages: groups,
            longest: longest_from(group_stages.windows(2).map(|pair| pair[1] - pair[0]).collect()),
        })
    }

    fn copy_to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            block_size: self.block_size,
            stages: self.stages.copy_to(stream)?,
            group_stages: self.group_stages.copy_to(stream)?,
            longest: self.longest.clone(),
        })
    }
}

/// Checks all numbers of a stage that kernels read. The lane of a block row holds its first block
/// and a packed number: the bits of the row's columns, and above them the position of its blocks
/// among the blocks of the stage.
fn check_stage(
    stage: &[i32; 2 * LANES],
    block_size: u32,
    blocks: usize,
    block_cols: usize,
) -> std::result::Result<(), String> {
    let number = |lane: usize, which: usize| usize::try_from(stage[2 * lane + which]).ok();
    let require = |holds: bool, what: std::fmt::Arguments<'_>| {
        if holds { Ok(()) } else { Err(what.to_string()) }
    };
    let (columns, count) = (number(COUNTS, 0).unwrap_or(0), number(COUNTS, 1).unwrap_or(0));
    let [rows, most_columns, most_blocks] = [
        BsrMatmulHopper::group_rows(block_size),
        BsrMatmulHopper::stage_columns(block_size),
        BsrMatmulHopper::stage_blocks(block_size),
    ]
    .map(|most| most as usize);
    require(
        (1..=most_columns).contains(&columns),
        format_args!("{} columns, expected 1 to {most_columns}", stage[2 * COUNTS]),
    )?;
    require(count <= most_blocks, format_args!("{count} blocks, the limit is {most_blocks}"))?;
    for lane in FIRST_COLUMN..FIRST_COLUMN + columns {
        let exists = number(lane, 0).is_some_and(|col| col < block_cols);
        let column = stage[2 * lane];
        require(exists, format_args!("column {column}, expected less than {block_cols}"))?;
    }
    let mut place = 0;
    for lane in 0..FIRST_COLUMN {
        let (first, word) = (stage[2 * lane], stage[2 * lane + 1]);
        let packed = number(lane, 1).unwrap_or(0);
        require(
            word >= 0,
            format_args!("row {lane} has {word} for its blocks, a negative number"),
        )?;
        let (bits, own_place) = (packed & 0xFF, packed >> 8);
        if bits == 0 {
            continue;
        }
        let own = bits.count_ones() as usize;
        require(
            lane < rows && bits < 1 << columns,
            format_args!(
                "row {lane} has columns {bits:#b}, there are {rows} rows, {columns} columns"
            ),
        )?;
        require(
            own_place == place,
            format_args!("blocks of row {lane} begin at {own_place}, expected {place}"),
        )?;
        require(
            number(lane, 0).is_some_and(|first| first.saturating_add(own) <= blocks),
            format_args!("row {lane} has {own} blocks from {first} on, there are {blocks}"),
        )?;
        place += own;
    }
    let counted = stage[2 * COUNTS + 1];
    require(place == count, format_args!("{counted} blocks are counted, its rows have {place}"))
}

/// For each position, the largest of the values from there on.
fn longest_from(mut lengths: Vec<i32>) -> Vec<i32> {
    let mut longest = 0;
    for length in lengths.iter_mut().rev() {
        longest = longest.max(*length);
        *length = longest;
    }
    lengths
}
