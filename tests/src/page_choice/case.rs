//! Cases, each of which follows from its seed.

use crate::number::{normal_rounded, rng};
use blockflash_ops::DType;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// A cache in pages, the queries that choose among them, and what is chosen.
#[derive(Clone, Debug)]
pub struct PageCase {
    /// The numbers follow from it, too.
    pub seed: u64,
    /// Element type of keys, queries and summaries.
    pub dtype: DType,
    /// Elements of a row.
    pub head_dim: usize,
    /// Heads of keys.
    pub heads_kv: usize,
    /// Heads of queries that share a head of keys.
    pub group: usize,
    /// Slots of a page.
    pub page_size: usize,
    /// Columns of the block table.
    pub max_pages: usize,
    /// Keys of each sequence as they are stored, also negative and beyond the capacity.
    pub lengths: Vec<i32>,
    /// Queries of each sequence.
    pub queries: Vec<usize>,
    /// Whether queries are packed; if not, all sequences have equally many.
    pub packed: bool,
    /// Whether the heads of a page come before its slots.
    pub heads_first: bool,
    /// 1 or 2 rows of summaries.
    pub statistics: usize,
    /// The last tokens that are summarised.
    pub tokens: usize,
    /// Room of a list.
    pub capacity: usize,
    /// Small integers, for which all sums are exact, so that equal scores are frequent.
    pub exact: bool,
    /// Whether some numbers are NaN or infinite.
    pub specials: bool,
}

impl PageCase {
    /// A random case with a head dimension among these.
    pub fn random(seed: u64, dtype: DType, head_dims: &[usize]) -> Self {
        let mut random = rng(seed ^ 0x9A6E);
        let one_of =
            |values: &[usize], random: &mut StdRng| values[random.random_range(0..values.len())];
        let batch = random.random_range(1..5);
        let exact = random.random_bool(0.6);
        let page_size = one_of(if exact { &[16, 16, 128] } else { &[16, 48, 128] }, &mut random);
        let max_pages = one_of(&[1, 2, 3, 5, 9, 40, 300], &mut random).min(6000 / page_size);
        let most = (page_size * max_pages) as i32;
        let length = |random: &mut StdRng| match random.random_range(0..8) {
            0 => 0,
            1 => -5,
            2 => most.saturating_add(7),
            3 => most,
            _ => random.random_range(0..=most),
        };
        let lengths: Vec<i32> = (0..batch).map(|_| length(&mut random)).collect();
        let packed = random.random();
        let equal = random.random_range(0..4);
        let queries = (0..batch).map(|_| if packed { random.random_range(0..6) } else { equal });
        Self {
            seed,
            dtype,
            queries: queries.collect(),
            head_dim: one_of(head_dims, &mut random),
            heads_kv: one_of(&[1, 2, 3], &mut random),
            group: one_of(&[1, 3, 4], &mut random),
            page_size,
            max_pages,
            lengths,
            packed,
            heads_first: random.random(),
            statistics: one_of(&[1, 2], &mut random),
            tokens: one_of(&[1, 2, 17, page_size, 10_000], &mut random),
            capacity: one_of(&[2, 3, 5, 17, max_pages + 2], &mut random),
            exact,
            specials: exact && random.random_bool(0.3),
        }
    }

    /// More pages than the scores that kernels hold in shared memory, few of them distinct.
    pub fn long(dtype: DType) -> Self {
        Self {
            lengths: vec![9000 * 16 - 3, 8193 * 16],
            queries: vec![1, 1],
            packed: false,
            heads_kv: 1,
            group: 2,
            page_size: 16,
            max_pages: 9000,
            head_dim: 8,
            capacity: 600,
            tokens: 1 << 20,
            statistics: 1,
            exact: true,
            specials: false,
            ..Self::random(7, dtype, &[8])
        }
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Pages that exist; some belong to no sequence.
    pub fn pages(&self) -> usize {
        self.batch() * self.max_pages + 2
    }

    /// Keys of a sequence.
    pub fn length(&self, sequence: usize) -> usize {
        let most = (self.page_size * self.max_pages) as i32;
        self.lengths[sequence].clamp(0, most) as usize
    }

    /// Pages that hold keys of a sequence.
    pub fn columns(&self, sequence: usize) -> usize {
        self.length(sequence).div_ceil(self.page_size)
    }

    /// The block table, `[batch, max_pages]`: all pages are different.
    pub fn table(&self) -> Vec<i32> {
        let mut pages: Vec<i32> = (0..self.pages() as i32).collect();
        pages.shuffle(&mut rng(self.seed ^ 0x7AB1E));
        pages[..self.batch() * self.max_pages].to_vec()
    }

    /// First row of the queries of each sequence, then all rows.
    pub fn offsets(&self) -> Vec<i32> {
        let mut offsets = vec![0];
        for &queries in &self.queries {
            offsets.push(offsets[offsets.len() - 1] + queries as i32);
        }
        offsets
    }

    /// Keys `[pages, page_size, heads_kv, head_dim]`.
    pub fn keys(&self) -> Vec<f32> {
        self.numbers(1, self.pages() * self.page_size * self.heads_kv * self.head_dim)
    }

    /// Queries `[rows, heads_kv · group, head_dim]`.
    pub fn q(&self) -> Vec<f32> {
        let rows: usize = self.queries.iter().sum();
        self.numbers(2, rows * self.heads_kv * self.group * self.head_dim)
    }

    fn numbers(&self, salt: u64, count: usize) -> Vec<f32> {
        if !self.exact {
            return normal_rounded(self.seed ^ salt, count, self.dtype);
        }
        let mut random = rng(self.seed ^ salt);
        let mut values: Vec<f32> =
            (0..count).map(|_| random.random_range(-1..3i32) as f32).collect();
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
