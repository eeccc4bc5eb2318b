//! Grids of a suite's file.

use crate::case::{
    AttentionShape, BlockMaskShape, BlockSparseShape, BsrShape, Case, Lengths, MaskKind, MaskStep,
    Pattern, VarlenShape,
};
use blockflash_sys::DType;
use serde::Deserialize;

/// Which rivals the cases of a grid are measured with.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum GridPeers {
    /// Those of the suite.
    #[default]
    Suite,
    None,
}

pub(super) fn uniform() -> Vec<Pattern> {
    vec![Pattern::Uniform]
}

fn full() -> Vec<MaskKind> {
    vec![MaskKind::Full]
}

/// Every combination of the lists is a case. Either `seqlen` with `batch`, or with `tokens` for a
/// batch of `tokens / seqlen`; or `lengths`, each a list of the lengths of packed sequences.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttentionGrid {
    batch: Option<usize>,
    tokens: Option<usize>,
    seqlen: Option<Vec<usize>>,
    lengths: Option<Vec<Vec<usize>>>,
    seqlen_kv: Option<usize>,
    num_heads_q: usize,
    num_heads_kv: Option<usize>,
    head_dim: usize,
    mask: Vec<MaskKind>,
    dtype: Vec<DType>,
    #[serde(default)]
    pub(super) peers: GridPeers,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockSparseGrid {
    batch: usize,
    seqlen: Vec<usize>,
    num_heads_q: usize,
    num_heads_kv: Option<usize>,
    mask_heads: Option<usize>,
    head_dim: usize,
    /// Queries and keys of a block.
    block: Vec<[usize; 2]>,
    density: Vec<f64>,
    #[serde(default = "uniform")]
    pattern: Vec<Pattern>,
    #[serde(default = "full")]
    mask: Vec<MaskKind>,
    dtype: Vec<DType>,
    #[serde(default)]
    pub(super) peers: GridPeers,
}

/// Each combination is two cases: the scores, and the mask from scores.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockMaskGrid {
    seqlen: Vec<usize>,
    num_heads: usize,
    head_dim: usize,
    block: Vec<usize>,
    top_k: usize,
    dtype: Vec<DType>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BsrGrid {
    m: usize,
    k: usize,
    n: Vec<usize>,
    block_size: Vec<usize>,
    density: Vec<f64>,
    pattern: Vec<Pattern>,
    dtype: Vec<DType>,
}

impl AttentionGrid {
    pub(super) fn expand(&self, cases: &mut Vec<Case>) -> Result<(), String> {
        match (&self.seqlen, &self.lengths) {
            (Some(seqlens), None) => self.dense(seqlens, cases),
            (None, Some(lengths)) => self.varlen(lengths, cases),
            _ => Err("an attention grid has either seqlen or lengths".to_owned()),
        }
    }

    fn varlen(&self, lengths: &[Vec<usize>], cases: &mut Vec<Case>) -> Result<(), String> {
        let Self { num_heads_q, head_dim, .. } = *self;
        if [self.batch, self.tokens, self.seqlen_kv].iter().any(Option::is_some) {
            return Err("lengths say what batch, tokens and seqlen_kv would say".to_owned());
        }
        if head_dim == 0 {
            return Err("an attention grid has a size of 0".to_owned());
        }
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        for &dtype in &self.dtype {
            for &mask in &self.mask {
                for lengths in lengths {
                    let lengths = Lengths::new(lengths).map_err(|error| error.to_string())?;
                    let shape =
                        VarlenShape { lengths, num_heads_q, num_heads_kv, head_dim, mask, dtype };
                    cases.push(Case::VarlenFwd(shape));
                }
            }
        }
        Ok(())
    }

    fn dense(&self, seqlens: &[usize], cases: &mut Vec<Case>) -> Result<(), String> {
        let Self { num_heads_q, head_dim, .. } = *self;
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        for &dtype in &self.dtype {
            for &mask in &self.mask {
                for &seqlen_q in seqlens {
                    let batch = match (self.batch, self.tokens) {
                        (Some(batch), None) => batch,
                        (None, Some(tokens)) if seqlen_q > 0 && tokens % seqlen_q == 0 => {
                            tokens / seqlen_q
                        }
                        (None, Some(tokens)) => {
                            return Err(format!("{tokens} tokens are no multiple of {seqlen_q}"));
                        }
                        _ => return Err("an attention grid has either batch or tokens".to_owned()),
                    };
                    let seqlen_kv = self.seqlen_kv.unwrap_or(seqlen_q);
                    if [batch, seqlen_q, seqlen_kv, head_dim].contains(&0) {
                        return Err("an attention grid has a size of 0".to_owned());
                    }
                    let shape = AttentionShape {
                        batch,
                        seqlen_q,
                        seqlen_kv,
                        num_heads_q,
                        num_heads_kv,
                        head_dim,
                        mask,
                        dtype,
                    };
                    cases.push(Case::AttentionFwd(shape));
                }
            }
        }
        Ok(())
    }
}

impl BlockSparseGrid {
    pub(super) fn expand(&self, cases: &mut Vec<Case>) -> Result<(), String> {
        let Self { batch, num_heads_q, head_dim, .. } = *self;
        let num_heads_kv = self.num_heads_kv.unwrap_or(num_heads_q);
        for &dtype in &self.dtype {
            for &mask in &self.mask {
                for &[block_q, block_kv] in &self.block {
                    for &seqlen in &self.seqlen {
                        let shape = |density, pattern| BlockSparseShape {
                            batch,
                            seqlen_q: seqlen,
                            seqlen_kv: seqlen,
                            num_heads_q,
                            num_heads_kv,
                            mask_heads: self.mask_heads.unwrap_or(num_heads_q),
                            head_dim,
                            block_q,
                            block_kv,
                            density,
                            pattern,
                            mask,
                            dtype,
                        };
                        for &density in &self.density {
                            for &pattern in &self.pattern {
                                let shape = shape(density, pattern);
                                shape.check()?;
                                cases.push(Case::BlockSparseFwd(shape));
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl BlockMaskGrid {
    pub(super) fn expand(&self, cases: &mut Vec<Case>) -> Result<(), String> {
        let Self { num_heads, head_dim, top_k, .. } = *self;
        for &seqlen in &self.seqlen {
            for &block in &self.block {
                let scores = self.dtype.iter().map(|&dtype| MaskStep::Scores { head_dim, dtype });
                for step in scores.chain([MaskStep::Choose { top_k }]) {
                    let shape = BlockMaskShape { seqlen, num_heads, block, step };
                    shape.check()?;
                    cases.push(Case::BlockMaskBuild(shape));
                }
            }
        }
        Ok(())
    }
}

impl BsrGrid {
    pub(super) fn expand(&self, cases: &mut Vec<Case>) -> Result<(), String> {
        let Self { m, k, .. } = *self;
        for &dtype in &self.dtype {
            for &n in &self.n {
                for &block_size in &self.block_size {
                    if [m, n, k, block_size].contains(&0)
                        || m % block_size != 0
                        || k % block_size != 0
                    {
                        return Err(format!(
                            "m {m}, n {n}, k {k}: sizes of 0, or no multiples of block_size {block_size}"
                        ));
                    }
                    for &density in &self.density {
                        fraction(density)?;
                        let shape =
                            |pattern| BsrShape { m, n, k, block_size, density, pattern, dtype };
                        cases.extend(
                            self.pattern.iter().map(|&pattern| Case::BsrMatmul(shape(pattern))),
                        );
                    }
                }
            }
        }
        Ok(())
    }
}

fn heads_kv(num_heads_q: usize, num_heads_kv: Option<usize>) -> Result<usize, String> {
    let num_heads_kv = num_heads_kv.unwrap_or(num_heads_q);
    if num_heads_q == 0 || num_heads_kv == 0 || !num_heads_q.is_multiple_of(num_heads_kv) {
        return Err(format!(
            "{num_heads_q} query heads cannot share {num_heads_kv} key-value heads"
        ));
    }
    Ok(num_heads_kv)
}

fn fraction(density: f64) -> Result<(), String> {
    if density > 0.0 && density <= 1.0 {
        Ok(())
    } else {
        Err(format!("density {density} is not in (0, 1]"))
    }
}
