//! The sizes of attention, which its cases, their grid and their block masks are about.

use super::block_lists::BlockLists;
use super::id::named;
use super::lengths::Lengths;
use super::mask_kind::MaskKind;
use super::pairs::Pairs;
use super::shape::head_dim_of_all;
use blockflash_ops::attention::{AttentionProblem, Strides};
use blockflash_ops::{Mask, PackedRows};
use blockflash_sys::{DType, ElementTypes, HeadDims};
use serde::Serialize;

/// Attention over `[batch, seqlen, num_heads, head_dim]`, or over packed `[tokens, num_heads,
/// head_dim]`; contiguous.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttentionShape {
    /// Whether o or the gradients of q, k and v are computed; for these, what the forward pass
    /// makes is there already.
    #[serde(skip)]
    pub pass: Pass,
    /// Number of sequences.
    pub batch: usize,
    /// Queries of each sequence, of the longest one if they are packed.
    pub seqlen_q: usize,
    /// Keys of each sequence, of the longest one if they are packed.
    pub seqlen_kv: usize,
    /// Lengths of packed sequences, each with as many queries as keys; `None`: a dense batch.
    #[serde(skip)]
    pub lengths: Option<Lengths>,
    /// Heads of q and o.
    pub num_heads_q: usize,
    /// Heads of k and v.
    pub num_heads_kv: usize,
    /// Elements of a row of q and k, and of v and o. Competitors are told one.
    #[serde(rename = "head_dim", serialize_with = "head_dim_of_all")]
    pub head_dims: HeadDims,
    /// The blocks that are visited; `None`: all.
    #[serde(flatten)]
    pub lists: Option<BlockLists>,
    /// A mask inside of blocks, or what is added to scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<Pairs>,
    /// Mask of tokens.
    pub mask: MaskKind,
    /// Element type of q, k and v, and of o, which is bf16 beside e4m3.
    pub dtype: DType,
}

/// Which pass of attention is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// The output.
    Forward,
    /// The gradients.
    Backward,
}

named!(Pass: Forward = "forward", Backward = "backward");

impl AttentionShape {
    /// Element types of the tensors.
    pub fn types(&self) -> ElementTypes {
        let o = if self.dtype.is_code() { DType::BF16 } else { self.dtype };
        ElementTypes { o, ..ElementTypes::all(self.dtype) }
    }

    /// The problem of contiguous tensors, without the block mask.
    pub fn problem(&self) -> AttentionProblem {
        let sizes = [self.batch, self.seqlen_q, self.seqlen_kv];
        let heads = [self.num_heads_q, self.num_heads_kv];
        let dense = AttentionProblem::contiguous(self.types(), sizes, heads, self.head_dims);
        let dense = dense.with_mask(self.mask());
        let Some(tokens) = self.lengths.as_ref().map(Lengths::tokens) else { return dense };
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

    /// The mask as the library takes it, without those of lists of blocks.
    pub fn mask(&self) -> Mask {
        self.pairs.map_or(self.mask.into(), |pairs| pairs.token_mask(self.mask))
    }

    /// The same without a block mask.
    #[must_use]
    pub fn without_lists(&self) -> Self {
        Self { lists: None, ..self.clone() }
    }

    /// Each packed sequence as a dense batch of one.
    pub fn sequences(&self) -> impl Iterator<Item = AttentionShape> + '_ {
        let lengths = self.lengths.iter().flat_map(Lengths::as_slice);
        lengths.map(|&length| self.of_one_length(1, length))
    }

    fn of_one_length(&self, batch: usize, length: usize) -> Self {
        Self { batch, seqlen_q: length, seqlen_kv: length, lengths: None, ..self.clone() }
    }

    /// The same of packed sequences.
    pub(super) fn packed(&self, lengths: Lengths) -> Self {
        let of_one_length = self.of_one_length(lengths.batch(), lengths.longest());
        Self { lengths: Some(lengths), ..of_one_length }
    }

    /// Bytes of a key and its value of one head.
    pub(super) fn pair_bytes(&self) -> usize {
        self.head_dims.sum() * self.dtype.size()
    }

    /// Bytes of q, k, v, o and lse of a dense batch.
    pub(super) fn bytes(&self) -> f64 {
        let rows_q = (self.batch * self.seqlen_q * self.num_heads_q) as f64;
        let rows_kv = (self.batch * self.seqlen_kv * self.num_heads_kv) as f64;
        let HeadDims { qk, v } = self.head_dims;
        let of_query = qk * self.dtype.size() + v * self.types().o.size();
        rows_q * of_query as f64 + rows_kv * self.pair_bytes() as f64 + 4.0 * rows_q
    }

    /// Bytes of q of a dense batch.
    pub(super) fn query_bytes(&self) -> f64 {
        let elements = self.batch * self.seqlen_q * self.num_heads_q * self.head_dims.qk;
        (elements * self.dtype.size()) as f64
    }
}
