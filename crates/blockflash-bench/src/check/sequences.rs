//! Where the rows of each sequence lie in dense and in packed tensors.

use super::attention::AttentionCase;
use super::{Mismatch, ensure};
use crate::io::Array;

/// One sequence of all heads. Rows count from the start of a tensor: a row of q, k, v or o holds all heads.
pub(super) struct Sequence {
    /// First row of q and o.
    pub(super) q: usize,
    pub(super) seqlen_q: usize,
    /// First row of k and v.
    pub(super) kv: usize,
    pub(super) seqlen_kv: usize,
    /// Element of lse of the first query of head 0.
    pub(super) lse: usize,
    /// Elements of lse between heads.
    pub(super) lse_head: usize,
}

/// The sequences of a case, equally long unless it is packed.
pub(super) fn sequences(case: &AttentionCase<'_>, o: &Array, lse: &Array) -> Result<Vec<Sequence>, Mismatch> {
    let sequences = match case.lengths {
        None => dense(case, lse)?,
        Some(lengths) => packed(case, lengths, lse)?,
    };
    ensure(case.k.shape() == case.v.shape(), || {
        format!("k is {:?} and v {:?}", case.k.shape(), case.v.shape())
    })?;
    ensure(o.shape() == case.q.shape(), || format!("o is {:?} and q {:?}", o.shape(), case.q.shape()))?;
    let ([heads, _], [heads_kv, _]) = (heads_of(case.q), heads_of(case.k));
    ensure(heads == 0 || heads_kv > 0 && heads.is_multiple_of(heads_kv), || {
        format!("{heads} heads of q, {heads_kv} of k")
    })?;
    if let (Some(blocks), Some(sequence)) = (case.blocks, sequences.first()) {
        ensure(case.lengths.is_none(), || "packed sequences have no lists of blocks".to_owned())?;
        blocks.check(sequence.seqlen_q, heads)?;
    }
    Ok(sequences)
}

/// Number of heads, and elements of a row of each.
pub(super) fn heads_of(array: &Array) -> [usize; 2] {
    match *array.shape() {
        [.., heads, head_dim] => [heads, head_dim],
        _ => [0, 0],
    }
}

fn wrong(case: &AttentionCase<'_>, lse: &Array) -> Mismatch {
    Mismatch(format!("q is {:?}, k {:?} and lse {:?}", case.q.shape(), case.k.shape(), lse.shape()))
}

fn dense(case: &AttentionCase<'_>, lse: &Array) -> Result<Vec<Sequence>, Mismatch> {
    let wrong = || wrong(case, lse);
    let (&[batch, seqlen_q, heads, head_dim], &[batch_kv, seqlen_kv, _, head_dim_kv]) =
        (case.q.shape(), case.k.shape())
    else {
        return Err(wrong());
    };
    let agree = (batch_kv, head_dim_kv) == (batch, head_dim) && lse.shape() == [batch, heads, seqlen_q];
    let sequence = |at: usize| Sequence {
        q: at * seqlen_q,
        seqlen_q,
        kv: at * seqlen_kv,
        seqlen_kv,
        lse: at * heads * seqlen_q,
        lse_head: seqlen_q,
    };
    agree.then(|| (0..batch).map(sequence).collect()).ok_or_else(wrong)
}

fn packed(case: &AttentionCase<'_>, lengths: &[usize], lse: &Array) -> Result<Vec<Sequence>, Mismatch> {
    let wrong = || wrong(case, lse);
    let (&[rows, heads, head_dim], &[rows_kv, _, head_dim_kv]) = (case.q.shape(), case.k.shape()) else {
        return Err(wrong());
    };
    let agree = rows_kv == rows && head_dim_kv == head_dim && lse.shape() == [heads, rows];
    let total = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
    if !agree || total != Some(rows) {
        return Err(wrong());
    }
    let mut start = 0;
    let sequence = |&length: &usize| {
        let first = start;
        start += length;
        Sequence { q: first, seqlen_q: length, kv: first, seqlen_kv: length, lse: first, lse_head: rows }
    };
    Ok(lengths.iter().map(sequence).collect())
}
