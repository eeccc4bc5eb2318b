//! Measured problems: one shape of one operation, with a readable id. Each operation has a file
//! with its `Shape` and its grid in suite files; attention has several.

mod attention;
mod attention_grid;
mod attention_operands;
mod attention_shape;
mod backward_operands;
mod block_lists;
mod block_mask;
mod block_sparse;
mod bsr_data;
mod bsr_matmul;
mod bsr_operands;
mod bsr_sddmm;
mod bsr_sddmm_operands;
mod cache_inputs;
mod choice_operands;
mod decode;
mod decode_data;
mod decode_grid;
mod decode_operands;
mod decode_pages;
mod decode_rows;
mod grid;
mod id;
mod index;
mod index_choice;
mod index_grid;
mod index_lists;
mod index_operands;
mod lengths;
mod limits;
mod mask_kind;
mod mask_operands;
mod operands;
mod pairs;
mod pattern;
mod peer;
mod quantize;
mod scores;
mod shape;
mod work;

pub use attention_grid::AttentionGrid;
pub use attention_operands::{AttentionData, AttentionOperands, offsets};
pub use attention_shape::{AttentionShape, Pass};
pub use block_lists::{BlockLists, from_rows};
pub use block_mask::{BlockMaskGrid, BlockMaskShape, MaskStep};
pub use block_sparse::BlockSparse;
pub use bsr_data::BsrData;
pub use bsr_matmul::{BsrGrid, BsrShape};
pub use bsr_operands::{BsrCall, BsrOperands, oracle_activation};
pub use bsr_sddmm::{SddmmGrid, SddmmShape};
pub use bsr_sddmm_operands::{SddmmCall, SddmmData, SddmmOperands};
pub use decode::{DecodeShape, Fill};
pub use decode_data::{CacheValues, DecodeData};
pub use decode_grid::DecodeGrid;
pub use decode_operands::DecodeOperands;
pub use decode_pages::{Chosen, PageSelection};
pub use grid::GridPeers;
pub use index::{IndexShape, Listing};
pub use index_choice::{ChoiceGrid, ChoiceShape};
pub use index_grid::IndexGrid;
pub use index_operands::{IndexData, IndexOperands};
pub use lengths::{Lengths, LengthsError};
pub use mask_kind::MaskKind;
pub use operands::{Operands, Progress, TensorInfo, rotation_bytes};
pub use pairs::{PairKind, Pairs};
pub use pattern::Pattern;
pub use peer::{PeerCase, PeerCaseError};
pub use quantize::{QuantizeGrid, QuantizeShape, Rows, ScaledBy};
pub use shape::Shape;
pub use work::{TILE_COLUMNS, TILE_ROWS, Work};

use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

/// Lists the operations, one line each; no other place names all of them.
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
        }

        impl fmt::Display for $shape {
            /// Writes the id.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                id::write(self, f)
            }
        })*

        /// All operations are used through their shapes.
        impl Deref for Case {
            type Target = dyn Shape;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Case::$variant(shape) => shape,)*
                }
            }
        }

        impl Case {
            /// Parses the parts of an id with each shape in turn; the first that succeeds wins.
            fn parse(parts: &[&str]) -> Option<Self> {
                None$(.or_else(|| id::read::<$shape>(parts).map(Case::$variant)))*
            }
        }
    };
}

cases! {
    /// Attention: dense, over packed sequences, or with a block mask; forward or backward.
    Attention(AttentionShape),
    /// Attention of the last queries of sequences to a cache.
    AttentionDecode(DecodeShape),
    /// Attention of queries to the blocks of keys that lists name.
    AttentionIndex(IndexShape),
    /// Scores of blocks of keys for each query, and the choice of the largest.
    IndexChoice(ChoiceShape),
    /// Scores of blocks, or a block mask from scores.
    BlockMaskBuild(BlockMaskShape),
    /// Rows of attention as codes of 8 bits.
    Quantize(QuantizeShape),
    /// Block-sparse matrix times dense matrix.
    BsrMatmul(BsrShape),
    /// Sampled dense-dense product: dense times dense at the blocks of a sparse matrix.
    BsrSddmm(SddmmShape),
}

impl Case {
    /// The shape of attention to q, k and v; `None` for other operations, also that to a cache.
    pub fn attention(&self) -> Option<&AttentionShape> {
        match self {
            Self::Attention(shape) => Some(shape),
            _ => None,
        }
    }
}

impl fmt::Display for Case {
    /// Writes the id, which can be parsed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl FromStr for Case {
    type Err = String;

    /// Parses the id that [`Display`](fmt::Display) writes.
    fn from_str(id: &str) -> Result<Self, String> {
        let parts = Pattern::joined(id);
        let case = Self::parse(&parts.split('_').collect::<Vec<_>>());
        // Only the exact spelling that `Display` writes is an id.
        let case = case.filter(|case| case.to_string() == id).ok_or_else(|| {
            format!(
                "{id:?} is not a case: expected for example b4_s4096_h32_d64_causal_bf16, \
                 b1_q1_kv8192_h32kv8_d128_full_f16, varlen4096+512x2_h16_d128_causal_bf16, \
                 bwd_b4_s4096_h32_d64_causal_bf16, \
                 decode_b8_q1_kv8192_h32kv8_d128_page16_full_bf16 or \
                 m8192_n1024_k8192_b64_d0.1_uniform_f16"
            )
        })?;
        case.check().map_err(|problem| format!("{id:?} is not a case: {problem}"))?;
        Ok(case)
    }
}

#[cfg(test)]
mod tests;
