//! The table of kernels: every image that exists, with its tile sizes. Nothing else in the
//! workspace writes a tile size.
//!
//! A kernel family is one file here and one implementation of [`Family`]. Tiles differ between
//! targets because of shared memory: sm_80 and sm_90 have 163 KB and more per CTA, every other
//! GPU 99 KB. Rows with equal [`Row::symbol`] are the same source with the same tiles for different
//! targets.

mod attention_fwd_sm80;
mod attention_fwd_sm90a;
mod block_mask;
mod bsr_matmul_any_sm80;
mod bsr_matmul_sm80;
mod bsr_matmul_sm90a;
mod bsr_sddmm_sm80;
mod bsr_sddmm_sm90a;
mod family;
mod probe;
mod row;
mod tile;

pub use attention_fwd_sm80::AttentionFwd;
pub use attention_fwd_sm90a::AttentionFwdHopper;
pub use block_mask::BlockMaskKernel;
pub use bsr_matmul_any_sm80::BsrMatmulAny;
pub use bsr_matmul_sm80::BsrMatmul;
pub use bsr_matmul_sm90a::BsrMatmulHopper;
pub use bsr_sddmm_sm80::BsrSddmm;
pub use bsr_sddmm_sm90a::BsrSddmmHopper;
pub use family::{Family, Size, Support};
pub use probe::Probe;
pub use row::Row;
pub use tile::{AttentionTile, BsrSddmmTile, BsrTile, Lse, Major};

use crate::{DType, Target};
use std::sync::LazyLock;

/// The kernel family of a row with its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Variant {
    /// Attention forward, dense or under a block mask, with the instructions of Ampere and later.
    AttentionFwd(AttentionFwd),
    /// Attention forward, dense or under a block mask, with the instructions of Hopper.
    AttentionFwdHopper(AttentionFwdHopper),
    /// BSR matrix times dense matrix, with the instructions of Ampere and later.
    BsrMatmul(BsrMatmul),
    /// The same for A as it is or transposed, and B and C row-major or column-major, which the
    /// launch decides.
    BsrMatmulAny(BsrMatmulAny),
    /// BSR matrix times dense matrix, with the instructions of Hopper.
    BsrMatmulHopper(BsrMatmulHopper),
    /// Product of dense matrices at the stored blocks of a BSR matrix, with the instructions of
    /// Ampere and later.
    BsrSddmm(BsrSddmm),
    /// The same with the instructions of Hopper.
    BsrSddmmHopper(BsrSddmmHopper),
    /// Block masks made on the GPU.
    BlockMask(BlockMaskKernel),
    /// No operation: one unit of the GPU at its highest rate, which kernels are held against.
    Probe(Probe),
}

impl Variant {
    /// What the family says about itself.
    pub const fn family(&self) -> &dyn Family {
        match self {
            Variant::AttentionFwd(tile) => tile,
            Variant::AttentionFwdHopper(tile) => tile,
            Variant::BsrMatmul(tile) => tile,
            Variant::BsrMatmulAny(tile) => tile,
            Variant::BsrMatmulHopper(tile) => tile,
            Variant::BsrSddmm(tile) => tile,
            Variant::BsrSddmmHopper(tile) => tile,
            Variant::BlockMask(kernel) => kernel,
            Variant::Probe(probe) => probe,
        }
    }
}

/// Every family: its variants for a target, the preferred ones first.
const FAMILIES: [fn(Target) -> Vec<Variant>; 9] = [
    attention_fwd_sm90a::variants,
    attention_fwd_sm80::variants,
    bsr_matmul_sm90a::variants,
    bsr_sddmm_sm90a::variants,
    bsr_sddmm_sm80::variants,
    bsr_matmul_sm80::variants,
    bsr_matmul_any_sm80::variants,
    block_mask::variants,
    probe::variants,
];

/// All rows, the preferred targets first. Of rows that suit a problem equally well the first is
/// taken. Each has a committed image, a line in `kernels.lock` and a recorded GPU pass.
pub fn rows() -> &'static [Row] {
    static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
        let of = |target| FAMILIES.into_iter().flat_map(move |variants| variants(target));
        let rows = |target| of(target).map(move |variant| Row { variant, target });
        Target::ALL.into_iter().flat_map(rows).collect()
    });
    &ROWS
}

/// The tiles of a table for each element type that kernels compute with; none where the family is
/// not compiled for the target.
fn tiles<T: Copy>(compiled: bool, table: &'static [T]) -> impl Iterator<Item = (DType, T)> {
    let table = if compiled { table } else { &[] };
    let of = |dtype| table.iter().map(move |&tile| (dtype, tile));
    [DType::F16, DType::BF16].into_iter().flat_map(of)
}
