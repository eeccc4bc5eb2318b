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
    /// `block_mask_transpose_sm80`: index arrays of the transpose.
    Transpose {
        /// Rows of the mask per CTA, a multiple of 32.
        slab_rows: u32,
        /// Columns of the mask per CTA, a multiple of 32.
        chunk_cols: u32,
    },
    /// `block_bits_sm80`: visited blocks and bits of partial ones from pairs of tokens.
    Bits {
        /// Tiles of 64 × 64 pairs that a block may have.
        max_tiles: u32,
    },
    /// `block_scores_sm80`: scores from the means of queries and keys.
    Scores {
        /// Element type of q and k.
        dtype: DType,
        /// Rows and columns of scores per CTA.
        tile: u32,
    },
}

const KERNELS: [BlockMaskKernel; 5] = [
    BlockMaskKernel::Build { slab_rows: 16 },
    BlockMaskKernel::Transpose { slab_rows: 128, chunk_cols: 8192 },
    BlockMaskKernel::Bits { max_tiles: 16 },
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
            Self::Transpose { .. } => "block_mask_transpose_sm80",
            Self::Bits { .. } => "block_bits_sm80",
            Self::Scores { .. } => "block_scores_sm80",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Build { slab_rows } => format!("r{slab_rows}"),
            Self::Transpose { slab_rows, chunk_cols } => format!("r{slab_rows}_c{chunk_cols}"),
            Self::Bits { max_tiles } => format!("t{max_tiles}"),
            Self::Scores { dtype, tile } => format!("{dtype}_t{tile}"),
        }
    }

    fn warps(&self) -> u32 {
        match *self {
            Self::Build { slab_rows } => slab_rows,
            Self::Transpose { .. } => 16,
            Self::Bits { .. } | Self::Scores { .. } => 4,
        }
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        match *self {
            Self::Build { slab_rows } => {
                define("VARIANT_SLAB_ROWS", slab_rows);
                define("VARIANT_MIN_BLOCKS", 2);
            }
            Self::Transpose { slab_rows, chunk_cols } => {
                define("VARIANT_TRANSPOSE_ROWS", slab_rows);
                define("VARIANT_TRANSPOSE_COLS", chunk_cols);
                define("VARIANT_MIN_BLOCKS", 3);
            }
            Self::Bits { max_tiles } => {
                define("VARIANT_MAX_TILES", max_tiles);
                define("VARIANT_MIN_BLOCKS", 7);
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
            Self::Transpose { .. } => &["ATOMS", "POPC"],
            Self::Bits { .. } => &["LDG", "ATOMG"],
            Self::Scores { .. } => &["FFMA"],
        }
    }
}
