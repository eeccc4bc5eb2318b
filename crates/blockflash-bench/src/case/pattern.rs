//! How stored blocks are spread.

use crate::random;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How the blocks of a sparse matrix are spread. At equal density all patterns store the same number of blocks, up to rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// The same number of blocks in each row, their columns drawn at random.
    Uniform,
    /// Every block is equally likely, so that rows differ by chance.
    Random,
    /// The row of rank r holds about r^-0.8 times as many blocks as the first, in shuffled order; columns drawn at random.
    PowerLaw,
    /// The same number of blocks in each row, side by side around the diagonal.
    Banded,
}

/// Exponent of [`Pattern::PowerLaw`].
const SKEW: f64 = 0.8;

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pattern::Uniform => "uniform",
            Pattern::Random => "random",
            Pattern::PowerLaw => "power_law",
            Pattern::Banded => "banded",
        })
    }
}

impl Pattern {
    /// Number of stored blocks: `density` rounded to whole blocks, per row (at least one) or for `Random` in all.
    pub(crate) fn nnz_blocks(self, rows: usize, columns: usize, density: f64) -> usize {
        match self {
            Pattern::Random => rounded(density, rows * columns),
            _ => rows * rounded(density, columns),
        }
    }

    /// `row_ptr` and `col_idx`, ascending within each row.
    pub(crate) fn draw(self, rows: usize, columns: usize, density: f64, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let each = rounded(density, columns);
        let at_random = |row: usize, count| random::choose(count, columns, seed, row as u64);
        let of_rows: Vec<Vec<usize>> = match self {
            Pattern::Uniform => (0..rows).map(|row| at_random(row, each)).collect(),
            Pattern::PowerLaw => {
                let counts = skewed(rows, columns, rows * each, seed);
                counts.into_iter().enumerate().map(|(row, count)| at_random(row, count)).collect()
            }
            Pattern::Banded => {
                let first = |row: usize| {
                    let centre = (2 * row + 1) * columns / (2 * rows.max(1));
                    centre.saturating_sub(each / 2).min(columns - each)
                };
                (0..rows).map(|row| (first(row)..first(row) + each).collect()).collect()
            }
            Pattern::Random => {
                let mut of_rows = vec![Vec::new(); rows];
                for block in random::choose(rounded(density, rows * columns), rows * columns, seed, 0) {
                    of_rows[block / columns].push(block % columns);
                }
                of_rows
            }
        };
        let mut row_ptr = vec![0];
        row_ptr.extend(of_rows.iter().scan(0, |end, row| {
            *end += row.len() as i32;
            Some(*end)
        }));
        (row_ptr, of_rows.into_iter().flatten().map(|column| column as i32).collect())
    }
}

/// A fraction of so many blocks, at least one.
pub(super) fn rounded(density: f64, blocks: usize) -> usize {
    ((density * blocks as f64).round() as usize).clamp(1, blocks.max(1))
}

/// Lengths of power-law rows with a given sum, each from 1 to `columns`.
fn skewed(rows: usize, columns: usize, sum: usize, seed: u64) -> Vec<usize> {
    let lengths = |scale: f64| -> Vec<usize> {
        let length = |rank: usize| (scale * (rank as f64).powf(-SKEW)).round().clamp(1.0, columns as f64);
        (1..=rows).map(|rank| length(rank) as usize).collect()
    };
    // The largest scale that does not exceed the sum.
    let (mut low, mut high) = (0.0, (columns * rows) as f64);
    for _ in 0..64 {
        let middle = (low + high) / 2.0;
        if lengths(middle).iter().sum::<usize>() > sum { high = middle } else { low = middle }
    }
    let mut lengths = lengths(low);
    // Rounding leaves a rest, less than one block per row: to the shortest rows that have room.
    let mut rest = sum.saturating_sub(lengths.iter().sum());
    for length in lengths.iter_mut().rev().filter(|length| **length < columns) {
        if rest == 0 {
            break;
        }
        *length += 1;
        rest -= 1;
    }
    random::shuffle(&mut lengths, seed);
    lengths
}
