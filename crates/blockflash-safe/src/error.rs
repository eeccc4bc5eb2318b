use crate::Device;
use blockflash_sys::DType;
use blockflash_sys::image::ImageError;

/// Errors of devices, memory, tensors and launches. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine has no CUDA driver library.
    #[error("no NVIDIA driver is installed (libcuda not found)")]
    NoDriver,
    /// The driver is older than the kernel images. Versions are `1000 * major + 10 * minor`.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, but {}.{} is needed: update the driver",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    DriverTooOld {
        /// The newest CUDA version that the driver supports.
        found: u32,
        /// The CUDA version that the kernel images need.
        needed: u32,
    },
    /// The driver lacks a function that every driver of its version has.
    #[error(
        "the NVIDIA driver says that it supports CUDA {}.{}, but has no {symbol}: install it anew",
        .found / 1000, .found % 1000 / 10
    )]
    DriverIncomplete {
        /// The newest CUDA version that the driver supports, as it says.
        found: u32,
        /// The function.
        symbol: &'static str,
    },
    /// CUDA was in use when this process was forked from another one, so this one cannot use it.
    #[error(
        "{call} failed: CUDA was initialised before this process was forked, and cannot be used in \
         it: start processes by spawn or forkserver"
    )]
    Forked {
        /// The driver function that was called.
        call: &'static str,
    },
    /// No GPU has this number.
    #[error("there is no cuda:{ordinal}: the driver reports {count} GPU(s)")]
    NoSuchDevice {
        /// The number that was asked for, from 0.
        ordinal: usize,
        /// How many GPUs there are.
        count: usize,
    },
    /// A device name other than `cpu`, `cuda` and `cuda:N`.
    #[error("unknown device {text:?}: expected cpu, cuda or cuda:N")]
    InvalidDevice {
        /// The name that was given.
        text: String,
    },
    /// The GPU lacks something that blockflash needs.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// The GPU.
        device: Device,
        /// What it lacks.
        what: &'static str,
    },
    /// The host has no room for an allocation.
    #[error("out of memory: an allocation of {bytes} bytes failed")]
    OutOfMemory {
        /// Size of the allocation.
        bytes: usize,
    },
    /// A GPU has no room for an allocation.
    #[error("out of memory: an allocation of {bytes} bytes on {device} failed")]
    DeviceOutOfMemory {
        /// The GPU.
        device: Device,
        /// Size of the allocation.
        bytes: usize,
    },
    /// Any other failure of a CUDA driver call. After an asynchronous failure (an illegal address
    /// in a kernel, for example) every later call on the GPU reports it, and the process has to be
    /// restarted.
    #[error("{call} failed: {name} ({code}): {message}")]
    Cuda {
        /// The driver function.
        call: &'static str,
        /// The number of the error (`CUresult`).
        code: i32,
        /// The name of the error, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        /// The driver's description.
        message: String,
    },
    /// The kernel image is missing or damaged.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The parameter struct of the host differs from the one that the kernel image was compiled
    /// with.
    #[error("kernel {symbol} takes parameters of {image} bytes, but the host passes {host}")]
    ParamSize {
        /// The kernel.
        symbol: String,
        /// Bytes of the host's struct.
        host: usize,
        /// Bytes that the image expects.
        image: usize,
    },
    /// A launch that does not fit its kernel or its tensors. A plan that respects the kernel's
    /// entry in the table never causes it.
    #[error("launch of {symbol}: {what}")]
    Launch {
        /// The kernel.
        symbol: String,
        /// What does not fit.
        what: String,
    },
    /// More dimensions than a tensor can have, or a number that the operation does not take.
    #[error("a tensor of {found} dimensions, expected {expected:?}")]
    Rank {
        /// Numbers of dimensions that are accepted.
        expected: std::ops::RangeInclusive<usize>,
        /// Number of dimensions that were given.
        found: usize,
    },
    /// A shape and its strides have different lengths.
    #[error("a shape of {shape} dimensions with {strides} strides")]
    ShapeStrides {
        /// Dimensions of the shape.
        shape: usize,
        /// Number of strides.
        strides: usize,
    },
    /// The tensor's size in elements or bytes does not fit into 63 bits.
    #[error("the tensor is too large to be addressed")]
    TooLarge,
    /// A tensor reaches beyond the memory that it is a view of, or a copy's lengths differ.
    #[error("{needed} elements are needed, but the memory holds {available}")]
    OutOfBounds {
        /// Elements from the first to the last one of the tensor.
        needed: usize,
        /// Elements that are available.
        available: usize,
    },
    /// A dimension or a range of indices that the tensor does not have.
    #[error("dimension {dim}, indices {start}..{end}: not inside the shape {shape:?}")]
    Slice {
        /// The dimension.
        dim: usize,
        /// First index.
        start: usize,
        /// One past the last index.
        end: usize,
        /// The shape that was sliced.
        shape: Vec<usize>,
    },
    /// Dimensions that do not exist, or that are not in memory as one.
    #[error("dimensions {start}..{end} cannot be flattened: shape {shape:?}, strides {strides:?}")]
    Flatten {
        /// First dimension.
        start: usize,
        /// One past the last dimension.
        end: usize,
        /// The shape.
        shape: Vec<usize>,
        /// The strides in elements.
        strides: Vec<usize>,
    },
    /// A dimension that cannot be repeated.
    #[error(
        "dimension {dim} of shape {shape:?} cannot be expanded: only a dimension of size 1 can"
    )]
    Expand {
        /// The dimension.
        dim: usize,
        /// The shape that was to be expanded.
        shape: Vec<usize>,
    },
    /// The order of dimensions is not a permutation.
    #[error("{order:?} is not a permutation of {rank} dimensions")]
    Permutation {
        /// The order that was given.
        order: Vec<usize>,
        /// Number of dimensions.
        rank: usize,
    },
    /// A tensor that is to be copied has another shape than its target.
    #[error("expected a tensor of shape {expected:?}, found {found:?}")]
    Shape {
        /// The shape of the target.
        expected: Vec<usize>,
        /// The shape of the source.
        found: Vec<usize>,
    },
    /// The element type is not the required one.
    #[error("expected elements of type {expected}, found {found}")]
    DType {
        /// The type that is needed.
        expected: DType,
        /// The type of the tensor.
        found: DType,
    },
    /// Memory of a GPU cannot be read as a slice.
    #[error("the tensor is on {device}, not on the CPU")]
    NotOnCpu {
        /// The device of the memory.
        device: Device,
    },
    /// Only possible on a GPU.
    #[error("{what} needs a GPU, not the CPU")]
    NotOnGpu {
        /// The operation that was asked for.
        what: &'static str,
    },
    /// A tensor, stream or event of one device used with another device.
    #[error("expected something on {expected}, found it on {found}")]
    DeviceMismatch {
        /// The device of the operation.
        expected: Device,
        /// The device of the tensor, stream or event.
        found: Device,
    },
    /// Several elements of a tensor to be written share (or may share) memory.
    #[error(
        "a tensor that is written must not overlap itself: shape {shape:?}, strides {strides:?}"
    )]
    OverlappingOutput {
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides in elements.
        strides: Vec<usize>,
    },
    /// Not possible while the stream is being captured into a graph.
    #[error("{what} is not possible while a graph is being captured")]
    InCapture {
        /// The operation that was asked for.
        what: &'static str,
    },
    /// Not possible while a captured graph uses the tensor.
    #[error("{what} is not possible while a captured graph uses it")]
    InGraph {
        /// The operation that was asked for.
        what: &'static str,
    },
    /// Every stream and every captured graph that launches persistent kernels has a pair of tile
    /// counters, and none is left. A pair returns some time after its stream or graph was dropped
    /// and the work is done.
    #[error(
        "all {limit} pairs of tile counters are in use, one by each stream and each captured graph"
    )]
    TileCounters {
        /// Pairs per GPU.
        limit: usize,
    },
    /// An event that has not been recorded, or was created without timing.
    #[error("the event {what}")]
    Event {
        /// Why the event cannot be used.
        what: &'static str,
    },
    /// An array of another library over whose memory no view is possible.
    #[error("the array {what}")]
    Array {
        /// The property that prevents it.
        what: String,
    },
    /// A pointer of another library that cannot point to the first element of a tensor.
    #[error("the pointer {what}")]
    Pointer {
        /// What is wrong with it.
        what: String,
    },
    /// Index arrays that no kernel may follow.
    #[error("{what}")]
    Indices {
        /// The first entry that is wrong.
        what: String,
    },
    /// The description of a tensor map breaks a rule of TMA.
    #[error("tensor map: {what}")]
    TensorMap {
        /// The rule.
        what: String,
    },
    /// NCCL cannot be used on this machine.
    #[error("NCCL: {what}")]
    NoNccl {
        /// What is missing.
        what: String,
    },
    /// A call of NCCL failed, or cannot be made as asked.
    #[error("{call}: {what}")]
    Nccl {
        /// The function.
        call: &'static str,
        /// NCCL's description, or what is wrong with the arguments.
        what: String,
    },
    /// The communicator was given up, because a rank did not answer in time or NCCL reported a
    /// failure. Tensors that were being received have unspecified contents.
    #[error("the communicator is lost: {what}")]
    Lost {
        /// What happened.
        what: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
