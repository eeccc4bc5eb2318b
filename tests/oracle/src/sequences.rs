//! What attention is computed from, and where the rows of each sequence are in dense and in packed
//! tensors.

use crate::attention_row::visible;
use crate::blocks::{Blocks, Sequence};
use crate::comparison::{Mismatch, ensure};
use crate::elements::Elements;
use crate::scores::{Added, Scores};
use std::ops::Range;

/// Attention: `q` is `[batch, seqlen_q, num_heads_q, head_dim]`, `k` and `v` are
/// `[batch, seqlen_kv, num_heads_kv, head_dim]`, with a `head_dim` of its own for v and the output;
/// or all are packed, `[rows, heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase<'a> {
    /// Queries.
    pub q: &'a dyn Elements,
    /// Keys.
    pub k: &'a dyn Elements,
    /// Values.
    pub v: &'a dyn Elements,
    /// f32 `[num_heads_q]`: a score of each head that joins the sum of exponentials and has no
    /// value.
    pub sink: Option<&'a dyn Elements>,
    /// Added to the scores, `[batch, num_heads_q, seqlen_q, seqlen_kv]`, where any extent may be 1;
    /// of packed sequences with room for the longest.
    pub bias: Option<&'a dyn Elements>,
    /// Slopes of ALiBi, f32 `[num_heads_q]` or `[batch, num_heads_q]`.
    pub alibi: Option<&'a dyn Elements>,
    /// Lengths of the packed sequences, of their queries and of their keys; `None` for a dense
    /// batch.
    pub lengths: Option<[&'a [usize]; 2]>,
    /// Which blocks of keys are seen at all; `None` for all.
    pub blocks: Option<Blocks<'a>>,
    /// The last query of a sequence is aligned with its last key; otherwise the first with the
    /// first.
    pub bottom_right: bool,
    /// Keys to see before the aligned one; `None` is all.
    pub left: Option<usize>,
    /// Keys to see after the aligned one; `None` is all.
    pub right: Option<usize>,
    /// How scores are made, but for sinks.
    pub scores: Scores,
}

impl AttentionCase<'_> {
    /// Which of some keys the query `row` of a head of q attends to.
    pub(crate) fn attended(
        &self,
        sequence: &Sequence,
        [head, row]: [usize; 2],
        keys: Range<usize>,
    ) -> Vec<usize> {
        let lengths = [sequence.seqlen_q, sequence.seqlen_kv];
        let shown = visible(row, lengths, [self.left, self.right], self.bottom_right);
        let shown = shown.start.max(keys.start)..shown.end.min(keys.end);
        let heads = heads_of(self.q)[0];
        match &self.blocks {
            Some(blocks) => blocks.seen(row, [head, heads], sequence, shown),
            None => shown.collect(),
        }
    }

    /// What is added to the scores of the query `row` of a head of q and some keys.
    pub(crate) fn added(
        &self,
        sequence: &Sequence,
        [head, row]: [usize; 2],
        keys: Range<usize>,
    ) -> Vec<Added> {
        if self.bias.is_none() && self.alibi.is_none() {
            return vec![Added::default(); keys.len()];
        }
        let Sequence { entry, seqlen_q, seqlen_kv, .. } = *sequence;
        let element = |of: &dyn Elements, at: usize| of.to_f32(at..at + 1).first().copied();
        let slope = self.alibi.and_then(|slopes| match *slopes.shape() {
            [_, heads] => element(slopes, entry * heads + head),
            _ => element(slopes, head),
        });
        let bias = self.bias.map(|bias| {
            let &[batch, heads, queries, columns] = bias.shape() else { return vec![] };
            let at = |at: usize, extent: usize| if extent == 1 { 0 } else { at };
            let row = (at(entry, batch) * heads + at(head, heads)) * queries + at(row, queries);
            let columns = if columns == 1 {
                row..row + 1
            } else {
                row * columns + keys.start..row * columns + keys.end
            };
            bias.to_f32(columns)
        });
        let bias = bias.unwrap_or_default();
        let of_key = |key: usize| Added {
            bias: bias.get(if bias.len() == 1 { 0 } else { key - keys.start }).map_or(0.0, |&x| x),
            slope: slope.unwrap_or(0.0),
            distance: Added::distance(row, key, [seqlen_q, seqlen_kv]),
        };
        keys.clone().map(of_key).collect()
    }

    /// How the scores of a head of q are made.
    pub(crate) fn scores(&self, head: usize) -> Scores {
        let sink = self.sink.and_then(|sink| sink.to_f32(head..head + 1).first().copied());
        Scores { sink, ..self.scores }
    }
}

/// The sequences of a case, equally long unless it is packed.
pub(crate) fn sequences(
    case: &AttentionCase<'_>,
    o: &dyn Elements,
    lse: Option<&dyn Elements>,
) -> Result<Vec<Sequence>, Mismatch> {
    let mut sequences = match case.lengths {
        None => dense(case, lse)?,
        Some(lengths) => packed(case, lengths, lse)?,
    };
    let width = heads_of(case.v)[1];
    for (what, array, like) in [("v", case.v, case.k), ("o", o, case.q)] {
        let (found, expected) = (array.shape(), with_width(like, width));
        ensure(found == expected, || format!("{what} is {found:?}, not {expected:?}"))?;
    }
    let ([heads, _], [heads_kv, _]) = (heads_of(case.q), heads_of(case.k));
    ensure(heads == 0 || heads_kv > 0 && heads.is_multiple_of(heads_kv), || {
        format!("{heads} heads of q, {heads_kv} of k")
    })?;
    ensure(case.sink.is_none_or(|sink| sink.shape() == [heads]), || {
        format!("a sink of {heads} heads")
    })?;
    if let Some(bias) = case.bias {
        let longest = |of: fn(&Sequence) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        let pairs = [sequences.len(), heads, longest(|s| s.seqlen_q), longest(|s| s.seqlen_kv)];
        let fits = |(&found, full): (&usize, usize)| match case.lengths {
            None => found == 1 || found == full,
            // With room for the longest sequence.
            Some(_) => found == 1 || found >= full,
        };
        let fits = bias.shape().len() == 4 && bias.shape().iter().zip(pairs).all(fits);
        ensure(fits, || format!("bias is {:?}, not {pairs:?}", bias.shape()))?;
    }
    ensure(
        case.alibi.is_none_or(|slopes| match *slopes.shape() {
            [of] => of == heads,
            [entries, of] => [entries, of] == [sequences.len(), heads],
            _ => false,
        }),
        || format!("slopes of {heads} heads"),
    )?;
    if let Some(blocks) = case.blocks {
        blocks.place(&mut sequences, heads)?;
    }
    Ok(sequences)
}

/// Number of heads, and elements of a row of each.
pub(crate) fn heads_of(array: &dyn Elements) -> [usize; 2] {
    match *array.shape() {
        [.., heads, head_dim] => [heads, head_dim],
        _ => [0, 0],
    }
}

/// The shape of an array with rows of this many elements.
pub(crate) fn with_width(array: &dyn Elements, width: usize) -> Vec<usize> {
    let mut shape = array.shape().to_vec();
    shape.iter_mut().last().into_iter().for_each(|last| *last = width);
    shape
}

/// `[rows, heads, head_dim]` of neighbouring heads.
pub(crate) fn rows_of(array: &dyn Elements, rows: Range<usize>, of: Range<usize>) -> Vec<f32> {
    let [heads, head_dim] = heads_of(array);
    let at = |row: usize, head: usize| (row * heads + head) * head_dim;
    rows.flat_map(|row| array.to_f32(at(row, of.start)..at(row, of.end))).collect()
}

fn wrong(case: &AttentionCase<'_>, lse: Option<&dyn Elements>) -> Mismatch {
    let [q, k] = [case.q, case.k].map(Elements::shape);
    Mismatch(match lse {
        Some(lse) => format!("q is {q:?}, k {k:?} and lse {:?}", lse.shape()),
        None => format!("q is {q:?} and k {k:?}"),
    })
}

fn dense(case: &AttentionCase<'_>, lse: Option<&dyn Elements>) -> Result<Vec<Sequence>, Mismatch> {
    let wrong = || wrong(case, lse);
    let (&[batch, seqlen_q, heads, head_dim], &[batch_kv, seqlen_kv, _, head_dim_kv]) =
        (case.q.shape(), case.k.shape())
    else {
        return Err(wrong());
    };
    let agree = (batch_kv, head_dim_kv) == (batch, head_dim)
        && lse.is_none_or(|lse| lse.shape() == [batch, heads, seqlen_q]);
    let sequence = |at: usize| Sequence {
        entry: at,
        q: at * seqlen_q,
        seqlen_q,
        kv: at * seqlen_kv,
        seqlen_kv,
        lse: at * heads * seqlen_q,
        lse_head: seqlen_q,
        lists: 0,
    };
    agree.then(|| (0..batch).map(sequence).collect()).ok_or_else(wrong)
}

fn packed(
    case: &AttentionCase<'_>,
    [lengths_q, lengths_kv]: [&[usize]; 2],
    lse: Option<&dyn Elements>,
) -> Result<Vec<Sequence>, Mismatch> {
    let wrong = || wrong(case, lse);
    let (&[rows, heads, head_dim], &[rows_kv, _, head_dim_kv]) = (case.q.shape(), case.k.shape())
    else {
        return Err(wrong());
    };
    let agree = head_dim_kv == head_dim && lse.is_none_or(|lse| lse.shape() == [heads, rows]);
    let total =
        |lengths: &[usize]| lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
    let totals = [lengths_q, lengths_kv].map(total) == [Some(rows), Some(rows_kv)];
    if !(agree && totals && lengths_q.len() == lengths_kv.len()) {
        return Err(wrong());
    }
    let (mut next_q, mut next_kv) = (0, 0);
    let sequence = |(entry, (&seqlen_q, &seqlen_kv)): (usize, (&usize, &usize))| {
        let (q, kv) = (next_q, next_kv);
        (next_q, next_kv) = (q + seqlen_q, kv + seqlen_kv);
        Sequence { entry, q, seqlen_q, kv, seqlen_kv, lse: q, lse_head: rows, lists: 0 }
    };
    Ok(lengths_q.iter().zip(lengths_kv).enumerate().map(sequence).collect())
}
