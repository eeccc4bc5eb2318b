//! Attention over packed sequences of different lengths, and grids of it and of dense attention.

use super::attention::AttentionShape;
use super::backward::Forward;
use super::grid::{GridPeers, heads_kv, pairs};
use super::id::{self, Fields, Id, displayed};
use super::lengths::Lengths;
use super::mask_kind::MaskKind;
use super::operands::Operands;
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::Work;
use crate::error::Result;
use blockflash_ops::attention::{AttentionProblem, Strides};
use blockflash_ops::{PackedRows, Stream};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Attention over packed sequences, `[tokens, num_heads, head_dim]`. Each has as many queries as
/// keys and sees itself only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[allow(missing_docs)]
pub struct VarlenShape {
    pub lengths: Lengths,
    pub num_heads_q: usize,
    pub num_heads_kv: usize,
    pub head_dim: usize,
    pub mask: MaskKind,
    pub dtype: DType,
}

impl VarlenShape {
    /// Each sequence as a dense batch of one.
    pub fn sequences(&self) -> impl Iterator<Item = AttentionShape> + '_ {
        let dense = self.of_one_length(1, 0);
        self.lengths.as_slice().iter().map(move |&length| AttentionShape {
            seqlen_q: length,
            seqlen_kv: length,
            ..dense
        })
    }

    /// The problem of contiguous packed tensors.
    pub fn problem(&self) -> AttentionProblem {
        let (tokens, lengths) = (self.lengths.tokens(), &self.lengths);
        let dense = self.of_one_length(lengths.batch(), lengths.longest()).problem();
        let packed = |strides: Strides| Strides { batch: 0, ..strides };
        AttentionProblem {
            packed: Some(PackedRows { total_q: tokens, total_kv: tokens }),
            q: packed(dense.q),
            k: packed(dense.k),
            v: packed(dense.v),
            o: packed(dense.o),
            lse: None,
            ..dense
        }
    }

    fn of_one_length(&self, batch: usize, length: usize) -> AttentionShape {
        let Self { num_heads_q, num_heads_kv, head_dim, mask, dtype, .. } = *self;
        AttentionShape {
            batch,
            seqlen_q: length,
            seqlen_kv: length,
            num_heads_q,
            num_heads_kv,
            head_dim,
            mask,
            dtype,
        }
    }
}

impl Fields for VarlenShape {
    const EMPTY: Self = Self {
        lengths: Lengths::NONE,
        num_heads_q: 0,
        num_heads_kv: 0,
        head_dim: 0,
        mask: MaskKind::Full,
        dtype: DType::F16,
    };

    /// `varlen4096+512x2_h16_d128_causal_bf16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.field("varlen", &mut self.lengths)?;
        id.heads(&mut self.num_heads_q, &mut self.num_heads_kv)?;
        id.field("d", &mut self.head_dim)?;
        id.name(&mut self.mask)?;
        id.name(&mut self.dtype)
    }
}

displayed!(VarlenShape);

impl Shape for VarlenShape {
    fn parse(parts: &[&str]) -> Option<Self> {
        id::read(parts)
    }

    fn check(&self) -> Result<(), String> {
        self.of_one_length(1, self.lengths.tokens()).check()
    }

    fn op(&self) -> &'static str {
        "attention_fwd"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    /// Every sequence for itself, and the offsets.
    fn work(&self) -> Work {
        let offsets = 4.0 * (self.lengths.batch() + 1) as f64;
        let start = Work { bytes: offsets, ..Work::default() };
        self.sequences().map(|sequence| sequence.work()).fold(start, |sum, one| sum + one)
    }

    fn group(&self) -> String {
        format!("head_dim {}, {}, variable length", self.head_dim, self.mask)
    }

    fn peer_case(&self, _seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        Err(PeerCaseError::DenseOnly)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        Ok(Box::new(self.forward(stream, seed)?))
    }
}

/// Every combination of the lists is a case. Either `seqlen` with `batch`, or with `tokens` for a
/// batch of `tokens / seqlen`; or `lengths`, each a list of the lengths of packed sequences.
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
    head_dim: usize,
    mask: Vec<MaskKind>,
    dtype: Vec<DType>,
    #[serde(default)]
    pub peers: GridPeers,
}

impl AttentionGrid {
    pub fn expand<C>(&self, cases: &mut Vec<C>) -> Result<(), String>
    where
        C: From<AttentionShape> + From<VarlenShape>,
    {
        match (&self.seqlen, &self.lengths) {
            (Some(seqlens), None) => self.dense(seqlens, cases),
            (None, Some(lengths)) => self.varlen(lengths, cases),
            _ => Err("an attention grid has either seqlen or lengths".to_owned()),
        }
    }

    fn varlen<C: From<VarlenShape>>(
        &self,
        lengths: &[Vec<usize>],
        cases: &mut Vec<C>,
    ) -> Result<(), String> {
        let Self { num_heads_q, head_dim, .. } = *self;
        if [self.batch, self.tokens, self.seqlen_kv].iter().any(Option::is_some) {
            return Err("lengths cannot be combined with batch, tokens or seqlen_kv".to_owned());
        }
        if head_dim == 0 {
            return Err("an attention grid has a size of 0".to_owned());
        }
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        for ((dtype, mask), lengths) in pairs(&pairs(&self.dtype, &self.mask)?, lengths)? {
            let lengths = Lengths::new(&lengths).map_err(|error| error.to_string())?;
            let shape = VarlenShape { lengths, num_heads_q, num_heads_kv, head_dim, mask, dtype };
            cases.push(shape.into());
        }
        Ok(())
    }

    fn dense<C: From<AttentionShape>>(
        &self,
        seqlens: &[usize],
        cases: &mut Vec<C>,
    ) -> Result<(), String> {
        let Self { num_heads_q, head_dim, .. } = *self;
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        for ((dtype, mask), seqlen_q) in pairs(&pairs(&self.dtype, &self.mask)?, seqlens)? {
            let batch = match (self.batch, self.tokens) {
                (Some(batch), None) => batch,
                (None, Some(tokens)) if seqlen_q > 0 && tokens % seqlen_q == 0 => tokens / seqlen_q,
                (None, Some(tokens)) => {
                    return Err(format!("{tokens} tokens are not a multiple of {seqlen_q}"));
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
            cases.push(shape.into());
        }
        Ok(())
    }
}
