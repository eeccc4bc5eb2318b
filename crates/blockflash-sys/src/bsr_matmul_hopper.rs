use crate::tile::BsrTile;
use crate::{DType, Expect, Target};

/// Tiles of the BSR kernels for Hopper: one block of threads per multiprocessor takes tile after
/// tile, each some block rows of A times `block_n` columns of B. One warpgroup copies, the others
/// compute.
///
/// Blocks of 64 and 128 (`bsr_matmul_sm90a.cu`): two warpgroups compute, 64 rows each where the
/// tile has 128, else half of the columns. Blocks of 16 and 32 (`bsr_matmul_gather_sm90a.cu`): each
/// warp computes one block row, or with fewer than eight half of its columns. Where they are filled
/// with zeros (`bsr_matmul_filled_sm90a.cu`), each of two warpgroups computes 64 rows.
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
    /// Whether small blocks are filled up with zeros to 64 rows, for instructions that multiply so
    /// many. The blocks of threads of a cluster then have the columns of all of them, and a part of
    /// the block rows each.
    pub filled: bool,
    /// Blocks of threads that compute neighbouring tiles of the same block rows, to all of which A
    /// comes at once: 1 or 2.
    pub cluster: u32,
    /// Whether blocks of A are multiplied transposed, in the order of an index of their block
    /// columns.
    pub a_transposed: bool,
    /// Whether columns of B are contiguous instead of rows.
    pub b_column_major: bool,
}

impl BsrMatmulHopper {
    /// Depth of a stage along K where blocks are no smaller: a row of the swizzle, 128 bytes.
    const BLOCK_K: u32 = 64;
    /// Depth along K of what a stage holds of B at most, where blocks are smaller.
    const GATHERED_K: u32 = 128;
    /// Rows of a group of block rows there.
    const GROUP: u32 = 256;
    /// Bytes of barriers, announced tiles and what consumers need to know of stages.
    const EXTRA_BYTES: u32 = 1024;

    /// Whether blocks are small, and many block rows gather the rows of B that any of them needs.
    pub const fn gathers(&self) -> bool {
        self.block_size < Self::BLOCK_K
    }

    /// Block rows of a tile there, a group of the plan.
    pub const fn group_rows(block_size: u32) -> u32 {
        Self::GROUP / block_size
    }

    /// Most block columns of a stage of the plan there.
    pub const fn stage_columns(block_size: u32) -> u32 {
        Self::GATHERED_K / block_size
    }

    /// Most blocks of A of a stage of the plan there. A block column in which every row of a group
    /// has a block fits.
    pub const fn stage_blocks(block_size: u32) -> u32 {
        if block_size == 16 { 32 } else { 10 }
    }

    /// Whether a long tile may be computed in parts. Two block rows are cut nowhere at once.
    pub const fn splits(&self) -> bool {
        self.gathers() || self.block_rows == 1
    }

    /// Warps that compute, each with its own sums of a tile.
    pub const fn consumer_warps(&self) -> u32 {
        4 * self.warpgroups()
    }

    /// Name of the folder in `kernels/` that holds the source.
    pub(crate) const fn source(&self) -> &'static str {
        match (self.gathers(), self.filled) {
            (true, true) => "bsr_matmul_filled_sm90a",
            (true, false) => "bsr_matmul_gather_sm90a",
            (false, _) => "bsr_matmul_sm90a",
        }
    }

    /// Depth along K that is copied at once.
    const fn block_k(&self) -> u32 {
        if self.gathers() { self.block_size } else { Self::BLOCK_K }
    }

    /// Warpgroups that compute.
    const fn warpgroups(&self) -> u32 {
        match (self.gathers(), self.filled) {
            (true, false) if self.block_rows > 8 => self.block_rows / 4,
            _ => 2,
        }
    }

    /// What it has in common with other BSR kernels.
    pub const fn tile(&self) -> BsrTile {
        let Self {
            dtype,
            block_size,
            block_rows,
            block_n,
            cluster,
            a_transposed,
            b_column_major,
            ..
        } = *self;
        let block_k = self.block_k();
        BsrTile {
            dtype,
            block_size,
            block_rows,
            block_n,
            block_k,
            cluster,
            a_transposed,
            b_column_major,
        }
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(&self) -> String {
        let Self { dtype, block_size, block_rows, block_n, stages, cluster, .. } = self;
        let cluster = if *cluster > 1 { format!("_c{cluster}") } else { String::new() };
        let a = if self.a_transposed { "_ta" } else { "" };
        let b = if self.b_column_major { "_tb" } else { "" };
        format!("{dtype}_b{block_size}_r{block_rows}_n{block_n}_s{stages}{cluster}{a}{b}")
    }

    /// Warps per block of threads: four per warpgroup, and those of the one that copies.
    pub(crate) const fn warps(&self) -> u32 {
        4 * (self.warpgroups() + 1)
    }

    /// Shared memory in bytes: a ring of A and B tiles, barriers and the announced tiles, and what
    /// is left up to some size for C on its way to memory. That is per warp two pages of 16 rows ×
    /// 64 columns for tensor copies, where warpgroups compute, or 16 rows of f32 accumulators, 32
    /// columns wide or at least 16; a few more keep rows in different banks.
    pub(crate) const fn smem_bytes(&self) -> u32 {
        let element = self.dtype.size() as u32;
        let stage = if self.gathers() && !self.filled {
            let a = Self::stage_blocks(self.block_size) * self.block_size * self.block_size;
            (a + Self::GATHERED_K * self.block_n) * element
        } else {
            (self.block_rows * self.block_size + self.block_n) * self.block_k() * element
        };
        let warps = self.consumer_warps();
        let pages = if self.gathers() && !self.filled { 0 } else { warps * 2 * 16 * 64 * element };
        let (wide, narrow) = (warps * 16 * (32 + 8) * 4, warps * 16 * (16 + 4) * 4);
        let (ring, limit) = (self.stages * stage + Self::EXTRA_BYTES, Target::Sm90a.smem_limit());
        ring + if pages > 0 && ring + pages <= limit {
            pages
        } else if ring + wide <= limit {
            wide
        } else {
            narrow
        }
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
        number("VARIANT_FILLED", self.filled.into());
        number("VARIANT_CLUSTER", self.cluster);
        number("VARIANT_A_TRANSPOSED", self.a_transposed.into());
        number("VARIANT_B_COLUMN_MAJOR", self.b_column_major.into());
        number("VARIANT_STAGE_BLOCKS", Self::stage_blocks(self.block_size));
        number("VARIANT_MIN_BLOCKS", 1);
    }

    pub(crate) const fn expects(&self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        if self.gathers() && !self.filled {
            &[
                Contains("HMMA"),
                Contains("LDSM"),
                Contains("UTMALDG"),
                Contains("UBLKCP"),
                Contains("USETMAXREG"),
                Lacks("LDL"),
                Lacks("STL"),
            ]
        } else {
            &[
                Contains("HGMMA"),
                Contains("UTMALDG"),
                Contains("USETMAXREG"),
                Lacks("LDL"),
                Lacks("STL"),
            ]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Row;
    use crate::manifest::{self, Variant};

    fn rows(source: &str) -> Vec<(&'static Row, BsrMatmulHopper)> {
        let rows = manifest::rows().iter().filter_map(|row| match row.variant {
            Variant::BsrMatmulHopper(tile) if row.source() == source => Some((row, tile)),
            _ => None,
        });
        rows.inspect(|(row, tile)| {
            assert_eq!((row.target, row.bsr_tile()), (Target::Sm90a, Some(tile.tile())));
            assert!(
                row.smem_bytes() <= row.target.smem_limit(),
                "{}: {}",
                row.symbol(),
                row.smem_bytes()
            );
            // Three stages at least: one is multiplied, one read to the end, one on its way.
            assert!(tile.stages >= 3, "{}", row.symbol());
        })
        .collect()
    }

    #[test]
    fn hopper_rows() {
        let rows = rows("bsr_matmul_sm90a");
        assert_eq!(rows.len(), 2 * (8 + 3 * 5));
        for (row, tile) in &rows {
            assert_eq!(row.threads(), 384);
            assert!(row.expects().contains(&Expect::Contains("HGMMA")));
            assert!(
                matches!((tile.block_size, tile.block_rows), (64, 1 | 2) | (128, 1)),
                "{}",
                row.symbol()
            );
        }
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_matmul_sm90a_f16_b64_r2_n256_s4");
        assert_eq!(row.smem_bytes(), 4 * 48 * 1024 + 1024 + 8 * 2 * 16 * 64 * 2);
        assert!(row.macros().contains(&("VARIANT_CONSUMER_WARPGROUPS", "2".to_owned())));
        for (row, tile) in &rows {
            let suffix = ["", "_tb", "_ta", "_ta_tb"]
                [usize::from(tile.a_transposed) * 2 + usize::from(tile.b_column_major)];
            let cluster = if tile.cluster > 1 { "_c2" } else { "" };
            assert!(
                row.symbol().ends_with(&format!("_s{}{cluster}{suffix}", tile.stages)),
                "{}",
                row.symbol()
            );
            assert_eq!(row.cluster(), (tile.cluster > 1).then_some([2, 1, 1]), "{}", row.symbol());
            let flags = [
                ("VARIANT_A_TRANSPOSED", tile.a_transposed),
                ("VARIANT_B_COLUMN_MAJOR", tile.b_column_major),
            ];
            for (name, flag) in flags {
                assert!(row.macros().contains(&(name, u32::from(flag).to_string())), "{name}");
            }
            // One box holds all columns of a column-major B.
            assert!(!tile.b_column_major || tile.block_n <= 256, "{}", row.symbol());
        }
        let widest =
            rows.iter().find(|(_, tile)| (tile.block_size, tile.block_n) == (128, 256)).unwrap().0;
        assert_eq!(widest.smem_bytes(), 4 * 48 * 1024 + 1024 + 8 * 2 * 16 * 64 * 2);
    }

    #[test]
    fn rows_that_gather() {
        let rows = rows("bsr_matmul_gather_sm90a");
        assert_eq!(rows.len(), 2 * 7);
        for (row, tile) in &rows {
            assert!(!tile.a_transposed && !tile.b_column_major, "{}", row.symbol());
            assert!(row.expects().contains(&Expect::Contains("HMMA")));
            // A warp per block row, but eight at least.
            let warps = tile.block_rows.max(8);
            assert!(
                warps % tile.block_rows == 0 && row.threads() == 128 + 32 * warps,
                "{}",
                row.symbol()
            );
            assert_eq!(tile.block_rows, BsrMatmulHopper::group_rows(tile.block_size));
            assert!(
                BsrMatmulHopper::stage_blocks(tile.block_size) >= tile.block_rows,
                "{}",
                row.symbol()
            );
        }
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_matmul_gather_sm90a_f16_b16_r16_n128_s4");
        assert_eq!(row.smem_bytes(), 4 * 48 * 1024 + 1024 + 16 * 16 * 20 * 4);
        for (name, value) in [("VARIANT_CONSUMER_WARPGROUPS", "4"), ("VARIANT_BLOCK_K", "16")] {
            assert!(row.macros().contains(&(name, value.to_owned())), "{name}");
        }
    }

    #[test]
    fn rows_filled_with_zeros() {
        let rows = rows("bsr_matmul_filled_sm90a");
        assert_eq!(rows.len(), 2);
        for (row, tile) in &rows {
            assert!(tile.gathers() && tile.filled && tile.splits(), "{}", row.symbol());
            // Two warpgroups in each of two blocks multiply 64 rows each: the group of the plan.
            assert_eq!((row.threads(), row.cluster()), (384, Some([2, 1, 1])), "{}", row.symbol());
            assert_eq!(tile.block_rows, BsrMatmulHopper::group_rows(tile.block_size));
            assert!(row.expects().contains(&Expect::Contains("HGMMA")));
            assert!(row.macros().contains(&("VARIANT_FILLED", "1".to_owned())));
        }
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_matmul_filled_sm90a_f16_b32_r8_n128_s8_c2");
        // Half of 256 rows and all of 256 columns, 32 deep.
        assert_eq!(row.smem_bytes(), 8 * (128 + 256) * 32 * 2 + 1024 + 8 * 2 * 16 * 64 * 2);
    }
}
