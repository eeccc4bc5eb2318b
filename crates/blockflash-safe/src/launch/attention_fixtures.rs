//! What the tests of launches of attention have in common.

use super::AttentionScalars;
use blockflash_sys::params::{blockflash_scores, blockflash_window};
use std::f32::consts::{LN_2, LOG2_E};
use std::ptr::null;

/// Scores with a scale of 1 and nothing else.
pub(super) const PLAIN_SCORES: blockflash_scores = blockflash_scores {
    sink: null(),
    scale: 1.0,
    softcap: 0.0,
    scale_log2: LOG2_E,
    inverse_scale_log2: LN_2,
    scale_over_cap: 0.0,
    window: blockflash_window { left: i32::MAX, right: i32::MAX, align_bottom_right: 0 },
};

/// Plain scores, packed sequences of at most `longest` queries and keys, and blocks of a mask.
pub(super) fn scalars(longest: [i32; 2], blocks: [i32; 2]) -> AttentionScalars {
    AttentionScalars { scores: PLAIN_SCORES, longest, blocks }
}
