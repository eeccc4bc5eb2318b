use super::BsrMatmulTile;
use super::family::{Family, Support, each_dtype};
use crate::{DType, Target};

/// Tiles of `bsr_matmul_narrow_sm80`, for few columns: a CTA computes a strip of a block row, and
/// its warps share the depth. A cluster of CTAs may share a long strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmulNarrow {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A.
    pub block_size: u32,
    /// Columns of C per CTA: 8 or 32.
    pub block_n: u32,
    /// Warps per CTA.
    pub warps: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
}

const fn tile(block_size: u32, block_n: u32, [warps, min_blocks]: [u32; 2]) -> BsrMatmulNarrow {
    BsrMatmulNarrow { dtype: DType::F16, block_size, block_n, warps, min_blocks }
}

/// Tiles by block size: as many warps on an SM as registers allow, since the bytes in flight decide
/// how fast A is read, and fewer in a CTA where block rows are smaller and more.
const TILES: &[BsrMatmulNarrow] = &[
    tile(16, 8, [4, 6]),
    tile(16, 32, [4, 4]),
    tile(32, 8, [4, 6]),
    tile(32, 32, [4, 4]),
    tile(64, 8, [8, 3]),
    tile(64, 32, [6, 2]),
    tile(128, 8, [8, 3]),
    tile(128, 32, [6, 2]),
];

/// Made and measured on Hopper.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = BsrMatmulNarrow> {
    each_dtype(TILES)
        .filter(move |_| target == Target::Sm90)
        .map(|(dtype, tile)| BsrMatmulNarrow { dtype, ..tile })
}

impl BsrMatmulNarrow {
    /// Largest number of rows of a strip.
    const STRIP: u32 = 64;
    /// Depth of what a warp reads of A at a time.
    pub const WINDOW: u32 = 32;

    /// Rows of C that a CTA computes.
    const fn rows(&self) -> u32 {
        if self.block_size < Self::STRIP { self.block_size } else { Self::STRIP }
    }

    /// Strips of a block row.
    pub const fn strips(&self) -> u32 {
        self.block_size / self.rows()
    }

    /// The part that all BSR kernels have.
    pub const fn tile(&self) -> BsrMatmulTile {
        let Self { dtype, block_size, block_n, .. } = *self;
        BsrMatmulTile {
            dtype,
            block_size,
            block_rows: 1,
            block_n,
            block_k: Self::WINDOW,
            cluster: 1,
            a_transposed: false,
            b_column_major: false,
            tensor_maps: false,
        }
    }
}

impl Family for BsrMatmulNarrow {
    fn source(&self) -> &'static str {
        "bsr_matmul_narrow_sm80"
    }

    fn name(&self) -> String {
        let Self { dtype, block_size, block_n, warps, .. } = self;
        format!("{dtype}_b{block_size}_n{block_n}_w{warps}")
    }

    fn warps(&self) -> u32 {
        self.warps
    }

    /// The sums of all warps, in padded rows.
    fn smem_bytes(&self) -> u32 {
        self.warps * self.rows() * (self.block_n + 4) * 4
    }

    fn most_in_cluster(&self) -> u32 {
        8
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_NARROW", 1);
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_BLOCK_SIZE", self.block_size);
        define("VARIANT_BLOCK_N", self.block_n);
        define("VARIANT_MIN_BLOCKS", self.min_blocks);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "MOVM"]
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        let Self { block_size, block_n, dtype, .. } = self;
        Some(format!("m14336_n{block_n}_k4096_b{block_size}_d0.1_uniform_{dtype}"))
    }
}
