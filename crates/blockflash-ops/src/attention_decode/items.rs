//! How long splits are at least, and how many of them an item has. Both are thresholds from
//! measurements on an H200 (`benches/results/nvidia-h200/kv_cache.md`).

use super::AttentionDecodeProblem;
use crate::attention::Align;

/// Fewest keys of a split of sequences that are short, and of others.
const FEWEST_KEYS: [usize; 2] = [128, 256];
/// Most keys of a short sequence.
const SHORT: usize = 2048;
/// Log2 of the most splits of an item.
const LONGEST_RUN_LOG2: u32 = 4;
/// Items per CTA from which the end of the grid costs little, whatever the length of an item.
const MANY_ITEMS: usize = 16;
/// Elements of K in the longest split whose end still costs more than longer items do.
const SMALL_SPLIT: usize = 256 * 128;

/// What the length of a run depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Splits of all row tiles of all heads.
    pub(crate) splits: usize,
    /// CTAs that run at once, and how many of them on a multiprocessor.
    pub(crate) ctas: usize,
    pub(crate) ctas_of_multiprocessor: usize,
    /// Splits of a row tile.
    pub(crate) of_row_tile: usize,
    /// Elements of K in a split.
    pub(crate) split_elements: usize,
    /// Whether the splits of a run leave one result.
    pub(crate) combines: bool,
}

impl AttentionDecodeProblem {
    /// The keys that the queries of a sequence see, where the host knows that all sequences have
    /// equally many.
    pub(super) fn keys_of_each(&self) -> Option<usize> {
        let known = self.attention.packed.is_none() && !self.cache.seqused_kv;
        (known && self.pages.is_none()).then(|| self.keys_of_full())
    }

    /// The keys that the queries of a sequence see that fills the cache.
    pub(super) fn keys_of_full(&self) -> usize {
        let attention = &self.attention;
        let limits = attention.scores.mask.limits(attention.seqlen_q, attention.seqlen_kv);
        let sides = match (limits.left, limits.right, limits.align) {
            (Some(left), Some(right), _) => left.saturating_add(right),
            (Some(side), None, Align::BottomRight) | (None, Some(side), Align::TopLeft) => side,
            _ => attention.seqlen_kv,
        };
        sides.saturating_add(attention.seqlen_q).min(attention.seqlen_kv)
    }

    /// Whether the host knows that the queries of each sequence see all its keys, with the last
    /// query.
    pub(super) fn sees_all(&self) -> bool {
        let attention = &self.attention;
        let limits = attention.scores.mask.limits(attention.seqlen_q, attention.seqlen_kv);
        let to_the_end = limits.right.is_none() || limits.align == Align::BottomRight;
        self.keys_of_each().is_some() && limits.left.is_none() && to_the_end
    }

    /// Fewest keys of a split. A short sequence has more splits, so that one alone is computed
    /// sooner; runs make up for them in batches. Where lengths are read on the device, short splits
    /// cost batches of short sequences a quarter of their speed, when there were no runs for them.
    pub(super) fn fewest_keys_of_a_split(&self) -> usize {
        let short = self.keys_of_each().is_some_and(|keys| keys <= SHORT);
        FEWEST_KEYS[usize::from(!short)]
    }
}

impl Work {
    /// Log2 of the splits of an item. Long items leave CTAs without work where they do not divide
    /// evenly among CTAs, so they are as long as they can be with (almost) full rounds of CTAs.
    ///
    /// Where a kernel stores each split of a run, less is gained: with many items, runs of 4 are
    /// faster only where splits are small or nothing else runs on a multiprocessor while an item
    /// ends.
    pub(crate) fn run_log2(&self) -> u32 {
        let longest = LONGEST_RUN_LOG2.min(self.of_row_tile.trailing_zeros());
        if !self.combines && self.splits >= MANY_ITEMS * self.ctas {
            let gains = self.split_elements <= SMALL_SPLIT || self.ctas_of_multiprocessor == 1;
            return if gains { longest.min(2) } else { 0 };
        }
        let full_rounds = |log2: &u32| {
            let items = self.splits >> log2;
            items > 0 && items * 20 >= items.div_ceil(self.ctas) * self.ctas * 19
        };
        (1..=longest).rev().find(full_rounds).unwrap_or(0)
    }
}

#[cfg(test)]
#[path = "items_tests.rs"]
mod tests;
