//! Block-sparse products against the dense product: the fraction of the dense rate that they reach,
//! and the density below which they take less time.

use super::cells::{Cells, NONE};
use super::run::Row;
use super::shape::is_cold;
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

impl BreakEven {
    /// The highest density at which the sparse product is known to be faster.
    pub fn density(self) -> Option<f64> {
        match self {
            Self::Below(_) => None,
            Self::At(density) | Self::Above(density) => Some(density),
        }
    }
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

/// Explains the tables.
pub(crate) const NOTE: &str = "\
Columns of densities: the rate of the stored blocks as a fraction of the rate of the dense \
product, whose zeros count as work. Break-even: the part of the blocks up to which the sparse \
product takes less time, between measured densities along straight lines. Of two dense products \
one multiplies the zeros, which save power and so raise the clock, the other one N(0, 1) \
everywhere.";

/// A measured density.
struct Point {
    /// Density as the case names it.
    density: f64,
    /// Fraction of the blocks that is stored.
    stored: f64,
    /// Our time relative to the dense product in the same run.
    time: f64,
}

/// Points that differ in density only, keyed by block size (largest first) and by the number of
/// columns of the dense matrix.
type Lines = BTreeMap<(Reverse<usize>, usize), Vec<Point>>;

/// One table with a heading for each size and type of A and each measured dense product.
pub(crate) fn tables(rows: &[Row<'_>]) -> Vec<(String, Cells)> {
    let mut tables: BTreeMap<String, Lines> = BTreeMap::new();
    for (row, dense) in rows.iter().flat_map(|row| row.marks().map(move |dense| (row, dense))) {
        let Some((heading, shape, point)) = point(row, dense) else { continue };
        if shape.pattern != Pattern::Uniform {
            continue;
        }
        let line = (Reverse(shape.block_size), shape.n);
        tables.entry(heading).or_default().entry(line).or_default().push(point);
    }
    for lines in tables.values_mut() {
        lines.retain(|_, points| points.len() > 1);
        lines.values_mut().for_each(|points| points.sort_by(|a, b| a.stored.total_cmp(&b.stored)));
    }
    tables.retain(|_, lines| !lines.is_empty());
    tables.into_iter().map(|(heading, lines)| (heading, cells(&lines))).collect()
}

/// Our rate relative to the dense product; multiplications by zeros count as work.
pub(crate) fn part(row: &Row<'_>, dense: &Record) -> Option<f64> {
    point(row, dense).map(|(_, _, point)| point.stored / point.time)
}

fn point(row: &Row<'_>, dense: &Record) -> Option<(String, BsrShape, Point)> {
    let Some(Case::BsrMatmul(shape)) = row.case().filter(|_| !row.ours.is_empty()) else {
        return None;
    };
    let BsrShape { m, k, density, dtype, .. } = shape;
    let caches = if is_cold(row.any) { ", cold caches" } else { "" };
    let heading =
        format!("{m} × {k}, {dtype}{caches}: part of the rate of `{}`", dense.implementation);
    let stored = shape.nnz_blocks() as f64 / (shape.block_rows() * shape.block_columns()) as f64;
    let point = Point { density, stored, time: row.best()?.us? / dense.us? };
    Some((heading, shape, point))
}

fn cells(lines: &Lines) -> Cells {
    let mut densities: Vec<f64> = lines.values().flatten().map(|point| point.density).collect();
    densities.sort_by(f64::total_cmp);
    // A column that only few lines fill allows no comparison and is left out.
    let most = |alike: &&[f64]| 2 * alike.len() > lines.len();
    let densities: Vec<f64> =
        densities.chunk_by(|a, b| a == b).filter(most).map(|alike| alike[0]).collect();
    let mut header = vec!["block".to_owned(), "N".to_owned()];
    header.extend(densities.iter().map(|density| format!("at {density}")));
    header.push("break-even".to_owned());
    let line = |(&(Reverse(block), n), points): (&(Reverse<usize>, usize), &Vec<Point>)| {
        let rate = |&density: &f64| {
            let point = points.iter().find(|point| point.density == density);
            point.map_or(NONE.to_owned(), |point| format!("{:.2}", point.stored / point.time))
        };
        let times: Vec<_> = points.iter().map(|point| (point.stored, point.time)).collect();
        let mut line = vec![block.to_string(), n.to_string()];
        line.extend(densities.iter().map(rate));
        line.push(break_even(&times).map_or(NONE.to_owned(), |found| found.to_string()));
        line
    };
    Cells { header, rows: lines.iter().map(line).collect() }
}

#[cfg(test)]
mod tests {
    use super::super::run::rows;
    use super::super::sample::record;
    use super::*;
    use crate::record::OURS;

    /// Records of ours, whose time depends on the density, and of a dense product that takes 100
    /// µs.
    fn measured(n: usize, block: usize, densities: &[f64], us: fn(f64) -> f64) -> Vec<Record> {
        let case = |density| format!("m1024_n{n}_k1024_b{block}_d{density}_uniform_f16");
        let both = |&density: &f64| {
            let dense = record(&case(density), "cublas", Some(100.0));
            [record(&case(density), OURS, Some(us(density))), Record { reference: true, ..dense }]
        };
        densities.iter().flat_map(both).collect()
    }

    fn tables_of(records: &[Record]) -> Vec<(String, Cells)> {
        tables(&rows(&records.iter().collect::<Vec<_>>()))
    }

    #[test]
    fn the_line_between_two_densities_meets_the_dense_time() {
        let at = |points: &[(f64, f64)]| match break_even(points) {
            Some(BreakEven::At(density)) => density,
            other => panic!("{other:?}"),
        };
        let density = at(&[(0.1, 0.4), (0.2, 0.7), (0.6, 1.9)]);
        approx::assert_abs_diff_eq!(density, 0.3, epsilon = 1e-12);
        assert_eq!(at(&[(0.1, 0.2), (0.5, 1.0), (1.0, 2.0)]), 0.5);
        assert_eq!(break_even(&[(0.1, 0.5), (1.0, 0.9)]), Some(BreakEven::Above(1.0)));
        assert_eq!(break_even(&[(0.1, 1.0), (0.5, 0.9)]), Some(BreakEven::Below(0.1)));
        assert_eq!(break_even(&[]), None);
        let known = [BreakEven::Below(0.1), BreakEven::At(0.2), BreakEven::Above(0.3)];
        assert_eq!(known.map(BreakEven::density), [None, Some(0.2), Some(0.3)]);
    }

    #[test]
    fn a_line_for_each_block_size_and_width() {
        let records = [
            measured(1024, 32, &[0.5, 0.25, 0.125], |density| 50.0 + 200.0 * density),
            measured(128, 64, &[0.125, 0.25, 0.5], |density| 20.0 + 100.0 * density),
            // Density 1 gets no column, but counts for the break-even.
            measured(1024, 64, &[0.125, 0.25, 0.5, 1.0], |density| 110.0 * density),
            measured(64, 64, &[0.125, 0.25, 0.5], |density| 100.0 + density),
        ];
        let tables = tables_of(&records.concat());
        let [(heading, cells)] = &tables[..] else { panic!("{tables:?}") };
        assert_eq!(heading, "1024 × 1024, f16: part of the rate of `cublas`");
        assert_eq!(cells.header, ["block", "N", "at 0.125", "at 0.25", "at 0.5", "break-even"]);
        assert_eq!(cells.rows[0], ["64", "64", "0.12", "0.25", "0.50", "below 0.12"]);
        assert_eq!(cells.rows[1], ["64", "128", "0.38", "0.56", "0.71", "above 0.50"]);
        assert_eq!(cells.rows[2], ["64", "1024", "0.91", "0.91", "0.91", "0.91"]);
        assert_eq!(cells.rows[3], ["32", "1024", "0.17", "0.25", "0.33", "0.25"]);
    }

    #[test]
    fn each_dense_product_has_its_table() {
        let mut records = measured(8, 64, &[0.25, 0.5], |density| 200.0 * density);
        let marks = records.iter().filter(|record| record.reference);
        let slower = |record: &Record| Record {
            implementation: "random".into(),
            us: record.us.map(|us| us * 1.25),
            ..record.clone()
        };
        let slower: Vec<_> = marks.map(slower).collect();
        records.extend(slower);
        let [(zeros, of_zeros), (random, of_random)] = &tables_of(&records)[..] else { panic!() };
        assert!(zeros.ends_with("`cublas`") && random.ends_with("`random`"), "{zeros}, {random}");
        assert_eq!((of_zeros.rows[0][2].as_str(), of_random.rows[0][2].as_str()), ("0.50", "0.62"));
    }

    #[test]
    fn stored_blocks_count_and_not_what_was_asked_for() {
        // Of 16 columns 0.1 is 2 and 0.3 is 5.
        let records =
            measured(8, 64, &[0.1, 0.3], |density| if density < 0.2 { 50.0 } else { 125.0 });
        let (_, cells) = &tables_of(&records)[0];
        assert_eq!(cells.header[2..4], ["at 0.1", "at 0.3"]);
        // 2/16 of the work in half the time; two thirds of the way from 0.125 to 0.3125.
        assert_eq!(cells.rows[0], ["64", "8", "0.25", "0.25", "0.25"]);
    }

    #[test]
    fn types_and_caches_are_kept_apart_and_lines_need_two_densities() {
        let warm = measured(8, 64, &[0.25, 0.5], |density| density);
        let cold = warm.iter().cloned().map(|record| Record { cache: "cold".into(), ..record });
        let headings: Vec<_> = tables_of(&warm.iter().cloned().chain(cold).collect::<Vec<_>>())
            .into_iter()
            .map(|t| t.0)
            .collect();
        let expected = ["1024 × 1024, f16, cold caches", "1024 × 1024, f16"];
        assert_eq!(
            headings,
            expected.map(|heading| format!("{heading}: part of the rate of `cublas`"))
        );
        assert!(tables_of(&measured(8, 64, &[0.25], |density| density)).is_empty());
        // Without the mark, or another pattern.
        let rivals: Vec<_> =
            warm.iter().cloned().map(|record| Record { reference: false, ..record }).collect();
        assert!(tables_of(&rivals).is_empty());
        let other =
            |record: Record| Record { case: record.case.replace("uniform", "banded"), ..record };
        assert!(tables_of(&warm.into_iter().map(other).collect::<Vec<_>>()).is_empty());
    }
}
