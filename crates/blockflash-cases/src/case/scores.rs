//! What happens to a score: for the oracle and in words.

use super::operands::Placed;
use crate::error::{Error, Result};
use crate::io::Array;
use crate::memory::count;
use blockflash_ops::{Align, BiasProblem, Mask, Scores, ScoresProblem};
use blockflash_oracle::{AttentionCase, Elements};
use std::ops::Range;

/// The oracle's case of dense q, k and v with the scores of a problem, for which `placed` has the
/// tensors.
///
/// # Errors
/// If the oracle does not know the mask.
pub(super) fn for_oracle<'a>(
    scores: &ScoresProblem,
    [q, k, v]: [&'a dyn Elements; 3],
    placed: &'a Scores<Placed>,
) -> Result<AttentionCase<'a>> {
    let (left, right, align) = sides(scores.mask)?;
    Ok(AttentionCase {
        q,
        k,
        v,
        sink: placed.sink.as_ref().map(|sink| sink.host() as _),
        bias: placed.bias.as_ref().map(|bias| bias.host() as _),
        alibi: placed.alibi.as_ref().map(|slopes| slopes.host() as _),
        lengths: None,
        blocks: None,
        bottom_right: align == Align::BottomRight,
        left,
        right,
        scores: blockflash_oracle::Scores::new(scores.softmax_scale, scores.softcap),
    })
}

/// The tensors of some heads of q, on the host, where they have one number for each head.
pub(super) fn of_heads(scores: &Scores<Placed>, heads: Range<usize>) -> Result<Scores<Placed>> {
    scores.as_ref().try_map(|name, tensor| {
        let part = Array::new(&[heads.len()], tensor.host().to_f32(heads.clone()));
        let part = part.ok_or_else(|| Error::Option(format!("{name} has not all heads")))?;
        Ok(Placed::on_host(part))
    })
}

/// The scores of a problem in words. Where queries and keys `differ` in number, the alignment of
/// the mask matters.
pub(super) fn details(scores: &ScoresProblem, differ: bool) -> Vec<(&'static str, String)> {
    let mut details =
        vec![("mask", words(scores.mask, differ)), ("scale", format!("{}", scores.softmax_scale))];
    details.extend(scores.softcap.map(|softcap| ("softcap", format!("{softcap}"))));
    if scores.sink {
        details.push(("sink", "one score per head".to_owned()));
    }
    if let Some(BiasProblem { dtype, broadcast, .. }) = scores.bias {
        let axes = ["batch entry", "head", "query", "key"].into_iter().zip(broadcast);
        let axes: Vec<_> = axes.filter_map(|(axis, one)| (!one).then_some(axis)).collect();
        let per =
            if axes.is_empty() { "for all".to_owned() } else { format!("per {}", axes.join(", ")) };
        details.push(("bias", format!("one {dtype} {per}")));
    }
    if scores.alibi {
        details.push(("alibi", "one slope per head".to_owned()));
    }
    details
}

/// The keys before and after the aligned one that a mask shows, `None` for all, and the alignment.
///
/// # Errors
/// For a mask without these.
fn sides(mask: Mask) -> Result<(Option<usize>, Option<usize>, Align)> {
    match mask {
        Mask::Full => Ok((None, None, Align::TopLeft)),
        Mask::Causal { align } => Ok((None, Some(0), align)),
        Mask::Window { left, right, align } => Ok((left, right, align)),
        other => Err(Error::Option(format!("there is no reference for the mask {other:?}"))),
    }
}

fn words(mask: Mask, differ: bool) -> String {
    let aligned = |align| match align {
        Align::BottomRight if differ => ", bottom-right",
        Align::TopLeft if differ => ", top-left",
        _ => "",
    };
    let keys = |side: Option<usize>| side.map_or("all".to_owned(), |keys| count(keys as u64));
    match mask {
        Mask::Full => "full".to_owned(),
        Mask::Causal { align } => format!("causal{}", aligned(align)),
        Mask::Window { left, right, align } => {
            let (left, right) = (keys(left), keys(right));
            format!("window, {left} keys before and {right} after{}", aligned(align))
        }
        other => format!("{other:?}"),
    }
}
