//! What makes two problems of attention alike.

use super::{Align, AttentionProblem, Mask};
use crate::tuning::Likeness;

impl Likeness {
    /// Of attention; `None` for packed sequences, windows and a causal mask along another diagonal,
    /// of which no case is measured.
    pub fn of_attention(problem: &AttentionProblem) -> Option<Self> {
        let square = problem.seqlen_q == problem.seqlen_kv;
        let causal = match problem.mask {
            Mask::Full => false,
            Mask::Causal { align } if square || align == Align::BottomRight => true,
            _ => return None,
        };
        let group = problem.num_heads_q.checked_div(problem.num_heads_kv)?;
        problem.packed.is_none().then_some(Self::Attention {
            dtype: problem.dtype,
            head_dim: problem.head_dim,
            causal,
            block_mask: problem.block_mask.map(|mask| [mask.block_q, mask.block_kv]),
            heads: problem.batch.saturating_mul(problem.num_heads_q),
            group,
            seqlen_q: problem.seqlen_q,
            seqlen_kv: problem.seqlen_kv,
        })
    }
}
