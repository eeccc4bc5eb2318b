use blockflash_safe::MAX_RANK;

/// Why a foreign tensor is no operand of a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// More dimensions than a view has, or a negative size or stride.
    #[error(
        "{what}: shape {shape:?} with strides {strides:?}: a tensor has at most {MAX_RANK} \
         dimensions here, and no negative size or stride"
    )]
    Layout {
        /// The operand.
        what: &'static str,
        /// Its sizes.
        shape: Vec<i64>,
        /// Its strides, in elements.
        strides: Vec<i64>,
    },
    /// A descriptor of DLPack that contradicts itself.
    #[error("{what}: {text}")]
    Descriptor {
        /// The operand.
        what: &'static str,
        /// What is wrong with it.
        text: String,
    },
    /// An element type that no operation takes.
    #[error(
        "{what} is {dtype}: float16, bfloat16 and float32 are possible, and int32 for indices and \
         offsets"
    )]
    DType {
        /// The operand.
        what: &'static str,
        /// Its type, as the library names it.
        dtype: String,
    },
    /// Neither the CPU nor a GPU of CUDA.
    #[error("{what} is on a device of another kind than CPU and CUDA{kind}")]
    Device {
        /// The operand.
        what: &'static str,
        /// Which kind, as far as the library says, in parentheses behind a space.
        kind: String,
    },
    /// The library works on a stream that cannot be wrapped.
    #[error(
        "the current stream is CUDA's per-thread default stream, which cannot be used here: choose \
         another one"
    )]
    PerThreadStream,
    /// A tensor that is written has an element in common with another tensor of the call.
    #[error("{what} shares memory with {other}")]
    SharedMemory {
        /// The tensor that is written.
        what: &'static str,
        /// The other one.
        other: &'static str,
    },
    /// A tensor that is written is in the gaps between the elements of another tensor on the CPU,
    /// where views are slices. A copy of the other one mends that.
    #[error("{what} is between elements of {other}")]
    Interleaved {
        /// The tensor that is written.
        what: &'static str,
        /// The other one.
        other: &'static str,
    },
    /// The memory or the strides of an operand.
    #[error("{what}: {source}")]
    Operand {
        /// The operand.
        what: &'static str,
        /// What is wrong with it.
        source: blockflash_safe::Error,
    },
    /// The device of an operand, or its stream.
    #[error(transparent)]
    Safe(#[from] blockflash_safe::Error),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
