//! Cases, each of which follows from its seed.

use crate::attention_latent::rows;
use crate::number::rng;
use blockflash_ops::attention::{Align, Mask};
use blockflash_ops::{DType, HeadDims, Scores, View};
use blockflash_oracle::visible;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::ops::Range;

/// What kernels are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IndexForm {
    /// Element type of queries and outputs.
    pub dtype: DType,
    /// Elements of a row of q and k, and of v and o.
    pub head_dims: HeadDims,
    /// What rows of the cache are.
    pub rows: RowKind,
}

/// What rows of the cache are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowKind {
    /// Keys and values in the type of the queries.
    Plain,
    /// Codes of e4m3, which may have scales.
    Codes,
    /// Keys whose first columns are the values.
    Latent,
    /// The same as codes with their scales, and elements behind them.
    LatentCodes,
}

impl IndexForm {
    /// Whether the values are the first columns of the keys.
    pub fn is_latent(&self) -> bool {
        matches!(self.rows, RowKind::Latent | RowKind::LatentCodes)
    }

    /// The element type of the cache.
    pub fn cache_dtype(&self) -> DType {
        match self.rows {
            RowKind::Plain | RowKind::Latent => self.dtype,
            RowKind::Codes => DType::E4M3,
            RowKind::LatentCodes => DType::U8,
        }
    }

    /// Elements in which a row of keys is stored, and one of values.
    pub fn stored(&self) -> [usize; 2] {
        let HeadDims { qk, v } = self.head_dims;
        match self.rows {
            RowKind::LatentCodes => [rows::stored((self.dtype, self.head_dims, true)).1; 2],
            _ => [qk, v],
        }
    }
}

/// Where keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyLayout {
    /// `[batch, capacity, heads, head_dim]`.
    Contiguous,
    /// Pages of this many slots, `[pages, slots, heads, head_dim]`.
    Pages(usize),
    /// `[pages, heads, slots, head_dim]`.
    HeadsFirst(usize),
    /// `[pages, slots, 2, heads, head_dim]`: keys, then values.
    Interleaved(usize),
    /// `[1, total, heads, head_dim]`, with offsets of sequences.
    Packed,
}

/// A call; everything else follows from it.
#[derive(Clone, Debug)]
pub struct IndexCase {
    /// Of all random numbers.
    pub seed: u64,
    /// Types and sizes of rows.
    pub form: IndexForm,
    /// Heads of queries, and of keys.
    pub heads: [usize; 2],
    /// Lists of each query.
    pub groups: usize,
    /// Tokens of a block.
    pub granularity: usize,
    /// Room of a list.
    pub capacity: usize,
    /// Queries and keys of each sequence.
    pub lengths: Vec<(usize, usize)>,
    /// Whether queries are packed; otherwise all sequences have equally many.
    pub packed: bool,
    /// Where keys are.
    pub layout: KeyLayout,
    /// Whether entries are there that count twice, or not at all.
    pub odd_entries: bool,
    /// Whether lists ascend, with −1 behind the last entry, as a top-k leaves them.
    pub ascending: bool,
    /// Sides of the window, aligned at the last query and the last key.
    pub window: [Option<usize>; 2],
    /// Factor of the products instead of the usual one.
    pub scale: Option<f32>,
    /// See [`Scores::softcap`].
    pub softcap: Option<f32>,
    /// Whether heads have logits without a value.
    pub sink: bool,
    /// Whether lengths are on the device; otherwise all sequences have equally many keys, which
    /// fill the capacity.
    pub seqused: bool,
    /// Whether the bits of a query depend on no other one.
    pub batch_invariant: bool,
    /// Whether a value that some queries see is NaN.
    pub nonfinite: bool,
}

impl IndexCase {
    /// A case in pages of 64 slots without any option.
    pub fn simple(
        form: IndexForm,
        heads: [usize; 2],
        [granularity, capacity]: [usize; 2],
        lengths: &[(usize, usize)],
    ) -> Self {
        Self {
            seed: 1,
            form,
            heads,
            groups: heads[1],
            granularity,
            capacity,
            lengths: lengths.to_vec(),
            packed: false,
            layout: KeyLayout::Pages(64),
            odd_entries: false,
            ascending: true,
            window: [None, Some(0)],
            scale: None,
            softcap: None,
            sink: false,
            seqused: true,
            batch_invariant: false,
            nonfinite: false,
        }
    }

    /// A random case of these granularities.
    pub fn random(seed: u64, form: IndexForm, granularities: &[usize]) -> Self {
        let mut random = rng(seed ^ 0x1DE8);
        let random = &mut random;
        let granularity = one_of(granularities, random);
        let heads_kv = if form.is_latent() { 1 } else { one_of(&[1, 2, 3], random) };
        let group = one_of(&[1, 2, 3, 8, 16, 20], random);
        let heads = [heads_kv * group, heads_kv];
        let groups = one_of(&[1, heads[1], heads[1], heads[0]], random);
        let packed = random.random_bool(0.4);
        let equal: usize = one_of(&[1, 1, 1, 2, 5, 17], random);
        let layout = match random.random_range(0..6) {
            0 => KeyLayout::Contiguous,
            1 => KeyLayout::HeadsFirst(one_of(&[16, 64], random)),
            2 if !form.is_latent() && form.head_dims.single().is_some() => {
                KeyLayout::Interleaved(one_of(&[16, 32], random))
            }
            3 => KeyLayout::Packed,
            _ => KeyLayout::Pages(one_of(&[16, 48, 64, 128], random)),
        };
        let seqused = layout == KeyLayout::Packed || random.random_bool(0.8);
        let longest: usize = one_of(&[20, 300, 900], random);
        let full = match layout {
            KeyLayout::Pages(page) | KeyLayout::HeadsFirst(page) | KeyLayout::Interleaved(page) => {
                random.random_range(1..=longest).next_multiple_of(page)
            }
            _ => random.random_range(1..=longest),
        };
        let lengths = (0..random.random_range(1..=4)).map(|_| {
            let queries = if packed { random.random_range(0..=equal + 1) } else { equal };
            let keys = match random.random_range(0..6) {
                _ if !seqused => full,
                0 => random.random_range(0..=2),
                1 => granularity.min(longest),
                _ => random.random_range(1..=longest),
            };
            (queries, keys)
        });
        let lengths: Vec<_> = lengths.collect();
        let blocks = longest.div_ceil(granularity);
        let window = match random.random_range(0..4) {
            0 => [None, None],
            1 => {
                [Some(random.random_range(0..=longest)), one_of(&[None, Some(0), Some(5)], random)]
            }
            _ => [None, Some(0)],
        };
        Self {
            seed,
            groups,
            capacity: one_of(&[0, 1, 2, 3, 7, 16, 33, 64, 500], random).min(2 * blocks + 1),
            packed,
            layout,
            odd_entries: random.random(),
            ascending: random.random_bool(0.3),
            window,
            scale: random.random_bool(0.3).then_some(0.1),
            softcap: random.random_bool(0.2).then_some(20.0),
            sink: random.random_bool(0.3),
            seqused,
            batch_invariant: random.random_bool(0.3),
            nonfinite: random.random_bool(0.2),
            ..Self::simple(form, heads, [granularity, 0], &lengths)
        }
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Queries of all sequences.
    pub fn total(&self) -> usize {
        self.lengths.iter().map(|lengths| lengths.0).sum()
    }

    /// The first query of a sequence among those of all.
    pub fn start(&self, sequence: usize) -> usize {
        self.lengths[..sequence].iter().map(|lengths| lengths.0).sum()
    }

    /// Queries of the longest sequence.
    pub fn longest(&self) -> usize {
        self.lengths.iter().map(|lengths| lengths.0).max().unwrap_or(0)
    }

    /// Keys of the longest sequence.
    pub fn longest_keys(&self) -> usize {
        self.lengths.iter().map(|lengths| lengths.1).max().unwrap_or(0)
    }

    /// All queries: their sequence, and their place in it.
    pub fn queries(&self) -> impl Iterator<Item = [usize; 2]> {
        let sequences = self.lengths.iter().enumerate();
        sequences.flat_map(|(b, &(queries, _))| (0..queries).map(move |query| [b, query]))
    }

    /// Slots of a page, columns of the table, and pages.
    pub fn pages(&self) -> [usize; 3] {
        let keys = self.longest_keys().max(1);
        match self.layout {
            KeyLayout::Packed => [self.offsets()[self.batch()] as usize + 5, 1, 1],
            // Room for more keys than there are, unless all slots are used.
            KeyLayout::Contiguous => [if self.seqused { keys + 3 } else { keys }, 1, self.batch()],
            KeyLayout::Pages(page) | KeyLayout::HeadsFirst(page) | KeyLayout::Interleaved(page) => {
                let columns = keys.div_ceil(page) + usize::from(self.seqused);
                [page, columns, (self.batch() * columns + 2) | 1]
            }
        }
    }

    /// Whether keys are found by a block table.
    pub fn has_table(&self) -> bool {
        !matches!(self.layout, KeyLayout::Packed | KeyLayout::Contiguous)
    }

    /// The block table.
    pub fn table(&self) -> Vec<i32> {
        let [_, columns, pages] = self.pages();
        // An odd number of pages: none is there twice.
        (0..self.batch() * columns).map(|at| ((at * 2 + 3) % pages) as i32).collect()
    }

    /// First row of the packed keys of each sequence, then all rows.
    pub fn offsets(&self) -> Vec<i32> {
        let mut offsets = vec![0];
        for &(_, keys) in &self.lengths {
            offsets.push(offsets[offsets.len() - 1] + keys as i32);
        }
        offsets
    }

    /// Page and slot of a key of a sequence.
    pub fn slot(&self, table: &[i32], sequence: usize, key: usize) -> [usize; 2] {
        let [page_size, columns, _] = self.pages();
        match self.layout {
            KeyLayout::Packed => [0, self.offsets()[sequence] as usize + key],
            KeyLayout::Contiguous => [sequence, key],
            _ => [table[sequence * columns + key / page_size] as usize, key % page_size],
        }
    }

    /// Keys that the mask shows a query of a sequence.
    pub fn shown(&self, [sequence, query]: [usize; 2]) -> Range<usize> {
        let (queries, keys) = self.lengths[sequence];
        visible(query, [queries, keys], self.window, true)
    }

    /// Heads of queries that share a list and a head of keys.
    pub fn group(&self) -> usize {
        self.heads[0] / self.groups.max(self.heads[1])
    }

    /// The lists, `[groups, total, capacity]`.
    pub fn entries(&self) -> Vec<i32> {
        let mut random = rng(self.seed ^ 0x7157);
        let queries: Vec<_> = self.queries().collect();
        let lists = (0..self.groups).flat_map(|_| &queries);
        lists.flat_map(|&[sequence, _]| self.list(sequence, &mut random)).collect()
    }

    /// A list of blocks of a sequence.
    fn list(&self, sequence: usize, random: &mut StdRng) -> Vec<i32> {
        let blocks = self.lengths[sequence].1.div_ceil(self.granularity);
        let most = self.capacity.min(blocks);
        let count = if random.random() { most } else { random.random_range(0..=most) };
        let mut list: Vec<i32> = rand::seq::index::sample(random, blocks, count)
            .iter()
            .map(|block| block as i32)
            .collect();
        if self.ascending {
            list.sort_unstable();
            list.resize(self.capacity, -1);
            return list;
        }
        list.resize(self.capacity, -1);
        if self.odd_entries && count > 0 {
            for at in count..self.capacity {
                let beyond = [blocks as i32, blocks as i32 + 1, i32::MAX, i32::MIN, -7];
                match random.random_range(0..4) {
                    0 => list[at] = list[random.random_range(0..count)],
                    1 => list[at] = beyond[random.random_range(0..beyond.len())],
                    _ => {}
                }
            }
        }
        list.shuffle(random);
        list
    }

    /// What happens to scores, without tensors.
    pub fn scores<'a>(&self) -> Scores<View<'a>> {
        let align = Align::BottomRight;
        let mask = match self.window {
            [None, None] => Mask::Full,
            [None, Some(0)] => Mask::Causal { align },
            [left, right] => Mask::Window { left, right, align },
        };
        Scores { softmax_scale: self.scale, softcap: self.softcap, ..mask.into() }
    }

    /// The factor of the products.
    pub fn factor(&self) -> f32 {
        self.scale.unwrap_or(1.0 / (self.form.head_dims.qk as f32).sqrt())
    }
}

fn one_of<T: Copy>(values: &[T], random: &mut StdRng) -> T {
    values[random.random_range(0..values.len())]
}
