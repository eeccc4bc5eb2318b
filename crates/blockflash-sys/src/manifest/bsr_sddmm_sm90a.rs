use super::family::{Family, Support, each_dtype};
use super::{BsrSddmmTile, Major};
use crate::{DType, Target};

/// Tiles of `bsr_sddmm_sm90a`: persistent CTAs, one per SM, take tile after tile, each as many
/// neighbouring stored blocks of a block row as fit into 256 columns. A producer warpgroup loads,
/// two consumer warpgroups compute: 64 rows each where blocks have 128, else half of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrSddmmHopper {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of the pattern: 64 or 128.
    pub block_size: u32,
    /// How A is in memory.
    pub a: Major,
    /// How B is in memory.
    pub b: Major,
    /// Pipeline stages in shared memory.
    pub stages: u32,
}

/// Block sizes, each with as many stages as fit, for every layout of A and B.
const TILES: &[(u32, u32)] = &[(64, 5), (128, 4)];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = BsrSddmmHopper> {
    let majors = || Major::ALL.into_iter().flat_map(|a| Major::ALL.map(|b| (a, b)));
    each_dtype(TILES).filter(move |_| target == Target::Sm90a).flat_map(
        move |(dtype, (block_size, stages))| {
            majors().map(move |(a, b)| BsrSddmmHopper { dtype, block_size, a, b, stages })
        },
    )
}

impl BsrSddmmHopper {
    /// Columns of a tile, if all of its blocks are there: two warpgroups have no registers for
    /// more.
    const COLUMNS: u32 = 256;
    /// Depth of a stage along K: the span of the swizzle, 128 bytes.
    pub const BLOCK_K: u32 = 64;
    /// Bytes of mbarriers and announced tiles.
    const EXTRA_BYTES: u32 = 256;

    /// Blocks of a tile; the last one of a block row may have fewer.
    pub const fn blocks(&self) -> u32 {
        Self::COLUMNS / self.block_size
    }

    /// The part that all kernels of the sampled product have.
    pub const fn tile(&self) -> BsrSddmmTile {
        let Self { dtype, block_size, a, b, .. } = *self;
        BsrSddmmTile { dtype, block_size, blocks: self.blocks(), majors: Some([a, b]) }
    }
}

impl Family for BsrSddmmHopper {
    fn source(&self) -> &'static str {
        "bsr_sddmm_sm90a"
    }

    fn name(&self) -> String {
        let Self { dtype, block_size, a, b, stages } = self;
        format!("{dtype}_b{block_size}_{}_{}_s{stages}", a.name(), b.name())
    }

    /// Two consumer warpgroups and the producer warpgroup.
    fn warps(&self) -> u32 {
        12
    }

    /// A ring of stages of A and B, mbarriers and the announced tiles.
    fn smem_bytes(&self) -> u32 {
        let stage = (self.block_size + Self::COLUMNS) * Self::BLOCK_K * self.dtype.size() as u32;
        self.stages * stage + Self::EXTRA_BYTES
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_SDDMM_BLOCK_SIZE", self.block_size);
        define("VARIANT_SDDMM_BLOCKS", self.blocks());
        define("VARIANT_A_COLUMN_MAJOR", (self.a == Major::Column).into());
        define("VARIANT_B_COLUMN_MAJOR", (self.b == Major::Column).into());
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_MIN_BLOCKS", 1);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["HGMMA", "UTMALDG", "USETMAXREG"]
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
    use super::*;
    use crate::{Expect, manifest, manifest::Variant};
    use std::collections::HashSet;

    #[test]
    fn every_layout_has_its_kernel() {
        let kernels: Vec<_> = manifest::kernels()
            .iter()
            .filter_map(|kernel| match kernel.variant {
                Variant::BsrSddmmHopper(tile) => Some((kernel, tile)),
                _ => None,
            })
            .inspect(|(kernel, tile)| {
                assert_eq!(
                    (kernel.target, kernel.source(), kernel.threads()),
                    (Target::Sm90a, "bsr_sddmm_sm90a", 384)
                );
                assert!(
                    kernel.smem_bytes() <= kernel.target.smem_limit(),
                    "{}: {}",
                    kernel.symbol(),
                    kernel.smem_bytes()
                );
                // Three stages at least: one is multiplied, one read to the end, one on its way.
                assert!(
                    tile.stages >= 3 && tile.blocks() * tile.block_size == 256,
                    "{}",
                    kernel.symbol()
                );
                assert!(kernel.expects().contains(&Expect::Contains("HGMMA")));
                assert_eq!(kernel.bsr_matmul_tile(), None);
                assert_eq!(kernel.bsr_sddmm_tile(), Some(tile.tile()));
            })
            .collect();
        let kinds: HashSet<_> =
            kernels.iter().map(|(_, tile)| (tile.dtype, tile.block_size, tile.a, tile.b)).collect();
        assert_eq!((kernels.len(), kinds.len()), (16, 16));
        let (kernel, _) = kernels[0];
        assert_eq!(kernel.symbol(), "blockflash_bsr_sddmm_sm90a_f16_b64_row_row_s5");
        assert_eq!(kernel.smem_bytes(), 5 * 40 * 1024 + 256);
        let macros = kernels[2].0.macros();
        for (name, value) in [("VARIANT_A_COLUMN_MAJOR", "1"), ("VARIANT_B_COLUMN_MAJOR", "0")] {
            assert!(macros.contains(&(name, value.to_owned())), "{name}");
        }
    }
}
