//! How the stored blocks of a sparse matrix are distributed.

use super::id::{Named, named, with_name};
use crate::random;
use serde::{Deserialize, Serialize};

/// Distribution of the stored blocks of a sparse matrix. At equal density all patterns store the
/// same number of blocks, up to rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Every row stores the same number of blocks; their columns are drawn at random.
    Uniform,
    /// Every block is equally likely to be stored, so row lengths vary by chance.
    Random,
    /// Row lengths follow a power law: the row of rank r stores about r^-0.8 times as many blocks
    /// as the longest row. Ranks are shuffled and columns are drawn at random.
    PowerLaw,
    /// Every row stores the same number of contiguous blocks around the diagonal.
    Banded,
    /// A fraction of the rows equal to the density is full, evenly spaced; all other rows are
    /// empty. If only one row is full, it is the middle row.
    FullRows,
    /// Every row stores the same number of blocks. Up to sixteen equally spaced rows form a
    /// cluster, which has one list of as many columns as a row stores. Each row takes nine tenths
    /// of its columns from the list of its cluster and draws the rest at random.
    Clustered,
    /// Every row stores the same number of blocks: the diagonal column and the columns whose index
    /// differs from it in one bit, nearest first. Where these are too few, each one stands for an
    /// aligned run of 2, 4, … columns, the shortest run that suffices; surplus columns are dropped
    /// from the far end.
    Butterfly,
    /// Every row stores the same number of blocks. Rows 2 t and 2 t + 1 have half of their columns
    /// in common; all are drawn at random.
    Paired,
}

/// Exponent of [`Pattern::PowerLaw`].
const SKEW: f64 = 0.8;
/// Number of rows in a cluster of [`Pattern::Clustered`], and the share of its columns that a row
/// takes from the list of its cluster.
const CLUSTER: usize = 16;
const SHARED: f64 = 0.9;

named!(Pattern:
    Uniform = "uniform",
    Random = "random",
    PowerLaw = "power_law",
    Banded = "banded",
    FullRows = "full_rows",
    Clustered = "clustered",
    Butterfly = "butterfly",
    Paired = "paired"
);

impl Pattern {
    /// All patterns.
    pub const ALL: &[Pattern] = <Self as Named>::ALL;

    /// Parses the displayed name of a pattern.
    pub fn named(name: &str) -> Option<Self> {
        with_name(name)
    }

    /// An id in which the names of patterns have `-` in place of `_`, which separates its parts.
    pub(super) fn joined(id: &str) -> String {
        let join = |id: String, name: String| id.replace(&name, &name.replace('_', "-"));
        Self::ALL.iter().map(ToString::to_string).fold(id.to_owned(), join)
    }

    /// Number of stored blocks. The density is rounded to whole blocks per row (at least one), for
    /// `Random` to whole blocks of the matrix, and for `FullRows` to whole rows (at least one).
    pub fn nnz_blocks(self, rows: usize, columns: usize, density: f64) -> usize {
        match self {
            Pattern::Random => rounded(density, rows * columns),
            Pattern::FullRows => rounded(density, rows) * columns,
            _ => rows * rounded(density, columns),
        }
    }

    /// Draws `row_ptr` and `col_idx`; columns ascend within each row.
    pub fn draw(
        self,
        rows: usize,
        columns: usize,
        density: f64,
        seed: u64,
    ) -> (Vec<i32>, Vec<i32>) {
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
                for block in
                    random::choose(rounded(density, rows * columns), rows * columns, seed, 0)
                {
                    of_rows[block / columns].push(block % columns);
                }
                of_rows
            }
            Pattern::FullRows => {
                let mut of_rows = vec![Vec::new(); rows];
                let full = rounded(density, rows).min(rows);
                (0..full).for_each(|at| {
                    of_rows[(2 * at + 1) * rows / (2 * full)] = (0..columns).collect()
                });
                of_rows
            }
            Pattern::Clustered => clustered(rows, columns, each, seed),
            Pattern::Butterfly => {
                let run = shortest_run(columns, each);
                // A matrix that is not square has no diagonal: rows are scaled to the number of
                // columns.
                let row = |row: usize| butterfly(row * columns / rows, columns, each, run);
                (0..rows).map(row).collect()
            }
            Pattern::Paired => (0..rows).map(|row| paired(row, columns, each, seed)).collect(),
        };
        let mut row_ptr = vec![0];
        row_ptr.extend(of_rows.iter().scan(0, |end, row| {
            *end += row.len() as i32;
            Some(*end)
        }));
        (row_ptr, of_rows.into_iter().flatten().map(|column| column as i32).collect())
    }
}

/// A fraction of `blocks`, rounded, at least one.
pub(super) fn rounded(density: f64, blocks: usize) -> usize {
    ((density * blocks as f64).round() as usize).clamp(1, blocks.max(1))
}

/// Draws power-law row lengths with the given sum; each length is between 1 and `columns`.
fn skewed(rows: usize, columns: usize, sum: usize, seed: u64) -> Vec<usize> {
    let lengths = |scale: f64| -> Vec<usize> {
        let length =
            |rank: usize| (scale * (rank as f64).powf(-SKEW)).round().clamp(1.0, columns as f64);
        (1..=rows).map(|rank| length(rank) as usize).collect()
    };
    // Bisects for the largest scale whose lengths do not exceed the sum.
    let (mut low, mut high) = (0.0, (columns * rows) as f64);
    for _ in 0..64 {
        let middle = (low + high) / 2.0;
        if lengths(middle).iter().sum::<usize>() > sum { high = middle } else { low = middle }
    }
    let mut lengths = lengths(low);
    // Rounding leaves less than one block per row; it goes to the shortest rows that have room.
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

/// Columns of the rows of [`Pattern::Clustered`], row `r` in cluster `r % clusters`.
fn clustered(rows: usize, columns: usize, each: usize, seed: u64) -> Vec<Vec<usize>> {
    let clusters = rows.div_ceil(CLUSTER);
    // Near density 1 too few columns remain outside of the list, so rows take more from the list.
    let shared = ((SHARED * each as f64).round() as usize).max((2 * each).saturating_sub(columns));
    let row = |row: usize| {
        let draw = |count, total, lane| random::choose(count, total, seed, lane as u64);
        // One random stream for each list and two for each row.
        let list = draw(each, columns, row % clusters);
        let of_list = draw(shared, list.len(), clusters + 2 * row);
        let of_others = draw(each - shared, columns - list.len(), clusters + 2 * row + 1);
        let mut chosen: Vec<usize> = of_list.into_iter().map(|at| list[at]).collect();
        // Place `at` among the columns that are not in the list. Both ascend, so one walk finds
        // all: looking at every column would be quadratic in the size of the matrix.
        let mut before = 0;
        chosen.extend(of_others.into_iter().map(|at| {
            while list.get(before).is_some_and(|&column| column <= at + before) {
                before += 1;
            }
            at + before
        }));
        chosen.sort_unstable();
        chosen
    };
    (0..rows).map(row).collect()
}

fn paired(row: usize, columns: usize, each: usize, seed: u64) -> Vec<usize> {
    // Near density 1 there are too few columns for halves of their own.
    let common = each.div_ceil(2).max((2 * each).saturating_sub(columns));
    // Two random streams for each pair. What is not common goes to both rows in turns.
    let (pair, second) = (row / 2, row % 2);
    let both = random::choose(2 * each - common, columns, seed, 2 * pair as u64);
    let shared = random::choose(common, both.len(), seed, 2 * pair as u64 + 1);
    let mut turn = 0;
    let mut is_own = |at| {
        turn += usize::from(shared.binary_search(&at).is_err());
        shared.binary_search(&at).is_ok() || turn % 2 == second
    };
    (0..both.len()).filter(|&at| is_own(at)).map(|at| both[at]).collect()
}

/// The shortest power-of-two run of columns with which all positions of a butterfly together hold
/// `each` columns.
fn shortest_run(columns: usize, each: usize) -> usize {
    let places = |run: usize| 1 + columns.div_ceil(run).next_power_of_two().ilog2() as usize;
    let mut run = 1;
    while run * places(run) < each {
        run *= 2;
    }
    run
}

/// Columns of the row whose diagonal column is `own`. If the number of columns is no power of two,
/// some one-bit neighbours are outside of the matrix; neighbours that differ in two bits follow,
/// then in three, and so on.
fn butterfly(own: usize, columns: usize, each: usize, run: usize) -> Vec<usize> {
    let distance = |column: &usize| (((own / run) ^ (column / run)).count_ones(), own ^ column);
    let mut nearest: Vec<usize> = (0..columns).collect();
    nearest.sort_unstable_by_key(distance);
    nearest.truncate(each);
    nearest.sort_unstable();
    nearest
}

#[cfg(test)]
mod tests;
