//! What the grids of suite files have in common.

use super::mask_kind::MaskKind;
use super::pattern::Pattern;
use serde::Deserialize;

/// Which competitors the cases of a grid are measured with.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GridPeers {
    /// Those of the suite.
    #[default]
    Suite,
    None,
}

pub(super) fn uniform() -> Vec<Pattern> {
    vec![Pattern::Uniform]
}

pub(super) fn full() -> Vec<MaskKind> {
    vec![MaskKind::Full]
}

pub(super) fn heads_kv(num_heads_q: usize, num_heads_kv: Option<usize>) -> Result<usize, String> {
    let num_heads_kv = num_heads_kv.unwrap_or(num_heads_q);
    if num_heads_q == 0 || num_heads_kv == 0 || !num_heads_q.is_multiple_of(num_heads_kv) {
        return Err(format!(
            "{num_heads_q} query heads cannot share {num_heads_kv} key-value heads"
        ));
    }
    Ok(num_heads_kv)
}

/// Most cases of a grid.
const MOST: usize = 1 << 16;

/// The pairs of an element of each list, those with the first element of `outer` first.
pub(super) fn pairs<A: Clone, B: Clone>(outer: &[A], inner: &[B]) -> Result<Vec<(A, B)>, String> {
    let count = outer.len().saturating_mul(inner.len());
    if count > MOST {
        return Err(format!("a grid has {count} combinations, the limit is {MOST}"));
    }
    Ok(outer.iter().flat_map(|a| inner.iter().map(move |b| (a.clone(), b.clone()))).collect())
}

pub(super) fn fraction(density: f64) -> Result<(), String> {
    if density > 0.0 && density <= 1.0 {
        Ok(())
    } else {
        Err(format!("density {density} is not in (0, 1]"))
    }
}
