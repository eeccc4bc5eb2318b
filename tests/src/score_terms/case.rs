//! Problems as plain data.

use blockflash_ops::attention::{Align, Mask};
use blockflash_ops::block_sparse::BitTile;
use blockflash_ops::{BlockGeometry, BlockMask, DType, Stream};
use blockflash_oracle::visible;

/// A problem as plain data. Batch entries share the block mask.
#[derive(Clone, Debug)]
pub struct TermCase {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Columns of all of them.
    pub head_dim: usize,
    /// Batch entries.
    pub batch: usize,
    /// Heads of q, and of k and v.
    pub heads: [usize; 2],
    /// Queries and keys.
    pub seqlens: [usize; 2],
    /// The mask.
    pub mask: Mask,
    /// The softcap.
    pub softcap: Option<f32>,
    /// Whether there is a sink.
    pub sink: bool,
    /// The bias.
    pub bias: Option<BiasCase>,
    /// Whether there are slopes: for each head, or for each batch entry and head.
    pub alibi: Option<SlopesOf>,
    /// Queries and keys of a block of a mask with partial blocks.
    pub block: Option<usize>,
    /// Whether elements of the bias that no pair sees are NaN.
    pub poisoned: bool,
    /// Whether keys and values that no query sees are NaN and infinite, and some values NaN that
    /// some queries see. The case has no gradients then.
    pub nonfinite: bool,
    /// Seed of the numbers.
    pub seed: u64,
}

/// A bias.
#[derive(Clone, Copy, Debug)]
pub struct BiasCase {
    /// Its element type.
    pub dtype: DType,
    /// Along which of batch, heads, queries and keys one element serves all.
    pub broadcast: [bool; 4],
    /// Whether queries are contiguous in memory instead of keys.
    pub transposed: bool,
    /// Columns in memory beyond those of the bias.
    pub gap: usize,
}

/// What ALiBi has slopes of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlopesOf {
    /// Heads.
    Heads,
    /// Batch entries and heads.
    Entries,
}

impl TermCase {
    /// Without any options.
    pub fn simple(dtype: DType, head_dim: usize, seqlens: [usize; 2], seed: u64) -> Self {
        Self {
            dtype,
            head_dim,
            batch: 2,
            heads: [4, 2],
            seqlens,
            mask: Mask::Full,
            softcap: None,
            sink: false,
            bias: None,
            alibi: None,
            block: None,
            poisoned: false,
            nonfinite: false,
            seed,
        }
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    pub(super) fn bias_shape(&self) -> [usize; 4] {
        let full = [self.batch, self.heads[0], self.seqlens[0], self.seqlens[1]];
        let broadcast = self.bias.map_or([true; 4], |bias| bias.broadcast);
        std::array::from_fn(|dim| if broadcast[dim] { 1 } else { full[dim] })
    }

    /// Whether a pair is visible in the block mask, of a head: a third of the blocks is not
    /// visited, a third is full.
    fn in_blocks(&self, head: usize, [query, key]: [usize; 2]) -> bool {
        let Some(block) = self.block else { return true };
        match self.block_of(head, [query / block, key / block]) {
            BlockKind::Absent => false,
            BlockKind::Full => true,
            BlockKind::Partial => (query * 31 + key * 17 + query * key / 7) % 5 < 3,
        }
    }

    fn block_of(&self, head: usize, [row, col]: [usize; 2]) -> BlockKind {
        match (row + col + head / (self.heads[0] / self.heads[1])) % 3 {
            0 => BlockKind::Full,
            1 => BlockKind::Partial,
            _ => BlockKind::Absent,
        }
    }

    /// The keys that a query sees.
    pub(super) fn attended(&self, head: usize, query: usize) -> Vec<usize> {
        let (left, right, align) = match self.mask {
            Mask::Causal { align } => (None, Some(0), align),
            Mask::Window { left, right, align } => (left, right, align),
            _ => (None, None, Align::TopLeft),
        };
        let keys = visible(query, self.seqlens, [left, right], align == Align::BottomRight);
        keys.filter(|&key| self.in_blocks(head, [query, key])).collect()
    }

    /// The mask on a device, with a list for each head of keys.
    pub(super) fn block_mask(&self, stream: &Stream) -> Result<Option<BlockMask>, String> {
        let Some(block) = self.block else { return Ok(None) };
        let make = || {
            let geometry = BlockGeometry::new(self.seqlens[0], self.seqlens[1], block, block)?;
            let [rows, cols] = self.seqlens.map(|length| length.div_ceil(block));
            let group = self.heads[0] / self.heads[1];
            let heads = self.heads[1];
            let at = |entry: usize| [entry / (rows * cols), entry / cols % rows, entry % cols];
            let kinds: Vec<BlockKind> = (0..heads * rows * cols)
                .map(|entry| {
                    let [head, row, col] = at(entry);
                    self.block_of(head * group, [row, col])
                })
                .collect();
            let visited: Vec<bool> = kinds.iter().map(|&kind| kind != BlockKind::Absent).collect();
            let (mut block_bits, mut words) = (Vec::new(), Vec::new());
            for (entry, kind) in kinds.iter().enumerate() {
                let [head, row, col] = at(entry);
                match kind {
                    BlockKind::Absent => {}
                    BlockKind::Full => block_bits.push(-1),
                    BlockKind::Partial => {
                        block_bits.push((words.len() / BitTile::WORDS) as i32);
                        for tile in 0..(block / 64) * (block / 64) {
                            let [i, j] = [tile / (block / 64), tile % (block / 64)];
                            let [q, k] = [row * block + i * 64, col * block + j * 64];
                            let sees = |r, c| self.in_blocks(head * group, [q + r, k + c]);
                            words.extend(BitTile::new(sees).words());
                        }
                    }
                }
            }
            BlockMask::from_bool(geometry, 1, heads, &visited)?
                .with_bits(&block_bits, &words)?
                .with_transpose()?
                .to(stream)
        };
        make().map(Some).map_err(|error: blockflash_ops::Error| error.to_string())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockKind {
    Absent,
    Full,
    Partial,
}

/// Cases of kernels up to a head dimension: every broadcast and type of a bias, ALiBi and partial
/// blocks, in combination with masks, softcap, sinks, odd sizes, and NaN that bits hide.
pub fn term_cases(dtype: DType, head_dim: usize) -> Vec<TermCase> {
    let types = [DType::F16, DType::BF16, DType::F32];
    let window = Mask::Window { left: Some(70), right: Some(9), align: Align::BottomRight };
    let top = Mask::Causal { align: Align::TopLeft };
    let masks = [Mask::Full, Mask::causal(), window, top];
    let lengths = [[70, 130], [64, 64], [1, 75], [129, 65], [150, 201]];
    let mut cases = Vec::new();
    for at in 0..16usize {
        let broadcast = std::array::from_fn(|dim| at >> dim & 1 == 1);
        let bias = BiasCase {
            dtype: types[at % 3],
            broadcast,
            transposed: at % 4 == 2,
            gap: [0, 1, 8][at / 2 % 3],
        };
        cases.push(TermCase {
            bias: Some(bias),
            mask: masks[at / 3 % 4],
            softcap: (at % 5 == 1).then_some(15.0),
            sink: at % 4 == 1,
            alibi: [None, Some(SlopesOf::Heads), None, None, Some(SlopesOf::Entries)][at % 5],
            block: [None, None, Some(64), Some(128)][at % 4],
            poisoned: at % 2 == 0,
            ..TermCase::simple(dtype, head_dim, lengths[at % 5], at as u64 * 10)
        });
    }
    for (at, block) in [64, 128, 64, 128].into_iter().enumerate() {
        cases.push(TermCase {
            block: Some(block),
            mask: masks[at],
            sink: at == 1,
            softcap: (at == 2).then_some(20.0),
            heads: [[2, 2], [6, 2]][at % 2],
            ..TermCase::simple(dtype, head_dim - 8, lengths[(at + 3) % 5], 1000 + at as u64)
        });
    }
    for (at, block) in [64, 128, 64, 128, 0].into_iter().enumerate() {
        let full = BiasCase { dtype, broadcast: [false; 4], transposed: false, gap: 0 };
        cases.push(TermCase {
            block: (block > 0).then_some(block),
            mask: masks[at.min(3)],
            bias: (at % 2 == 1).then_some(full),
            alibi: (at % 2 == 0 && at > 0).then_some(SlopesOf::Heads),
            poisoned: true,
            nonfinite: true,
            ..TermCase::simple(dtype, head_dim, lengths[(2 * at + 2) % 5], 1500 + at as u64)
        });
    }
    for (at, of) in [SlopesOf::Heads, SlopesOf::Entries].into_iter().enumerate() {
        cases.push(TermCase {
            alibi: Some(of),
            mask: masks[at + 1],
            ..TermCase::simple(dtype, head_dim, lengths[at], 2000 + at as u64)
        });
    }
    cases
}
