//! What happens to a score, as kernels take it: the only place where factors are derived from the
//! options.

use super::mask::Limits;
use super::{Align, AttentionProblem, ScoresProblem};
use blockflash_sys::params::{BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_scores, blockflash_window};
use std::f64::consts::LOG2_E;
use std::ptr::null;

/// The options of a problem, with a null pointer for the sink.
pub(crate) fn score_params(problem: &AttentionProblem) -> blockflash_scores {
    let ScoresProblem { mask, softmax_scale, softcap, .. } = problem.scores;
    let scale = f64::from(softmax_scale);
    // A score that was capped or added to is scaled already.
    let is_scaled = softcap.is_some() || problem.scores.added().is_some();
    let scale_log2 = if is_scaled { LOG2_E } else { LOG2_E * scale };
    blockflash_scores {
        sink: null(),
        scale: softmax_scale,
        softcap: softcap.unwrap_or(0.0),
        scale_log2: scale_log2 as f32,
        inverse_scale_log2: scale_log2.recip() as f32,
        scale_over_cap: softcap.map_or(0.0, |cap| (scale / f64::from(cap)) as f32),
        window: window_params(&mask.limits(problem.seqlen_q, problem.seqlen_kv)),
    }
}

/// The sides of a window as kernels encode them.
pub(crate) fn window_params(limits: &Limits) -> blockflash_window {
    let side = |side: Option<usize>| {
        side.and_then(|side| i32::try_from(side).ok()).unwrap_or(BLOCKFLASH_WINDOW_UNBOUNDED)
    };
    blockflash_window {
        left: side(limits.left),
        right: side(limits.right),
        align_bottom_right: i32::from(limits.align == Align::BottomRight),
    }
}
