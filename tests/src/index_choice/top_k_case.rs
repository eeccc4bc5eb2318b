//! Cases of choices, each of which follows from its seed.

use super::case::{Keys, RowsCase, one_of};
use crate::number::{normal, rng};
use rand::Rng;

/// A choice among scores.
#[derive(Clone, Debug)]
pub struct TopKCase {
    /// The numbers follow from it, too.
    pub seed: u64,
    /// Queries and what they see.
    pub rows: RowsCase,
    /// Scores, and lists, of each query.
    pub groups: usize,
    /// Room of a list.
    pub k: usize,
    /// Blocks that are always chosen, at the start and at the end.
    pub forced: [usize; 2],
    /// How many different scores there are; 0 for any.
    pub distinct: usize,
}

impl TopKCase {
    /// A random case.
    pub fn random(seed: u64) -> Self {
        let mut random = rng(seed ^ 0x70B4);
        let random = &mut random;
        let sizes = one_of(&[[5, 300], [3, 5000], [70, 400], [2, 40_000]], random);
        let rows = RowsCase::random(random, sizes);
        let k = one_of(&[1, 2, 3, 16, 17, 64, 512, 2048], random);
        let first = one_of(&[0, 0, 1, 2, k], random).min(k);
        let last = one_of(&[0, 0, 1, 3, k], random).min(k - first);
        let groups = one_of(&[1, 1, 2, 4], random);
        let distinct = one_of(&[0, 0, 1, 2, 5, 300], random);
        Self { seed, rows, groups, k, forced: [first, last], distinct }
    }

    /// Rows of this many blocks of one token, all of which queries see.
    pub fn long(seed: u64, blocks: usize, k: usize, distinct: usize) -> Self {
        let rows = RowsCase {
            queries: vec![3],
            packed: false,
            spare: 0,
            lengths: vec![blocks as i32],
            given: true,
            keys: Keys::Contiguous,
            capacity: blocks,
            window: [None, Some(0)],
            granularity: 1,
        };
        Self { seed, rows, groups: 1, k, forced: [1, usize::from(k > 1)], distinct }
    }

    /// Scores `[groups, rows, blocks]`; those that a query does not see are NaN.
    pub fn scores(&self) -> Vec<f32> {
        let (rows, blocks) = (self.rows.visible(), self.rows.blocks());
        let mut random = rng(self.seed ^ 0x5C0);
        let any = normal(self.seed, self.groups * rows.len() * blocks);
        let mut scores = any;
        for (at, row) in scores.chunks_exact_mut(blocks).enumerate() {
            let columns = self.rows.blocks_of(&rows[at % rows.len()].1);
            for (column, score) in row.iter_mut().enumerate() {
                if !columns.contains(&column) {
                    *score = f32::NAN;
                    continue;
                }
                if self.distinct > 0 {
                    *score = random.random_range(0..self.distinct) as f32 - 1.0;
                }
                // Numbers of few bits of difference, special ones, and those of any bits.
                *score = match random.random_range(0..40) {
                    0 => one_of(
                        &[f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0],
                        &mut random,
                    ),
                    1 => f32::from_bits(random.random()),
                    2 if self.distinct == 0 => {
                        1.0 + f32::EPSILON * random.random_range(0..9) as f32
                    }
                    _ => *score,
                };
            }
        }
        scores
    }
}
