use crate::Expect;

/// The kernel that copies the blocks of a block-sparse matrix into larger ones, with its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrReblockKernel {
    /// Warps per block of threads.
    pub warps: u32,
    /// Chunks of 16 bytes that a thread copies.
    pub chunks: u32,
}

impl BsrReblockKernel {
    /// The only one: loads of a thread are under way together.
    pub(crate) const TILE: Self = Self { warps: 8, chunks: 4 };

    /// Chunks of 16 bytes that a block of threads copies.
    pub const fn block_chunks(&self) -> u32 {
        32 * self.warps * self.chunks
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(self) -> String {
        format!("w{}_c{}", self.warps, self.chunks)
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_REBLOCK_CHUNKS", self.chunks);
        number("VARIANT_MIN_BLOCKS", 4);
    }

    pub(crate) const fn expects(self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        &[Contains("LDG"), Contains("STG"), Lacks("LDL"), Lacks("STL")]
    }
}
