use super::select::AttentionDecodeTile;
use super::{AttentionDecodeProblem, AttentionDecodeWorkspace};
use crate::attention::check_strides;
use crate::check::to_i32;
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;

/// Fewest and most keys of a split, as long as a sequence has at most [`MOST_SPLITS`].
const CHUNK: [usize; 2] = [128, 4096];
/// Splits of the longest sequences.
const MOST_SPLITS: usize = 256;
/// Key heads times splits of a sequence of medium length.
const HEADS_AND_SPLITS: usize = 128;

/// How the work of a call is divided. A sequence of `keys` keys has splits of `chunk` keys, a
/// multiple of 64 that follows from the sequence alone, so its bits depend on no other sequence:
/// the greater of `keys / splits`, but within `chunk_min..=chunk_max`, and of `keys / 256`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDecodePlan {
    /// Splits of a sequence of medium length.
    pub splits: usize,
    /// Fewest keys of a split.
    pub chunk_min: usize,
    /// Most keys of a split, unless there are 256 splits.
    pub chunk_max: usize,
    /// Splits that a sequence can have within the capacity.
    pub most_splits: usize,
    /// Rows of a tile that can be in use.
    pub partial_rows: usize,
    /// Splits of all row tiles of all heads that a call can have.
    pub items: usize,
}

impl AttentionDecodeProblem {
    /// Queries of a sequence times the heads that share a head of keys.
    pub(super) fn group_rows(&self) -> usize {
        let attention = &self.attention;
        attention.seqlen_q.saturating_mul(attention.num_heads_q / attention.num_heads_kv.max(1))
    }
}

/// Divides the work of a problem for a kernel that accepts it on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// more items than 32 bits count, [`Error::Unsupported`] if the kernel does not compute this
/// problem.
pub fn plan(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<AttentionDecodePlan> {
    fits(kernel, problem, gpu)?;
    planned(&tile_of::<AttentionDecodeProblem>(kernel, &gpu.compute_capability)?, problem)
}

/// Like [`plan`], for the tile of a kernel that is known to accept the problem.
fn planned(
    tile: &AttentionDecodeTile,
    problem: &AttentionDecodeProblem,
) -> Result<AttentionDecodePlan> {
    let (attention, cache) = (&problem.attention, &problem.cache);
    let queries = [attention.batch, attention.seqlen_q, attention.num_heads_q];
    let keys = [cache.pages, cache.page_size, cache.num_heads_kv];
    check_strides(&[
        ("q", attention.q, queries),
        ("o", attention.o, queries),
        ("cache.k", cache.k, keys),
        ("cache.v", cache.v, keys),
    ])?;
    let rows = (tile.rows as usize).max(1);
    let heads = attention.num_heads_kv.max(1);
    let [chunk_min, chunk_max] = CHUNK;
    let splits = (HEADS_AND_SPLITS / heads).max(1);
    let visited = match problem.pages {
        None => attention.seqlen_kv,
        Some(pages) => pages.capacity.saturating_mul(cache.page_size).min(attention.seqlen_kv),
    };
    // Splits begin at a multiple of 16 keys.
    let most_splits = most_splits(visited.next_multiple_of(16), splits);

    let group_rows = problem.group_rows();
    let tiles = attention.batch.saturating_mul(group_rows.div_ceil(rows));
    let tiles = attention.packed.map_or(tiles, |packed| {
        let all = packed.total_q.saturating_mul(attention.num_heads_q / heads).div_ceil(rows);
        tiles.min(all.saturating_add(attention.batch))
    });
    let items = tiles.saturating_mul(heads).saturating_mul(most_splits);
    to_i32("items", items)?;
    let partial_rows = rows.min(group_rows);
    Ok(AttentionDecodePlan { splits, chunk_min, chunk_max, most_splits, partial_rows, items })
}

/// The most splits of a sequence of at most `capacity` keys.
fn most_splits(capacity: usize, splits: usize) -> usize {
    let [chunk_min, chunk_max] = CHUNK;
    let most = if capacity <= chunk_max * splits {
        splits.min(capacity.div_ceil(chunk_min))
    } else {
        splits.max(capacity.div_ceil(chunk_max).min(MOST_SPLITS))
    };
    most.max(1)
}

/// Bytes of an [`AttentionDecodeWorkspace`] that a kernel needs for a problem that it accepts: for
/// each item its partial outputs and two numbers per row in f32, and a word; and the queries, if
/// they are turned.
///
/// # Errors
/// As [`plan`]; [`Error::TooLarge`] beyond the address space.
pub fn workspace_bytes(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<usize> {
    let plan = plan(kernel, problem, gpu)?;
    let bytes = plan.room(problem).and_then(|[sums, words]| {
        AttentionDecodeWorkspace::bytes_for(sums, words).filter(|&b| isize::try_from(b).is_ok())
    });
    let limit = isize::MAX as usize;
    bytes.ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
}

impl AttentionDecodePlan {
    /// Numbers of 32 bits, and words that count, of the workspace.
    fn room(&self, problem: &AttentionDecodeProblem) -> Option<[usize; 2]> {
        let attention = &problem.attention;
        let (mut sums, mut words) = (0usize, 0);
        if self.most_splits > 1 {
            words = self.items;
            let row = attention.head_dim.checked_add(2)?;
            sums = self.items.checked_mul(self.partial_rows)?.checked_mul(row)?;
        }
        if problem.rotary.is_some() {
            let elements = attention.o_shape().into_iter().try_fold(1, usize::checked_mul)?;
            let bytes = elements.checked_mul(attention.dtype.size())?;
            sums = sums.checked_next_multiple_of(4)?.checked_add(bytes.div_ceil(4))?;
        }
        Some([sums, words])
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
