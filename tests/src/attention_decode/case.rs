//! Description of one call of attention to a cache; everything else follows from it.

use super::{CodeCase, CodeScales};
use crate::attention::{AttentionCase, Lengths, Sequence};
use crate::number::rng;
use crate::placement::Placement;
use blockflash_ops::RotaryPairs;
use blockflash_sys::DType;
use rand::Rng;
use rand::seq::SliceRandom;

/// One call: queries and options, the cache, and what is done with it.
#[derive(Clone, Debug)]
pub struct DecodeCase {
    /// Queries, outputs and options. The lengths are packed: queries and keys of each sequence, the
    /// new ones counted. Placements of k and v do not matter.
    pub attention: AttentionCase,
    /// All sequences have equally many queries, and tensors have a batch dimension.
    pub equal: bool,
    /// Where the keys are.
    pub layout: CacheLayout,
    /// Whether the lengths are given; otherwise every sequence fills the capacity.
    pub seqused: bool,
    /// Part of the pages that are visited.
    pub listed: Option<f64>,
    /// Rotation of queries and new keys.
    pub rotary: Option<RotaryCase>,
    /// The last keys of each sequence, as many as it has queries, are appended by the call.
    pub append: bool,
    /// Whether the bits of a sequence depend on no other one.
    pub batch_invariant: bool,
    /// A mask of the last keys.
    pub tail: Option<TailCase>,
    /// Keys and values are codes of 8 bits, to which nothing is appended.
    pub codes: Option<CodeCase>,
}

/// A mask of the last keys, whose entries follow from the seed of the case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailCase {
    /// Its keys.
    pub tail: usize,
    /// Whether one serves all sequences.
    pub shared: bool,
}

/// Where the keys of a case are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLayout {
    /// `[batch, capacity, heads, head_dim]`.
    Contiguous {
        /// Slots of each sequence.
        capacity: usize,
    },
    /// Pages in random order.
    Paged {
        /// Slots of a page.
        page_size: usize,
        /// Columns of the table.
        max_pages: usize,
        /// Pages that no sequence uses.
        spare: usize,
        /// First pages of sequence 0 that all other sequences share which are long enough.
        shared: usize,
        /// Heads are before the slots.
        heads_first: bool,
    },
}

/// A rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotaryCase {
    /// Elements of a row that are turned.
    pub dim: usize,
    /// Which elements are pairs.
    pub pairs: RotaryPairs,
    /// Type of the tables.
    pub dtype: DType,
}

impl DecodeCase {
    /// Sequences of this many queries and keys in pages of 16 slots, and no option.
    pub fn simple(
        dtype: DType,
        heads: (usize, usize),
        head_dim: usize,
        lengths: &[(usize, usize)],
    ) -> Self {
        let longest = lengths.iter().map(|lengths| lengths.1).max().unwrap_or(0);
        Self {
            attention: AttentionCase {
                lengths: Lengths::Packed { lengths: lengths.to_vec(), slack: (0, 0) },
                ..AttentionCase::simple(dtype, heads, head_dim, (0, 0))
            },
            equal: false,
            layout: CacheLayout::Paged {
                page_size: 16,
                max_pages: longest.div_ceil(16) + 1,
                spare: 2,
                shared: 0,
                heads_first: false,
            },
            seqused: true,
            listed: None,
            rotary: None,
            append: false,
            batch_invariant: false,
            tail: None,
            codes: None,
        }
    }

    /// The same with whatever contradicts itself left out: a batch dimension needs equal numbers of
    /// queries and no padding, lists need pages, and shared pages are not appended to.
    pub fn consistent(mut self) -> Self {
        let sequences = self.attention.sequences();
        let first = sequences.first().map_or(0, |s| s.q_len);
        self.append &= self.codes.is_none();
        self.equal &= sequences.iter().all(|s| s.q_len == first);
        if self.equal {
            for placement in &mut self.attention.placements {
                placement.padding.clear();
            }
            self.attention.lse_placement = Placement::default();
        } else {
            self.attention.terms.bias = None;
        }
        if let Lengths::Packed { slack, .. } = &mut self.attention.lengths {
            *slack = (if self.equal { 0 } else { slack.0 }, 0);
        }
        let (capacity, equal) = (self.capacity(), self.equal);
        self.tail = self.tail.filter(|_| capacity > 0).map(|TailCase { tail, shared }| TailCase {
            tail: tail.clamp(1, capacity),
            shared: shared && equal,
        });
        self.seqused |= sequences.iter().any(|s| s.kv_len != capacity);
        if let CacheLayout::Paged { page_size, shared, .. } = &mut self.layout {
            let differ = |codes: CodeCase| codes.scales.map(CodeScales::differ_by_sequence);
            if self.codes.is_some_and(|codes| differ(codes).contains(&true)) {
                *shared = 0;
            }
            if self.append {
                let old = sequences.iter().map(|s| s.kv_len.saturating_sub(s.q_len));
                *shared = (*shared).min(old.min().unwrap_or(0) / *page_size);
            }
            if *shared > 0 {
                // What one sequence does not see another one may.
                self.attention.content = crate::attention::Content::Normal;
            }
        } else {
            self.listed = None;
        }
        self
    }

    /// Element type of keys and values.
    pub fn cache_dtype(&self) -> DType {
        self.codes.map_or(self.attention.dtype, |codes| codes.dtype)
    }

    /// Slots of a page, columns of the table, and pages.
    pub fn pages(&self) -> [usize; 3] {
        let batch = self.attention.sequences().len();
        match self.layout {
            CacheLayout::Contiguous { capacity } => [capacity, 1, batch],
            CacheLayout::Paged { page_size, max_pages, spare, .. } => {
                [page_size, max_pages, batch * max_pages + spare]
            }
        }
    }

    /// Most keys of a sequence.
    pub fn capacity(&self) -> usize {
        let [page_size, max_pages, _] = self.pages();
        page_size * max_pages
    }

    /// The table: the page of each column of each sequence. Columns beyond the length hold garbage
    /// where `garbage` is true.
    pub fn table(&self, garbage: bool) -> Vec<i32> {
        let [page_size, max_pages, pages] = self.pages();
        let sequences = self.attention.sequences();
        let CacheLayout::Paged { shared, .. } = self.layout else {
            return (0..pages as i32).collect();
        };
        let mut random = rng(self.attention.seed ^ 0x7AB1E);
        let mut table: Vec<i32> = (0..pages as i32).collect();
        table.shuffle(&mut random);
        for (b, sequence) in sequences.iter().enumerate() {
            let row = b * max_pages;
            if b > 0 && self.shares(sequence) {
                table.copy_within(..shared, row);
            }
            let used = sequence.kv_len.div_ceil(page_size);
            if garbage {
                for entry in &mut table[row + used..row + max_pages] {
                    let bad = [i32::MIN, -1, i32::MAX, pages as i32, 0];
                    *entry = bad[random.random_range(0..bad.len())];
                }
            }
        }
        table.truncate(sequences.len() * max_pages);
        table
    }

    /// Whether a sequence shares the first pages of sequence 0.
    pub fn shares(&self, sequence: &Sequence) -> bool {
        let CacheLayout::Paged { page_size, shared, .. } = self.layout else { return false };
        let long = |s: &Sequence| s.kv_len >= shared * page_size;
        shared > 0 && long(sequence) && self.attention.sequences().first().is_some_and(long)
    }

    /// Columns that each key head of each sequence visits, `[batch][heads_kv][]`; equally many for
    /// all heads.
    pub fn lists(&self) -> Option<Vec<Vec<Vec<i32>>>> {
        let (density, [_, max_pages, _]) = (self.listed?, self.pages());
        let mut random = rng(self.attention.seed ^ 0x115);
        let of_sequence = |_| {
            let count = (density * max_pages as f64).round() as usize;
            let count = count.min(max_pages).saturating_sub(random.random_range(0..2));
            let of_head = |_| {
                let mut columns: Vec<i32> = (0..max_pages as i32).collect();
                columns.shuffle(&mut random);
                columns.truncate(count);
                columns.sort_unstable();
                columns
            };
            (0..self.attention.heads_kv).map(of_head).collect()
        };
        Some(self.attention.sequences().iter().map(of_sequence).collect())
    }

    /// Entries of the mask of the last keys for this many rows.
    pub fn tail_entries(&self, rows: usize) -> Vec<u8> {
        let tail = self.tail.map_or(0, |tail| tail.tail);
        let rows = 0..rows;
        rows.flat_map(|row| (0..tail).map(move |entry| self.tail_entry(row, entry))).collect()
    }

    /// One of them: a fifth of the keys is hidden from all queries, and a third from any.
    fn tail_entry(&self, row: usize, entry: usize) -> u8 {
        let of = |row: usize| rng(self.attention.seed ^ (row << 24 ^ entry) as u64).random::<u32>();
        let hidden = of(usize::MAX >> 24).is_multiple_of(5) || of(row).is_multiple_of(3);
        if hidden { 0 } else { of(row) as u8 | 1 }
    }

    /// Whether a query of a sequence sees a key by the mask of the last keys.
    pub fn shows(&self, sequence: &Sequence, query: usize, key: usize) -> bool {
        let Some(TailCase { tail, shared }) = self.tail else { return true };
        let row = if shared { query } else { sequence.q_start + query };
        (key + tail).checked_sub(sequence.kv_len).is_none_or(|at| self.tail_entry(row, at) != 0)
    }

    /// The keys that are appended: of each sequence, those from this one on. Negative if it has
    /// more queries than keys; the first ones are dropped then.
    pub fn first_new(&self, sequence: &Sequence) -> i64 {
        sequence.kv_len as i64 - sequence.q_len as i64
    }
}
