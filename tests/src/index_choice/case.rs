//! Cases, each of which follows from its seed.

use crate::number::{normal, normal_rounded, rng};
use blockflash_ops::{Align, DType, Mask};
use blockflash_oracle::visible;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::ops::Range;

/// Where the keys of sequences are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// A cache with a page for each sequence.
    Contiguous,
    /// Pages with a table.
    Paged {
        /// Slots of a page.
        page_size: usize,
        /// Whether the heads of a page come before its slots.
        heads_first: bool,
    },
    /// One sequence after another.
    Packed,
}

/// The queries of a batch, and the keys that they see.
#[derive(Clone, Debug)]
pub struct RowsCase {
    /// Queries of each sequence.
    pub queries: Vec<usize>,
    /// Whether queries are packed; if not, all sequences have equally many.
    pub packed: bool,
    /// Rows of packed queries behind the last sequence.
    pub spare: usize,
    /// Keys of each sequence as they are stored, also negative and beyond the capacity.
    pub lengths: Vec<i32>,
    /// Whether the lengths are given; if not, all sequences fill the capacity. Packed keys have
    /// offsets instead.
    pub given: bool,
    /// Where keys are.
    pub keys: Keys,
    /// The most keys of a sequence; a multiple of the page size in pages.
    pub capacity: usize,
    /// Keys before and after its own position that a query sees; `None` is all.
    pub window: [Option<usize>; 2],
    /// Tokens of a block.
    pub granularity: usize,
}

/// One of these.
pub(super) fn one_of<T: Copy>(values: &[T], random: &mut StdRng) -> T {
    values[random.random_range(0..values.len())]
}

impl RowsCase {
    /// A random case with sequences of up to about this many queries and keys.
    pub fn random(random: &mut StdRng, [most_queries, most_keys]: [usize; 2]) -> Self {
        let batch = random.random_range(1..5);
        let (packed, equal) = (random.random(), random.random_range(0..=most_queries));
        let queries: Vec<usize> = (0..batch)
            .map(|_| if packed { random.random_range(0..=most_queries) } else { equal })
            .collect();
        let keys = match random.random_range(0..4) {
            0 => Keys::Contiguous,
            1 => Keys::Packed,
            _ => Keys::Paged {
                page_size: one_of(&[16, 16, 48, 64, 128, 272], random),
                heads_first: random.random(),
            },
        };
        let mut capacity = random.random_range(1..=most_keys);
        if let Keys::Paged { page_size, .. } = keys {
            capacity = capacity.next_multiple_of(page_size);
        }
        let most = capacity as i32;
        let mut length = || match random.random_range(0..8) {
            0 => 0,
            1 if keys != Keys::Packed => -5,
            2 if keys != Keys::Packed => most.saturating_add(7),
            3 => most,
            _ => random.random_range(0..=most),
        };
        let lengths = (0..batch).map(|_| length()).collect();
        let side = |random: &mut StdRng| match random.random_range(0..3) {
            0 => None,
            _ => Some(one_of(&[0, 1, 7, 33, 100], random)),
        };
        let window = match random.random_range(0..5) {
            0 => [None, None],
            1 => [side(random), side(random)],
            2 => [side(random), Some(0)],
            _ => [None, Some(0)],
        };
        Self {
            queries,
            packed,
            spare: if packed { one_of(&[0, 0, 3], random) } else { 0 },
            lengths,
            given: random.random_bool(0.8),
            keys,
            capacity,
            window,
            granularity: one_of(&[1, 4, 16, 64, 128], random),
        }
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.queries.len()
    }

    /// Rows of the results.
    pub fn rows(&self) -> usize {
        self.queries.iter().sum::<usize>() + self.spare
    }

    /// Columns of the scores.
    pub fn blocks(&self) -> usize {
        self.capacity.div_ceil(self.granularity)
    }

    /// Keys of a sequence.
    pub fn length(&self, sequence: usize) -> usize {
        match self.given || self.keys == Keys::Packed {
            true => self.lengths[sequence].clamp(0, self.capacity as i32) as usize,
            false => self.capacity,
        }
    }

    /// The mask of the window.
    pub fn mask(&self) -> Mask {
        match self.window {
            [None, None] => Mask::Full,
            [None, Some(0)] => Mask::causal(),
            [left, right] => Mask::Window { left, right, align: Align::BottomRight },
        }
    }

    /// The sequence of each row, and the keys that it sees.
    pub fn visible(&self) -> Vec<(usize, Range<usize>)> {
        let mut rows = Vec::new();
        for (sequence, &queries) in self.queries.iter().enumerate() {
            let lengths = [queries, self.length(sequence)];
            let keys = |query| visible(query, lengths, self.window, true);
            rows.extend((0..queries).map(|query| (sequence, keys(query))));
        }
        rows.resize(self.rows(), (0, 0..0));
        rows
    }

    /// The blocks of these keys.
    pub fn blocks_of(&self, keys: &Range<usize>) -> Range<usize> {
        match keys.is_empty() {
            true => 0..0,
            false => keys.start / self.granularity..keys.end.div_ceil(self.granularity),
        }
    }

    /// First row of each sequence, then the end of the last one.
    pub fn offsets_q(&self) -> Vec<i32> {
        sums(&self.queries.iter().map(|&n| n as i32).collect::<Vec<_>>())
    }

    /// First key of each sequence in packed ones, then the end of the last one.
    pub fn offsets_kv(&self) -> Vec<i32> {
        sums(&self.lengths)
    }

    /// The most queries of a sequence, as packed tensors say it.
    pub fn max_seqlen_q(&self) -> usize {
        self.queries.iter().copied().max().unwrap_or(0).max(1)
    }
}

fn sums(counts: &[i32]) -> Vec<i32> {
    let mut sums = vec![0];
    for &count in counts {
        sums.push(sums[sums.len() - 1] + count);
    }
    sums
}

/// Scores of blocks of keys.
#[derive(Clone, Debug)]
pub struct ScoresCase {
    /// The numbers follow from it, too.
    pub seed: u64,
    /// Queries and what they see.
    pub rows: RowsCase,
    /// Element type of keys and queries.
    pub dtype: DType,
    /// Elements of a row.
    pub head_dim: usize,
    /// Heads of keys.
    pub heads_kv: usize,
    /// Groups of heads for each head of keys.
    pub groups_of_key: usize,
    /// Heads of a group.
    pub heads_of_group: usize,
    /// Whether blocks have the mean of their keys.
    pub mean: bool,
    /// Whether products below 0 become 0.
    pub relu: bool,
    /// Factor of products.
    pub scale: f32,
    /// Whether heads have weights.
    pub weighted: bool,
    /// Small integers, for which all sums are exact.
    pub exact: bool,
    /// Whether some numbers are NaN or infinite.
    pub specials: bool,
}

impl ScoresCase {
    /// A random case with a head dimension among these.
    pub fn random(seed: u64, dtype: DType, head_dims: &[usize]) -> Self {
        let mut random = rng(seed ^ 0x51D3);
        let random = &mut random;
        let sizes = match random.random_range(0..6) {
            0 => [150, 300],
            1 => [2, 2500],
            _ => [9, 500],
        };
        let rows = RowsCase::random(random, sizes);
        let exact = random.random_bool(0.5);
        // Many heads cost the reference time.
        let many: &[usize] = if sizes[0] < 100 { &[1, 2, 3, 4, 8, 32, 64] } else { &[1, 2, 4] };
        Self {
            seed,
            rows,
            dtype,
            head_dim: one_of(head_dims, random),
            heads_kv: one_of(&[1, 1, 1, 2, 3], random),
            groups_of_key: one_of(&[1, 1, 2, 4], random),
            heads_of_group: one_of(many, random),
            mean: random.random_bool(0.3),
            relu: random.random(),
            scale: if exact {
                one_of(&[1.0, 0.25, 2.0], random)
            } else {
                one_of(&[1.0, 0.088], random)
            },
            weighted: random.random(),
            exact,
            specials: random.random_bool(0.2),
        }
    }

    /// Whether lengths on the device tell the keys of sequences.
    pub fn has_lengths(&self) -> bool {
        self.rows.given && self.rows.keys != Keys::Packed
    }

    /// Groups of heads.
    pub fn groups(&self) -> usize {
        self.heads_kv * self.groups_of_key
    }

    /// Heads of queries.
    pub fn heads(&self) -> usize {
        self.groups() * self.heads_of_group
    }

    /// Columns of the block table.
    pub fn max_pages(&self) -> usize {
        match self.rows.keys {
            Keys::Paged { page_size, .. } => self.rows.capacity / page_size,
            _ => 1,
        }
    }

    /// Pages and slots of a page.
    pub fn pages(&self) -> [usize; 2] {
        match self.rows.keys {
            Keys::Contiguous => [self.rows.batch(), self.rows.capacity],
            Keys::Paged { page_size, .. } => [self.rows.batch() * self.max_pages() + 2, page_size],
            // A few behind the last sequence.
            Keys::Packed => [1, self.rows.offsets_kv()[self.rows.batch()] as usize + 3],
        }
    }

    /// The block table, `[batch, max_pages]`: all pages are different.
    pub fn table(&self) -> Vec<i32> {
        let mut pages: Vec<i32> = (0..self.pages()[0].max(self.rows.batch()) as i32).collect();
        pages.shuffle(&mut rng(self.seed ^ 0x7AB1E));
        pages[..self.rows.batch() * self.max_pages()].to_vec()
    }

    /// Keys `[pages, page_size, heads_kv, head_dim]`.
    pub fn k(&self) -> Vec<f32> {
        let [pages, page_size] = self.pages();
        self.numbers(1, pages * page_size * self.heads_kv * self.head_dim)
    }

    /// Queries `[rows, heads, head_dim]`.
    pub fn q(&self) -> Vec<f32> {
        self.numbers(2, self.rows.rows() * self.heads() * self.head_dim)
    }

    /// Weights `[rows, heads]`.
    pub fn weights(&self) -> Vec<f32> {
        let count = self.rows.rows() * self.heads();
        if !self.exact {
            return normal(self.seed ^ 3, count);
        }
        let mut random = rng(self.seed ^ 3);
        (0..count).map(|_| one_of(&[1.0, 2.0, 0.5, -1.0, 0.0], &mut random)).collect()
    }

    fn numbers(&self, salt: u64, count: usize) -> Vec<f32> {
        let mut random = rng(self.seed ^ salt);
        let mut values: Vec<f32> = match self.exact {
            true => (0..count).map(|_| random.random_range(-1..3i32) as f32).collect(),
            false => normal_rounded(self.seed ^ salt, count, self.dtype),
        };
        if self.specials && count > 0 {
            for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0] {
                for _ in 0..3 {
                    values[random.random_range(0..count)] = special;
                }
            }
        }
        values
    }
}
