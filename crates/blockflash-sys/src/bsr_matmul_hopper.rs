use crate::tile::BsrTile;
use crate::{DType, Expect, Target};

/// Tiles of the BSR kernels for Hopper: one block of threads per multiprocessor takes tile after tile, each some block rows of A times
/// `block_n` columns of B. One warpgroup copies, the others compute.
///
/// Blocks of 64 and 128 (`bsr_matmul_sm90a.cu`): two warpgroups compute, 64 rows each where the tile has 128, else half of the columns.
/// Blocks of 16 and 32 (`bsr_matmul_gather_sm90a.cu`): each warp computes one block row, or with fewer than eight half of its columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmulHopper {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of A: 16, 32, 64 or 128.
    pub block_size: u32,
    /// Block rows per tile; several share the rows of B that any of them needs.
    pub block_rows: u32,
    /// Columns of C per tile.
    pub block_n: u32,
    /// Pipeline stages in shared memory.
    pub stages: u32,
}

impl BsrMatmulHopper {
    /// Depth of a stage along K where blocks are no smaller: a row of the swizzle, 128 bytes.
    const BLOCK_K: u32 = 64;
    /// Depth along K of what a stage holds of B at most, where blocks are smaller.
    const GATHERED_K: u32 = 128;
    /// Bytes of a stage for blocks of A there.
    const GATHERED_A_BYTES: u32 = 16 * 1024;
    /// Bytes of barriers, descriptions of stages and announced tiles there.
    const GATHERED_PLAN_BYTES: u32 = 8 * 1024;

    /// Whether blocks are small, and many block rows gather the rows of B that any of them needs.
    pub const fn gathers(&self) -> bool {
        self.block_size < Self::BLOCK_K
    }

    /// Name of the source file in `kernels/`, without `.cu`.
    pub(crate) const fn source(&self) -> &'static str {
        if self.gathers() { "bsr_matmul_gather_sm90a" } else { "bsr_matmul_sm90a" }
    }

    /// Depth along K that is copied at once.
    const fn block_k(&self) -> u32 {
        if self.gathers() { self.block_size } else { Self::BLOCK_K }
    }

    /// Warpgroups that compute.
    const fn warpgroups(&self) -> u32 {
        if self.gathers() && self.block_rows > 8 { self.block_rows / 4 } else { 2 }
    }

    /// What it has in common with other BSR kernels.
    pub const fn tile(&self) -> BsrTile {
        let Self { dtype, block_size, block_rows, block_n, .. } = *self;
        BsrTile { dtype, block_size, block_rows, block_n, block_k: self.block_k() }
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(&self) -> String {
        let Self { dtype, block_size, block_rows, block_n, stages } = self;
        format!("{dtype}_b{block_size}_r{block_rows}_n{block_n}_s{stages}")
    }

    /// Warps per block of threads: four per warpgroup, and those of the one that copies.
    pub(crate) const fn warps(&self) -> u32 {
        4 * (self.warpgroups() + 1)
    }

    /// Shared memory in bytes: a ring of A and B tiles, barriers and the announced tiles, and per warp 16 rows of f32 accumulators on their
    /// way to C, 32 columns wide or, where the ring leaves no room for that, 16; a few more keep rows in different banks.
    pub(crate) const fn smem_bytes(&self) -> u32 {
        let element = self.dtype.size() as u32;
        let (stage, extra) = if self.gathers() {
            (Self::GATHERED_A_BYTES + Self::GATHERED_K * self.block_n * element, Self::GATHERED_PLAN_BYTES)
        } else {
            ((self.block_rows * self.block_size + self.block_n) * Self::BLOCK_K * element, 384)
        };
        let column = 4 * self.warpgroups() * 16 * size_of::<f32>() as u32;
        let (narrow, wide) = ((16 + 4) * column, (32 + 8) * column);
        let ring = self.stages * stage + extra;
        if ring + wide <= Target::Sm90a.smem_limit() { ring + wide } else { ring + narrow }
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(&self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_DTYPE", self.dtype as u32);
        number("VARIANT_BLOCK_SIZE", self.block_size);
        number("VARIANT_BLOCK_ROWS", self.block_rows);
        number("VARIANT_BLOCK_N", self.block_n);
        number("VARIANT_BLOCK_K", self.block_k());
        number("VARIANT_CONSUMER_WARPGROUPS", self.warpgroups());
        number("VARIANT_STAGES", self.stages);
        number("VARIANT_MIN_BLOCKS", 1);
    }

    pub(crate) const fn expects(&self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        if self.gathers() {
            &[
                Contains("HMMA"),
                Contains("LDSM"),
                Contains("UTMALDG"),
                Contains("LDGSTS"),
                Contains("USETMAXREG"),
                Lacks("LDL"),
                Lacks("STL"),
            ]
        } else {
            &[Contains("HGMMA"), Contains("UTMALDG"), Contains("USETMAXREG"), Lacks("LDL"), Lacks("STL")]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Row;
    use crate::manifest::{self, Variant};

    fn rows(gathers: bool) -> Vec<(&'static Row, BsrMatmulHopper)> {
        let rows = manifest::all_rows().iter().filter_map(|row| match row.variant {
            Variant::BsrMatmulHopper(tile) if tile.gathers() == gathers => Some((row, tile)),
            _ => None,
        });
        rows.inspect(|(row, tile)| {
            assert_eq!((row.target, row.bsr_tile()), (Target::Sm90a, Some(tile.tile())));
            assert!(row.smem_bytes() <= row.target.smem_limit(), "{}: {}", row.symbol(), row.smem_bytes());
            // Three stages at least: one is multiplied, one read to the end, one on its way.
            assert!(tile.stages >= 3, "{}", row.symbol());
        })
        .collect()
    }

    #[test]
    fn hopper_rows() {
        let rows = rows(false);
        assert_eq!(rows.len(), 14);
        for (row, tile) in &rows {
            assert_eq!((row.source(), row.threads()), ("bsr_matmul_sm90a", 384));
            assert!(row.expects().contains(&Expect::Contains("HGMMA")));
            assert!(matches!((tile.block_size, tile.block_rows), (64, 1 | 2) | (128, 1)), "{}", row.symbol());
        }
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_matmul_sm90a_f16_b64_r1_n512_s3");
        assert_eq!(row.smem_bytes(), 3 * 72 * 1024 + 384 + 8 * 16 * 20 * 4);
        assert!(row.macros().contains(&("VARIANT_CONSUMER_WARPGROUPS", "2".to_owned())));
        let widest = rows.iter().find(|(_, tile)| (tile.block_size, tile.block_n) == (128, 256)).unwrap().0;
        assert_eq!(widest.smem_bytes(), 4 * 48 * 1024 + 384 + 8 * 16 * 40 * 4);
    }

    #[test]
    fn rows_that_gather() {
        let rows = rows(true);
        assert_eq!(rows.len(), 12);
        for (row, tile) in &rows {
            assert_eq!(row.source(), "bsr_matmul_gather_sm90a");
            assert!(row.expects().contains(&Expect::Contains("HMMA")));
            // A warp per block row, but eight at least.
            let warps = tile.block_rows.max(8);
            assert!(warps % tile.block_rows == 0 && row.threads() == 128 + 32 * warps, "{}", row.symbol());
            // A column in which every block row has a block fits into a stage.
            let blocks = tile.block_rows * tile.block_size * tile.block_size * 2;
            assert!(blocks <= BsrMatmulHopper::GATHERED_A_BYTES, "{}", row.symbol());
        }
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_matmul_gather_sm90a_f16_b16_r16_n128_s4");
        assert_eq!(row.smem_bytes(), 4 * 48 * 1024 + 8192 + 16 * 16 * 20 * 4);
        for (name, value) in [("VARIANT_CONSUMER_WARPGROUPS", "4"), ("VARIANT_BLOCK_K", "16")] {
            assert!(row.macros().contains(&(name, value.to_owned())), "{name}");
        }
    }
}
