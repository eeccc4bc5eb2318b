//! Which keys the rows of a panel see.

use super::sequence::{PartialBlock, QueryRows, clip, words_of};
use crate::attention::AttentionProblem;
use crate::panels::{LANES, Lanes, ROWS};
use std::ops::Range;

/// The keys that the token mask shows each row of a panel. Both ends are nondecreasing from row to
/// row.
#[derive(Default)]
pub(crate) struct Visible {
    rows: Vec<Range<usize>>,
    queries: Vec<usize>,
}

/// Some keys of a step.
pub(crate) struct Visit {
    /// Relative to the step; they start at a multiple of [`ROWS`].
    pub(crate) keys: Range<usize>,
    /// If some rows do not see some of them.
    pub(crate) seen: Option<Seen>,
}

/// Which keys the rows see: `start <= key < end`, and where a word has their bit.
pub(crate) struct Seen {
    start: [i32; LANES],
    end: [i32; LANES],
    /// A word for each key, if some blocks are partial.
    words: Option<Vec<u32>>,
}

impl Visible {
    /// Sets the rows, of which there are at most [`LANES`].
    pub(crate) fn set(
        &mut self,
        problem: &AttentionProblem,
        task: &QueryRows,
        rows: impl Iterator<Item = usize>,
    ) {
        let [seqlen_q, seqlen_kv] = [task.sequence.seqlen_q, task.sequence.seqlen_kv];
        let visible = |&query: &usize| problem.scores.mask.visible(query, seqlen_q, seqlen_kv);
        self.queries.clear();
        self.queries.extend(rows.map(|row| task.at(row)[1]));
        self.rows.clear();
        self.rows.extend(self.queries.iter().map(visible));
    }

    /// From the first to the last key that some row of some panels sees.
    pub(crate) fn ends<'a>(mut panels: impl DoubleEndedIterator<Item = &'a Self>) -> Range<usize> {
        let first = panels.next();
        let last = panels.next_back().or(first);
        let start = first.map_or(0, |first| first.all().start);
        start..last.map_or(0, |last| last.all().end)
    }

    fn all(&self) -> Range<usize> {
        match &*self.rows {
            [] => 0..0,
            [first, ..] => first.start..self.rows[self.rows.len() - 1].end,
        }
    }

    /// Which rows see a key: their lanes.
    pub(crate) fn seeing(
        &self,
        key: usize,
        partial: &[PartialBlock],
    ) -> impl Iterator<Item = usize> {
        let word = words_of(partial, &self.queries, key..key + 1);
        let word = word.map_or(u32::MAX, |words| words[0]);
        let sees = move |lane: &usize| self.rows[*lane].contains(&key) && word >> lane & 1 == 1;
        (0..self.rows.len()).filter(sees)
    }

    /// What the panel visits of the keys of a step. A row for which there is `nothing` sees none.
    pub(crate) fn of(
        &self,
        step: &Range<usize>,
        partial: &[PartialBlock],
        nothing: impl Fn(usize) -> bool,
    ) -> Option<Visit> {
        let all = clip(self.all(), step);
        if all.is_empty() {
            return None;
        }
        // Whole rows of a product from a multiple of them on are within the step.
        let keys = all.start / ROWS * ROWS..all.end;
        let visited = step.start + keys.start..step.start + keys.end;
        let sees_all = |(lane, row): (usize, &Range<usize>)| {
            row.start <= visited.start && row.end >= visited.end && !nothing(lane)
        };
        let words = words_of(partial, &self.queries, visited.clone());
        let seen = match words.is_none() && self.rows.iter().enumerate().all(sees_all) {
            true => None,
            false => {
                let mut seen = Seen { start: [0; LANES], end: [0; LANES], words };
                for (lane, row) in self.rows.iter().enumerate().filter(|(lane, _)| !nothing(*lane))
                {
                    // A step is short.
                    let row = clip(row.clone(), &visited);
                    (seen.start[lane], seen.end[lane]) = (row.start as i32, row.end as i32);
                }
                Some(seen)
            }
        };
        Some(Visit { keys, seen })
    }
}

impl Seen {
    /// Sets masked pairs; there is a row for each key.
    #[inline(always)]
    pub(crate) fn mask(&self, pairs: &mut [Lanes], value: f32) {
        for (key, pairs) in (0..).zip(&mut *pairs) {
            for (lane, pair) in pairs.iter_mut().enumerate() {
                let masked = key < self.start[lane] || key >= self.end[lane];
                *pair = if masked { value } else { *pair };
            }
        }
        if let Some(words) = &self.words {
            mask_by_words(words, pairs, value);
        }
    }
}

/// Sets pairs whose bit is 0; there is a word for each row.
#[inline(always)]
pub(crate) fn mask_by_words(words: &[u32], pairs: &mut [Lanes], value: f32) {
    for (word, pairs) in words.iter().zip(pairs) {
        for (lane, pair) in pairs.iter_mut().enumerate() {
            *pair = if word >> lane & 1 == 0 { value } else { *pair };
        }
    }
}
