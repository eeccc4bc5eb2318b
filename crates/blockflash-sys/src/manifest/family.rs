use crate::DType;

/// A kernel family: one source file, compiled with the compile-time parameters that `self` holds.
///
/// Everything that a [`Kernel`](super::Kernel) reports about its machine code comes from here.
pub trait Family {
    /// Name of the source in `kernels/`.
    fn source(&self) -> &'static str;

    /// The part of symbols that names the parameters, such as `f16_d64_q128_kv64_w4_s1`.
    fn name(&self) -> String;

    /// Warps per CTA.
    fn warps(&self) -> u32;

    /// Dynamic shared memory per CTA in bytes.
    fn smem_bytes(&self) -> u32 {
        0
    }

    /// CTAs per cluster; 1 for kernels that are launched without clusters.
    fn cluster(&self) -> u32 {
        1
    }

    /// The most CTAs of a cluster that a launch may ask for on Hopper; 1 for kernels that leave it
    /// no choice.
    fn most_in_cluster(&self) -> u32 {
        1
    }

    /// Whether CTAs take their tiles from a counter in device memory, which each launch must
    /// provide.
    fn counts_tiles(&self) -> bool {
        false
    }

    /// Whether CTAs take one tile after another. CTAs of all other kernels have one tile each.
    fn is_persistent(&self) -> bool {
        self.counts_tiles()
    }

    /// CTAs of a persistent kernel that a multiprocessor has room for, where that is a property of
    /// the tile.
    fn blocks_per_multiprocessor(&self) -> u32 {
        1
    }

    /// Whether CTAs may be more than tiles, so that some find none. Only persistent kernels can.
    fn may_idle(&self) -> bool {
        false
    }

    /// Whether the source waits itself for the kernel before it on the stream, which machine code
    /// for Hopper can ([`Kernel::waits_for_predecessor`](super::Kernel::waits_for_predecessor)).
    fn waits_for_predecessor(&self) -> bool {
        self.is_persistent()
    }

    /// Calls `define` with the name and the value of each preprocessor definition, except for the
    /// definitions that every kernel has.
    fn macros(&self, define: &mut dyn FnMut(&'static str, u32));

    /// Opcodes that the machine code must contain.
    fn contains(&self) -> &'static [&'static str];

    /// The kernel's cell of the support table; `None` for a kernel that only prepares the operand
    /// of an operation or measures the GPU.
    fn supports(&self) -> Option<Support> {
        None
    }

    /// The case of `blockflash bench` that `cargo xtask profile` runs it on: large enough for many
    /// waves of CTAs. `None` for kernels that no case launches.
    fn profile_case(&self) -> Option<String> {
        None
    }
}

/// A cell of the support table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// The operation, in words.
    pub operation: &'static str,
    /// The size that the kernel is made for.
    pub size: Size,
    /// Element type of the inputs.
    pub dtype: DType,
}

/// The size that distinguishes the kernels of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// The largest head dimension.
    HeadDim(u32),
    /// Rows and columns of a stored block.
    Block(u32),
    /// The head dimensions of rows of a cache whose first columns are the values.
    Latent {
        /// Of keys.
        qk: u32,
        /// Of values.
        v: u32,
        /// Whether the values are codes of 8 bits.
        codes: bool,
    },
}

/// The tiles of a table for each element type that kernels compute with.
pub(super) fn each_dtype<T: Copy>(table: &'static [T]) -> impl Iterator<Item = (DType, T)> {
    let of = |dtype| table.iter().map(move |&tile| (dtype, tile));
    [DType::F16, DType::BF16].into_iter().flat_map(of)
}
