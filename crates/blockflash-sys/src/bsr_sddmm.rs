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

/// Tiles of `bsr_sddmm_sm90a.cu`: one block of threads per multiprocessor takes tile after tile, each as many neighbouring stored blocks of
/// a block row as 256 columns hold. One warpgroup copies, two compute: 64 rows each where blocks have 128, else half of the blocks.
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

impl BsrSddmmHopper {
    /// Columns of a tile, if all of its blocks are there: two warpgroups have no registers for more.
    const COLUMNS: u32 = 256;
    /// Depth of a stage along K: a row of the swizzle, 128 bytes.
    pub const BLOCK_K: u32 = 64;
    /// Bytes of barriers and announced tiles.
    const EXTRA_BYTES: u32 = 256;

    /// Blocks of a tile; the last one of a block row may have fewer.
    pub const fn blocks(&self) -> u32 {
        Self::COLUMNS / self.block_size
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
        &[Contains("HGMMA"), Contains("UTMALDG"), Contains("USETMAXREG"), Lacks("LDL"), Lacks("STL")]
    }
}

impl Row {
    /// The tiles of a kernel of the sampled product; `None` for the others.
    pub const fn bsr_sddmm_tile(&self) -> Option<BsrSddmmHopper> {
        match self.variant {
            Variant::BsrSddmmHopper(tile) => Some(tile),
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
        let rows: Vec<_> = manifest::all_rows()
            .iter()
            .filter_map(|row| Some((row, row.bsr_sddmm_tile()?)))
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
                assert!(tile.stages >= 3 && tile.blocks() * tile.block_size == 256, "{}", row.symbol());
                assert!(row.expects().contains(&Expect::Contains("HGMMA")));
                assert_eq!(row.bsr_tile(), None);
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
}
