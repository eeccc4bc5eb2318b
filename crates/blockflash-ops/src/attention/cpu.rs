use super::{Attention, AttentionProblem};
use crate::{Error, Result};
use blockflash_safe::{Stream, ViewMut};
pub(super) fn forward(
    _: &Attention<'_>,
    _: &AttentionProblem,
    _: ViewMut<'_>,
    _: Option<ViewMut<'_>>,
    _: &Stream,
) -> Result<()> {
    Err(Error::Unsupported { op: super::OP, arch: "cpu".into(), what: "in work".into() })
}
