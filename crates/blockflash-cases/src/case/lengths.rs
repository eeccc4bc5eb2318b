//! Lengths of packed sequences, and their text form.

use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Lengths of packed sequences in order: at least one, none of them 0. The text form of 4096, 512,
/// 512 is `4096+512x2`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Lengths(Vec<usize>);

/// Reason why a list is not a valid [`Lengths`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LengthsError {
    /// The list is empty.
    #[error("a list of lengths is empty")]
    Empty,
    /// A sequence without rows, which no case needs.
    #[error("a list of lengths has a length of 0")]
    Zero,
    /// Offsets into the packed rows are 32-bit.
    #[error("at most {MOST} sequences and {} rows in all are possible", i32::MAX)]
    TooLarge,
    /// Text that cannot be parsed.
    #[error("expected lengths like 4096+512x2")]
    Text,
}

/// Maximum number of sequences in a case: a short id such as `1x999999999` must not exhaust memory.
const MOST: usize = super::limits::SEQUENCES;

impl Lengths {
    /// No lengths yet, for an id to be read.
    pub(super) const NONE: Self = Self(Vec::new());

    /// Checks a list.
    ///
    /// # Errors
    /// [`LengthsError`].
    pub fn new(lengths: &[usize]) -> Result<Self, LengthsError> {
        let total = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
        match total {
            _ if lengths.is_empty() => Err(LengthsError::Empty),
            _ if lengths.contains(&0) => Err(LengthsError::Zero),
            Some(total) if i32::try_from(total).is_ok() && lengths.len() <= MOST => {
                Ok(Self(lengths.to_vec()))
            }
            _ => Err(LengthsError::TooLarge),
        }
    }

    /// The lengths.
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.0.len()
    }

    /// Total number of rows.
    pub fn tokens(&self) -> usize {
        self.0.iter().sum()
    }

    /// The greatest length.
    pub fn longest(&self) -> usize {
        self.0.iter().copied().max().unwrap_or(0)
    }
}

impl FromStr for Lengths {
    type Err = LengthsError;

    /// Parses the text that [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, LengthsError> {
        let number = |text: &str| text.parse::<usize>().map_err(|_| LengthsError::Text);
        let mut lengths = Vec::new();
        for part in text.split('+') {
            let (length, count) = part.split_once('x').unwrap_or((part, "1"));
            let (length, count) = (number(length)?, number(count)?);
            if count > MOST - lengths.len() {
                return Err(LengthsError::TooLarge);
            }
            lengths.extend(std::iter::repeat_n(length, count));
        }
        Self::new(&lengths)
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, run) in self.0.chunk_by(|left, right| left == right).enumerate() {
            let plus = if index == 0 { "" } else { "+" };
            write!(f, "{plus}{}", run[0])?;
            if run.len() > 1 {
                write!(f, "x{}", run.len())?;
            }
        }
        Ok(())
    }
}
