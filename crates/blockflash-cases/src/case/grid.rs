//! What the grids of suite files have in common.

use super::pattern::Pattern;
use blockflash_sys::HeadDims;
use serde::Deserialize;

/// Which competitors the cases of a grid are measured with.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GridPeers {
    /// Those of the suite.
    #[default]
    Suite,
    /// None at all.
    None,
}

pub(super) fn uniform() -> Vec<Pattern> {
    vec![Pattern::Uniform]
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

/// Head dimensions of q and k, and of v and o, which are those of q and k unless they are given.
pub(super) fn head_dims(qk: usize, v: Option<usize>) -> HeadDims {
    HeadDims { qk, v: v.unwrap_or(qk) }
}

/// Most cases of a grid.
const MOST: usize = 1 << 16;

/// Refuses a grid of lists with too many combinations.
pub(super) fn limit(lists: &[usize]) -> Result<(), String> {
    let count = lists.iter().fold(1usize, |count, &length| count.saturating_mul(length));
    if count > MOST {
        return Err(format!("a grid has {count} combinations, the limit is {MOST}"));
    }
    Ok(())
}

/// Runs a block for every combination of elements of these lists, the last one fastest.
macro_rules! each {
    ($($name:pat in $list:expr),+ => $body:block) => {
        $crate::case::grid::limit(&[$($list.len()),+])?;
        $crate::case::grid::each!(@ $($name in $list),+ => $body)
    };
    (@ $name:pat in $list:expr $(, $others:pat in $lists:expr)* => $body:block) => {
        for $name in $list.iter().cloned() {
            $crate::case::grid::each!(@ $($others in $lists),* => $body)
        }
    };
    (@ => $body:block) => { $body };
}
pub(super) use each;

pub(super) fn fraction(density: f64) -> Result<(), String> {
    if density > 0.0 && density <= 1.0 {
        Ok(())
    } else {
        Err(format!("density {density} is not in (0, 1]"))
    }
}
