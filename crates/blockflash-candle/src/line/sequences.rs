//! Which rows of packed tensors, and which keys of a cache, the sequences of a call have.

use super::candle_core::{Result, Tensor};
use super::held::Reading;
use super::memory::{Operand, Place};
use super::paged::check_lengths;
use blockflash_ops::{KvCache, PackedTokens, View};

/// The sequences of a call; by default all have equally many queries and fill the keys.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<S> {
    /// u32 or i32 `[batch]`: how many keys each sequence has. A length that does not exist counts
    /// as the nearest one that does.
    pub lengths: Option<S>,
    /// u32 or i32 `[batch, max_pages]`: the pages of each sequence. Keys are
    /// `[pages, page_size, num_heads_kv, head_dim]` then; a GPU takes pages of a multiple of 16
    /// slots. A page that does not exist counts as the last one; on the CPU beside lengths it is an
    /// error.
    pub block_table: Option<S>,
    /// Set when queries are packed, `[total_q, num_heads_q, head_dim]`.
    pub q: Option<Offsets<S>>,
    /// Set when keys are packed, `[total_kv, num_heads_kv, head_dim]`, without lengths and table.
    pub kv: Option<Offsets<S>>,
}

/// Where sequences are in a packed tensor.
#[derive(Clone, Copy, Debug)]
pub struct Offsets<S> {
    /// u32 or i32 `[batch + 1]`.
    pub offsets: S,
    /// Upper bound on the rows of a sequence.
    pub max_seqlen: usize,
}

impl<S> Default for Sequences<S> {
    fn default() -> Self {
        Self { lengths: None, block_table: None, q: None, kv: None }
    }
}

impl<S> Offsets<S> {
    fn as_ref(&self) -> Offsets<&S> {
        Offsets { offsets: &self.offsets, max_seqlen: self.max_seqlen }
    }

    fn try_map<T>(self, make: impl FnOnce(S) -> Result<T>) -> Result<Offsets<T>> {
        Ok(Offsets { offsets: make(self.offsets)?, max_seqlen: self.max_seqlen })
    }
}

impl<S> Sequences<S> {
    pub(crate) fn as_ref(&self) -> Sequences<&S> {
        let [q, kv] = [&self.q, &self.kv].map(|packed| packed.as_ref().map(Offsets::as_ref));
        let (lengths, block_table) = (self.lengths.as_ref(), self.block_table.as_ref());
        Sequences { lengths, block_table, q, kv }
    }

    /// The same with what `make`, which gets the name of the field, turns each tensor into.
    pub(crate) fn try_map<T>(
        self,
        mut make: impl FnMut(&'static str, S) -> Result<T>,
    ) -> Result<Sequences<T>> {
        let Self { lengths, block_table, q, kv } = self;
        Ok(Sequences {
            lengths: lengths.map(|of| make("lengths", of)).transpose()?,
            block_table: block_table.map(|of| make("block_table", of)).transpose()?,
            q: q.map(|of| of.try_map(|of| make("sequences.q", of))).transpose()?,
            kv: kv.map(|of| of.try_map(|of| make("sequences.kv", of))).transpose()?,
        })
    }
}

impl Sequences<&Tensor> {
    /// Keys or values as those of a cache, whose only page holds packed ones.
    pub(crate) fn pages(&self, rows: &Tensor) -> Result<Tensor> {
        if self.kv.is_some() { rows.unsqueeze(0) } else { Ok(rows.clone()) }
    }

    /// On the CPU, what a GPU could not say: a page or a length that does not exist.
    pub(crate) fn check(&self, keys: &Tensor) -> Result<()> {
        let (Some(table), Some(lengths)) = (self.block_table, self.lengths) else { return Ok(()) };
        // Ranks that are wrong are refused later, by name.
        let (true, &[pages, page_size, _, _], 2, 1) =
            (keys.device().is_cpu(), keys.dims(), table.rank(), lengths.rank())
        else {
            return Ok(());
        };
        check_lengths(("block_table", table), ("lengths", lengths), [pages, page_size])
    }

    /// Runs with these sequences over views.
    pub(crate) fn with_views<R>(
        &self,
        place: &Place,
        work: impl FnOnce(Sequences<View<'_>>) -> Result<R>,
    ) -> Result<R> {
        let locked = self.try_map(|_, tensor| Ok(tensor.storage_and_layout()))?;
        let read = |name, locked| place.read(&Operand::of(name, locked)?);
        let read: Sequences<Reading<'_>> = locked.as_ref().try_map(read)?;
        work(read.as_ref().try_map(|_, tensor| Ok(tensor.view))?)
    }
}

impl<'a> Sequences<View<'a>> {
    /// A cache of these sequences.
    pub(crate) fn cache(&self, k: View<'a>, v: View<'a>) -> KvCache<'a> {
        let (block_table, seqused_kv) = (self.block_table, self.lengths);
        KvCache { block_table, seqused_kv, ..KvCache::new(k, v) }
    }

    /// The offsets of queries and of keys.
    pub(crate) fn packed(&self) -> [Option<PackedTokens<'a>>; 2] {
        [self.q, self.kv].map(|packed| {
            packed.map(|Offsets { offsets, max_seqlen }| PackedTokens {
                cu_seqlens: offsets,
                max_seqlen,
            })
        })
    }
}
