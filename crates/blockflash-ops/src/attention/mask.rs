use std::ops::Range;

/// Longest sequence. Positions, windows and their sums stay within 32 bits in the kernels.
pub const MAX_SEQLEN: usize = 1 << 30;

/// Which diagonal a causal or window mask follows when `seqlen_q != seqlen_kv`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Align {
    /// Query 0 stands at key 0.
    TopLeft,
    /// The last query stands at the last key: what decoding with a key-value cache needs.
    #[default]
    BottomRight,
}

/// Which keys a query attends.
///
/// Query `i` stands at key `p = i + diagonal`, where `diagonal` is 0 for [`Align::TopLeft`] and
/// `seqlen_kv - seqlen_q` for [`Align::BottomRight`]. A query that attends no key at all gets
/// output 0 and `lse` −∞.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mask {
    /// Every key.
    #[default]
    Full,
    /// Keys `j <= p`.
    Causal {
        /// Which diagonal.
        align: Align,
    },
    /// Keys `p - left <= j <= p + right`.
    Window {
        /// Keys before the query's own; `None` does not limit them.
        left: Option<usize>,
        /// Keys after the query's own; `None` does not limit them, `Some(0)` makes the window
        /// causal.
        right: Option<usize>,
        /// Which diagonal.
        align: Align,
    },
}

/// A mask as two limits that are known to matter; see [`Mask::limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
    pub(crate) align: Align,
}

impl Limits {
    /// Whether every query attends every key.
    pub(crate) fn is_unbounded(&self) -> bool {
        self.left.or(self.right).is_none()
    }
}

impl Mask {
    /// Causal along the bottom-right diagonal, the usual meaning of the word.
    pub const fn causal() -> Self {
        Mask::Causal { align: Align::BottomRight }
    }

    /// The keys that query `i` attends, as a range of `0..seqlen_kv`; empty when there is none.
    pub fn visible(&self, i: usize, seqlen_q: usize, seqlen_kv: usize) -> Range<usize> {
        let (left, right, align) = self.sides();
        // Signed 128 bits hold every sum of three usize.
        let diagonal = match align {
            Align::TopLeft => 0,
            Align::BottomRight => seqlen_kv as i128 - seqlen_q as i128,
        };
        let position = i as i128 + diagonal;
        let clamp = |key: i128| key.clamp(0, seqlen_kv as i128) as usize;
        let start = left.map_or(0, |left| clamp(position - left as i128));
        let end = right.map_or(seqlen_kv, |right| clamp(position + right as i128 + 1));
        start..end.max(start)
    }

    /// The queries of `0..seqlen_q` that may attend a key of a range which is not empty: outside of
    /// the result none does.
    pub(crate) fn attending(
        &self,
        keys: &Range<usize>,
        seqlen_q: usize,
        seqlen_kv: usize,
    ) -> Range<usize> {
        let (left, right, align) = self.sides();
        let diagonal = match align {
            Align::TopLeft => 0,
            Align::BottomRight => seqlen_kv as i128 - seqlen_q as i128,
        };
        let clamp = |query: i128| query.clamp(0, seqlen_q as i128) as usize;
        // A query that stands at key p attends `p - left..=p + right`.
        let start = right.map_or(0, |right| clamp(keys.start as i128 - diagonal - right as i128));
        let end = left.map_or(seqlen_q, |left| clamp(keys.end as i128 - diagonal + left as i128));
        start..end.max(start)
    }

    /// Number of (query, key) pairs that the mask leaves: what the FLOPs are counted from.
    pub fn visited_pairs(&self, seqlen_q: usize, seqlen_kv: usize) -> u64 {
        if self.limits(seqlen_q, seqlen_kv) == Mask::Full.limits(seqlen_q, seqlen_kv) {
            return (seqlen_q as u64).saturating_mul(seqlen_kv as u64);
        }
        self.pairs_in(0..seqlen_q, 0..seqlen_kv, [seqlen_q, seqlen_kv])
    }

    /// The same of a rectangle of queries and keys of sequences of these lengths. Takes the same
    /// time for every size.
    pub(crate) fn pairs_in(
        &self,
        queries: Range<usize>,
        keys: Range<usize>,
        [seqlen_q, seqlen_kv]: [usize; 2],
    ) -> u64 {
        let (left, right, align) = self.sides();
        let diagonal = match align {
            Align::TopLeft => 0,
            Align::BottomRight => seqlen_kv as i128 - seqlen_q as i128,
        };
        let [rows, columns] = [queries.len(), keys.len()].map(|length| length as i128);
        // Query t of the rectangle has this many of its keys before key `first + t`: none up to
        // some t, then one more each, then all.
        let before = |first: i128| {
            let (some, all) = ((-first).clamp(0, rows), (columns - first).clamp(0, rows));
            let ends = 2 * first + some + all - 1;
            let (triangle, rest) = ((all - some).saturating_mul(ends) / 2, rows - all);
            triangle.saturating_add(rest.saturating_mul(columns))
        };
        let position = queries.start as i128 + diagonal - keys.start as i128;
        let end = right
            .map_or(rows.saturating_mul(columns), |right| before(position + right as i128 + 1));
        let start = left.map_or(0, |left| before(position - left as i128));
        u64::try_from(end - start).unwrap_or(u64::MAX)
    }

    /// The sides of the window. One that cannot hide a key at these lengths becomes `None`, so that
    /// neither a kernel nor the CPU spends time on it, and sums of positions and window stay within
    /// the range of the lengths.
    pub(crate) fn limits(&self, seqlen_q: usize, seqlen_kv: usize) -> Limits {
        let (left, right, align) = self.sides();
        // The last query to the first key, and the first query to the last key.
        let (farthest_left, farthest_right) = match align {
            Align::TopLeft => (seqlen_q.saturating_sub(1), seqlen_kv.saturating_sub(1)),
            Align::BottomRight => (seqlen_kv.saturating_sub(1), seqlen_q.saturating_sub(1)),
        };
        let left = left.filter(|&left| left < farthest_left);
        let right = right.filter(|&right| right < farthest_right);
        Limits { left, right, align: if left.or(right).is_some() { align } else { Align::TopLeft } }
    }

    fn sides(&self) -> (Option<usize>, Option<usize>, Align) {
        match *self {
            Mask::Full => (None, None, Align::TopLeft),
            Mask::Causal { align } => (None, Some(0), align),
            Mask::Window { left, right, align } => (left, right, align),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGNS: [Align; 2] = [Align::TopLeft, Align::BottomRight];

    fn masks() -> Vec<Mask> {
        let sides = [None, Some(0), Some(1), Some(3), Some(usize::MAX)];
        let mut masks = vec![Mask::Full];
        for align in ALIGNS {
            masks.push(Mask::Causal { align });
            for left in sides {
                masks.extend(sides.map(|right| Mask::Window { left, right, align }));
            }
        }
        masks
    }

    /// The definition in the documentation, pair by pair.
    fn attends(mask: Mask, i: usize, j: usize, seqlen_q: usize, seqlen_kv: usize) -> bool {
        let (left, right, align) = mask.sides();
        let diagonal =
            if align == Align::BottomRight { seqlen_kv as i128 - seqlen_q as i128 } else { 0 };
        let distance = j as i128 - (i as i128 + diagonal);
        left.is_none_or(|left| distance >= -(left as i128))
            && right.is_none_or(|right| distance <= right as i128)
    }

    #[test]
    fn visible_is_the_definition() {
        for mask in masks() {
            for (seqlen_q, seqlen_kv) in [(1, 1), (5, 5), (3, 8), (8, 3), (4, 0), (1, 7), (7, 1)] {
                let mut pairs = 0;
                for i in 0..seqlen_q {
                    let range = mask.visible(i, seqlen_q, seqlen_kv);
                    for j in 0..seqlen_kv {
                        let expected = attends(mask, i, j, seqlen_q, seqlen_kv);
                        assert_eq!(
                            range.contains(&j),
                            expected,
                            "{mask:?} {seqlen_q}x{seqlen_kv} ({i}, {j})"
                        );
                        pairs += u64::from(expected);
                    }
                }
                assert_eq!(
                    mask.visited_pairs(seqlen_q, seqlen_kv),
                    pairs,
                    "{mask:?} {seqlen_q}x{seqlen_kv}"
                );
            }
        }
    }

    #[test]
    fn pairs_of_rectangles_are_the_definition() {
        let ranges = |end: usize| (0..=end).flat_map(move |a| (a..=end).map(move |b| a..b));
        for mask in masks() {
            for (seqlen_q, seqlen_kv) in [(1, 1), (5, 5), (3, 6), (6, 3), (4, 0)] {
                for (queries, keys) in
                    ranges(seqlen_q).flat_map(|q| ranges(seqlen_kv).map(move |k| (q.clone(), k)))
                {
                    let every = queries.clone().flat_map(|i| keys.clone().map(move |j| (i, j)));
                    let expected =
                        every.filter(|&(i, j)| attends(mask, i, j, seqlen_q, seqlen_kv)).count();
                    let text =
                        format!("{mask:?} {queries:?} of {seqlen_q}, {keys:?} of {seqlen_kv}");
                    let found = mask.pairs_in(queries, keys, [seqlen_q, seqlen_kv]);
                    assert_eq!(found, expected as u64, "{text}");
                }
            }
        }
    }

    /// By the sum of 1 to n, and a window of 5: no loop over 2^30 queries, let alone 2^60.
    #[test]
    fn pairs_of_the_longest_sequences_are_counted_at_once() {
        let n = 1u64 << 30;
        assert_eq!(Mask::causal().visited_pairs(n as usize, n as usize), n * (n + 1) / 2);
        let window = |side| Mask::Window { left: side, right: side, align: Align::TopLeft };
        assert_eq!(window(Some(2)).visited_pairs(n as usize, n as usize), 5 * n - 6);
        assert_eq!(window(Some(2)).visited_pairs(1 << 60, 1 << 60), 5 * (1 << 60) - 6);
        assert_eq!(Mask::causal().visited_pairs(usize::MAX, usize::MAX), u64::MAX);
    }

    #[test]
    fn attending_queries_are_the_definition() {
        for mask in masks() {
            for (seqlen_q, seqlen_kv) in [(1, 1), (5, 5), (3, 8), (8, 3), (1, 7), (7, 1), (0, 2)] {
                let every = (0..seqlen_kv).flat_map(|a| (a + 1..=seqlen_kv).map(move |b| a..b));
                for keys in every {
                    let found = mask.attending(&keys, seqlen_q, seqlen_kv);
                    for i in 0..seqlen_q {
                        let sees = keys.clone().any(|j| attends(mask, i, j, seqlen_q, seqlen_kv));
                        assert_eq!(found.contains(&i), sees, "{mask:?} {seqlen_q} {keys:?} {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn limits_hide_the_same_keys() {
        for mask in masks() {
            for (seqlen_q, seqlen_kv) in [(1, 1), (5, 5), (3, 8), (8, 3), (4, 0), (1, 7), (7, 1)] {
                let Limits { left, right, align } = mask.limits(seqlen_q, seqlen_kv);
                let limited = Mask::Window { left, right, align };
                for i in 0..seqlen_q {
                    assert_eq!(
                        mask.visible(i, seqlen_q, seqlen_kv),
                        limited.visible(i, seqlen_q, seqlen_kv),
                        "{mask:?} {seqlen_q}x{seqlen_kv} query {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn decoding_one_token_is_not_masked() {
        assert_eq!(Mask::causal().limits(1, 4096), Mask::Full.limits(1, 4096));
        assert_eq!(Mask::causal().limits(2, 2).right, Some(0));
    }
}
