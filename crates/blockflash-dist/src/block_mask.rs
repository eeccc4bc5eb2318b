use crate::agree::agree;
use crate::band::Band;
use crate::block_exchange::BlockMaskExchange;
use crate::exchange::exchange_lists;
use crate::gathered::PARTS;
use crate::grid::Grid;
use crate::plan::Plan;
use crate::problem::mask_arguments;
use crate::{Communicator, Density, Error, Result, Scheme, Shard};
use blockflash_ops::{AttentionProblem, BlockGeometry, BlockMask, BlockMaskSizes, Mask};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
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

/// What the ranks have in common, and the place of this one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) grid: Grid,
    pub(crate) mask: Mask,
    pub(crate) band: Band,
    /// Of the whole sequence.
    pub(crate) geometry: BlockGeometry,
    pub(crate) batch: usize,
    /// Of the mask, on all ranks of a group.
    pub(crate) heads: usize,
}

impl DistributedBlockMask {
    /// Exchanges what the lists need, with all ranks at the same time, and waits for it.
    ///
    /// `lists` is on the CPU: the blocks of this rank's rows × the keys of the whole sequence, so
    /// its lengths are the rows of `shard` and [`Shard::seqlen`]; see [`Shard::block_mask`]. It has
    /// 1 head, as many as q or as many as k. `shard` is cut between its blocks
    /// ([`Shard::in_blocks`]). `mask` is the token mask of the calls, which decides pair by pair
    /// within the blocks; where keys are divided it is full or causal. Blocks that it hides do not
    /// count as visited. The gradients on GPUs need no [transpose](BlockMask::with_transpose) of
    /// the lists; it is made here.
    ///
    /// # Errors
    /// [`Error::BlockMask`], [`Error::Scheme`], [`Error::Unsupported`] and [`Error::Size`] for what
    /// does not fit; [`Error::Refused`] if another rank has one of these errors;
    /// [`Error::Mismatch`] if sizes, masks or schemes differ; those of
    /// [`Communicator::exchange`].
    pub fn new(
        lists: &BlockMask,
        mask: Mask,
        shard: Shard,
        scheme: Scheme,
        comm: &dyn Communicator,
    ) -> Result<DistributedBlockMask> {
        let here = Grid::new(scheme, shard, comm);
        let exchange = here.and_then(|_| BlockMaskExchange::new(lists, mask, shard, scheme));
        let sizes = exchange.as_ref().ok().map(|exchange| &exchange.sizes);
        let agreed = agree(comm, sizes.is_some(), &Sizes::arguments(sizes), []);
        let exchange = exchange?;
        agreed?;
        let messages = exchange_lists(comm, &exchange.messages());
        let (parts, stream) = (exchange.sizes.parts(comm), comm.stream());
        let finish = |messages: Vec<Vec<i32>>| exchange.finish_in(&messages, parts, stream);
        let result = messages.and_then(finish);
        result.inspect_err(|error| comm.give_up(&error.to_string()))
    }

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
            return error("token mask", format!("{mask:?}"), format!("{:?}", local.mask));
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
        Ok(BlockMaskSizes { block_q, block_kv, batch, heads, packed_rows: None })
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

impl Sizes {
    pub(crate) fn new(
        lists: &BlockMask,
        mask: Mask,
        shard: Shard,
        scheme: Scheme,
    ) -> Result<Sizes> {
        let grid = Grid::of(scheme, shard)?;
        let unsupported = |what| Error::Unsupported { scheme, what };
        let band = Band::of(mask, shard.seqlen()).ok_or(unsupported("the mask"))?;
        if scheme.keys > 1 && !band.is_simple() {
            return Err(unsupported("a block mask with a window"));
        }
        if lists.cu_rows().is_some() {
            return Err(unsupported("packed sequences"));
        }
        if !lists.device().is_cpu() {
            return Err(unsupported("lists on a GPU"));
        }
        let (batch, heads) = (lists.batch(), lists.heads());
        let found = [lists.seqlen_q(), lists.seqlen_kv()];
        let expected = [shard.rows(), shard.seqlen()];
        let error =
            |what, found: String, expected: String| Err(Error::BlockMask { what, found, expected });
        if found != expected {
            return error("queries and keys", format!("{found:?}"), format!("{expected:?}"));
        }
        let blocks = [lists.block_q(), lists.block_kv()];
        if !blocks.iter().all(|&block| shard.block().is_multiple_of(block)) {
            let expected = format!("divisors of the {} rows of a block of rows", shard.block());
            return error("blocks", format!("{blocks:?}"), expected);
        }
        if heads != 1 && !heads.is_multiple_of(scheme.heads) {
            return error(
                "heads",
                heads.to_string(),
                format!("1 or a multiple of {}", scheme.heads),
            );
        }
        let geometry =
            BlockGeometry::new(shard.seqlen(), shard.seqlen(), lists.block_q(), lists.block_kv())?;
        Ok(Sizes { grid, mask, band, geometry, batch, heads })
    }

    /// Parts of the heads that need lists of their own where keys are gathered: 1 if one list
    /// serves them, 0 if keys come by steps.
    fn parts(&self, comm: &dyn Communicator) -> usize {
        let gathers = comm.gathers() && self.grid.scheme.heads == 1 && self.grid.scheme.keys > 1;
        let divides = self.heads > 1 && self.heads.is_multiple_of(PARTS);
        match gathers {
            true if divides => PARTS,
            gathers => usize::from(gathers),
        }
    }

    /// What has to be the same on every rank.
    fn arguments(sizes: Option<&Sizes>) -> Vec<(&'static str, u64)> {
        const NAMES: [&str; 11] = [
            "seqlen",
            "block of shard",
            "queries of a block",
            "keys of a block",
            "batch",
            "heads of block mask",
            "heads of scheme",
            "kind of mask",
            "left side of mask",
            "right side of mask",
            "world",
        ];
        let values = sizes.map_or([0; NAMES.len()], |sizes| {
            let Sizes { grid, mask, geometry, batch, heads, .. } = *sizes;
            let [kind, left, right] = mask_arguments(mask);
            let (block_q, block_kv) = (geometry.block_q(), geometry.block_kv());
            let shard = [geometry.seqlen_q(), grid.shard.block(), block_q, block_kv];
            let [seqlen, block, block_q, block_kv] = shard.map(|size| size as u64);
            let sizes = [batch, heads, grid.scheme.heads, grid.shard.world()];
            let [batch, heads, members, world] = sizes.map(|size| size as u64);
            [seqlen, block, block_q, block_kv, batch, heads, members, kind, left, right, world]
        });
        NAMES.into_iter().zip(values).collect()
    }

    /// The heads of the mask that a rank computes. All ranks do a mask of one head.
    pub(crate) fn heads_of(&self, rank: usize) -> std::ops::Range<usize> {
        let members = self.grid.scheme.heads;
        if self.heads == 1 {
            return 0..1;
        }
        let heads = self.heads / members;
        rank % members * heads..(rank % members + 1) * heads
    }
}

pub(crate) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
