//! The backward pass of attention: its gradients, for every shape of the forward pass.

use super::Case;
use super::attention::AttentionShape;
use super::attention_operands::{AttentionData, AttentionOperands};
use super::backward_operands::BackwardOperands;
use super::block_sparse::BlockSparseShape;
use super::id::{self, Fields, Id};
use super::operands::Operands;
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::varlen::VarlenShape;
use super::work::Work;
use crate::error::Result;
use blockflash_ops::Stream;
use blockflash_sys::DType;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// The gradients of q, k and v of attention of this shape. What the forward pass makes is there
/// already. The id is the one of the forward pass after `bwd_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Backward<S>(pub S);

/// A shape of attention.
pub(super) trait Forward: Shape + Fields {
    /// Name of the backward pass in records.
    const BACKWARD: &'static str;

    /// Operands of the forward pass.
    ///
    /// # Errors
    /// As [`Shape::operands`].
    fn forward(&self, stream: &Stream, seed: u64) -> Result<AttentionOperands>;
}

/// Which pass of attention is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    Forward,
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        })
    }
}

impl Case {
    /// The backward pass of a forward pass; `None` for other operations.
    pub fn backward(self) -> Option<Self> {
        match self {
            Case::AttentionFwd(shape) => Some(Backward(shape).into()),
            Case::VarlenFwd(shape) => Some(Backward(shape).into()),
            Case::BlockSparseFwd(shape) => Some(Backward(shape).into()),
            _ => None,
        }
    }

    /// A dense batch without a block mask.
    pub fn dense_attention(&self) -> Option<(&AttentionShape, Pass)> {
        match self {
            Case::AttentionFwd(shape) => Some((shape, Pass::Forward)),
            Case::AttentionBwd(Backward(shape)) => Some((shape, Pass::Backward)),
            _ => None,
        }
    }

    /// Attention with a block mask.
    pub fn block_sparse_attention(&self) -> Option<(&BlockSparseShape, Pass)> {
        match self {
            Case::BlockSparseFwd(shape) => Some((shape, Pass::Forward)),
            Case::BlockSparseBwd(Backward(shape)) => Some((shape, Pass::Backward)),
            _ => None,
        }
    }
}

impl<S: Forward> fmt::Display for Backward<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        id::write(self, f)
    }
}

impl<S: Forward> Fields for Backward<S> {
    const EMPTY: Self = Self(S::EMPTY);

    /// `bwd_b4_s4096_h32_d64_causal_bf16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("bwd")?;
        self.0.fields(id)
    }
}

impl<S: Forward> Shape for Backward<S> {
    fn parse(parts: &[&str]) -> Option<Self> {
        id::read(parts)
    }

    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn op(&self) -> &'static str {
        S::BACKWARD
    }

    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    /// Five products in place of two. Exponentials are computed anew, and a tile of keys shares
    /// each query and its gradient of o as one of queries shares keys and values before. To q, k,
    /// v, o and lse come the gradients of the former four, and rowsum(d_o∘o), as large as lse.
    fn work(&self) -> Work {
        let forward = self.0.work();
        Work { flops: 2.5 * forward.flops, bytes: 2.0 * forward.bytes, ..forward }
    }

    fn group(&self) -> String {
        format!("{}, {}", Pass::Backward, self.0.group())
    }

    fn peer_case(&self, seed: u64, folder: &Path) -> Result<PeerCase, PeerCaseError> {
        Ok(self.0.peer_case(seed, folder)?.with_op(self.op()))
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        Ok(Box::new(BackwardOperands::new(self.0.forward(stream, seed)?, stream, seed)?))
    }
}

impl Forward for AttentionShape {
    const BACKWARD: &'static str = "attention_bwd";

    fn forward(&self, stream: &Stream, seed: u64) -> Result<AttentionOperands> {
        let data = AttentionData::random(&self.problem(), seed)?;
        AttentionOperands::new(self.mask().into(), data, false, stream)
    }
}

impl Forward for VarlenShape {
    const BACKWARD: &'static str = "attention_bwd";

    fn forward(&self, stream: &Stream, seed: u64) -> Result<AttentionOperands> {
        let (problem, lengths) = (self.problem(), self.lengths.as_slice().to_vec());
        let data = AttentionData::random(&problem, seed)?;
        let data = AttentionData { lengths: Some([lengths.clone(), lengths]), ..data };
        AttentionOperands::new(problem.mask.into(), data, false, stream)
    }
}

impl Forward for BlockSparseShape {
    const BACKWARD: &'static str = "block_sparse_bwd";

    fn forward(&self, stream: &Stream, seed: u64) -> Result<AttentionOperands> {
        let data = AttentionData::random(&self.dense().problem(), seed)?;
        // A backward pass reads the transpose.
        let block_mask = Some(self.block_mask(seed)?.with_transpose()?);
        let data = AttentionData { block_mask, ..data };
        AttentionOperands::new(self.dense().mask().into(), data, false, stream)
    }
}

#[cfg(test)]
mod tests {
    use crate::case::Case;

    #[test]
    fn competitors_get_the_shape_and_the_lists_of_the_forward_pass() {
        let folder = std::env::temp_dir();
        let peer_case = |id: &str| {
            let case: Case = id.parse().unwrap();
            serde_json::to_value(case.shape().peer_case(3, &folder).unwrap()).unwrap()
        };
        for forward in ["b1_s8_h1_d8_full_bf16", "b1_s64_h2_d8_q32kv32_d0.5_uniform_full_bf16"] {
            let [mut forward, backward] =
                [peer_case(forward), peer_case(&format!("bwd_{forward}"))];
            let op = forward["op"].as_str().unwrap().replace("fwd", "bwd");
            forward["op"] = op.into();
            assert_eq!(backward, forward);
        }
    }
}
