use super::BsrSddmmTile;
use super::family::{Family, Support, each_dtype};
use crate::{DType, Target};

/// Tiles of `bsr_sddmm_sm80`: a CTA computes as many neighbouring stored blocks of a block row as
/// fit into `columns`. The launch says how A and B are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrSddmm {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of the pattern.
    pub block_size: u32,
    /// Columns of a tile, if all of its blocks are there.
    pub columns: u32,
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

const fn tile(
    block_size: u32,
    [warps_m, warps_n]: [u32; 2],
    stages: u32,
    min_blocks: u32,
) -> BsrSddmm {
    let (dtype, columns, block_k) = (DType::F16, 128, 64);
    BsrSddmm { dtype, block_size, columns, block_k, warps_m, warps_n, stages, min_blocks }
}

/// Tiles by block size, for all layouts of A and B: two stages where several CTAs share an SM and
/// hide each other's copies, three where registers leave room for one or two.
const TILES: &[BsrSddmm] = &[
    tile(16, [1, 4], 2, 4),
    tile(32, [1, 4], 2, 4),
    tile(64, [2, 2], 2, 3),
    tile(128, [2, 2], 3, 2),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = BsrSddmm> {
    each_dtype(TILES)
        .filter(move |_| target.is_portable())
        .map(|(dtype, tile)| BsrSddmm { dtype, ..tile })
}

impl BsrSddmm {
    /// The part that all kernels of the sampled product have.
    pub const fn tile(&self) -> BsrSddmmTile {
        let Self { dtype, block_size, columns, .. } = *self;
        BsrSddmmTile { dtype, block_size, blocks: columns / block_size, majors: None }
    }
}

impl Family for BsrSddmm {
    fn source(&self) -> &'static str {
        "bsr_sddmm_sm80"
    }

    fn name(&self) -> String {
        let Self { dtype, block_size, columns, block_k, warps_m, warps_n, stages, .. } = self;
        format!("{dtype}_b{block_size}_n{columns}_k{block_k}_w{warps_m}x{warps_n}_s{stages}")
    }

    fn warps(&self) -> u32 {
        self.warps_m * self.warps_n
    }

    /// A ring of stages of A and B.
    fn smem_bytes(&self) -> u32 {
        self.stages * (self.block_size + self.columns) * self.block_k * self.dtype.size() as u32
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_SDDMM_BLOCK_SIZE", self.block_size);
        define("VARIANT_SDDMM_COLUMNS", self.columns);
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
        Some(self.tile().profile_case())
    }
}

#[cfg(test)]
mod tests {
    use crate::{Expect, manifest, manifest::Variant};
    use std::collections::HashSet;

    #[test]
    fn one_kernel_for_every_layout() {
        let kernels: Vec<_> = manifest::kernels()
            .iter()
            .filter_map(|kernel| match kernel.variant {
                Variant::BsrSddmm(tile) => Some((kernel, tile)),
                _ => None,
            })
            .collect();
        for (kernel, tile) in &kernels {
            assert_eq!(
                (kernel.source(), kernel.threads(), tile.columns),
                ("bsr_sddmm_sm80", 128, 128)
            );
            assert!(
                kernel.smem_bytes() <= 99 << 10,
                "{}: {}",
                kernel.symbol(),
                kernel.smem_bytes()
            );
            let shared = kernel.bsr_sddmm_tile().unwrap();
            assert_eq!((shared.majors, shared.blocks * shared.block_size), (None, tile.columns));
            assert!(kernel.expects().contains(&Expect::Contains("LDGSTS")));
        }
        let kinds: HashSet<_> = kernels
            .iter()
            .map(|(kernel, tile)| (kernel.target, tile.dtype, tile.block_size))
            .collect();
        assert_eq!((kernels.len(), kinds.len()), (5 * 2 * 4, 5 * 2 * 4));
        let (kernel, _) = kernels[0];
        assert_eq!(kernel.symbol(), "blockflash_bsr_sddmm_sm80_f16_b16_n128_k64_w1x4_s2");
        assert_eq!(kernel.smem_bytes(), 2 * 18 * 1024);
        assert!(kernel.macros().contains(&("VARIANT_SDDMM_COLUMNS", "128".to_owned())));
    }
}
