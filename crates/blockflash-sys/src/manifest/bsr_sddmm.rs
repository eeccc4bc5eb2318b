//! What all kernels of the sampled product have in common.

use super::family::{Size, Support};
use super::{Kernel, Major, Variant};
use crate::DType;

/// A tile of the sampled product is at most `blocks` neighbouring stored blocks of a block row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrSddmmTile {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of the pattern.
    pub block_size: u32,
    /// Blocks of a tile; the last one of a block row may have fewer.
    pub blocks: u32,
    /// The layouts of A and B that the kernel's tensor maps describe; `None`: any layout, any
    /// leading dimension, starting anywhere.
    pub majors: Option<[Major; 2]>,
}

impl BsrSddmmTile {
    pub(super) fn support(&self) -> Support {
        let Self { block_size, dtype, .. } = *self;
        Support { operation: "sampled product", size: Size::Block(block_size), dtype }
    }

    pub(super) fn profile_case(&self) -> String {
        let Self { block_size, dtype, .. } = self;
        // A kernel for all layouts is profiled on the gradient of weights.
        let [a, b] = self.majors.unwrap_or([Major::Column, Major::Row]).map(Major::name);
        format!("sddmm_m8192_n8192_k4096_b{block_size}_d0.1_uniform_{a}_{b}_{dtype}")
    }
}

impl Kernel {
    /// The part that all kernels of the sampled product have; `None` for other kernels.
    pub const fn bsr_sddmm_tile(&self) -> Option<BsrSddmmTile> {
        match self.variant {
            Variant::BsrSddmm(tile) => Some(tile.tile()),
            Variant::BsrSddmmHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }
}
