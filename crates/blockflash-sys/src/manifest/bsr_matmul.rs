//! The parameters that all kernels of BSR matmul share.

use super::family::{Size, Support};
use super::{Kernel, Variant};
use crate::DType;

/// A CTA of a BSR kernel computes `block_rows` block rows of A times `block_n` columns of B,
/// `block_k` of the depth at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmulTile {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A.
    pub block_size: u32,
    /// Block rows per tile.
    pub block_rows: u32,
    /// Columns of C per tile.
    pub block_n: u32,
    /// Depth of one pipeline stage along K.
    pub block_k: u32,
    /// CTAs of a cluster, which compute neighbouring columns of C.
    pub cluster: u32,
    /// Whether A is multiplied transposed.
    pub a_transposed: bool,
    /// Whether B is column-major.
    pub b_column_major: bool,
    /// Whether a tensor map describes B, which has limits on sizes and strides.
    pub tensor_maps: bool,
}

impl BsrMatmulTile {
    /// Number of tiles along `n` columns of C. Clusters are whole, so some tiles may have no
    /// columns.
    pub const fn tiles_n(&self, n: u64) -> u64 {
        n.div_ceil((self.cluster * self.block_n) as u64) * self.cluster as u64
    }

    pub(super) fn support(&self) -> Support {
        let operation = if self.a_transposed || self.b_column_major {
            "BSR matmul, Aᵀ, column-major B"
        } else {
            "BSR matmul"
        };
        Support { operation, size: Size::Block(self.block_size), dtype: self.dtype }
    }

    pub(super) fn profile_case(&self) -> Option<String> {
        let Self { block_size, dtype, a_transposed, b_column_major, .. } = *self;
        // No case of `blockflash bench` has a transposed A or a column-major B.
        (!a_transposed && !b_column_major)
            .then(|| format!("m8192_n1024_k8192_b{block_size}_d0.1_uniform_{dtype}"))
    }
}

impl Kernel {
    /// The parameters that all BSR kernels share; `None` for other kernels. A kernel that [takes
    /// any layout](Kernel::takes_any_layout) returns them for a matrix A as stored and a row-major
    /// B.
    pub const fn bsr_matmul_tile(&self) -> Option<BsrMatmulTile> {
        match self.variant {
            Variant::BsrMatmul(tile) => Some(tile.tile()),
            Variant::BsrMatmulAny(tile) => Some(tile.tile()),
            Variant::BsrMatmulNarrow(tile) => Some(tile.tile()),
            Variant::BsrMatmulHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }

    /// Whether a BSR kernel takes A as stored and transposed, and B and C in row-major and
    /// column-major order.
    pub const fn takes_any_layout(&self) -> bool {
        matches!(self.variant, Variant::BsrMatmulAny(_))
    }

    /// Whether a BSR kernel writes C in row-major and column-major order. Hopper kernels do that do
    /// not gather small blocks.
    pub const fn writes_any_layout(&self) -> bool {
        match &self.variant {
            Variant::BsrMatmulHopper(tile) => !tile.gathers(),
            _ => self.takes_any_layout(),
        }
    }
}
