//! Grids of attention in suite files.

use super::Case;
use super::attention_shape::{AttentionShape, Pass};
use super::block_lists::BlockLists;
use super::grid::{GridPeers, each, head_dims, heads_kv, uniform};
use super::id::Fields;
use super::lengths::Lengths;
use super::mask_kind::MaskKind;
use super::pairs::Pairs;
use super::pattern::Pattern;
use super::shape::Shape;
use blockflash_sys::DType;
use serde::Deserialize;

/// Every combination of the lists is a case. Either `seqlen` with `batch`, or with `tokens` for a
/// batch of `tokens / seqlen`; or `lengths`, each a list of the lengths of packed sequences. With a
/// block mask, also every combination of `block` (queries and keys), `density` and `pattern`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionGrid {
    batch: Option<usize>,
    tokens: Option<usize>,
    seqlen: Option<Vec<usize>>,
    lengths: Option<Vec<Vec<usize>>>,
    seqlen_kv: Option<usize>,
    num_heads_q: usize,
    num_heads_kv: Option<usize>,
    mask_heads: Option<usize>,
    head_dim: usize,
    head_dim_v: Option<usize>,
    block: Option<Vec<[usize; 2]>>,
    density: Option<Vec<f64>>,
    pattern: Option<Vec<Pattern>>,
    mask: Option<Vec<MaskKind>>,
    /// Masks inside of blocks, or what is added to scores; default: nothing.
    pairs: Option<Vec<Pairs>>,
    dtype: Vec<DType>,
    /// Which competitors the cases are measured with.
    #[serde(default)]
    pub peers: GridPeers,
}

impl AttentionGrid {
    /// The cases of this pass, which have block masks if this says so.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self, pass: Pass, block_sparse: bool) -> Result<Vec<Case>, String> {
        let (sequences, variants) = (self.sequences(pass)?, self.lists(block_sparse)?);
        let masks = match &self.mask {
            None if !block_sparse => return Err("an attention grid has no mask".to_owned()),
            masks => masks.as_deref().unwrap_or(&[MaskKind::Full]),
        };
        let pairs: Vec<Option<Pairs>> = match &self.pairs {
            Some(pairs) => pairs.iter().copied().map(Some).collect(),
            None => vec![None],
        };
        let mut cases = Vec::new();
        each!(dtype in self.dtype, mask in masks, pairs in pairs, block in variants.blocks,
            shape in sequences, density in variants.densities, pattern in variants.patterns => {
            let lists = block.map(|[block_q, block_kv]| {
                let mask_heads = self.mask_heads.unwrap_or(self.num_heads_q);
                BlockLists { mask_heads, block_q, block_kv, density, pattern }
            });
            let shape = AttentionShape { lists, pairs, mask, dtype, ..shape.clone() };
            shape.check()?;
            cases.push(shape.into());
        });
        Ok(cases)
    }

    /// A shape for each length, or for each list of lengths.
    fn sequences(&self, pass: Pass) -> Result<Vec<AttentionShape>, String> {
        let num_heads_q = self.num_heads_q;
        let head_dims = head_dims(self.head_dim, self.head_dim_v);
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        let empty = AttentionShape::EMPTY;
        let shape = AttentionShape { pass, num_heads_q, num_heads_kv, head_dims, ..empty };
        let of_one_length = |&seqlen_q: &usize| {
            let batch = match (self.batch, self.tokens) {
                (Some(batch), None) => batch,
                (None, Some(tokens)) if seqlen_q > 0 && tokens % seqlen_q == 0 => tokens / seqlen_q,
                (None, Some(tokens)) => {
                    return Err(format!("{tokens} tokens are not a multiple of {seqlen_q}"));
                }
                _ => return Err("an attention grid has either batch or tokens".to_owned()),
            };
            let seqlen_kv = self.seqlen_kv.unwrap_or(seqlen_q);
            Ok(AttentionShape { batch, seqlen_q, seqlen_kv, ..shape.clone() })
        };
        match (&self.seqlen, &self.lengths) {
            (Some(seqlens), None) => seqlens.iter().map(of_one_length).collect(),
            (None, Some(_)) if [self.batch, self.tokens, self.seqlen_kv] != [None; 3] => {
                Err("lengths cannot be combined with batch, tokens or seqlen_kv".to_owned())
            }
            (None, Some(lists)) => {
                let lengths = lists.iter().map(|list| Lengths::new(list));
                let shape = |lengths| Ok(shape.packed(lengths));
                lengths
                    .map(|list| list.map_err(|error| error.to_string()).and_then(shape))
                    .collect()
            }
            _ => Err("an attention grid has either seqlen or lengths".to_owned()),
        }
    }

    fn lists(&self, block_sparse: bool) -> Result<Variants, String> {
        match (&self.block, &self.density) {
            (Some(blocks), Some(density)) if block_sparse => Ok(Variants {
                blocks: blocks.iter().copied().map(Some).collect(),
                densities: density.clone(),
                patterns: self.pattern.clone().unwrap_or_else(uniform),
            }),
            _ if block_sparse => Err("a block-sparse grid has block and density".to_owned()),
            (None, None) if self.pattern.is_none() && self.mask_heads.is_none() => {
                Ok(Variants { blocks: vec![None], densities: vec![1.0], patterns: uniform() })
            }
            _ => {
                Err("block, density, pattern and mask_heads are for block-sparse grids".to_owned())
            }
        }
    }
}

/// The block masks of a grid; a block of `None` is none.
struct Variants {
    blocks: Vec<Option<[usize; 2]>>,
    densities: Vec<f64>,
    patterns: Vec<Pattern>,
}
