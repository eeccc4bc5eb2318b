//! Lengths of packed sequences, and how their list is written.

use serde::Serialize;
use std::fmt;

/// Lengths of packed sequences in their order: at least one, none of them 0. Written `4096+512x2`
/// for 4096, 512, 512.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Lengths(Vec<usize>);

/// Why a list is no [`Lengths`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LengthsError {
    /// No sequence.
    #[error("a list of lengths is empty")]
    Empty,
    /// A sequence without rows, which no list needs.
    #[error("a list of lengths has a length of 0")]
    Zero,
    /// Offsets into the packed rows are 32-bit.
    #[error("{MOST} sequences at most, and {} rows in all", i32::MAX)]
    TooLarge,
    /// Text that is no list.
    #[error("expected lengths like 4096+512x2")]
    Text,
}

/// Most sequences of a case: an id of a few characters must not fill the memory.
const MOST: usize = 1 << 16;

impl Lengths {
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

    /// Reads what [`Display`](fmt::Display) writes.
    pub(super) fn parse(text: &str) -> Result<Self, LengthsError> {
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

    /// The lengths.
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.0.len()
    }

    /// Rows in all.
    pub fn tokens(&self) -> usize {
        self.0.iter().sum()
    }

    /// The greatest length.
    pub fn longest(&self) -> usize {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// Where each sequence begins in the packed rows, and where the last one ends.
    pub fn offsets(&self) -> Vec<i32> {
        let ends = self.0.iter().scan(0usize, |end, length| {
            *end += length;
            Some(*end as i32) // `new` has checked the sum
        });
        std::iter::once(0).chain(ends).collect()
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
