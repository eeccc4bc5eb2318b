//! Masks of tokens that suites know.

use super::id::number;
use blockflash_ops::{Align, Mask};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A mask of tokens, in text `full`, `causal` and `window1024`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum MaskKind {
    /// Every query sees every key.
    Full,
    /// The diagonal ends at the last key.
    Causal,
    /// The same, and of the keys up to the diagonal each query sees the last ones, this number.
    Window(usize),
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Causal => f.write_str("causal"),
            Self::Window(keys) => write!(f, "window{keys}"),
        }
    }
}

impl From<MaskKind> for String {
    fn from(mask: MaskKind) -> Self {
        mask.to_string()
    }
}

impl TryFrom<String> for MaskKind {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "full" => Ok(Self::Full),
            "causal" => Ok(Self::Causal),
            other => number(other, "window").filter(|&keys| keys > 0).map(Self::Window).ok_or_else(
                || format!("the mask {other:?} is neither full nor causal nor like window1024"),
            ),
        }
    }
}

impl From<MaskKind> for Mask {
    fn from(mask: MaskKind) -> Self {
        match mask {
            MaskKind::Full => Mask::Full,
            MaskKind::Causal => Mask::causal(),
            MaskKind::Window(keys) => {
                let (left, right) = (Some(keys.saturating_sub(1)), Some(0));
                Mask::Window { left, right, align: Align::BottomRight }
            }
        }
    }
}
