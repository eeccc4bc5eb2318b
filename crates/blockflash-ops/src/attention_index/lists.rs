use crate::check::{Operand, to_i32};
use crate::{Error, Result};
use blockflash_safe::{Stream, View};
use blockflash_sys::DType;
use std::ops::Range;

/// The blocks of keys that each query attends, of which block `e` is the keys
/// `e * granularity .. (e + 1) * granularity` of the query's sequence.
///
/// A list may be in any order. Entries that are negative, as the −1 that fills lists up, and blocks
/// at or beyond the end of the sequence are skipped, wherever they stand. A block that is listed
/// several times counts as often in the softmax, as if its keys were there as often.
/// [`set_checks`](crate::set_checks) makes repeated blocks, blocks beyond the sequence and negative
/// entries other than −1 errors. Whatever a list holds, nothing outside the tensors is touched.
#[derive(Clone, Copy, Debug)]
pub struct IndexLists<'a> {
    /// i32 `[groups, total_q, capacity]`, with contiguous lists and any other strides. `total_q` is
    /// the rows of packed queries, otherwise `batch * seqlen_q`, sequence by sequence. `groups` is
    /// 1 for lists that all heads share, `num_heads_kv` for one for each head of keys, or
    /// `num_heads_q`.
    pub entries: View<'a>,
    /// Tokens of a block, at least 1. A GPU takes 1, 4, 16, 64 and 128. Pages need not be blocks.
    pub granularity: usize,
}

/// [`IndexLists`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexListSizes {
    /// Lists of each query: 1, or one for each head of keys, or of queries.
    pub groups: usize,
    /// Room of a list.
    pub capacity: usize,
    /// Tokens of a block.
    pub granularity: usize,
    /// Elements from group to group, and from query to query.
    pub strides: [usize; 2],
}

impl IndexLists<'_> {
    /// The sizes, checked for this many queries in these heads of q and of keys.
    pub(super) fn sizes(
        &self,
        total_q: usize,
        [num_heads_q, num_heads_kv]: [usize; 2],
    ) -> Result<IndexListSizes> {
        let entries = Operand::new("lists.entries", &self.entries);
        entries.dtype_in(&[DType::I32])?;
        let wrong = || {
            entries.wrong_shape(format!(
                "[1, {num_heads_kv} or {num_heads_q}, {total_q}, capacity]: groups, queries and \
                 room of a list"
            ))
        };
        let &[groups, queries, capacity] = entries.shape else { return Err(wrong()) };
        if queries != total_q || ![1, num_heads_kv, num_heads_q].contains(&groups) {
            return Err(wrong());
        }
        entries.last_dim_contiguous()?;
        to_i32("lists.entries", capacity)?;
        let granularity = self.granularity;
        if granularity == 0 {
            let (what, expected) = ("lists.granularity", "at least 1".into());
            return Err(Error::Number { what, value: granularity, expected });
        }
        to_i32("lists.granularity", granularity)?;
        let strides = [entries.strides[0], entries.strides[1]];
        Ok(IndexListSizes { groups, capacity, granularity, strides })
    }
}

impl IndexListSizes {
    /// Pairs of a list and a head of keys: the query heads of one of them are neighbours.
    pub fn units(&self, num_heads_kv: usize) -> usize {
        self.groups.max(num_heads_kv)
    }
}

/// The lists of a call in host memory.
pub(super) struct HostLists {
    /// `[groups, total_q, capacity]`, without gaps.
    entries: Vec<i32>,
    total_q: usize,
    sizes: IndexListSizes,
}

/// The keys of one list that a query sees.
pub(super) struct ListedKeys {
    /// Positions, ascending and without repeats.
    pub(super) keys: Vec<usize>,
    /// Logarithms of how often each of these keys is listed; empty if none is listed twice.
    pub(super) repeats: Vec<f32>,
}

impl HostLists {
    pub(super) fn new(
        lists: &IndexLists<'_>,
        sizes: IndexListSizes,
        stream: &Stream,
    ) -> Result<Self> {
        let total_q = lists.entries.shape()[1];
        Ok(Self { entries: lists.entries.to_vec(stream)?, total_q, sizes })
    }

    fn list(&self, [group, query]: [usize; 2]) -> &[i32] {
        let capacity = self.sizes.capacity;
        &self.entries[(group * self.total_q + query) * capacity..][..capacity]
    }

    /// The keys of a list in a range of positions.
    pub(super) fn keys(&self, at: [usize; 2], shown: &Range<usize>) -> ListedKeys {
        let granularity = self.sizes.granularity;
        let first = |block: usize| block.saturating_mul(granularity);
        let listed = self.list(at).iter().filter_map(|&entry| usize::try_from(entry).ok());
        let mut blocks: Vec<usize> = listed.filter(|&block| first(block) < shown.end).collect();
        blocks.sort_unstable();
        let (mut keys, mut repeats, mut repeated) = (Vec::new(), Vec::new(), false);
        for same in blocks.chunk_by(|a, b| a == b) {
            let start = first(same[0]);
            let of_block = start.max(shown.start)..start.saturating_add(granularity).min(shown.end);
            repeated |= same.len() > 1;
            repeats.resize(repeats.len() + of_block.len(), (same.len() as f64).ln() as f32);
            keys.extend(of_block);
        }
        if !repeated {
            repeats.clear();
        }
        ListedKeys { keys, repeats }
    }

    /// Verifies the lists of a query: that entries are −1 or blocks of its sequence, which has
    /// `length` keys, and that none is there twice.
    pub(super) fn verify(&self, query: usize, length: usize) -> Result<()> {
        let granularity = self.sizes.granularity;
        let blocks = length.div_ceil(granularity);
        for group in 0..self.sizes.groups {
            let list = self.list([group, query]);
            let wrong = |at: usize, problem: String| {
                let (what, index) = ("lists.entries", vec![group, query, at]);
                Err(Error::InvalidData { what, index, value: list[at], problem })
            };
            let mut places: Vec<(i32, usize)> = Vec::with_capacity(list.len());
            for (at, &entry) in list.iter().enumerate() {
                match usize::try_from(entry) {
                    Ok(block) if block < blocks => places.push((entry, at)),
                    Ok(_) => {
                        let problem = format!(
                            "the sequence has {length} keys, {blocks} blocks of {granularity}"
                        );
                        return wrong(at, problem);
                    }
                    Err(_) if entry == -1 => {}
                    Err(_) => return wrong(at, "entries are blocks, or -1 for none".into()),
                }
            }
            places.sort_unstable();
            // The first entry that repeats another one.
            let twice = places.windows(2).filter(|pair| pair[0].0 == pair[1].0);
            if let Some(pair) = twice.min_by_key(|pair| pair[1].1) {
                let problem = format!("the list has this block at {}, too", pair[0].1);
                return wrong(pair[1].1, problem);
            }
        }
        Ok(())
    }
}
