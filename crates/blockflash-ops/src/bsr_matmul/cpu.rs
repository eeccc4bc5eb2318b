use super::{BsrMatmul, BsrProblem};
use crate::{Error, Result};
use blockflash_safe::ViewMut;
pub(super) fn matmul(_: &BsrMatmul<'_>, _: &BsrProblem, _: ViewMut<'_>) -> Result<()> {
    Err(Error::Unsupported { op: super::OP, arch: "cpu".into(), what: "in work".into() })
}
