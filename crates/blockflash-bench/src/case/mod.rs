//! What is measured: one shape of one operation, with an id that a person can read. Each operation
//! has a file that says everything about it: its `Shape` and the grid of it in suite files.

mod attention;
mod attention_operands;
mod block_lists;
mod block_mask;
mod block_sparse;
mod bsr_matmul;
mod bsr_sddmm;
mod grid;
mod id;
mod lengths;
mod mask_kind;
mod mask_operands;
mod operands;
mod pattern;
mod peer;
mod shape;
mod varlen;
mod work;

pub use attention::AttentionShape;
pub use block_lists::from_rows;
pub(crate) use block_mask::BlockMaskGrid;
pub use block_mask::{BlockMaskShape, MaskStep};
pub(crate) use block_sparse::BlockSparseGrid;
pub use block_sparse::BlockSparseShape;
pub(crate) use bsr_matmul::BsrGrid;
pub use bsr_matmul::BsrShape;
pub(crate) use bsr_sddmm::SddmmGrid;
pub use bsr_sddmm::SddmmShape;
pub(crate) use grid::GridPeers;
pub use lengths::{Lengths, LengthsError};
pub use mask_kind::MaskKind;
pub(crate) use operands::Operands;
pub use pattern::Pattern;
pub use peer::{PeerCase, PeerCaseError};
pub(crate) use shape::Shape;
pub(crate) use varlen::AttentionGrid;
pub use varlen::VarlenShape;
pub use work::{TILE_COLUMNS, TILE_ROWS, Work};

use blockflash_sys::DType;
use std::fmt;
use std::str::FromStr;

/// The cases that there are: a line for each operation, and nothing else names them all.
macro_rules! cases {
    ($($(#[$doc:meta])* $variant:ident($shape:ty),)*) => {
        /// One measured problem.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Case {
            $($(#[$doc])* $variant($shape),)*
        }

        $(impl From<$shape> for Case {
            fn from(shape: $shape) -> Self {
                Case::$variant(shape)
            }
        })*

        impl Case {
            /// What it says of itself.
            pub(crate) fn shape(&self) -> &dyn Shape {
                match self {
                    $(Case::$variant(shape) => shape,)*
                }
            }

            /// The first shape that reads the parts of an id.
            fn parse(parts: &[&str]) -> Option<Self> {
                None$(.or_else(|| <$shape>::parse(parts).map(Case::$variant)))*
            }
        }
    };
}

cases! {
    /// Dense attention forward.
    AttentionFwd(AttentionShape),
    /// Attention forward over packed sequences of different lengths; in records the operation of
    /// the dense one.
    VarlenFwd(VarlenShape),
    /// Attention forward over a mask of blocks.
    BlockSparseFwd(BlockSparseShape),
    /// Scores of blocks, or a mask of blocks from scores.
    BlockMaskBuild(BlockMaskShape),
    /// Block-sparse matrix times dense matrix.
    BsrMatmul(BsrShape),
    /// Dense times dense at the blocks of a sparse matrix.
    BsrSddmm(SddmmShape),
}

impl Case {
    /// Name of the operation in records.
    pub fn op(&self) -> &'static str {
        self.shape().op()
    }

    /// Element type of the inputs.
    pub fn dtype(&self) -> DType {
        self.shape().dtype()
    }

    /// What a launch has to do.
    pub fn work(&self) -> Work {
        self.shape().work()
    }
}

impl fmt::Display for Case {
    /// The id, which can be read back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shape().fmt(f)
    }
}

impl FromStr for Case {
    type Err = String;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(id: &str) -> Result<Self, String> {
        let parts = id::parts(id);
        let case = Self::parse(&parts.split('_').collect::<Vec<_>>());
        // Whatever was read differently from how it was written is not an id.
        case.filter(|case| case.to_string() == id).ok_or_else(|| {
            format!(
                "{id:?} is no case: expected for example b4_s4096_h32_d64_causal_bf16, \
                 b1_q1_kv8192_h32kv8_d128_full_f16, varlen4096+512x2_h16_d128_causal_bf16 or \
                 m8192_n1024_k8192_b64_d0.1_uniform_f16"
            )
        })
    }
}

#[cfg(test)]
mod tests;
