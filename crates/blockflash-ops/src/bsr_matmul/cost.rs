//! How long kernels are estimated to take, in elements that a multiprocessor brings into shared
//! memory: what selection compares.

use super::BsrProblem;
use super::parts::MOST_PARTS;
use blockflash_safe::CudaProperties;
use blockflash_sys::Row;
use blockflash_sys::manifest::{BsrMatmulHopper, Variant};

/// What writing an element of C costs: so much as that many elements of A or B.
const COST_OF_C: f64 = 3.2;
/// The same where tensor copies write it.
const COST_OF_COPIED_C: f64 = 2.2;
/// What adding the sums of a part costs per element of C.
const COST_OF_SUM: f64 = 2.0;
/// What a tile of several parts costs beside: until one multiprocessor sees what others have left.
const COST_OF_PARTS: f64 = 150_000.0;
/// Columns of C that are computed before the next ones: `BsrTile` in `bsr_tiles.cuh`.
const PANEL_N: usize = 1024;
/// What part of the cost of A is saved where L2 need not deliver it: it still has to be written to
/// shared memory.
const COST_SAVED_BY_SHARING: f64 = 0.5;
/// What a launch in clusters costs: their blocks wait for one another at both ends.
const COST_OF_CLUSTERS: f64 = 20_000.0;
/// What a multiply-add of kernels that gather small blocks costs at least: dense patterns keep
/// their tensor cores busy.
const COST_OF_PRODUCT: f64 = 0.024;
/// The same for warpgroups: as much as copying a whole tile of 128 × 256, where nothing is gained
/// by sharing A.
const COST_OF_WARPGROUP_PRODUCT: f64 = 0.0117;
/// What all this costs where blocks are filled with zeros, one by one and a block column at a time:
/// so many times as much.
const COST_OF_FILLING: f64 = 1.3;
/// Rows that a warpgroup multiplies, those without a block filled with zeros.
const WARPGROUP_ROWS: usize = 64;
/// What fetching the blocks of A for small ones costs, in columns of C.
const COLUMNS_OF_A: usize = 16;
/// What an element costs that a portable kernel brings into shared memory.
const COST_OF_PORTABLE: f64 = 1.4;
/// Columns of a wide portable tile for small blocks.
const PORTABLE_BLOCK_N: usize = 256;

/// Estimated time of a kernel for Hopper. What flows into shared memory binds them: the blocks of
/// A, and the rows of B that they meet, which block rows of one tile share where both have a block.
/// Tiles of a cluster share A. While tiles are few, the multiprocessors with most of them decide;
/// many tiles spread evenly, but for half a round at the end. A tile much longer than the others
/// decides alone, and comes late in the last panel of columns. With a workspace long tiles may be
/// computed in parts: how many the longest should have is the second number.
pub(super) fn hopper_time(
    kernel: &BsrMatmulHopper,
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> (f64, usize) {
    let (tile, filled) = (kernel.tile(), kernel.filled);
    let [block_size, block_rows, block_n] =
        [tile.block_size, tile.block_rows, tile.block_n].map(|size| size as usize);
    let (rows, cols) = (problem.m.div_ceil(block_size), problem.k.div_ceil(block_size));
    let density = (problem.nnz_blocks as f64 / (rows as f64 * cols as f64).max(1.0)).min(1.0);
    let of_longest_row = problem
        .longest_row
        .map_or(density, |blocks| (blocks as f64 / cols.max(1) as f64).clamp(density, 1.0));
    // Blocks are filled with zeros by clusters that share B instead, which is in what that costs.
    let sharers =
        if filled { 1 } else { problem.n.div_ceil(block_n).clamp(1, tile.cluster as usize) };
    let saved = COST_SAVED_BY_SHARING * (1.0 - 1.0 / sharers as f64);
    // Of a tile with a block row of this density, and others of the mean.
    let depth = |of_first: f64| {
        let shared = 1.0 - (1.0 - of_first) * (1.0 - density).powi(tile.block_rows as i32 - 1);
        let a = (of_first + density * (block_rows - 1) as f64) * block_size as f64;
        let copied = (a * (1.0 - saved) + shared * block_n as f64) * block_size as f64;
        // Rows of the tile that a column of blocks is multiplied with, at which cost, and how many
        // columns count.
        let (cost, multiplied, columns) = match block_size {
            _ if filled => {
                let rows = WARPGROUP_ROWS / block_size;
                let has_some = 1.0 - (1.0 - density).powi(rows as i32);
                (COST_OF_WARPGROUP_PRODUCT, has_some * (block_rows * block_size) as f64, block_n)
            }
            ..64 => (COST_OF_PRODUCT, a, block_n + COLUMNS_OF_A),
            _ => (COST_OF_WARPGROUP_PRODUCT, a, block_n),
        };
        let multiplied = cost * multiplied * (block_size * columns) as f64;
        cols as f64 * copied.max(multiplied) * if filled { COST_OF_FILLING } else { 1.0 }
    };
    let mean = depth(density);
    let longest = match problem.longest_group {
        Some(group) if block_size < 64 => mean * group.max(1.0),
        _ => depth(of_longest_row),
    };
    let copies_c = (block_size >= 64 || filled) && problem.has_plain_output();
    let elements = (block_rows * block_size * block_n) as f64;
    let written = elements * if copies_c { COST_OF_COPIED_C } else { COST_OF_C };
    let in_parts = |depth: f64, parts: f64| {
        let added =
            if parts > 1.0 { COST_OF_PARTS + (parts - 1.0) * COST_OF_SUM * elements } else { 0.0 };
        depth / parts + written + added
    };
    let tiles = rows.div_ceil(block_rows) as f64 * tile.tiles_n(problem.n as u64) as f64;
    let before_last_panel = 1.0 - 1.0 / problem.n.div_ceil(PANEL_N).max(1) as f64;
    let clusters = if tile.cluster > 1 { COST_OF_CLUSTERS } else { 0.0 };
    // The longest tile in so many parts, of which a tile of the mean has fewer.
    let time = |parts: usize| {
        let of_mean = if parts == 1 { 1.0 } else { (parts as f64 * mean / longest).ceil() };
        let rounds = tiles * of_mean / f64::from(gpu.multiprocessors.max(1));
        let rounds = if rounds <= 4.0 { rounds.ceil() } else { rounds + 0.5 };
        let all = rounds * in_parts(mean, of_mean);
        clusters + all.max(before_last_panel * all + in_parts(longest, parts as f64))
    };
    let most = if kernel.splits() && problem.workspace && longest > 0.0 { MOST_PARTS } else { 1 };
    (2..=most)
        .map(|parts| (time(parts), parts))
        .fold((time(1), 1), |a, b| if b.0 < a.0 { b } else { a })
}

/// Parts in which a row computes its longest tile if there is memory for their sums.
pub(super) fn parts(row: &Row, problem: &BsrProblem, gpu: &CudaProperties) -> usize {
    match &row.variant {
        Variant::BsrMatmulHopper(kernel) => hopper_time(kernel, problem, gpu).1,
        _ => 1,
    }
}

/// Whether a kernel for Hopper of this estimated time is worth its large tiles. For small blocks
/// few of them may leave most multiprocessors idle, where one block row per tile, each with its own
/// rows of B, keeps all of them busy.
pub(super) fn pays(time: f64, problem: &BsrProblem, gpu: &CudaProperties) -> bool {
    problem.block_size >= 64 || time <= portable_time(problem, gpu)
}

/// Estimated time of a portable kernel for small blocks, in the same unit.
fn portable_time(problem: &BsrProblem, gpu: &CudaProperties) -> f64 {
    let block = problem.block_size as f64;
    let copied = |blocks: usize, columns: usize| blocks as f64 * block * (block + columns as f64);
    let written = problem.m as f64 * problem.n as f64;
    let all = COST_OF_PORTABLE * copied(problem.nnz_blocks, problem.n) + COST_OF_C * written;
    let longest = copied(problem.longest_row.unwrap_or(0), problem.n.min(PORTABLE_BLOCK_N));
    (all / f64::from(gpu.multiprocessors.max(1))).max(COST_OF_PORTABLE * longest)
}
