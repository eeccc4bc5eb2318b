use super::AttentionProblem;
use crate::check::scaled;

/// FLOPs of an attention forward pass: `2 * visited pairs * (head_dim of q + head_dim of v)` for
/// each batch entry and query head. `None` when the batch is variable-length, see
/// [`attention_varlen_flops`], or when there is a block mask, see
/// [`BlockMask::visited_pairs`](crate::BlockMask::visited_pairs).
pub fn attention_flops(problem: &AttentionProblem) -> Option<u64> {
    if problem.packed.is_some() || problem.block_mask.is_some() {
        return None;
    }
    let pairs = problem.scores.mask.visited_pairs(problem.seqlen_q, problem.seqlen_kv);
    Some(scaled(pairs, &[2, problem.batch, problem.num_heads_q, problem.head_dims.sum()]))
}

/// FLOPs of a variable-length attention forward pass with these offsets. Of a block mask nothing is
/// known here, see [`BlockMask::visited_pairs`](crate::BlockMask::visited_pairs).
pub fn attention_varlen_flops(
    problem: &AttentionProblem,
    cu_seqlens_q: &[i32],
    cu_seqlens_kv: &[i32],
) -> u64 {
    let length = |pair: &[i32]| usize::try_from(pair[1].saturating_sub(pair[0])).unwrap_or(0);
    let pairs = cu_seqlens_q
        .windows(2)
        .zip(cu_seqlens_kv.windows(2))
        .map(|(q, kv)| problem.scores.mask.visited_pairs(length(q), length(kv)))
        .fold(0u64, u64::saturating_add);
    scaled(pairs, &[2, problem.num_heads_q, problem.head_dims.sum()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Align, BlockMaskSizes, DType, Mask};

    #[test]
    fn attention_counts_visited_pairs() {
        let full = AttentionProblem::dense(DType::F16, [2, 5, 7], [4, 2], 64);
        assert_eq!(attention_flops(&full), Some(4 * 2 * 4 * 64 * 35));
        let causal = |align| full.with_mask(Mask::Causal { align });
        assert_eq!(
            attention_flops(&causal(Align::TopLeft)),
            Some(4 * 2 * 4 * 64 * (1 + 2 + 3 + 4 + 5))
        );
        assert_eq!(
            attention_flops(&causal(Align::BottomRight)),
            Some(4 * 2 * 4 * 64 * (3 + 4 + 5 + 6 + 7))
        );
        let mask = Mask::Window { left: Some(1), right: Some(0), align: Align::TopLeft };
        let window = full.with_mask(mask);
        assert_eq!(attention_flops(&window), Some(4 * 2 * 4 * 64 * (1 + 2 + 2 + 2 + 2)));
        // Which blocks are visited is not known from their sizes.
        let sizes = BlockMaskSizes {
            block_q: 64,
            block_kv: 64,
            batch: 1,
            heads: 1,
            packed_rows: None,
            bits: false,
        };
        assert_eq!(attention_flops(&AttentionProblem { block_mask: Some(sizes), ..full }), None);
    }

    #[test]
    fn variable_length_sums_sequences() {
        let packed = crate::PackedRows { total_q: 12, total_kv: 12 };
        let dense = AttentionProblem::dense(DType::F16, [3, 7, 7], [2, 2], 8);
        let problem = AttentionProblem { packed: Some(packed), ..dense.with_mask(Mask::causal()) };
        assert_eq!(attention_flops(&problem), None);
        let flops = attention_varlen_flops(&problem, &[0, 5, 5, 12], &[0, 5, 5, 12]);
        assert_eq!(flops, 4 * 2 * 8 * (15 + 28));
    }
}
