//! Parts of the ids of cases, written and read.

use super::mask_kind::MaskKind;
use super::pattern::Pattern;
use blockflash_sys::DType;
use std::fmt;
use std::str::FromStr;

/// Splits an id into its parts. A pattern's name may hold the separator, and has `-` in its place.
pub(super) fn parts(id: &str) -> String {
    let join = |id: String, name: String| id.replace(&name, &name.replace('_', "-"));
    Pattern::ALL.iter().map(ToString::to_string).fold(id.to_owned(), join)
}

/// `s4096_h32`, `q1_kv8192_h32kv8`.
pub(super) fn sizes(
    f: &mut fmt::Formatter<'_>,
    seqlens: [usize; 2],
    heads: [usize; 2],
) -> fmt::Result {
    match seqlens {
        [q, kv] if q == kv => write!(f, "s{q}")?,
        [q, kv] => write!(f, "q{q}_kv{kv}")?,
    }
    shared(f, heads)
}

/// `_h32`, `_h32kv8`.
pub(super) fn shared(f: &mut fmt::Formatter<'_>, heads: [usize; 2]) -> fmt::Result {
    match heads {
        [q, kv] if q == kv => write!(f, "_h{q}"),
        [q, kv] => write!(f, "_h{q}kv{kv}"),
    }
}

pub(super) fn number<T: FromStr>(part: &str, prefix: &str) -> Option<T> {
    part.strip_prefix(prefix)?.parse().ok()
}

pub(super) fn pair(part: &str, prefix: &str) -> Option<[usize; 2]> {
    let (first, second) = part.strip_prefix(prefix)?.split_once("kv")?;
    Some([first.parse().ok()?, second.parse().ok()?])
}

/// `h32` or `h32kv8`.
pub(super) fn heads(part: &str) -> Option<[usize; 2]> {
    pair(part, "h").or_else(|| Some([number(part, "h")?; 2])).filter(|heads| heads[1] > 0)
}

pub(super) fn dtype(part: &str) -> Option<DType> {
    [DType::F16, DType::BF16, DType::F32].into_iter().find(|dtype| dtype.name() == part)
}

pub(super) fn mask(part: &str) -> Option<MaskKind> {
    [MaskKind::Full, MaskKind::Causal].into_iter().find(|mask| mask.to_string() == part)
}

pub(super) fn pattern(part: &str) -> Option<Pattern> {
    Pattern::named(&part.replace('-', "_"))
}
