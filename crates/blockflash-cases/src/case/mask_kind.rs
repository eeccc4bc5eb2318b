//! Token masks of cases.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Masks that suites know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum MaskKind {
    Full,
    /// The diagonal ends at the last key.
    Causal,
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MaskKind::Full => "full",
            MaskKind::Causal => "causal",
        })
    }
}
