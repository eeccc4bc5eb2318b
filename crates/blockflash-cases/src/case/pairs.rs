//! What cases of attention have beside a token mask: masks inside of blocks, and what is added to
//! scores.

use super::attention_shape::AttentionShape;
use super::id::number;
use super::mask_kind::MaskKind;
use super::operands::normal;
use crate::error::Result;
use crate::io::Array;
use blockflash_ops::block_sparse::BitTile;
use blockflash_ops::{BlockGeometry, BlockMask, Mask, Scores};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// In text a kind, for masks with the size of their blocks: `documents16b128`, `prefix1024b64`,
/// `grid7b64`, `dilated64x8b128`, `treeb64`, `blocks16b128` and `blocks16bits128`, `bias`,
/// `sharedbias`, `alibi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pairs {
    /// What is done.
    pub kind: PairKind,
    /// Queries and keys of a block of a mask; 0 where something is added.
    pub block: usize,
}

/// A mask of tokens, or what is added to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairKind {
    /// This number of documents, whose lengths are like 1, 1/2, 1/3, … in another order. A query
    /// sees the keys of its own.
    Documents(usize),
    /// The blocks of that mask, all of them full.
    Blocks(usize),
    /// The same, all of them with bits that hide nothing.
    BlocksWithBits(usize),
    /// Everybody sees this number of keys, and those up to its own position.
    Prefix(usize),
    /// Tokens are on a grid, row by row. A query sees its neighbours in a square of this side.
    Grid(usize),
    /// This number of keys up to the query's own position, at this distance from each other.
    Dilated(usize, usize),
    /// The queries are the last keys and a binary tree: each sees its ancestors and all keys before
    /// the tree.
    Tree,
    /// A bias for each pair, in the type of q.
    Bias,
    /// One that all batch entries share.
    SharedBias,
    /// Slopes of ALiBi.
    Alibi,
}

/// A kind with a number.
type OfCount = fn(usize) -> PairKind;

impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            PairKind::Documents(count) => write!(f, "documents{count}"),
            PairKind::Blocks(count) => write!(f, "blocks{count}"),
            PairKind::BlocksWithBits(count) => return write!(f, "blocks{count}bits{}", self.block),
            PairKind::Prefix(keys) => write!(f, "prefix{keys}"),
            PairKind::Grid(side) => write!(f, "grid{side}"),
            PairKind::Dilated(keys, step) => write!(f, "dilated{keys}x{step}"),
            PairKind::Tree => f.write_str("tree"),
            PairKind::Bias => return f.write_str("bias"),
            PairKind::SharedBias => return f.write_str("sharedbias"),
            PairKind::Alibi => return f.write_str("alibi"),
        }?;
        write!(f, "b{}", self.block)
    }
}

impl From<Pairs> for String {
    fn from(pairs: Pairs) -> Self {
        pairs.to_string()
    }
}

impl TryFrom<String> for Pairs {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| {
            format!("{text:?} is neither a mask like documents16b128 nor bias, sharedbias or alibi")
        })
    }
}

impl Pairs {
    /// Reads the text form.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let of = |kind, block| Some(Self { kind, block });
        match text {
            "bias" => return of(PairKind::Bias, 0),
            "sharedbias" => return of(PairKind::SharedBias, 0),
            "alibi" => return of(PairKind::Alibi, 0),
            _ => {}
        }
        if let Some((kind, block)) = text.split_once("bits") {
            let count = number(kind, "blocks").filter(|&count| count > 0)?;
            return of(PairKind::BlocksWithBits(count), number(block, "").filter(|&b| b > 0)?);
        }
        let (kind, block) = text.rsplit_once('b')?;
        let block = number(block, "").filter(|&block| block > 0)?;
        let counted: [(&str, OfCount); 4] = [
            ("documents", PairKind::Documents),
            ("blocks", PairKind::Blocks),
            ("prefix", PairKind::Prefix),
            ("grid", PairKind::Grid),
        ];
        let of_count = |&(name, make): &(&str, OfCount)| {
            number::<usize>(kind, name).filter(|&count| count > 0).map(make)
        };
        let kind = counted.iter().find_map(of_count).or_else(|| match kind {
            "tree" => Some(PairKind::Tree),
            _ => {
                let (keys, step) = kind.strip_prefix("dilated")?.split_once('x')?;
                let (keys, step) = (keys.parse().ok()?, step.parse().ok()?);
                (keys > 0 && step > 0).then_some(PairKind::Dilated(keys, step))
            }
        })?;
        of(kind, block)
    }

    /// Whether this is a mask.
    pub(super) fn is_mask(&self) -> bool {
        self.block > 0
    }

    /// Checks that a shape can have it.
    pub(super) fn check(&self, shape: &AttentionShape) -> Result<(), String> {
        if shape.lists.is_some() || shape.lengths.is_some() {
            return Err(format!("{self} is for dense batches without lists of blocks"));
        }
        let causal = matches!(shape.mask, MaskKind::Full | MaskKind::Causal);
        if self.is_mask() && !causal {
            return Err(format!("{self} is under no window"));
        }
        if self.kind == PairKind::Tree && shape.seqlen_q > shape.seqlen_kv {
            return Err("the queries of a tree are the last keys".to_owned());
        }
        Ok(())
    }

    /// The keys that a query sees, as ranges, under the token mask of the shape.
    fn keys(&self, shape: &AttentionShape, ends: &[usize], query: usize) -> Vec<Range<usize>> {
        let keys = shape.seqlen_kv;
        let own = query + keys.saturating_sub(shape.seqlen_q);
        let document = |count: usize| {
            let at = ends.partition_point(|&end| end <= own).min(count - 1);
            one(if at == 0 { 0 } else { ends[at - 1] }..ends[at])
        };
        let ranges: Vec<Range<usize>> = match self.kind {
            PairKind::Documents(count)
            | PairKind::Blocks(count)
            | PairKind::BlocksWithBits(count) => document(count),
            PairKind::Prefix(first) => one(0..first.max(own + 1)),
            PairKind::Grid(side) => {
                let width = grid_width(keys);
                let (row, col) = (own / width, own % width);
                let from = |at: usize| at.saturating_sub(side / 2);
                let cols = from(col)..(col + side / 2 + 1).min(width);
                let rows = from(row)..(row + side / 2 + 1).min(keys.div_ceil(width));
                rows.map(|row| row * width + cols.start..row * width + cols.end).collect()
            }
            PairKind::Dilated(count, step) => {
                let seen = (0..count).rev().filter_map(|at| own.checked_sub(at * step));
                seen.map(|key| key..key + 1).collect()
            }
            PairKind::Tree => {
                let first = keys - shape.seqlen_q;
                let mut nodes = vec![query];
                while let Some(&node) = nodes.last().filter(|&&node| node > 0) {
                    nodes.push((node - 1) / 2);
                }
                let own = nodes.into_iter().rev().map(|node| first + node..first + node + 1);
                std::iter::once(0..first).chain(own).collect()
            }
            PairKind::Bias | PairKind::SharedBias | PairKind::Alibi => one(0..keys),
        };
        let end = if shape.mask == MaskKind::Causal { own + 1 } else { keys };
        let clipped = ranges.into_iter().map(|range| range.start..range.end.min(end));
        clipped.filter(|range| !range.is_empty()).collect()
    }

    /// The mask, in host memory; `None` where something is added.
    pub(super) fn block_mask(&self, shape: &AttentionShape) -> Result<Option<BlockMask>> {
        if !self.is_mask() {
            return Ok(None);
        }
        let geometry = BlockGeometry::new(shape.seqlen_q, shape.seqlen_kv, self.block, self.block)?;
        let ends = match self.kind {
            PairKind::Documents(count)
            | PairKind::Blocks(count)
            | PairKind::BlocksWithBits(count) => ends(shape.seqlen_kv, count),
            _ => Vec::new(),
        };
        let mask =
            BlockMask::from_ranges(geometry, 1, 1, |_, _, query| self.keys(shape, &ends, query))?;
        let full = || BlockMask::from_bool(geometry, 1, 1, &mask.to_bool()?);
        Ok(Some(match self.kind {
            PairKind::Blocks(_) => full()?,
            // Each block has bits of its own, as in a mask in which no two are alike.
            PairKind::BlocksWithBits(_) => {
                let (full, tiles) = (full()?, (self.block / BitTile::SIDE).pow(2));
                let words = BitTile::new(|_, _| true).words().repeat(tiles * full.nnz());
                let first: Vec<i32> = (0..full.nnz()).map(|block| (block * tiles) as i32).collect();
                full.with_bits(&first, &words)?
            }
            _ => mask,
        }))
    }

    /// The token mask that is left.
    pub(super) fn token_mask(&self, mask: MaskKind) -> Mask {
        if self.is_mask() { Mask::Full } else { mask.into() }
    }

    /// Adds to scores what is added, drawn from a stream of the seed of its own.
    pub(super) fn add(
        &self,
        shape: &AttentionShape,
        seed: u64,
        scores: &mut Scores<Array>,
    ) -> Result<()> {
        let AttentionShape { batch, num_heads_q, seqlen_q, seqlen_kv, dtype, .. } = *shape;
        let bias = |entries| normal(&[entries, num_heads_q, seqlen_q, seqlen_kv], dtype, seed, 4);
        match self.kind {
            PairKind::Bias => scores.bias = Some(bias(batch)?),
            PairKind::SharedBias => scores.bias = Some(bias(1)?),
            PairKind::Alibi => {
                let slope = |head: usize| 2f32.powf(-8.0 * (head + 1) as f32 / num_heads_q as f32);
                scores.alibi = Some((0..num_heads_q).map(slope).collect::<Vec<f32>>().into());
            }
            _ => {}
        }
        Ok(())
    }

    /// Bytes of what is added.
    pub(super) fn bytes(&self, shape: &AttentionShape) -> f64 {
        let pairs = (shape.num_heads_q * shape.seqlen_q * shape.seqlen_kv) as f64;
        match self.kind {
            PairKind::Bias => (shape.batch * shape.dtype.size()) as f64 * pairs,
            PairKind::SharedBias => shape.dtype.size() as f64 * pairs,
            PairKind::Alibi => (shape.num_heads_q * DType::F32.size()) as f64,
            _ => 0.0,
        }
    }
}

fn one(range: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(range).collect()
}

/// Where documents end.
fn ends(tokens: usize, count: usize) -> Vec<usize> {
    let weight = |at: usize| 1.0 / (1 + 5 * at % count) as f64;
    let total: f64 = (0..count).map(weight).sum();
    let mut sum = 0.0;
    let mut ends: Vec<usize> = (0..count)
        .map(|at| {
            sum += weight(at);
            (tokens as f64 * sum / total) as usize
        })
        .collect();
    ends[count - 1] = tokens;
    ends
}

/// Tokens in a row of a grid: a power of two, at most as many as there are rows but for a factor of
/// two.
fn grid_width(tokens: usize) -> usize {
    1 << (tokens.max(1).ilog2() / 2)
}

#[cfg(test)]
#[path = "pairs_tests.rs"]
mod tests;
