//! Dense attention.

use super::backward::Forward;
use super::id::{self, Fields, Id, displayed};
use super::limits;
use super::mask_kind::MaskKind;
use super::operands::Operands;
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::{TILE_ROWS, Work};
use crate::error::Result;
use blockflash_ops::attention::AttentionProblem;
use blockflash_ops::{Align, Mask, Stream, attention_flops};
use blockflash_sys::DType;
use serde::Serialize;
use std::path::Path;

/// Dense attention over `[batch, seqlen, num_heads, head_dim]`, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[allow(missing_docs)]
pub struct AttentionShape {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_kv: usize,
    pub num_heads_q: usize,
    pub num_heads_kv: usize,
    pub head_dim: usize,
    pub mask: MaskKind,
    pub dtype: DType,
}

impl AttentionShape {
    /// The problem of contiguous tensors.
    pub fn problem(&self) -> AttentionProblem {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, dtype, .. } =
            *self;
        let sizes = [batch, seqlen_q, seqlen_kv];
        let problem = AttentionProblem::dense(dtype, sizes, [num_heads_q, num_heads_kv], head_dim);
        AttentionProblem { mask: self.mask(), ..problem }
    }

    /// The mask as the library takes it.
    pub fn mask(&self) -> Mask {
        match self.mask {
            MaskKind::Full => Mask::Full,
            MaskKind::Causal => Mask::Causal { align: Align::BottomRight },
        }
    }

    /// Bytes of a row of one head.
    pub(super) fn row_bytes(&self) -> usize {
        self.head_dim * self.dtype.size()
    }

    /// Bytes of q, k, v, o and lse.
    pub(super) fn bytes(&self) -> f64 {
        let rows_q = (self.batch * self.seqlen_q * self.num_heads_q) as f64;
        let rows_kv = (self.batch * self.seqlen_kv * self.num_heads_kv) as f64;
        (2.0 * rows_q + 2.0 * rows_kv) * self.row_bytes() as f64 + 4.0 * rows_q
    }

    /// Bytes of q.
    pub(super) fn query_bytes(&self) -> f64 {
        (self.batch * self.seqlen_q * self.num_heads_q * self.row_bytes()) as f64
    }
}

impl Fields for AttentionShape {
    const EMPTY: Self = Self {
        batch: 0,
        seqlen_q: 0,
        seqlen_kv: 0,
        num_heads_q: 0,
        num_heads_kv: 0,
        head_dim: 0,
        mask: MaskKind::Full,
        dtype: DType::F16,
    };

    /// `b4_s4096_h32_d64_causal_bf16`, `b1_q1_kv8192_h32kv8_d128_full_f16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.field("b", &mut self.batch)?;
        id.seqlens(&mut self.seqlen_q, &mut self.seqlen_kv)?;
        id.heads(&mut self.num_heads_q, &mut self.num_heads_kv)?;
        id.field("d", &mut self.head_dim)?;
        id.name(&mut self.mask)?;
        id.name(&mut self.dtype)
    }
}

displayed!(AttentionShape);

impl Shape for AttentionShape {
    fn parse(parts: &[&str]) -> Option<Self> {
        id::read(parts)
    }

    fn check(&self) -> Result<(), String> {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, .. } = *self;
        limits::attention(batch, [seqlen_q, seqlen_kv], [num_heads_q, num_heads_kv], head_dim)
    }

    fn op(&self) -> &'static str {
        "attention_fwd"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn work(&self) -> Work {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, .. } = *self;
        let problem = self.problem();
        // Only a variable-length problem has no count.
        let flops = attention_flops(&problem).unwrap_or(0) as f64;
        let group = num_heads_q / num_heads_kv.max(1);
        let positions = (TILE_ROWS / group.max(1)).max(1);
        let tiles_of_heads = group.div_ceil(TILE_ROWS).max(1);
        // The last query of a tile sees the most keys.
        let keys = |tile: usize| {
            let last = ((tile + 1) * positions).min(seqlen_q) - 1;
            let first = last.min(tile * positions);
            let seen = |query: usize| problem.mask.visible(query, seqlen_q, seqlen_kv);
            seen(last).end.saturating_sub(seen(first).start)
        };
        let keys: usize = (0..seqlen_q.div_ceil(positions)).map(keys).sum();
        let fetches = (batch * num_heads_kv * tiles_of_heads) as f64 * keys as f64;
        Work {
            flops,
            exps: flops / (4 * head_dim) as f64,
            bytes: self.bytes(),
            l2_bytes: fetches * (2 * self.row_bytes()) as f64 + self.query_bytes(),
        }
    }

    fn group(&self) -> String {
        let queries = match self.seqlen_q {
            q if q == self.seqlen_kv => String::new(),
            1 => ", one query".to_owned(),
            q => format!(", {q} queries"),
        };
        format!("head_dim {}, {}{queries}", self.head_dim, self.mask)
    }

    fn peer_case(&self, seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        PeerCase::new(self.op(), self, seed)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        Ok(Box::new(self.forward(stream, seed)?))
    }
}
