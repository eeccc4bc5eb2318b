use super::AttentionDecodeProblem;
use super::division::Division;
use crate::Result;
use crate::attention::score_params;
use crate::check::to_i32;
use blockflash_safe::AttentionDecodeScalars;

/// What the tensors of a problem do not say.
pub(super) fn scalars(
    problem: &AttentionDecodeProblem,
    division: &Division,
) -> Result<AttentionDecodeScalars> {
    let attention = &problem.attention;
    Ok(AttentionDecodeScalars {
        scores: score_params(attention),
        longest: to_i32("seqlen_q", attention.seqlen_q)?,
        most_queries: to_i32("seqlen_q", division.most_queries)?,
        splits: to_i32("splits", division.splits)?,
        chunk_min: to_i32("chunk", division.chunk_min)?,
        chunk_max: to_i32("chunk", division.chunk_max)?,
        run_log2: division.run_log2 as i32,
        run: to_i32("run", division.run)?,
        even_ctas: to_i32("CTAs", division.even_ctas)?,
        even_items: to_i32("items", division.items)?,
    })
}
