//! Block-sparse products against the dense product: the fraction of the dense rate that they reach,
//! and the density below which they take less time.

use super::cells::{Cells, Table, two};
use super::runs::Row;
use crate::case::{BsrShape, Case, Pattern};
use crate::record::Record;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

/// Density at which a sparse product stops being faster than the dense one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BreakEven {
    /// The sparse product is slower even at the lowest density, which this is.
    Below(f64),
    /// Both take equally long at this density.
    At(f64),
    /// The sparse product is faster at all densities, of which this is the highest.
    Above(f64),
}

impl fmt::Display for BreakEven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Below(density) => write!(f, "below {density:.2}"),
            Self::At(density) => write!(f, "{density:.2}"),
            Self::Above(density) => write!(f, "above {density:.2}"),
        }
    }
}

/// Finds the density at which the time of a sparse product reaches the time of the dense one, by
/// linear interpolation between neighbouring points. `points` are densities and times in ascending
/// density, relative to the time of the dense product. Returns `None` without points.
///
/// ```
/// use blockflash_bench::report::{BreakEven, break_even};
///
/// assert_eq!(break_even(&[(0.25, 0.5), (0.75, 1.5)]), Some(BreakEven::At(0.5)));
/// assert_eq!(break_even(&[(0.25, 0.5), (0.75, 0.9)]), Some(BreakEven::Above(0.75)));
/// assert_eq!(break_even(&[(0.1, 1.0), (0.5, 0.9)]), Some(BreakEven::Below(0.1)));
/// assert_eq!(break_even(&[]), None);
/// ```
pub fn break_even(points: &[(f64, f64)]) -> Option<BreakEven> {
    let &(mut below) = points.first()?;
    if below.1 >= 1.0 {
        return Some(BreakEven::Below(below.0));
    }
    for &(density, time) in &points[1..] {
        if time >= 1.0 {
            let part = (1.0 - below.1) / (time - below.1);
            return Some(BreakEven::At(below.0 + part * (density - below.0)));
        }
        below = (density, time);
    }
    Some(BreakEven::Above(below.0))
}

pub(super) const NOTE: &str = "\
Columns of densities: the rate of the stored blocks as a fraction of the rate of the dense \
product, whose zeros count as work. Break-even: the part of the blocks up to which the sparse \
product takes less time, between measured densities along straight lines. Of two dense products \
one multiplies the zeros, which save power and so raise the clock, the other one N(0, 1) \
everywhere.";

/// A product, the part of its blocks that is stored, and our time relative to a dense product in
/// the same run.
fn against_dense(row: &Row<'_>, dense: &Record) -> Option<(BsrShape, f64, f64)> {
    let Some(Case::BsrMatmul(shape)) = row.case.as_ref().filter(|_| !row.ours.is_empty()) else {
        return None;
    };
    let stored = shape.nnz_blocks() as f64 / (shape.block_rows() * shape.block_columns()) as f64;
    Some((*shape, stored, row.best()?.us? / dense.us?))
}

/// Our rate relative to the dense product; multiplications by zeros count as work.
pub(super) fn part_of_rate(row: &Row<'_>, dense: &Record) -> Option<f64> {
    against_dense(row, dense).map(|(_, stored, time)| stored / time)
}

/// A density as the case names it, the part that is stored, and the time relative to dense.
type Point = (f64, f64, f64);
/// Points by block size (largest first) and number of columns of the dense matrix.
type Lines = BTreeMap<(Reverse<usize>, usize), Vec<Point>>;

/// One table with a heading for each size and type of A and each measured dense product.
pub(super) fn tables(rows: &[Row<'_>]) -> Vec<(String, Cells)> {
    let mut tables: BTreeMap<String, Lines> = BTreeMap::new();
    for (row, dense) in rows.iter().flat_map(|row| row.references().map(move |d| (row, d))) {
        let Some((shape, stored, time)) = against_dense(row, dense) else { continue };
        let BsrShape { m, n, k, block_size, density, dtype, pattern, .. } = shape;
        if pattern == Pattern::Uniform {
            let of = format!("part of the rate of `{}`", dense.implementation);
            let lines = tables.entry(format!("{m} × {k}, {dtype}{}: {of}", row.cold()));
            let line = lines.or_default().entry((Reverse(block_size), n)).or_default();
            line.push((density, stored, time));
        }
    }
    for lines in tables.values_mut() {
        lines.retain(|_, points| points.len() > 1);
        lines.values_mut().for_each(|points| points.sort_by(|a, b| a.1.total_cmp(&b.1)));
    }
    tables.retain(|_, lines| !lines.is_empty());
    tables.into_iter().map(|(heading, lines)| (heading, of_densities(lines))).collect()
}

fn of_densities(lines: Lines) -> Cells {
    let mut densities: Vec<f64> = lines.values().flatten().map(|point| point.0).collect();
    densities.sort_by(f64::total_cmp);
    // A column that only few lines fill allows no comparison and is left out.
    let most = |alike: &&[f64]| 2 * alike.len() > lines.len();
    let densities: Vec<_> =
        densities.chunk_by(|a, b| a == b).filter(most).map(|alike| alike[0]).collect();
    let items: Vec<_> = lines.into_iter().collect();
    let mut table = Table::of(&items)
        .column("block", |((Reverse(block), _), _)| Some(block.to_string()))
        .column("N", |((_, n), _)| Some(n.to_string()));
    for density in densities {
        table = table.column(format!("at {density}"), |(_, points)| {
            let point = points.iter().find(|point| point.0 == density)?;
            Some(two(point.1 / point.2))
        });
    }
    let table = table.column("break-even", |(_, points)| {
        let times: Vec<_> = points.iter().map(|&(_, stored, time)| (stored, time)).collect();
        break_even(&times).map(|density| density.to_string())
    });
    table.cells
}
