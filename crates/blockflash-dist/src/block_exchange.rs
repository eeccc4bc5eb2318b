use crate::agree::agree;
use crate::block_lists::{Lists, Visits};
use crate::exchange::exchange_lists;
use crate::grid::Grid;
use crate::mask_sizes::{Sizes, hash_of};
use crate::steps::PlanStep;
use crate::{Communicator, DistributedBlockMask, Error, Result, Scheme, Shard};
use blockflash_ops::{BlockMask, Mask, Stream};

/// What [`DistributedBlockMask::new`] does before and after its exchange, for ranks that talk by
/// other means than a [`Communicator`](crate::Communicator). Such ranks compare their arguments
/// themselves.
#[derive(Debug)]
pub struct BlockMaskExchange {
    pub(crate) sizes: Sizes,
    lists: Lists,
}

impl BlockMaskExchange {
    /// Checks the lists of the rank of `shard`, with the arguments of
    /// [`DistributedBlockMask::new`].
    ///
    /// # Errors
    /// Those of [`DistributedBlockMask::new`] for what does not fit.
    pub fn new(lists: &BlockMask, mask: Mask, shard: Shard, scheme: Scheme) -> Result<Self> {
        let sizes = Sizes::new(lists, mask, shard, scheme)?;
        Ok(BlockMaskExchange { sizes, lists: Lists::of(&sizes, lists)? })
    }

    /// What each rank has to get, this one among them.
    pub fn messages(&self) -> Vec<Vec<i32>> {
        let hash = hash_of(&self.lists);
        let message = |rank| {
            let mut message = vec![hash as i32, (hash >> 32) as i32];
            self.lists.write(&self.sizes, rank, &mut message);
            message
        };
        (0..self.sizes.grid.shard.world()).map(message).collect()
    }

    /// The mask by what this rank got from each one, with its lists on the device of the stream.
    ///
    /// # Errors
    /// [`Error::Message`] for messages that are not those of all ranks; a failing device.
    pub fn finish<M: AsRef<[i32]>>(
        &self,
        messages: &[M],
        stream: &Stream,
    ) -> Result<DistributedBlockMask> {
        self.finish_in(messages, 0, stream)
    }

    /// The same with lists for keys that are gathered, in this many parts of the heads; 0 if none
    /// are.
    pub(crate) fn finish_in<M: AsRef<[i32]>>(
        &self,
        messages: &[M],
        parts: usize,
        stream: &Stream,
    ) -> Result<DistributedBlockMask> {
        let world = self.sizes.grid.shard.world();
        if messages.len() != world {
            let [found, expected] = [messages.len(), world].map(|n| format!("{n} messages"));
            return Err(Error::Message { from: self.sizes.grid.shard.rank(), expected, found });
        }
        let mut hashes = Vec::with_capacity(world);
        let mut visits = Visits::new(&self.sizes);
        for (rank, message) in messages.iter().enumerate() {
            let [low, high, lists @ ..] = message.as_ref() else {
                let found = format!("{} numbers", message.as_ref().len());
                return Err(Error::message(rank, "2 numbers and lists of blocks", &found));
            };
            hashes.push([*low, *high]);
            visits.read(&self.sizes, rank, lists)?;
        }
        let (plans, density) = visits.plans(&self.sizes, parts, stream)?;
        // 0 stands for no block mask.
        let id = hash_of(&hashes).max(1);
        Ok(DistributedBlockMask { sizes: self.sizes, id, density, parts, plans: plans.into() })
    }
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

    /// The steps of this rank in the order in which all ranks make theirs, of each batch entry of
    /// the mask; where one rank has all keys, the one step of all entries together.
    pub fn steps(&self) -> Vec<Vec<PlanStep<'_>>> {
        self.plans.iter().map(PlanStep::all).collect()
    }
}
