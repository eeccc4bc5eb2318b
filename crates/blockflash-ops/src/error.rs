use blockflash_safe::Device;
use blockflash_sys::DType;

/// Every error of this crate. Nothing is clamped or ignored: a call that cannot be done as asked is
/// an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device, its memory or a launch failed.
    #[error(transparent)]
    Safe(#[from] blockflash_safe::Error),

    /// A tensor has the wrong number of dimensions or extents that do not fit the other operands.
    #[error("{what} has shape {found:?}, expected {expected}")]
    Shape {
        /// The operand.
        what: &'static str,
        /// The expected shape, in words.
        expected: String,
        /// The shape it has.
        found: Vec<usize>,
    },

    /// The layout of a tensor cannot be used: usually the innermost dimension is not contiguous.
    #[error("{what} has strides {found:?}, but {expected}")]
    Stride {
        /// The operand.
        what: &'static str,
        /// The requirement, in words.
        expected: &'static str,
        /// The strides it has, in elements.
        found: Vec<usize>,
    },

    /// A pointer or a stride does not allow the 16-byte accesses of the kernel.
    #[error("{what} must allow 16-byte accesses: {problem}")]
    Misaligned {
        /// The operand.
        what: &'static str,
        /// Which address or stride is in the way.
        problem: String,
    },

    /// An operand has the wrong element type.
    #[error("{what} is {found}, expected {expected}")]
    DType {
        /// The operand.
        what: &'static str,
        /// The element types that are accepted, in words.
        expected: String,
        /// The element type it has.
        found: DType,
    },

    /// No kernel for this combination on this device.
    #[error("{op} is not supported on {arch}: {what}")]
    Unsupported {
        /// Name of the operation, such as `attention` or `bsr_matmul`.
        op: &'static str,
        /// `cpu` or the architecture of the GPU, `sm_90`.
        arch: String,
        /// What is missing.
        what: String,
    },

    /// A factor is out of range: those of scores must be finite and positive, alpha and beta
    /// finite.
    #[error("{what} is {value}, but must be {expected}")]
    InvalidScale {
        /// The factor.
        what: &'static str,
        /// Its value.
        value: f32,
        /// The requirement.
        expected: &'static str,
    },

    /// The query heads cannot be shared evenly among the key and value heads.
    #[error("{num_heads_q} query heads are not a multiple of {num_heads_kv} key and value heads")]
    HeadGroups {
        /// Heads of q.
        num_heads_q: usize,
        /// Heads of k and v.
        num_heads_kv: usize,
    },

    /// The offsets of a variable-length batch are wrong.
    #[error("cu_seqlens.{which}[{index}] is {value}: {problem}")]
    InvalidCuSeqlens {
        /// `q` or `kv`.
        which: &'static str,
        /// The first bad entry.
        index: usize,
        /// Its value.
        value: i32,
        /// The rule that it breaks.
        problem: String,
    },

    /// Packed tensors have rows, but the longest sequence is said to have none.
    #[error("{what} is 0, but must be at least 1: the packed tensor has {rows} rows")]
    MaxSeqlen {
        /// The maximum.
        what: &'static str,
        /// Rows of the packed tensor.
        rows: usize,
    },

    /// A length, a page or a count that kernels read on the device is wrong.
    #[error("{what}{index:?} is {value}: {problem}")]
    InvalidData {
        /// The tensor.
        what: &'static str,
        /// The first bad entry.
        index: Vec<usize>,
        /// Its value.
        value: i32,
        /// The rule that it breaks.
        problem: String,
    },

    /// The index arrays of a block-sparse matrix are invalid, or the transpose that is given with a
    /// matrix belongs to another pattern.
    #[error("invalid BSR matrix: {0}")]
    InvalidBsr(String),

    /// The sizes or index arrays of a block mask are invalid, or two masks do not fit each other. A
    /// mask that does not fit the tensors of a call is [`Shape`](Self::Shape).
    #[error("invalid block mask: {0}")]
    InvalidBlockMask(String),

    /// No kernel takes a block mask of such blocks.
    #[error(
        "invalid block mask: {what} is {value}, not a multiple of {unit} from {unit} to {limit}"
    )]
    BlockSize {
        /// `block_q` or `block_kv`.
        what: &'static str,
        /// The size.
        value: usize,
        /// Sizes are multiples of this.
        unit: usize,
        /// The largest size.
        limit: usize,
    },

    /// A block reaches beyond the matrix and is not zero there.
    #[error(
        "block {block} (block row {block_row}, block column {block_col}) has a value that is not \
         zero at ({row}, {col}), beyond the matrix"
    )]
    NonzeroPadding {
        /// Index into `values`.
        block: usize,
        /// Its block row.
        block_row: usize,
        /// Its block column.
        block_col: usize,
        /// Row inside the block.
        row: usize,
        /// Column inside the block.
        col: usize,
    },

    /// Blocks reach beyond the matrix, and the values there cannot be checked to be zero.
    #[error(
        "blocks reach beyond the {rows} x {cols} matrix, where nothing would check that {what} \
         are zero: let a BsrMatrix own the values, and set them from host memory or compute them \
         by bsr_sddmm"
    )]
    UncheckedPadding {
        /// The values, in words.
        what: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Its columns.
        cols: usize,
    },

    /// Operands live on different devices.
    #[error("{what} is on {found}, but the stream is on {expected}")]
    DeviceMismatch {
        /// The operand.
        what: &'static str,
        /// The device of the stream.
        expected: Device,
        /// The device of the operand.
        found: Device,
    },

    /// A prepared call was used for another problem or on another device.
    #[error(
        "this {op} call differs from the prepared one in sizes, strides, types, options or device"
    )]
    NotPrepared {
        /// Name of the operation, such as `attention` or `bsr_matmul`.
        op: &'static str,
    },

    /// A number that is not possible.
    #[error("{what} is {value}, expected {expected}")]
    Number {
        /// What it says.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The possible values, in words.
        expected: String,
    },

    /// A size exceeds the integers in which kernels count.
    #[error("{what} is {value}, the limit is {limit}")]
    TooLarge {
        /// The quantity.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The largest value that works.
        limit: usize,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
