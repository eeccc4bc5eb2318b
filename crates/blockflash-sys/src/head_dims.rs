use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

/// Elements of the rows of attention's tensors, those of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HeadDims {
    /// Of rows of q, k and their gradients: the terms of a score.
    pub qk: usize,
    /// Of rows of v, o and their gradients.
    pub v: usize,
}

impl HeadDims {
    /// The same for all tensors.
    pub const fn all(head_dim: usize) -> Self {
        Self { qk: head_dim, v: head_dim }
    }

    /// The one head dimension of all tensors, or `None` if they have two.
    pub const fn single(self) -> Option<usize> {
        if self.qk == self.v { Some(self.qk) } else { None }
    }

    /// The larger one.
    pub const fn max(self) -> usize {
        if self.qk > self.v { self.qk } else { self.v }
    }

    /// The smaller one: what all tensors of a problem may have where these are a kernel's.
    pub const fn min(self) -> usize {
        if self.qk < self.v { self.qk } else { self.v }
    }

    /// Both together: what a key and its value, or a query and its output, have in elements.
    pub const fn sum(self) -> usize {
        self.qk.saturating_add(self.v)
    }
}

/// `128` for one head dimension, `192v128` (qk, v) for two: a part of names of images and cases.
impl fmt::Display for HeadDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.single() {
            Some(head_dim) => write!(f, "{head_dim}"),
            None => write!(f, "{}v{}", self.qk, self.v),
        }
    }
}

/// Reads what `Display` writes.
impl FromStr for HeadDims {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        Ok(match text.split_once('v') {
            Some((qk, v)) => Self { qk: qk.parse()?, v: v.parse()? },
            None => Self::all(text.parse()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_back() {
        for (dims, text) in [
            (HeadDims::all(128), "128"),
            (HeadDims { qk: 192, v: 128 }, "192v128"),
            (HeadDims { qk: 64, v: 128 }, "64v128"),
        ] {
            assert_eq!((dims.to_string().as_str(), text.parse()), (text, Ok(dims)));
        }
        for text in ["", "v", "192v", "v128", "192x128", "-1"] {
            assert!(text.parse::<HeadDims>().is_err(), "{text}");
        }
    }

    #[test]
    fn one_or_two() {
        let dims = HeadDims { qk: 192, v: 128 };
        assert_eq!((dims.single(), dims.max(), dims.min(), dims.sum()), (None, 192, 128, 320));
        assert_eq!(HeadDims { qk: 64, v: 128 }.max(), 128);
        assert_eq!(HeadDims::all(72).single(), Some(72));
    }
}
