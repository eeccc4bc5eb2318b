//! What happens to a score between its product and the sum of exponentials, but for sinks.

use crate::error::{Error, Result};
use crate::memory::count;
use blockflash_ops::{Align, Attention, AttentionProblem, Mask, View};
use blockflash_oracle::{AttentionCase, Elements};

/// Mask, scale and softcap of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor of the scores; `None`: 1/√head_dim.
    pub softmax_scale: Option<f32>,
    /// Scores become softcap · tanh(score / softcap).
    pub softcap: Option<f32>,
}

impl From<Mask> for Scores {
    fn from(mask: Mask) -> Self {
        Self { mask, softmax_scale: None, softcap: None }
    }
}

impl Scores {
    /// The call on dense q, k and v.
    pub fn call<'a>(&self, [q, k, v]: [View<'a>; 3]) -> Attention<'a> {
        let Self { mask, softmax_scale, softcap } = *self;
        Attention { mask, softmax_scale, softcap, ..Attention::new(q, k, v) }
    }

    /// The oracle's case of dense q, k and v, without a sink.
    ///
    /// # Errors
    /// If the oracle does not know the mask.
    pub fn for_oracle<'a>(
        &self,
        [q, k, v]: [&'a dyn Elements; 3],
        softmax_scale: f32,
    ) -> Result<AttentionCase<'a>> {
        let (left, right, align) = sides(self.mask)?;
        Ok(AttentionCase {
            q,
            k,
            v,
            sink: None,
            lengths: None,
            blocks: None,
            bottom_right: align == Align::BottomRight,
            left,
            right,
            softmax_scale,
            softcap: self.softcap,
        })
    }

    /// The options of a problem in words. Where queries and keys `differ` in number, the alignment
    /// of the mask matters.
    pub fn details(problem: &AttentionProblem, differ: bool) -> Vec<(&'static str, String)> {
        let mut details = vec![
            ("mask", words(problem.mask, differ)),
            ("scale", format!("{}", problem.softmax_scale)),
        ];
        details.extend(problem.softcap.map(|softcap| ("softcap", format!("{softcap}"))));
        if problem.sink {
            details.push(("sink", "one score per head".to_owned()));
        }
        details
    }
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
