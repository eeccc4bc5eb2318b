use crate::tile::BsrTile;
use crate::{DType, Expect, Target};

/// Tiles of `bsr_matmul_sm90a.cu`: one block of threads per multiprocessor takes tile after tile, each one block row of A, or two, times
/// `block_n` columns of B. One warpgroup copies, two compute: 64 rows each where the tile has 128, else half of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmulHopper {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A: 64 or 128.
    pub block_size: u32,
    /// Block rows per tile; several share the rows of B that any of them needs.
    pub block_rows: u32,
    /// Columns of C per tile.
    pub block_n: u32,
    /// Pipeline stages in shared memory.
    pub stages: u32,
}

impl BsrMatmulHopper {
    /// Depth of a stage along K: a row of the swizzle, 128 bytes.
    const BLOCK_K: u32 = 64;
    /// Warpgroups that compute.
    const WARPGROUPS: u32 = 2;
    /// Bytes for barriers and the announced tiles.
    const EXTRA_BYTES: u32 = 384;

    /// What it has in common with other BSR kernels.
    pub const fn tile(&self) -> BsrTile {
        let Self { dtype, block_size, block_rows, block_n, .. } = *self;
        BsrTile { dtype, block_size, block_rows, block_n, block_k: Self::BLOCK_K }
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(&self) -> String {
        let Self { dtype, block_size, block_rows, block_n, stages } = self;
        format!("{dtype}_b{block_size}_r{block_rows}_n{block_n}_s{stages}")
    }

    /// Warps per block of threads: four per warpgroup, and those of the one that copies.
    pub(crate) const fn warps(&self) -> u32 {
        4 * (Self::WARPGROUPS + 1)
    }

    /// Shared memory in bytes: a ring of A and B tiles, and per warp 16 rows of f32 accumulators on their way to C, 32 columns wide or,
    /// where the ring leaves no room for that, 16; a few more keep rows in different banks.
    pub(crate) const fn smem_bytes(&self) -> u32 {
        let rows = self.block_rows * self.block_size + self.block_n;
        let ring = self.stages * rows * Self::BLOCK_K * self.dtype.size() as u32;
        let column = 4 * Self::WARPGROUPS * 16 * size_of::<f32>() as u32;
        let wide = ring + Self::EXTRA_BYTES + (32 + 8) * column;
        if wide <= Target::Sm90a.smem_limit() { wide } else { ring + Self::EXTRA_BYTES + (16 + 4) * column }
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(&self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_DTYPE", self.dtype as u32);
        number("VARIANT_BLOCK_SIZE", self.block_size);
        number("VARIANT_BLOCK_ROWS", self.block_rows);
        number("VARIANT_BLOCK_N", self.block_n);
        number("VARIANT_BLOCK_K", Self::BLOCK_K);
        number("VARIANT_CONSUMER_WARPGROUPS", Self::WARPGROUPS);
        number("VARIANT_STAGES", self.stages);
        number("VARIANT_MIN_BLOCKS", 1);
    }

    pub(crate) const fn expects() -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        &[Contains("HGMMA"), Contains("UTMALDG"), Contains("USETMAXREG"), Lacks("LDL"), Lacks("STL")]
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest::{self, Variant};
    use crate::{Expect, Target};

    #[test]
    fn hopper_rows() {
        let rows: Vec<_> = manifest::all_rows()
            .iter()
            .filter_map(|row| match row.variant {
                Variant::BsrMatmulHopper(tile) => Some((row, tile)),
                _ => None,
            })
            .collect();
        assert_eq!(rows.len(), 14);
        for (row, tile) in &rows {
            assert_eq!((row.target, row.source()), (Target::Sm90a, "bsr_matmul_sm90a"));
            assert!(row.smem_bytes() <= row.target.smem_limit(), "{}: {}", row.symbol(), row.smem_bytes());
            assert_eq!((row.threads(), row.bsr_tile()), (384, Some(tile.tile())));
            assert!(row.expects().contains(&Expect::Contains("HGMMA")));
            // Three stages at least: one is multiplied, one read to the end, one on its way.
            assert!(tile.stages >= 3, "{}", row.symbol());
            assert!(matches!((tile.block_size, tile.block_rows), (64, 1 | 2) | (128, 1)), "{}", row.symbol());
        }
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_matmul_sm90a_f16_b64_r1_n512_s3");
        assert_eq!(row.smem_bytes(), 3 * 72 * 1024 + 384 + 8 * 16 * 20 * 4);
        assert!(row.macros().contains(&("VARIANT_CONSUMER_WARPGROUPS", "2".to_owned())));
        let widest = rows.iter().find(|(_, tile)| (tile.block_size, tile.block_n) == (128, 256)).unwrap().0;
        assert_eq!(widest.smem_bytes(), 4 * 48 * 1024 + 384 + 8 * 16 * 40 * 4);
    }
}
