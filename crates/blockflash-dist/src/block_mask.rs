use crate::band::Band;
use crate::grid::Grid;
use crate::mask_sizes::Sizes;
use crate::plan::{PARTS, Plan};
use crate::{Density, Error, Result};
use blockflash_ops::{AttentionProblem, BlockMaskSizes};
use std::fmt;
use std::sync::Arc;

/// A block mask whose rows are held by several ranks.
///
/// Each rank has the lists of its own queries: which blocks of the keys of the whole sequence they
/// visit. The ranks tell each other what they need when the mask is made, and only blocks of keys
/// that some list of a rank visits travel to it. The lists of all heads that a rank computes are
/// taken together there, those of the batch entries are not.
///
/// ```
/// use blockflash_dist::{Communicator, DistributedBlockMask, Memory, Result, Scheme, Shard};
/// use blockflash_ops::{Align, BlockGeometry, BlockMask, Device, Mask};
/// use std::time::Duration;
///
/// fn rank(comm: &Memory) -> Result<()> {
///     let shard = Shard::new(4096, comm.world(), comm.rank())?.in_blocks(64, 64)?;
///     // Or lists of this rank's queries that it has chosen itself.
///     let whole = BlockGeometry::new(4096, 4096, 64, 64)?;
///     let window = BlockMask::window(whole, Some(3), Some(0), Align::TopLeft)?;
///     let lists = shard.block_mask(&window)?;
///
///     let scheme = Scheme { heads: 1, keys: 2 };
///     let mask = DistributedBlockMask::new(&lists, Mask::causal(), shard, scheme, comm)?;
///     assert!(mask.density().keys < 0.2, "{mask}");
///     Ok(())
/// }
///
/// let ranks = Memory::group(&Device::cpu(), 2, Duration::from_secs(10))?;
/// std::thread::scope(|threads| {
///     for comm in ranks {
///         threads.spawn(move || rank(&comm).unwrap());
///     }
/// });
/// # Ok::<(), blockflash_dist::Error>(())
/// ```
#[derive(Debug)]
pub struct DistributedBlockMask {
    pub(crate) sizes: Sizes,
    pub(crate) id: u64,
    pub(crate) density: Density,
    /// Parts of the heads of which there are lists.
    pub(crate) parts: usize,
    pub(crate) plans: Arc<[Plan]>,
}

impl DistributedBlockMask {
    /// How much of the work of a dense call is left on this rank, for a
    /// [`Workload`](crate::Workload).
    pub fn density(&self) -> Density {
        self.density
    }

    /// Equal for equal lists on all ranks.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn plans(&self) -> Arc<[Plan]> {
        self.plans.clone()
    }

    /// Whether lists of parts of the heads are there, as a call of this many heads of keys gathers
    /// them.
    pub(crate) fn is_in_parts(&self, heads_kv: usize) -> bool {
        self.sizes.heads == 1 || self.parts == PARTS && heads_kv.is_multiple_of(PARTS)
    }

    /// The sizes for a call that the mask fits.
    pub(crate) fn fits(
        &self,
        local: &AttentionProblem,
        grid: &Grid,
        band: Band,
    ) -> Result<BlockMaskSizes> {
        let Sizes { batch, heads, geometry, mask, .. } = self.sizes;
        let error =
            |what, found: String, expected: String| Err(Error::BlockMask { what, found, expected });
        if self.sizes.grid != *grid {
            let text = |grid: &Grid| format!("{:?}, {}", grid.shard, grid.scheme);
            return error("rows and scheme", text(&self.sizes.grid), text(grid));
        }
        if self.sizes.band != band {
            return error("token mask", format!("{mask:?}"), format!("{:?}", local.scores.mask));
        }
        let [heads_q, heads_kv] = [local.num_heads_q, local.num_heads_kv];
        if ![1, heads_kv, heads_q].contains(&heads) {
            return error("heads", heads.to_string(), format!("1, {heads_kv} or {heads_q}"));
        }
        if ![1, local.batch].contains(&batch) {
            return error("batch entries", batch.to_string(), format!("1 or {}", local.batch));
        }
        let [block_q, block_kv] = [geometry.block_q() as u32, geometry.block_kv() as u32];
        let [batch, heads] = [batch as u32, heads as u32];
        Ok(BlockMaskSizes { block_q, block_kv, batch, heads, packed_rows: None, bits: false })
    }
}

impl fmt::Display for DistributedBlockMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { grid, geometry, .. } = self.sizes;
        write!(
            f,
            "rank {} of {}, {}, blocks of {} × {}: visits {:.2} % of the pairs, for which {:.2} % \
             of the keys of other ranks come",
            grid.shard.rank(),
            grid.shard.world(),
            grid.scheme,
            geometry.block_q(),
            geometry.block_kv(),
            self.density.pairs * 100.0,
            self.density.keys * 100.0
        )
    }
}
