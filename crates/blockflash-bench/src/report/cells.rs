//! The table of cases: one line per kernel of ours, one column per rival.

use super::rate::rate;
use super::run::{Row, geometric_mean, peer_names, rows};
use crate::record::Record;

/// Level of detail of a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// One line for each group of cases and each rival.
    Groups,
    /// One line for each case.
    Cases,
}

/// Cells of a table, all rows as long as the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cells {
    /// Names of the columns.
    pub header: Vec<String>,
    /// Lines in the order of measurement; the last one is a mean if there are several ratios.
    pub rows: Vec<Vec<String>>,
}

/// Placeholder for a missing number.
pub(crate) const NONE: &str = "—";

/// Table of records of one run, for a terminal.
pub fn cells(records: &[&Record]) -> Cells {
    let rows = rows(records);
    table(&rows.iter().collect::<Vec<_>>(), |text| text)
}

/// The table of `rows`; `mark` is applied to the best cell of a line.
pub(crate) fn table(rows: &[&Row<'_>], mark: fn(String) -> String) -> Cells {
    let columns = Columns::of(rows);
    let mut lines: Vec<_> = rows.iter().flat_map(|row| columns.lines(row, mark)).collect();
    let of_all: Vec<_> = rows.iter().filter_map(|row| row.ratio()).collect();
    let deterministic = rows.iter().filter_map(|row| row.deterministic_ratio());
    if let Some(mean) = geometric_mean(&of_all).filter(|_| of_all.len() > 1) {
        let deterministic = geometric_mean(&deterministic.collect::<Vec<_>>());
        let cell = |name: &String| match name.as_str() {
            "case" => "geometric mean".to_owned(),
            RATIO => in_line(Some(mean)),
            DETERMINISTIC_RATIO => in_line(deterministic),
            _ => String::new(),
        };
        lines.push(columns.header().iter().map(cell).collect());
    }
    Cells { header: columns.header(), rows: lines }
}

/// A ratio, or the placeholder.
fn in_line(ratio: Option<f64>) -> String {
    ratio.map_or(NONE.to_owned(), |ratio| format!("{ratio:.2}"))
}

const RATIO: &str = "× best rival";
/// Heading: the rival's time over ours, for the best of those that repeat their bits.
pub(super) const DETERMINISTIC_RATIO: &str = "× best deterministic";
/// Heading: TFLOP/s relative to dense attention.
const OF_DENSE: &str = "of dense";

/// The columns of a table; columns that would be empty are left out.
struct Columns<'a> {
    peers: Vec<&'a str>,
    rivals: bool,
    deterministic: bool,
    kernel: bool,
    dense: bool,
    ceiling: bool,
}

impl<'a> Columns<'a> {
    fn of(rows: &[&Row<'a>]) -> Self {
        let peers = || rows.iter().flat_map(|row| row.peers.iter().copied());
        Self {
            peers: peer_names(peers().filter(|peer| peer.us.is_some())),
            rivals: rows.iter().any(|row| row.rivals().next().is_some()),
            deterministic: rows.iter().any(|row| row.best_deterministic().is_some()),
            kernel: rows.iter().any(|row| row.ours.len() > 1),
            dense: rows.iter().any(|row| row.dense.is_some()),
            ceiling: rows.iter().flat_map(|row| &row.ours).any(|ours| ours.ceiling.is_some()),
        }
    }

    fn header(&self) -> Vec<String> {
        let mut header = vec!["case"];
        header.extend(self.kernel.then_some("kernel"));
        header.extend(["µs", "blockflash"]);
        header.extend(&self.peers);
        header.extend(self.rivals.then_some(RATIO));
        header.extend(self.deterministic.then_some(DETERMINISTIC_RATIO));
        header.extend(self.dense.then_some(OF_DENSE));
        header.extend(self.ceiling.then_some("ceiling"));
        header.push("verified");
        header.into_iter().map(str::to_owned).collect()
    }

    /// A line for each of our kernels, and one line if there is none.
    fn lines(&self, row: &Row<'_>, mark: fn(String) -> String) -> Vec<Vec<String>> {
        match row.ours.as_slice() {
            [] => vec![self.line(row, None, mark)],
            ours => ours.iter().map(|ours| self.line(row, Some(ours), mark)).collect(),
        }
    }

    fn line(
        &self,
        row: &Row<'_>,
        ours: Option<&Record>,
        mark: fn(String) -> String,
    ) -> Vec<String> {
        let us = ours.and_then(|ours| ours.us);
        let rival = row.best_rival().and_then(|rival| rival.us);
        let best = [us, rival].into_iter().flatten().reduce(f64::min);
        let speed = |record: Option<&Record>| match record {
            None => NONE.to_owned(),
            Some(record) if !record.reference && rate(record).is_some() && record.us == best => {
                mark(speed(record))
            }
            Some(record) => speed(record),
        };
        let mut line = vec![row.name()];
        line.extend(self.kernel.then(|| ours.map_or(NONE.to_owned(), kernel)));
        line.push(us.map_or(NONE.to_owned(), number));
        line.push(speed(ours));
        line.extend(self.peers.iter().map(|&peer| speed(row.peer(peer))));
        let ratio = |rival: Option<f64>| in_line(rival.zip(us).map(|(rival, us)| rival / us));
        line.extend(self.rivals.then(|| ratio(rival)));
        let deterministic = row.best_deterministic().and_then(|rival| rival.us);
        line.extend(self.deterministic.then(|| ratio(deterministic)));
        let part = || row.part_of_dense(ours?);
        line.extend(self.dense.then(|| in_line(part())));
        line.extend(self.ceiling.then(|| ours.and_then(ceiling).unwrap_or(NONE.to_owned())));
        line.push(verified(row, ours).to_owned());
        line
    }
}

/// Name of the kernel without the prefix that all kernels share.
pub(crate) fn kernel(record: &Record) -> String {
    let symbol = record.symbol.as_deref().unwrap_or_default();
    symbol.strip_prefix("blockflash_").unwrap_or(symbol).to_owned()
}

/// The ceiling that binds, and the fraction of it that was reached.
fn ceiling(record: &Record) -> Option<String> {
    let name = record.ceiling.clone()?;
    Some(record.ceiling_fraction.map_or(name.clone(), |fraction| format!("{name} {fraction:.2}")))
}

/// Flags outputs that were not verified, so that their times do not pass for valid ones.
fn verified(row: &Row<'_>, ours: Option<&Record>) -> &'static str {
    let mut timed =
        ours.into_iter().chain(row.peers.iter().copied()).filter(|record| record.us.is_some());
    match ours.is_some_and(|ours| ours.us.is_some()) {
        _ if timed.any(|record| !record.verified) => "NO",
        true => "yes",
        false => "no",
    }
}

/// The rate if there is one, or the fact that it failed.
fn speed(record: &Record) -> String {
    match record.us {
        Some(_) => rate(record).map_or(NONE.to_owned(), number),
        None => "error".to_owned(),
    }
}

/// Three or four significant digits.
pub(crate) fn number(value: f64) -> String {
    let decimals = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::super::sample::{record, suite};
    use super::*;
    use crate::record::OURS;

    #[test]
    fn a_line_compares_with_the_best_rival_and_not_with_a_mark() {
        let records = suite();
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(
            cells.header,
            ["case", "µs", "blockflash", "x", "y", "dense", "× best rival", "verified"]
        );
        assert_eq!(cells.rows[0], ["a", "2.00", "50.0", "33.3", "25.0", "1000", "1.50", "yes"]);
        assert_eq!(cells.rows[1], ["b", "—", "error", "20.0", "—", "—", "—", "no"]);
        assert_eq!(cells.rows.len(), 2);
    }

    #[test]
    fn the_best_deterministic_rival_has_a_column() {
        let repeats = |record| Record { deterministic: true, ..record };
        let mut records = vec![
            record("a", OURS, Some(2.0)),
            record("a", "fast", Some(1.0)),
            repeats(record("a", "repeats", Some(3.0))),
            repeats(record("a", "slow", Some(4.0))),
            record("b", OURS, Some(2.0)),
            record("b", "fast", Some(4.0)),
        ];
        let of = |records: &[Record]| cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(of(&records).header[6..8], ["× best rival", "× best deterministic"]);
        let ratios: Vec<_> = of(&records).rows.iter().map(|row| row[6..8].to_vec()).collect();
        assert_eq!(ratios, [["0.50", "1.50"], ["2.00", "—"], ["1.00", "1.50"]]);
        records.push(repeats(record("b", "repeats", Some(12.0))));
        assert_eq!(of(&records).rows[2][6..8], ["1.00", "3.00"]); // √(1.5 · 6)
    }

    #[test]
    fn the_best_of_a_row_is_marked() {
        let records = suite();
        let rows = rows(&records.iter().collect::<Vec<_>>());
        let bold = table(&rows.iter().collect::<Vec<_>>(), |text| format!("**{text}**"));
        assert_eq!(bold.rows[0][1..5], ["2.00", "**50.0**", "33.3", "25.0"]);
        assert_eq!(bold.rows[1][2..4], ["error", "**20.0**"]);
    }

    #[test]
    fn several_kernels_get_a_line_each() {
        let forced =
            |symbol: &str| Record { symbol: Some(symbol.into()), ..record("a", OURS, Some(1.0)) };
        let records = [forced("blockflash_p"), forced("blockflash_q")];
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(cells.header, ["case", "kernel", "µs", "blockflash", "verified"]);
        assert_eq!((cells.rows[0][1].as_str(), cells.rows[1][1].as_str()), ("p", "q"));
    }

    #[test]
    fn a_rival_without_a_number_has_no_column_and_a_case_without_ours_a_line() {
        let records = [record("a", "x", Some(3.0)), record("a", "absent", None)];
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(cells.header, ["case", "µs", "blockflash", "x", "× best rival", "verified"]);
        assert_eq!(cells.rows, [["a", "—", "—", "33.3", "—", "no"]]);
    }

    #[test]
    fn the_ceiling_that_binds_and_a_mean() {
        let limited = |case: &str, us| Record {
            ceiling: Some("l2".into()),
            ceiling_fraction: Some(0.416),
            ..record(case, OURS, Some(us))
        };
        let records = [
            limited("a", 1.0),
            record("a", "x", Some(2.0)),
            limited("b", 1.0),
            record("b", "x", Some(8.0)),
        ];
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(cells.rows[0][5], "l2 0.42");
        assert_eq!(cells.rows[2], ["geometric mean", "", "", "", "4.00", "", ""]);
    }

    #[test]
    fn attention_over_blocks_has_its_part_of_the_dense_rate() {
        let case = "b1_s256_h4_d64_q64kv64_d0.5_uniform_full_bf16";
        let records = [
            Record { op: "block_sparse_fwd".into(), ..record(case, OURS, Some(2.5)) },
            Record {
                op: "attention_fwd".into(),
                ..record("b1_s256_h4_d64_full_bf16", OURS, Some(2.0))
            },
        ];
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(cells.header, ["case", "µs", "blockflash", "of dense", "verified"]);
        assert_eq!((cells.rows[0][3].as_str(), cells.rows[1][3].as_str()), ("0.80", "—"));
    }

    #[test]
    fn an_unverified_time_is_shouted() {
        let records = [
            record("a", OURS, Some(1.0)),
            Record { verified: false, ..record("a", "x", Some(1.0)) },
        ];
        assert_eq!(cells(&records.iter().collect::<Vec<_>>()).rows[0].last().unwrap(), "NO");
    }
}
