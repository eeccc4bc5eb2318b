use super::LatentForm;
use crate::number::rng;
use blockflash_ops::attention::{Align, Mask};
use blockflash_ops::{DType, HeadDims, Scores, View};
use blockflash_oracle::visible;
use rand::Rng;
use std::ops::Range;

/// A call; everything else follows from it.
#[derive(Clone, Debug)]
pub struct LatentCase {
    /// Of all random numbers.
    pub seed: u64,
    /// Element type of queries and outputs.
    pub dtype: DType,
    /// Columns of keys, of which the first are the values.
    pub head_dims: HeadDims,
    /// Whether rows of the cache are codes.
    pub codes: bool,
    /// Heads of queries, which share one of keys.
    pub heads: usize,
    /// Queries and keys of each sequence.
    pub lengths: Vec<(usize, usize)>,
    /// Whether queries are packed; otherwise all sequences have equally many.
    pub packed: bool,
    /// Slots of a page; without it the cache is contiguous.
    pub page_size: Option<usize>,
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
    /// Whether the bits of a sequence depend on no other one.
    pub batch_invariant: bool,
    /// Whether one of the last keys of each sequence is NaN, which some queries see.
    pub nonfinite: bool,
}

impl LatentCase {
    /// A case in pages of 64 slots without any option.
    pub fn simple(
        (dtype, head_dims, codes): LatentForm,
        heads: usize,
        lengths: &[(usize, usize)],
    ) -> Self {
        Self {
            seed: 1,
            dtype,
            head_dims,
            codes,
            heads,
            lengths: lengths.to_vec(),
            packed: false,
            page_size: Some(64),
            window: [None, None],
            scale: None,
            softcap: None,
            sink: false,
            seqused: true,
            batch_invariant: false,
            nonfinite: false,
        }
    }

    /// Types and sizes of rows.
    pub fn form(&self) -> LatentForm {
        (self.dtype, self.head_dims, self.codes)
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

    /// Slots of a page, columns of the table, and pages.
    pub fn pages(&self) -> [usize; 3] {
        let keys = self.lengths.iter().map(|lengths| lengths.1).max().unwrap_or(0).max(1);
        match self.page_size {
            // Room for more keys than there are, unless all slots are used.
            None => [if self.seqused { keys + 3 } else { keys }, 1, self.batch()],
            Some(page) => {
                let columns = keys.div_ceil(page) + usize::from(self.seqused);
                [page, columns, (self.batch() * columns + 2) | 1]
            }
        }
    }

    /// Slots of a sequence.
    pub fn capacity(&self) -> usize {
        let [page_size, columns, _] = self.pages();
        page_size * columns
    }

    /// The block table.
    pub fn table(&self) -> Vec<i32> {
        let [_, columns, pages] = self.pages();
        // An odd number of pages: none is there twice.
        (0..self.batch() * columns).map(|at| ((at * 2 + 3) % pages) as i32).collect()
    }

    /// Rows of the cache up to a key of a sequence.
    pub fn slot(&self, table: &[i32], sequence: usize, key: usize) -> usize {
        let [page_size, columns, _] = self.pages();
        let page = match self.page_size {
            None => sequence,
            Some(_) => table[sequence * columns + key / page_size] as usize,
        };
        page * page_size + key % page_size
    }

    /// Keys that a query of a sequence sees.
    pub fn sees(&self, sequence: usize, query: usize) -> Range<usize> {
        let (queries, keys) = self.lengths[sequence];
        visible(query, [queries, keys], self.window, true)
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
        self.scale.unwrap_or(1.0 / (self.head_dims.qk as f32).sqrt())
    }
}

/// Cases for kernels of a form: all numbers of heads and queries in all
/// layouts, each with other options and lengths.
pub fn latent_cases(form: LatentForm) -> Vec<LatentCase> {
    let mut cases = Vec::new();
    for heads in [1, 7, 16, 128] {
        for queries in [1, 4] {
            for page_size in [None, Some(16), Some(64)] {
                for variant in 0..4 {
                    let seed = cases.len() as u64;
                    cases.push(drawn((seed, variant), form, heads, queries, page_size));
                }
            }
        }
    }
    // One key, none at all, one more than a step, and lengths that are many splits.
    let simple = |heads, lengths: &[_]| LatentCase::simple(form, heads, lengths);
    cases.push(simple(16, &[(1, 0), (1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65)]));
    cases.push(simple(16, &[(3, 1), (3, 2), (3, 0), (3, 4000)]));
    cases.push(simple(5, &[(1, 9001)]));
    cases.push(LatentCase { seqused: false, ..simple(16, &[(1, 8192)]) });
    cases.push(LatentCase { seqused: false, page_size: None, ..simple(24, &[(2, 3001); 3]) });
    cases.push(LatentCase { batch_invariant: true, ..simple(16, &[(1, 12_000), (1, 33)]) });
    // Of few keys that many queries see.
    let window = [Some(100), Some(0)];
    cases.push(LatentCase { window, ..simple(3, &[(70, 900), (70, 71), (70, 40)]) });
    cases
}

fn drawn(
    (seed, variant): (u64, usize),
    form: LatentForm,
    heads: usize,
    queries: usize,
    page_size: Option<usize>,
) -> LatentCase {
    let mut random = rng(seed);
    let longest = if heads > 16 { 200 } else { 700 };
    let batch = random.random_range(1..=4);
    let packed = variant == 3;
    let seqused = variant != 1;
    let keys: usize = random.random_range(1..=longest);
    let lengths: Vec<_> = (0..batch)
        .map(|at| {
            let of_sequence = match at {
                _ if !seqused => page_size.map_or(keys, |page| keys.next_multiple_of(page)),
                0 => keys,
                _ => [0, 1, random.random_range(2..=longest)][random.random_range(0..3)],
            };
            let fewer = if packed { random.random_range(0..=queries) } else { queries };
            (fewer, of_sequence)
        })
        .collect();
    let window = match variant {
        0 => [None, Some(0)],
        2 => [Some(random.random_range(0..=90)), [None, Some(0), Some(5)][seed as usize % 3]],
        3 => [None, Some(0)],
        _ => [None, None],
    };
    LatentCase {
        seed,
        packed,
        page_size,
        window,
        scale: (variant < 2).then_some(1.0 / 192f32.sqrt()),
        softcap: (variant == 2).then_some(20.0),
        sink: variant >= 2 || seed % 5 == 0,
        seqused,
        batch_invariant: seed % 3 == 0,
        nonfinite: variant == 0 && queries > 1,
        ..LatentCase::simple(form, heads, &lengths)
    }
}
