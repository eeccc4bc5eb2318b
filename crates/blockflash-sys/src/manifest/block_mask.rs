use super::family::Family;
use crate::{DType, Target};

/// The kernels that make block masks on the GPU, with their compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockMaskKernel {
    /// `block_mask_sm80`: index arrays from booleans, lists or scores.
    Build {
        /// Rows of the mask per CTA, one per warp.
        slab_rows: u32,
    },
    /// `block_scores_sm80`: scores from the means of queries and keys.
    Scores {
        /// Element type of q and k.
        dtype: DType,
        /// Rows and columns of scores per CTA.
        tile: u32,
    },
}

const KERNELS: [BlockMaskKernel; 3] = [
    BlockMaskKernel::Build { slab_rows: 16 },
    BlockMaskKernel::Scores { dtype: DType::F16, tile: 64 },
    BlockMaskKernel::Scores { dtype: DType::BF16, tile: 64 },
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = BlockMaskKernel> {
    KERNELS.into_iter().filter(move |_| target.is_portable())
}

impl Family for BlockMaskKernel {
    fn source(&self) -> &'static str {
        match self {
            Self::Build { .. } => "block_mask_sm80",
            Self::Scores { .. } => "block_scores_sm80",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Build { slab_rows } => format!("r{slab_rows}"),
            Self::Scores { dtype, tile } => format!("{dtype}_t{tile}"),
        }
    }

    fn warps(&self) -> u32 {
        match *self {
            Self::Build { slab_rows } => slab_rows,
            Self::Scores { .. } => 4,
        }
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        match *self {
            Self::Build { slab_rows } => {
                define("VARIANT_SLAB_ROWS", slab_rows);
                define("VARIANT_MIN_BLOCKS", 2);
            }
            Self::Scores { dtype, tile } => {
                define("VARIANT_DTYPE", dtype as u32);
                define("VARIANT_SCORE_TILE", tile);
                define("VARIANT_MIN_BLOCKS", 4);
            }
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        match self {
            Self::Build { .. } => &["VOTE", "REDUX"],
            Self::Scores { .. } => &["FFMA"],
        }
    }
}
