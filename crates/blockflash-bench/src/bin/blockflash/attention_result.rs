//! What `blockflash attention` says of a run, and whether its result is right.

use crate::attention_mask;
use crate::attention_operands::Operands;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::table;
use blockflash_bench::io::Array;
use blockflash_ops::{Align, AttentionProblem, BlockMask, Mask};
use blockflash_oracle::{self as oracle, AttentionCase, Blocks, Comparison};

/// A mask in words. Where queries and keys `differ` in number, its alignment matters.
pub fn mask_words(mask: Mask, differ: bool) -> String {
    let aligned = |align| match align {
        Align::BottomRight if differ => ", bottom-right",
        Align::TopLeft if differ => ", top-left",
        _ => "",
    };
    let keys =
        |side: Option<usize>| side.map_or("all".to_owned(), |keys| table::count(keys as u64));
    match mask {
        Mask::Full => "full".to_owned(),
        Mask::Causal { align } => format!("causal{}", aligned(align)),
        Mask::Window { left, right, align } => {
            format!(
                "window, {} keys before and {} after{}",
                keys(left),
                keys(right),
                aligned(align)
            )
        }
        other => format!("{other:?}"),
    }
}

/// The keys before and after the aligned one that a mask shows, `None` for all, and the
/// alignment.
pub fn sides(mask: Mask) -> Result<(Option<usize>, Option<usize>, Align)> {
    match mask {
        Mask::Full => Ok((None, None, Align::TopLeft)),
        Mask::Causal { align } => Ok((None, Some(0), align)),
        Mask::Window { left, right, align } => Ok((left, right, align)),
        other => Err(Failure::new(format!("--check has no reference for the mask {other:?}"))),
    }
}

/// The options, in words.
pub fn details(
    operands: &Operands,
    problem: &AttentionProblem,
    block_mask: Option<&BlockMask>,
) -> Vec<(&'static str, String)> {
    let differ = match &operands.packed {
        Some(packed) => packed.lengths[0] != packed.lengths[1],
        None => problem.seqlen_q != problem.seqlen_kv,
    };
    let mut details = vec![
        ("mask", mask_words(problem.mask, differ)),
        ("scale", format!("{}", problem.softmax_scale)),
    ];
    if let Some(softcap) = problem.softcap {
        details.push(("softcap", format!("{softcap}")));
    }
    if problem.sink {
        details.push(("sink", "one score per head".to_owned()));
    }
    if let Some(packed) = &operands.packed {
        let [queries, keys] = packed.longest();
        let sequences = table::count(packed.lengths[0].len() as u64);
        details
            .push(("sequences", format!("{sequences}, at most {queries} queries and {keys} keys")));
    }
    if let Some(mask) = block_mask {
        details.push(("block mask", attention_mask::describe(mask)));
    }
    details
}

/// Those of the pairs that are visited.
pub fn flops(
    operands: &Operands,
    problem: &AttentionProblem,
    block_mask: Option<&BlockMask>,
) -> Result<f64> {
    Ok(match (block_mask, &operands.packed) {
        (Some(mask), _) => attention_mask::flops(mask, problem)?,
        (None, Some(packed)) => {
            let [q, kv] =
                packed.offsets.each_ref().map(|offsets| offsets.as_i32().unwrap_or_default());
            blockflash_ops::attention_varlen_flops(problem, q, kv) as f64
        }
        (None, None) => blockflash_ops::attention_flops(problem).unwrap_or(0) as f64,
    })
}

/// Compares o and lse with the reference.
pub fn check(
    operands: &Operands,
    problem: &AttentionProblem,
    block_mask: Option<&BlockMask>,
    [o, lse]: [&Array; 2],
    seed: u64,
) -> Result<Vec<(&'static str, Comparison)>> {
    let (left, right, align) = sides(problem.mask)?;
    let lists = match block_mask {
        Some(mask) => Some((mask, attention_mask::lists(mask)?)),
        None => None,
    };
    let Operands { q, k, v, sink, packed } = operands;
    let case = AttentionCase {
        q,
        k,
        v,
        sink: sink.as_ref().map(|sink| sink as _),
        lengths: packed.as_ref().map(|packed| packed.lengths.each_ref().map(Vec::as_slice)),
        blocks: lists.as_ref().map(|(mask, [row_ptr, col_idx])| Blocks {
            block_q: mask.block_q(),
            block_kv: mask.block_kv(),
            heads: mask.heads(),
            row_ptr,
            col_idx,
        }),
        bottom_right: align == Align::BottomRight,
        left,
        right,
        softmax_scale: problem.softmax_scale,
        softcap: problem.softcap,
    };
    let progress = Progress::fractions("checking");
    let [o, lse] = oracle::attention(&case, o, lse, seed, |done| progress.fraction(done))?;
    Ok(vec![("o", o), ("lse", lse)])
}
