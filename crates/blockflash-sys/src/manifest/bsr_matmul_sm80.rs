use super::BsrMatmulTile;
use super::family::{Family, Support, each_dtype};
use crate::{DType, Target};

/// Tiles of `bsr_matmul_sm80`: a CTA computes one block row of A times `block_n` columns of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmul {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A.
    pub block_size: u32,
    /// Columns of C per CTA.
    pub block_n: u32,
    /// Depth of one pipeline stage along K.
    pub block_k: u32,
    /// Warps along M.
    pub warps_m: u32,
    /// Warps along N.
    pub warps_n: u32,
    /// Pipeline stages in shared memory.
    pub stages: u32,
    /// CTAs per SM that the register allocation must allow.
    pub min_blocks: u32,
}

/// Tiles by block size, from the widest to the narrowest. Those with more stages are for few
/// columns, where an SM has one or two CTAs.
const TILES: &[BsrMatmul] = &[
    BsrMatmul::new(16, [256, 32], [1, 4], 3, 4),
    BsrMatmul::new(16, [128, 32], [1, 4], 5, 4),
    BsrMatmul::new(16, [64, 64], [1, 2], 4, 4),
    BsrMatmul::new(32, [256, 32], [1, 4], 3, 4),
    BsrMatmul::new(32, [128, 64], [1, 4], 4, 2),
    BsrMatmul::new(32, [64, 64], [1, 2], 4, 4),
    BsrMatmul::new(64, [256, 64], [1, 4], 2, 2),
    BsrMatmul::new(64, [128, 64], [2, 2], 2, 4),
    BsrMatmul::new(64, [128, 64], [1, 4], 4, 2),
    BsrMatmul::new(64, [64, 64], [2, 2], 3, 4),
    BsrMatmul::new(64, [64, 64], [2, 2], 6, 2),
    BsrMatmul::new(128, [128, 64], [2, 2], 3, 2),
    BsrMatmul::new(128, [64, 64], [2, 2], 3, 3),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = BsrMatmul> {
    each_dtype(TILES)
        .filter(move |_| target.is_portable())
        .map(|(dtype, tile)| BsrMatmul { dtype, ..tile })
}

impl BsrMatmul {
    pub(super) const fn new(
        block_size: u32,
        [block_n, block_k]: [u32; 2],
        [warps_m, warps_n]: [u32; 2],
        stages: u32,
        min_blocks: u32,
    ) -> Self {
        let dtype = DType::F16;
        Self { dtype, block_size, block_n, block_k, warps_m, warps_n, stages, min_blocks }
    }

    /// The part that all BSR kernels have.
    pub const fn tile(&self) -> BsrMatmulTile {
        let Self { dtype, block_size, block_n, block_k, .. } = *self;
        BsrMatmulTile {
            dtype,
            block_size,
            block_rows: 1,
            block_n,
            block_k,
            cluster: 1,
            a_transposed: false,
            b_column_major: false,
            tensor_maps: false,
        }
    }
}

impl Family for BsrMatmul {
    fn source(&self) -> &'static str {
        "bsr_matmul_sm80"
    }

    fn name(&self) -> String {
        let Self { dtype, block_size, block_n, block_k, warps_m, warps_n, stages, .. } = self;
        format!("{dtype}_b{block_size}_n{block_n}_k{block_k}_w{warps_m}x{warps_n}_s{stages}")
    }

    fn warps(&self) -> u32 {
        self.warps_m * self.warps_n
    }

    /// A ring of A and B tiles.
    fn smem_bytes(&self) -> u32 {
        self.stages * (self.block_size + self.block_n) * self.block_k * self.dtype.size() as u32
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_BLOCK_SIZE", self.block_size);
        define("VARIANT_BLOCK_N", self.block_n);
        define("VARIANT_BLOCK_K", self.block_k);
        define("VARIANT_WARPS_M", self.warps_m);
        define("VARIANT_WARPS_N", self.warps_n);
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", self.min_blocks);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HMMA", "LDGSTS", "LDSM"]
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        self.tile().profile_case()
    }
}
