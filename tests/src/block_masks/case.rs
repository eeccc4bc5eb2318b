//! A mask to be built, as plain data.

use crate::number::{normal, rng};
use blockflash_ops::attention::{Align, Mask};
use blockflash_ops::{BlockGeometry, BlockMask, Error};
use rand::Rng;
use rand::seq::SliceRandom;

/// The source of a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskSource {
    /// A byte per block.
    Bool,
    /// Lists of columns, unsorted and padded.
    TopK,
    /// Scores, of which some are equal, infinite, subnormal, or a zero of either sign.
    Scores,
}

/// Description of a mask to be built.
#[derive(Clone, Debug)]
pub struct MaskCase {
    /// Queries and keys.
    pub seqlens: [usize; 2],
    /// Queries and keys of a block.
    pub blocks: [usize; 2],
    /// Batch entries and heads of the mask.
    pub groups: [usize; 2],
    /// The source.
    pub source: MaskSource,
    /// Length of the lists, or number of chosen scores.
    pub k: usize,
    /// The token mask.
    pub mask: Mask,
    /// Batch entries and heads of the blocks that are always visited, if any.
    pub always: Option<[usize; 2]>,
    /// Seed of the data.
    pub seed: u64,
}

/// The values of the source, and the blocks that are always visited.
#[derive(Clone, Debug)]
pub struct MaskData {
    /// `[batch, heads, rows, cols]`.
    pub blocks: Vec<bool>,
    /// `[batch, heads, rows, k]`.
    pub lists: Vec<i32>,
    /// `[batch, heads, rows, cols]`.
    pub scores: Vec<f32>,
    /// Row-major flags of its own batch entries and heads.
    pub always: Option<Vec<bool>>,
}

impl MaskCase {
    /// A mask of this many rows and columns of 64, with tails.
    pub fn new(source: MaskSource, [rows, cols]: [usize; 2], k: usize) -> Self {
        Self {
            seqlens: [rows * 64 - (rows > 0) as usize * 3, cols * 64 - (cols > 0) as usize * 5],
            blocks: [64, 64],
            groups: [1, 2],
            source,
            k,
            mask: Mask::Full,
            always: None,
            seed: 1,
        }
    }

    /// How queries and keys are divided.
    pub fn geometry(&self) -> BlockGeometry {
        let ([seqlen_q, seqlen_kv], [block_q, block_kv]) = (self.seqlens, self.blocks);
        BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv).expect("a valid geometry")
    }

    /// Rows of all heads of all batch entries.
    pub fn rows(&self) -> usize {
        self.groups[0] * self.groups[1] * self.geometry().rows()
    }

    /// Its data; only the source's is there.
    pub fn data(&self) -> MaskData {
        let (rows, cols) = (self.rows(), self.geometry().cols());
        let mut random = rng(self.seed);
        let has = |source| if self.source == source { rows } else { 0 };
        let blocks = (0..has(MaskSource::Bool) * cols).map(|_| random.random_bool(0.3)).collect();
        let mut lists = Vec::new();
        for _ in 0..has(MaskSource::TopK) {
            let mut columns: Vec<i32> = (0..cols as i32).collect();
            columns.shuffle(&mut random);
            columns.resize(cols.max(self.k), -1);
            columns.truncate(self.k);
            columns
                .iter_mut()
                .for_each(|col| *col = if random.random_bool(0.2) { -1 } else { *col });
            lists.extend(columns);
        }
        let mut scores = normal(self.seed, has(MaskSource::Scores) * cols);
        for score in &mut scores {
            *score = match (self.seed % 3, random.random_range(0..12)) {
                (1, _) => score.round(),
                (2, 0) => f32::INFINITY,
                (2, 1) => f32::NEG_INFINITY,
                (2, 2) => 0.0,
                (2, 3) => -0.0,
                (2, 4) => *score * f32::MIN_POSITIVE / 8.0,
                (2, 5) => f32::MAX.copysign(*score),
                _ => *score,
            };
        }
        let always = self.always.map(|[batch, heads]| {
            let count = batch * heads * self.geometry().rows() * cols;
            (0..count).map(|_| random.random_bool(0.08)).collect()
        });
        MaskData { blocks, lists, scores, always }
    }

    /// The blocks that are always visited, on the CPU.
    pub fn always(&self, data: &MaskData) -> Result<Option<BlockMask>, Error> {
        let (Some([batch, heads]), Some(flags)) = (self.always, &data.always) else {
            return Ok(None);
        };
        BlockMask::from_bool(self.geometry(), batch, heads, flags).map(Some)
    }

    /// The mask by the constructors for the CPU.
    pub fn expected(&self, data: &MaskData) -> Result<BlockMask, Error> {
        let (geometry, [batch, heads]) = (self.geometry(), self.groups);
        let chosen = match self.source {
            MaskSource::Bool => BlockMask::from_bool(geometry, batch, heads, &data.blocks),
            MaskSource::TopK => BlockMask::from_top_k(geometry, batch, heads, self.k, &data.lists),
            MaskSource::Scores => BlockMask::top_k_from_scores(
                geometry,
                batch,
                heads,
                &data.scores,
                self.k,
                self.mask,
            ),
        }?;
        match self.always(data)? {
            Some(always) => chosen.union(&always)?,
            None => chosen,
        }
        .intersect_mask(self.mask)
    }
}

/// Every width from one column to beyond what a kernel keeps in registers, with every kind of k;
/// heights around those of slabs, token masks, batch entries, heads, blocks and what is always
/// visited take turns.
pub fn mask_cases() -> Vec<MaskCase> {
    let widths = [
        1, 2, 3, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 300, 511, 512, 513, 544, 600,
    ];
    let heights = [1, 15, 16, 17, 33, 2, 40];
    let window = |left, right, align| Mask::Window { left, right, align };
    let masks = [
        Mask::Full,
        Mask::causal(),
        Mask::Causal { align: Align::TopLeft },
        window(Some(200), Some(0), Align::BottomRight),
        window(Some(0), Some(1000), Align::TopLeft),
        window(None, Some(300), Align::BottomRight),
    ];
    let sources = [MaskSource::Scores, MaskSource::Bool, MaskSource::TopK];
    let mut cases = Vec::new();
    for (turn, cols) in widths.into_iter().enumerate() {
        for k in [0, 1, cols / 3, cols - 1, cols, cols + 3] {
            for source in sources {
                let turn = turn + cases.len();
                let groups = [[1, 1], [1, 3], [2, 1], [2, 2]][turn % 4];
                let case = MaskCase::new(source, [heights[turn % heights.len()], cols], k);
                let always =
                    [None, Some([1, 1]), Some([1, groups[1]]), Some([groups[0], 1]), Some(groups)];
                cases.push(MaskCase {
                    mask: masks[turn / 2 % masks.len()],
                    groups,
                    always: always[turn % always.len()],
                    seed: turn as u64,
                    ..case
                });
            }
        }
    }
    for source in sources {
        // Blocks that are no squares, more queries than keys and fewer, nothing at all.
        for (seqlens, blocks) in [
            ([5000, 700], [128, 64]),
            ([300, 9001], [64, 320]),
            ([1, 5000], [1024, 64]),
            ([129, 1], [64, 128]),
            ([300, 0], [64, 64]),
            ([0, 300], [64, 64]),
        ] {
            for mask in masks {
                cases.push(MaskCase {
                    seqlens,
                    blocks,
                    mask,
                    seed: 5,
                    ..MaskCase::new(source, [1, 1], 7)
                });
            }
        }
        // As attention over 32k tokens has them, and more slabs than threads of a block.
        let many = MaskCase {
            groups: [1, 16],
            mask: Mask::causal(),
            ..MaskCase::new(source, [256, 256], 24)
        };
        cases.push(MaskCase { blocks: [128, 128], seqlens: [32768; 2], ..many.clone() });
        cases.push(MaskCase { groups: [40, 15], ..MaskCase::new(source, [17, 20], 3) });
    }
    cases
}
