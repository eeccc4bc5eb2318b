use super::BsrMatmulTile;
use super::family::{Family, Support, each_dtype};
use crate::{DType, Target};

/// Tiles of the BSR kernels for Hopper: persistent CTAs, one or two per SM, take tile after tile,
/// each some block rows of A times `block_n` columns of B. A producer warpgroup loads, consumer
/// warpgroups compute.
///
/// Blocks of 64 and 128 (`bsr_matmul_sm90a`): two consumer warpgroups have 64 rows each where the
/// tile has 128, else half of the columns. Blocks of 16 and 32 (`bsr_matmul_gather_sm90a`): each
/// consumer warp computes one block row, or with fewer than eight block rows half of its columns.
/// Where blocks are filled up with zeros (`bsr_matmul_filled_sm90a`), each of two consumer
/// warpgroups computes 64 rows.
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
    /// Whether small blocks are filled up with zeros to the 64 rows of a wgmma. The CTAs of a
    /// cluster then compute the same columns, each for its part of the block rows.
    pub filled: bool,
    /// CTAs of a cluster, 1 or 2: they compute neighbouring tiles of the same block rows and
    /// receive A by multicast.
    pub cluster: u32,
    /// CTAs that an SM holds at a time. With two, the CTAs of the next launch are there already
    /// when those of this one end.
    pub blocks_per_multiprocessor: u32,
    /// Whether blocks of A are multiplied transposed, in the order of an index of their block
    /// columns.
    pub a_transposed: bool,
    /// Whether B is column-major.
    pub b_column_major: bool,
}

const fn tile(block_size: u32, block_rows: u32, block_n: u32, stages: u32) -> BsrMatmulHopper {
    BsrMatmulHopper {
        dtype: DType::F16,
        block_size,
        block_rows,
        block_n,
        stages,
        filled: false,
        cluster: 1,
        blocks_per_multiprocessor: 1,
        a_transposed: false,
        b_column_major: false,
    }
}

/// The tile in CTAs that share an SM with another one.
const fn half(tile: BsrMatmulHopper) -> BsrMatmulHopper {
    BsrMatmulHopper { blocks_per_multiprocessor: 2, ..tile }
}

/// The tile in clusters of two CTAs.
const fn pair(tile: BsrMatmulHopper) -> BsrMatmulHopper {
    BsrMatmulHopper { cluster: 2, ..tile }
}

/// Small blocks filled up with zeros, in clusters that share B.
const fn filled(tile: BsrMatmulHopper) -> BsrMatmulHopper {
    BsrMatmulHopper { filled: true, ..pair(tile) }
}

/// Tiles by block size: as many accumulators as two warpgroups have registers for, and fewer for
/// few columns. The traffic into shared memory limits all of them: blocks of 64 take two block rows
/// that share B, small blocks 256 rows, the group of a pattern's plan. There are as many pipeline
/// stages as fit. Clusters of two share A where that was measured to be faster, or B where small
/// blocks are filled up with zeros.
const TILES: &[BsrMatmulHopper] = &[
    tile(16, 16, 128, 4),
    tile(16, 16, 64, 6),
    tile(32, 8, 128, 4),
    tile(32, 8, 64, 6),
    tile(64, 2, 256, 4),
    tile(64, 1, 256, 5),
    tile(64, 1, 128, 8),
    tile(128, 1, 256, 4),
    tile(128, 1, 128, 6),
    tile(128, 1, 64, 8),
    pair(tile(16, 16, 128, 4)),
    pair(tile(16, 16, 64, 6)),
    pair(tile(32, 8, 128, 4)),
    pair(tile(64, 2, 256, 4)),
    pair(tile(128, 1, 64, 8)),
    half(tile(64, 1, 128, 4)),
    pair(half(tile(128, 1, 64, 4))),
    filled(tile(32, 8, 128, 8)),
];

/// The tiles that are also compiled for a transposed A, for a column-major B, and for both.
const TRANSPOSED: &[BsrMatmulHopper] = &[
    tile(64, 2, 256, 4),
    tile(64, 1, 256, 5),
    tile(64, 1, 128, 8),
    tile(128, 1, 256, 4),
    tile(128, 1, 128, 6),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = BsrMatmulHopper> {
    let transposed = each_dtype(TRANSPOSED).flat_map(|(dtype, tile)| {
        [[true, false], [false, true], [true, true]].map(|[a_transposed, b_column_major]| {
            BsrMatmulHopper { dtype, a_transposed, b_column_major, ..tile }
        })
    });
    each_dtype(TILES)
        .map(|(dtype, tile)| BsrMatmulHopper { dtype, ..tile })
        .chain(transposed)
        .filter(move |_| target == Target::Sm90a)
}

impl BsrMatmulHopper {
    /// Depth of a stage along K for large blocks: the span of the swizzle, 128 bytes.
    const BLOCK_K: u32 = 64;
    /// Largest depth along K of the rows of B in a stage, for small blocks.
    const GATHERED_K: u32 = 128;
    /// Rows of a group of small block rows.
    const GROUP: u32 = 256;
    /// Bytes of the mbarriers, the announced tiles and the description of each stage for consumers.
    const EXTRA_BYTES: u32 = 1024;

    /// Whether blocks are small, and a CTA gathers the rows of B that any of its block rows needs.
    pub const fn gathers(&self) -> bool {
        self.block_size < Self::BLOCK_K
    }

    /// Block rows of a tile of small blocks, which is a group of the plan.
    pub const fn group_rows(block_size: u32) -> u32 {
        Self::GROUP / block_size
    }

    /// Largest number of block columns in a stage of the plan, for small blocks.
    pub const fn stage_columns(block_size: u32) -> u32 {
        Self::GATHERED_K / block_size
    }

    /// Largest number of blocks of A in a stage of the plan, for small blocks. A block column in
    /// which every row of a group has a block fits.
    pub const fn stage_blocks(block_size: u32) -> u32 {
        if block_size == 16 { 32 } else { 10 }
    }

    /// Whether a long tile may be computed in parts. A tile of two block rows of 64 may not,
    /// because the two cannot be cut at one common place.
    pub const fn splits(&self) -> bool {
        self.gathers() || self.block_rows == 1
    }

    /// Consumer warps, each with its own accumulators.
    pub const fn consumer_warps(&self) -> u32 {
        4 * self.warpgroups()
    }

    /// Depth along K of one copy.
    const fn block_k(&self) -> u32 {
        if self.gathers() { self.block_size } else { Self::BLOCK_K }
    }

    /// Pages of 16 rows × 64 columns in which a warp stages C: two, if it has the columns for them.
    const fn pages(&self) -> u32 {
        let rows = self.block_rows * self.block_size;
        if !self.gathers() && rows * self.block_n <= 64 * 128 { 1 } else { 2 }
    }

    /// Consumer warpgroups.
    const fn warpgroups(&self) -> u32 {
        match (self.gathers(), self.filled) {
            (true, false) if self.block_rows > 8 => self.block_rows / 4,
            _ => 2,
        }
    }

    /// The parameters that all BSR kernels share.
    pub const fn tile(&self) -> BsrMatmulTile {
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
        BsrMatmulTile {
            dtype,
            block_size,
            block_rows,
            block_n,
            block_k,
            cluster,
            a_transposed,
            b_column_major,
            tensor_maps: true,
        }
    }
}

impl Family for BsrMatmulHopper {
    fn source(&self) -> &'static str {
        match (self.gathers(), self.filled) {
            (true, true) => "bsr_matmul_filled_sm90a",
            (true, false) => "bsr_matmul_gather_sm90a",
            (false, _) => "bsr_matmul_sm90a",
        }
    }

    fn name(&self) -> String {
        let Self { dtype, block_size, block_rows, block_n, stages, cluster, .. } = self;
        let cluster = if *cluster > 1 { format!("_c{cluster}") } else { String::new() };
        // As the transposition flags of BLAS: A transposed, B column-major.
        let a = if self.a_transposed { "_ta" } else { "" };
        let b = if self.b_column_major { "_tb" } else { "" };
        format!("{dtype}_b{block_size}_r{block_rows}_n{block_n}_s{stages}{cluster}{a}{b}")
    }

    /// A launch of fewer tiles than multiprocessors has a CTA for each multiprocessor where two
    /// share one, so that the CTAs of the next launch find room for one on each.
    fn may_idle(&self) -> bool {
        self.blocks_per_multiprocessor > 1
    }

    /// Four warps per consumer warpgroup, and the producer warpgroup.
    fn warps(&self) -> u32 {
        4 * (self.warpgroups() + 1)
    }

    /// A ring of A and B tiles, mbarriers and the announced tiles, and the epilogue's staging of C
    /// in the space that is left. Each warp has one or two pages of 16 rows × 64 columns for TMA
    /// stores, where warpgroups compute, or 16 rows of f32 accumulators, 32 columns wide or at
    /// least 16; padding keeps rows in different banks.
    fn smem_bytes(&self) -> u32 {
        let element = self.dtype.size() as u32;
        let stage = if self.gathers() && !self.filled {
            let a = Self::stage_blocks(self.block_size) * self.block_size * self.block_size;
            (a + Self::GATHERED_K * self.block_n) * element
        } else {
            (self.block_rows * self.block_size + self.block_n) * self.block_k() * element
        };
        let warps = self.consumer_warps();
        let copied = !self.gathers() || self.filled;
        let pages = if copied { warps * self.pages() * 16 * 64 * element } else { 0 };
        let (wide, narrow) = (warps * 16 * (32 + 8) * 4, warps * 16 * (16 + 4) * 4);
        // An SM has 1 KiB more than a CTA can have, which each CTA takes for the system.
        let limit = (Target::Sm90a.smem_limit() + 1024) / self.blocks_per_multiprocessor - 1024;
        let ring = self.stages * stage + Self::EXTRA_BYTES;
        ring + if pages > 0 && ring + pages <= limit {
            pages
        } else if ring + wide <= limit {
            wide
        } else {
            narrow
        }
    }

    fn cluster(&self) -> u32 {
        self.cluster
    }

    fn counts_tiles(&self) -> bool {
        true
    }

    fn blocks_per_multiprocessor(&self) -> u32 {
        self.blocks_per_multiprocessor
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_BLOCK_SIZE", self.block_size);
        define("VARIANT_BLOCK_ROWS", self.block_rows);
        define("VARIANT_BLOCK_N", self.block_n);
        define("VARIANT_BLOCK_K", self.block_k());
        define("VARIANT_CONSUMER_WARPGROUPS", self.warpgroups());
        define("VARIANT_STAGES", self.stages);
        define("VARIANT_FILLED", self.filled.into());
        define("VARIANT_CLUSTER", self.cluster);
        define("VARIANT_A_TRANSPOSED", self.a_transposed.into());
        define("VARIANT_B_COLUMN_MAJOR", self.b_column_major.into());
        define("VARIANT_STAGE_BLOCKS", Self::stage_blocks(self.block_size));
        define("VARIANT_MIN_BLOCKS", self.blocks_per_multiprocessor);
    }

    fn contains(&self) -> &'static [&'static str] {
        if self.gathers() && !self.filled {
            &["HMMA", "LDSM", "UTMALDG", "UBLKCP", "USETMAXREG"]
        } else {
            &["HGMMA", "UTMALDG", "USETMAXREG"]
        }
    }

    fn supports(&self) -> Option<Support> {
        Some(self.tile().support())
    }

    fn profile_case(&self) -> Option<String> {
        self.tile().profile_case()
    }
}

#[cfg(test)]
#[path = "bsr_matmul_sm90a_tests.rs"]
mod tests;
