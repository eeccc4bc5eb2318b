//! Which keys the rows of a panel see.

use super::sequence::{QueryRows, clip};
use crate::attention::AttentionProblem;
use crate::panels::{LANES, Lanes, ROWS};
use std::ops::Range;

/// The keys that each row of a panel sees. Both ends are nondecreasing from row to row.
#[derive(Default)]
pub(crate) struct Visible(Vec<Range<usize>>);

/// Some keys of a step.
pub(crate) struct Visit {
    /// Relative to the step; they start at a multiple of [`ROWS`].
    pub(crate) keys: Range<usize>,
    /// If some rows do not see some of them.
    pub(crate) seen: Option<Seen>,
}

/// Which keys the rows see: `start <= key < end`.
pub(crate) struct Seen {
    start: [i32; LANES],
    end: [i32; LANES],
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
        let visible = |row| problem.scores.mask.visible(task.at(row)[1], seqlen_q, seqlen_kv);
        self.0.clear();
        self.0.extend(rows.map(visible));
    }

    /// From the first to the last key that some row of some panels sees.
    pub(crate) fn ends<'a>(mut panels: impl DoubleEndedIterator<Item = &'a Self>) -> Range<usize> {
        let first = panels.next();
        let last = panels.next_back().or(first);
        let start = first.map_or(0, |first| first.all().start);
        start..last.map_or(0, |last| last.all().end)
    }

    fn all(&self) -> Range<usize> {
        match &*self.0 {
            [] => 0..0,
            [first, ..] => first.start..self.0[self.0.len() - 1].end,
        }
    }

    /// Whether a row sees a key.
    pub(crate) fn sees(&self, lane: usize, key: usize) -> bool {
        self.0.get(lane).is_some_and(|keys| keys.contains(&key))
    }

    /// What the panel visits of the keys of a step. A row for which there is `nothing` sees none.
    pub(crate) fn of(&self, step: &Range<usize>, nothing: impl Fn(usize) -> bool) -> Option<Visit> {
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
        let seen = match self.0.iter().enumerate().all(sees_all) {
            true => None,
            false => {
                let mut seen = Seen { start: [0; LANES], end: [0; LANES] };
                for (lane, row) in self.0.iter().enumerate().filter(|(lane, _)| !nothing(*lane)) {
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
        for (key, pairs) in (0..).zip(pairs) {
            for (lane, pair) in pairs.iter_mut().enumerate() {
                let masked = key < self.start[lane] || key >= self.end[lane];
                *pair = if masked { value } else { *pair };
            }
        }
    }
}
