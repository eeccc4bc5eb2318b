use crate::manifest::Variant;
use crate::{DType, Expect, Row};

/// Which neighbours of a matrix are neighbours in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// Those of a row.
    Row,
    /// Those of a column: the transposed matrix is row-major.
    Column,
}

impl Major {
    /// Both.
    pub const ALL: [Major; 2] = [Major::Row, Major::Column];

    /// `row` or `column`.
    pub const fn name(self) -> &'static str {
        match self {
            Major::Row => "row",
            Major::Column => "column",
        }
    }
}

/// What every kernel of the sampled product has: a tile is at most `blocks` neighbouring stored
/// blocks of a block row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrSddmmTile {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of the pattern.
    pub block_size: u32,
    /// Blocks of a tile; the last one of a block row may have fewer.
    pub blocks: u32,
    /// How A and B lie, in lines that tensor maps describe; `None`: either way, at any distance,
    /// starting anywhere.
    pub majors: Option<[Major; 2]>,
}

/// Tiles of `bsr_sddmm_sm80.cu`: one block of threads computes as many neighbouring stored blocks
/// of a block row as `columns` hold. Which way A and B lie it is told at each launch.
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
    /// Blocks per multiprocessor that the register allocation must allow.
    pub min_blocks: u32,
}

/// Tiles of `bsr_sddmm_sm90a.cu`: one block of threads per multiprocessor takes tile after tile,
/// each as many neighbouring stored blocks of a block row as 256 columns hold. One warpgroup
/// copies, two compute: 64 rows each where blocks have 128, else half of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrSddmmHopper {
    /// Element type of A and B.
    pub dtype: DType,
    /// Rows and columns of a block of the pattern: 64 or 128.
    pub block_size: u32,
    /// How A lies in memory.
    pub a: Major,
    /// How B lies in memory.
    pub b: Major,
    /// Pipeline stages in shared memory.
    pub stages: u32,
}

impl BsrSddmm {
    /// What it has in common with other kernels of the sampled product.
    pub const fn tile(&self) -> BsrSddmmTile {
        let Self { dtype, block_size, columns, .. } = *self;
        BsrSddmmTile { dtype, block_size, blocks: columns / block_size, majors: None }
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(&self) -> String {
        let Self { dtype, block_size, columns, block_k, warps_m, warps_n, stages, .. } = self;
        format!("{dtype}_b{block_size}_n{columns}_k{block_k}_w{warps_m}x{warps_n}_s{stages}")
    }

    /// Shared memory in bytes: a ring of stages of A and B.
    pub(crate) const fn smem_bytes(&self) -> u32 {
        self.stages * (self.block_size + self.columns) * self.block_k * self.dtype.size() as u32
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(&self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_DTYPE", self.dtype as u32);
        number("VARIANT_SDDMM_BLOCK_SIZE", self.block_size);
        number("VARIANT_SDDMM_COLUMNS", self.columns);
        number("VARIANT_BLOCK_K", self.block_k);
        number("VARIANT_WARPS_M", self.warps_m);
        number("VARIANT_WARPS_N", self.warps_n);
        number("VARIANT_STAGES", self.stages);
        number("VARIANT_MIN_BLOCKS", self.min_blocks);
    }
}

impl BsrSddmmHopper {
    /// Columns of a tile, if all of its blocks are there: two warpgroups have no registers for
    /// more.
    const COLUMNS: u32 = 256;
    /// Depth of a stage along K: a row of the swizzle, 128 bytes.
    pub const BLOCK_K: u32 = 64;
    /// Bytes of barriers and announced tiles.
    const EXTRA_BYTES: u32 = 256;

    /// Blocks of a tile; the last one of a block row may have fewer.
    pub const fn blocks(&self) -> u32 {
        Self::COLUMNS / self.block_size
    }

    /// What it has in common with other kernels of the sampled product.
    pub const fn tile(&self) -> BsrSddmmTile {
        let Self { dtype, block_size, a, b, .. } = *self;
        BsrSddmmTile { dtype, block_size, blocks: self.blocks(), majors: Some([a, b]) }
    }

    /// What distinguishes it in symbols.
    pub(crate) fn name(&self) -> String {
        let Self { dtype, block_size, a, b, stages } = self;
        format!("{dtype}_b{block_size}_{}_{}_s{stages}", a.name(), b.name())
    }

    /// Warps per block of threads: those of two warpgroups that compute and of the one that copies.
    pub(crate) const fn warps(&self) -> u32 {
        12
    }

    /// Shared memory in bytes: a ring of stages of A and B, barriers and the announced tiles.
    pub(crate) const fn smem_bytes(&self) -> u32 {
        let stage = (self.block_size + Self::COLUMNS) * Self::BLOCK_K * self.dtype.size() as u32;
        self.stages * stage + Self::EXTRA_BYTES
    }

    /// Calls `number` with the name and the value of each preprocessor definition.
    pub(crate) fn macros(&self, mut number: impl FnMut(&'static str, u32)) {
        number("VARIANT_DTYPE", self.dtype as u32);
        number("VARIANT_SDDMM_BLOCK_SIZE", self.block_size);
        number("VARIANT_SDDMM_BLOCKS", self.blocks());
        number("VARIANT_A_COLUMN_MAJOR", (self.a == Major::Column).into());
        number("VARIANT_B_COLUMN_MAJOR", (self.b == Major::Column).into());
        number("VARIANT_STAGES", self.stages);
        number("VARIANT_MIN_BLOCKS", 1);
    }

    pub(crate) const fn expects(&self) -> &'static [Expect] {
        use Expect::{Contains, Lacks};
        &[
            Contains("HGMMA"),
            Contains("UTMALDG"),
            Contains("USETMAXREG"),
            Lacks("LDL"),
            Lacks("STL"),
        ]
    }
}

impl Row {
    /// What the kernels of the sampled product share; `None` for the others.
    pub const fn bsr_sddmm_tile(&self) -> Option<BsrSddmmTile> {
        match self.variant {
            Variant::BsrSddmm(tile) => Some(tile.tile()),
            Variant::BsrSddmmHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Target, manifest};
    use std::collections::HashSet;

    #[test]
    fn every_layout_has_its_row() {
        let rows: Vec<_> = manifest::rows()
            .iter()
            .filter_map(|row| match row.variant {
                Variant::BsrSddmmHopper(tile) => Some((row, tile)),
                _ => None,
            })
            .inspect(|(row, tile)| {
                assert_eq!(
                    (row.target, row.source(), row.threads()),
                    (Target::Sm90a, "bsr_sddmm_sm90a", 384)
                );
                assert!(
                    row.smem_bytes() <= row.target.smem_limit(),
                    "{}: {}",
                    row.symbol(),
                    row.smem_bytes()
                );
                // Three stages at least: one is multiplied, one read to the end, one on its way.
                assert!(
                    tile.stages >= 3 && tile.blocks() * tile.block_size == 256,
                    "{}",
                    row.symbol()
                );
                assert!(row.expects().contains(&Expect::Contains("HGMMA")));
                assert_eq!(row.bsr_tile(), None);
                assert_eq!(row.bsr_sddmm_tile(), Some(tile.tile()));
            })
            .collect();
        let kinds: HashSet<_> =
            rows.iter().map(|(_, tile)| (tile.dtype, tile.block_size, tile.a, tile.b)).collect();
        assert_eq!((rows.len(), kinds.len()), (16, 16));
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_sddmm_sm90a_f16_b64_row_row_s5");
        assert_eq!(row.smem_bytes(), 5 * 40 * 1024 + 256);
        let macros = rows[2].0.macros();
        for (name, value) in [("VARIANT_A_COLUMN_MAJOR", "1"), ("VARIANT_B_COLUMN_MAJOR", "0")] {
            assert!(macros.contains(&(name, value.to_owned())), "{name}");
        }
    }

    #[test]
    fn one_row_for_every_layout() {
        let rows: Vec<_> = manifest::rows()
            .iter()
            .filter_map(|row| match row.variant {
                Variant::BsrSddmm(tile) => Some((row, tile)),
                _ => None,
            })
            .collect();
        for (row, tile) in &rows {
            assert_eq!((row.source(), row.threads(), tile.columns), ("bsr_sddmm_sm80", 128, 128));
            assert!(row.smem_bytes() <= 99 << 10, "{}: {}", row.symbol(), row.smem_bytes());
            let shared = row.bsr_sddmm_tile().unwrap();
            assert_eq!((shared.majors, shared.blocks * shared.block_size), (None, tile.columns));
            assert!(row.expects().contains(&Expect::Contains("LDGSTS")));
        }
        let kinds: HashSet<_> =
            rows.iter().map(|(row, tile)| (row.target, tile.dtype, tile.block_size)).collect();
        assert_eq!((rows.len(), kinds.len()), (5 * 2 * 4, 5 * 2 * 4));
        let (row, _) = rows[0];
        assert_eq!(row.symbol(), "blockflash_bsr_sddmm_sm80_f16_b16_n128_k64_w1x4_s2");
        assert_eq!(row.smem_bytes(), 2 * 18 * 1024);
        assert!(row.macros().contains(&("VARIANT_SDDMM_COLUMNS", "128".to_owned())));
    }
}
