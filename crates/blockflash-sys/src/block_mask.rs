use crate::{DType, Expect};

/// The kernels that make block masks on the GPU, with their compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockMaskKernel {
    /// `block_mask_sm80.cu`: index arrays from booleans, lists or scores.
    Build {
        /// Rows of the mask per block of threads, one per warp.
        slab_rows: u32,
    },
    /// `block_scores_sm80.cu`: scores from the means of queries and keys.
    Scores {
        /// Element type of q and k.
        dtype: DType,
        /// Rows and columns of scores per block of threads.
        tile: u32,
    },
}

impl BlockMaskKernel {
    /// Every kernel.
    pub(crate) const ALL: [Self; 3] = [
        Self::Build { slab_rows: 16 },
        Self::Scores { dtype: DType::F16, tile: 64 },
        Self::Scores { dtype: DType::BF16, tile: 64 },
    ];

    pub(crate) const fn source(self) -> &'static str {
        match self {
            Self::Build { .. } => "block_mask_sm80",
            Self::Scores { .. } => "block_scores_sm80",
        }
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Build { slab_rows } => format!("r{slab_rows}"),
            Self::Scores { dtype, tile } => format!("{dtype}_t{tile}"),
        }
    }

    /// Warps per block of threads.
    pub(crate) const fn warps(self) -> u32 {
        match self {
            Self::Build { slab_rows } => slab_rows,
            Self::Scores { .. } => 4,
        }
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(self, mut number: impl FnMut(&'static str, u32)) {
        match self {
            Self::Build { slab_rows } => number("VARIANT_SLAB_ROWS", slab_rows),
            Self::Scores { dtype, tile } => {
                number("VARIANT_DTYPE", dtype as u32);
                number("VARIANT_SCORE_TILE", tile);
            }
        }
        number("VARIANT_MIN_BLOCKS", self.min_blocks());
    }

    /// Blocks per multiprocessor that the register allocation must allow.
    const fn min_blocks(self) -> u32 {
        match self {
            Self::Build { .. } => 2,
            Self::Scores { .. } => 4,
        }
    }

    pub(crate) const fn expects(self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        match self {
            Self::Build { .. } => {
                &[Contains("VOTE"), Contains("REDUX"), Lacks("LDL"), Lacks("STL")]
            }
            Self::Scores { .. } => &[Contains("FFMA"), Lacks("LDL"), Lacks("STL")],
        }
    }
}
