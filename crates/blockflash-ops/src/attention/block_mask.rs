//! How a block mask fits an attention call.

use super::{AttentionProblem, OP};
use crate::{BlockMask, Error, Result};
use blockflash_safe::Device;

/// The sizes of a block mask: what planning needs to know of it. Its lengths are those of the problem. A block mask has no count
/// beyond 31 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMaskSizes {
    /// Queries of a block.
    pub block_q: u32,
    /// Keys of a block.
    pub block_kv: u32,
    /// 1, or the batch entries of the problem.
    pub batch: u32,
    /// 1, the heads of k and v, or those of q.
    pub heads: u32,
    /// Visited blocks of all batch entries and heads of the mask.
    pub nnz: u32,
}

impl BlockMaskSizes {
    /// The head of the mask that a head of q follows.
    pub(crate) fn head(&self, head_q: usize, num_heads_q: usize) -> usize {
        head_q / (num_heads_q / self.heads as usize)
    }

    /// Checks that the mask fits a problem whose tensors are on `device`.
    pub(super) fn of(mask: &BlockMask, problem: &AttentionProblem, device: &Device) -> Result<Self> {
        if problem.packed.is_some() {
            let arch = device.cuda_properties().map(|gpu| gpu.compute_capability.to_string());
            return Err(Error::Unsupported {
                op: OP,
                arch: arch.unwrap_or_else(|| "cpu".into()),
                what: "block masks of variable-length batches".into(),
            });
        }
        let AttentionProblem { batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_kv, .. } = *problem;
        let fits = [1, batch].contains(&mask.batch())
            && [1, num_heads_kv, num_heads_q].contains(&mask.heads())
            && [mask.seqlen_q(), mask.seqlen_kv()] == [seqlen_q, seqlen_kv];
        if !fits {
            let heads = format!("1 or {num_heads_kv} or {num_heads_q}");
            return Err(Error::Shape {
                what: "block_mask",
                expected: format!("[1 or {batch}, {heads}, {seqlen_q}, {seqlen_kv}] in queries and keys"),
                found: vec![mask.batch(), mask.heads(), mask.seqlen_q(), mask.seqlen_kv()],
            });
        }
        Ok(Self {
            block_q: mask.block_q() as u32,
            block_kv: mask.block_kv() as u32,
            batch: mask.batch() as u32,
            heads: mask.heads() as u32,
            nnz: mask.nnz() as u32,
        })
    }
}

#[cfg(test)]
#[path = "block_mask_tests.rs"]
mod tests;
