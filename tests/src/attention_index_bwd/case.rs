//! Cases, each of which follows from its seed.

use crate::number::rng;
use blockflash_ops::attention::{Align, Mask};
use blockflash_ops::{DType, HeadDims, Scores, View};
use blockflash_oracle::{listed_keys, visible};
use rand::Rng;
use rand::rngs::StdRng;

/// Packed rows behind the last sequence, of queries and of keys.
pub(super) const SLACK: [usize; 2] = [3, 5];

/// A call; everything else follows from it.
#[derive(Clone, Debug)]
pub struct IndexBackwardCase {
    /// Of all random numbers.
    pub seed: u64,
    /// Of all tensors but the log-sum-exp.
    pub dtype: DType,
    /// Elements of a row of q and k, and of v and o.
    pub head_dims: HeadDims,
    /// Heads of queries, and of keys.
    pub heads: [usize; 2],
    /// Lists of each query.
    pub groups: usize,
    /// Tokens of a block, and room of a list.
    pub list: [usize; 2],
    /// Queries and keys of each sequence; all alike unless they are packed.
    pub lengths: Vec<(usize, usize)>,
    /// Whether queries and keys are packed.
    pub packed: bool,
    /// Sides of the window, aligned at the last query and the last key.
    pub window: [Option<usize>; 2],
    /// See [`Scores::softcap`].
    pub softcap: Option<f32>,
}

impl IndexBackwardCase {
    /// A causal case with a list for each head of keys.
    pub fn simple(
        (dtype, head_dims): (DType, HeadDims),
        heads: [usize; 2],
        list: [usize; 2],
        lengths: &[(usize, usize)],
    ) -> Self {
        let (groups, lengths) = (heads[1], lengths.to_vec());
        let window = [None, Some(0)];
        let (seed, packed, softcap) = (1, false, None);
        Self { seed, dtype, head_dims, heads, groups, list, lengths, packed, window, softcap }
    }

    /// A random case of these granularities.
    pub fn random(seed: u64, of: (DType, HeadDims), granularities: &[usize]) -> Self {
        let mut random = rng(seed ^ 0xB3D);
        let random = &mut random;
        let granularity = one_of(granularities, random);
        let heads_kv = one_of(&[1, 2, 3], random);
        let heads = [heads_kv * one_of(&[1, 2, 3, 8, 20], random), heads_kv];
        let packed = random.random_bool(0.5);
        let longest: usize = one_of(&[20, 300, 700], random);
        let blocks = longest.div_ceil(granularity);
        let capacity = one_of(&[0, 1, 2, 3, 7, 16, 33], random).min(2 * blocks + 1);
        // As many queries as the reference has time for.
        let pairs = heads[0] * (capacity * granularity).clamp(1, longest) * of.1.sum();
        let most = (30_000_000 / pairs).clamp(1, 150);
        let equal = (random.random_range(1..=most), random.random_range(1..=longest));
        let lengths: Vec<_> = (0..random.random_range(1..=3))
            .map(|_| match packed {
                true => (random.random_range(0..=most), random.random_range(0..=longest)),
                false => equal,
            })
            .collect();
        let window = match random.random_range(0..4) {
            0 => [None, None],
            1 => {
                [Some(random.random_range(0..=longest)), one_of(&[None, Some(0), Some(5)], random)]
            }
            _ => [None, Some(0)],
        };
        Self {
            seed,
            groups: one_of(&[1, heads[1], heads[1], heads[0]], random),
            packed,
            window,
            softcap: random.random_bool(0.2).then_some(20.0),
            ..Self::simple(of, heads, [granularity, capacity], &lengths)
        }
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Rows of queries, and of keys, of all sequences; packed ones with the rows behind them.
    pub fn rows(&self) -> [usize; 2] {
        let sum = |of: fn(&(usize, usize)) -> usize| self.lengths.iter().map(of).sum::<usize>();
        let slack = if self.packed { SLACK } else { [0; 2] };
        [sum(|lengths| lengths.0) + slack[0], sum(|lengths| lengths.1) + slack[1]]
    }

    /// First rows of queries and of keys of each sequence, then their ends.
    pub fn offsets(&self) -> [Vec<i32>; 2] {
        let mut offsets = [vec![0], vec![0]];
        for &(queries, keys) in &self.lengths {
            for (offsets, count) in offsets.iter_mut().zip([queries, keys]) {
                offsets.push(offsets[offsets.len() - 1] + count as i32);
            }
        }
        offsets
    }

    /// The longest sequences of queries and of keys.
    pub fn longest(&self) -> [usize; 2] {
        let most = |of: fn(&(usize, usize)) -> usize| self.lengths.iter().map(of).max();
        [most(|lengths| lengths.0), most(|lengths| lengths.1)].map(Option::unwrap_or_default)
    }

    /// Heads of queries that share a list and a head of keys.
    pub fn group(&self) -> usize {
        self.heads[0] / self.groups.max(self.heads[1])
    }

    /// All queries: their sequence, their place in it, and their row.
    pub fn queries(&self) -> impl Iterator<Item = [usize; 3]> {
        let [starts, _] = self.offsets();
        let sequences = self.lengths.clone().into_iter().enumerate();
        sequences.flat_map(move |(b, (queries, _))| {
            let start = starts[b] as usize;
            (0..queries).map(move |query| [b, query, start + query])
        })
    }

    /// The lists, `[groups, rows, capacity]`: blocks in any order, some of them twice, others that
    /// do not exist, and nothing. Those of rows of no sequence name blocks, too.
    pub fn entries(&self) -> Vec<i32> {
        let mut random = rng(self.seed ^ 0x7157);
        let ([granularity, capacity], [rows, _]) = (self.list, self.rows());
        let mut of_row = vec![1; rows];
        for [b, _, row] in self.queries() {
            of_row[row] = self.lengths[b].1.div_ceil(granularity);
        }
        let mut entries = Vec::with_capacity(self.groups * rows * capacity);
        for _ in 0..self.groups {
            for blocks in of_row.iter().map(|&blocks| blocks as i32) {
                let odd = [blocks, blocks + 1, i32::MAX, i32::MIN, -7, -1, -1, -1];
                entries.extend((0..capacity).map(|_| match random.random_range(0..8) {
                    0 => one_of(&odd, &mut random),
                    1 => 0,
                    _ => random.random_range(0..blocks.max(1)),
                }));
            }
        }
        entries
    }

    /// The keys that a unit of heads sees of a query, as often as they are listed.
    pub fn seen(&self, entries: &[i32], [b, query, row]: [usize; 3], head: usize) -> Vec<usize> {
        let ([granularity, capacity], (queries, keys)) = (self.list, self.lengths[b]);
        let shown = visible(query, [queries, keys], self.window, true);
        let units = self.heads[0] / self.group().max(1);
        let list = head / self.group() * self.groups / units * self.rows()[0] + row;
        listed_keys(&entries[list * capacity..][..capacity], granularity, shown)
    }

    /// What happens to scores, without tensors.
    pub fn scores<'a>(&self) -> Scores<View<'a>> {
        let align = Align::BottomRight;
        let mask = match self.window {
            [None, None] => Mask::Full,
            [None, Some(0)] => Mask::Causal { align },
            [left, right] => Mask::Window { left, right, align },
        };
        Scores { softcap: self.softcap, ..mask.into() }
    }

    /// The factor of the products.
    pub fn factor(&self) -> f32 {
        1.0 / (self.head_dims.qk as f32).sqrt()
    }
}

fn one_of<T: Copy>(values: &[T], random: &mut StdRng) -> T {
    values[random.random_range(0..values.len())]
}
