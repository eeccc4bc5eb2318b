//! Energy of a launch, where it was measured.

use super::cells::{Cells, NONE, number};
use super::run::{Row, geometric_mean, peer_names, rows};
use crate::record::Record;

/// What the table means.
pub(crate) const NOTE: &str = "Mean power of the whole GPU within the windows, by its own counter \
                               of energy, times the time of a launch; × is the energy of the rival \
                               that needs least over ours.";

const RATIO: &str = "× thriftiest rival";

/// The table of the cases whose energy was measured, for a terminal; one line per case, ours being
/// the fastest kernel.
pub fn cells(records: &[&Record]) -> Cells {
    table(&rows(records))
}

/// The table of `rows`.
pub(crate) fn table(rows: &[Row<'_>]) -> Cells {
    let measured = |record: &&Record| record.joules.is_some();
    let rows: Vec<_> =
        rows.iter().filter(|row| row.best().as_ref().is_some_and(measured)).collect();
    let peers = peer_names(rows.iter().flat_map(|row| row.peers.iter().copied().filter(measured)));
    let joules = |record: Option<&Record>| record.and_then(|record| record.joules);
    let mut ratios = Vec::new();
    let line = |row: &&Row<'_>| {
        let ours = row.best();
        let millijoules = |record| joules(record).map_or(NONE.to_owned(), |j| number(j * 1e3));
        let least = row.rivals().filter_map(|rival| rival.joules).reduce(f64::min);
        let ratio = least.zip(joules(ours)).map(|(least, ours)| least / ours);
        ratios.extend(ratio);
        // TFLOP/J are TFLOP/s per watt.
        let rate = ours.and_then(|ours| Some(ours.flops / ours.joules? * 1e-12));
        let mut line = vec![row.name(), millijoules(ours)];
        line.push(rate.filter(|&rate| rate > 0.0).map_or(NONE.to_owned(), number));
        line.extend(peers.iter().map(|peer| millijoules(row.peer(peer))));
        line.push(ratio.map_or(NONE.to_owned(), |ratio| format!("{ratio:.2}")));
        line
    };
    let mut lines: Vec<_> = rows.iter().map(line).collect();
    let mut header = vec!["case", "blockflash", "TFLOP/J"];
    header.extend(&peers);
    header.push(RATIO);
    if let Some(mean) = geometric_mean(&ratios).filter(|_| ratios.len() > 1) {
        let mut line = vec![String::new(); header.len()];
        line[0] = "geometric mean".to_owned();
        line[header.len() - 1] = format!("{mean:.2}");
        lines.push(line);
    }
    Cells { header: header.into_iter().map(str::to_owned).collect(), rows: lines }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{record, suite};
    use super::*;
    use crate::record::OURS;

    #[test]
    fn only_cases_with_joules_are_listed() {
        assert!(cells(&suite().iter().collect::<Vec<_>>()).rows.is_empty());
        let of = |case: &str, implementation: &str, joules| Record {
            joules: Some(joules),
            flops: 1e12,
            ..record(case, implementation, Some(2.0))
        };
        let records = [
            of("a", OURS, 1.0),
            of("a", "x", 1.2),
            of("a", "y", 1.5),
            Record { reference: true, ..of("a", "dense", 0.5) },
            record("b", OURS, Some(1.0)),
            of("c", OURS, 0.002),
            of("c", "y", 0.0015),
        ];
        let cells = cells(&records.iter().collect::<Vec<_>>());
        let ratio = "× thriftiest rival";
        assert_eq!(cells.header, ["case", "blockflash", "TFLOP/J", "x", "y", "dense", ratio]);
        assert_eq!(cells.rows[0], ["a", "1000", "1.00", "1200", "1500", "500", "1.20"]);
        assert_eq!(cells.rows[1], ["c", "2.00", "500", "—", "1.50", "—", "0.75"]);
        assert_eq!(cells.rows[2], ["geometric mean", "", "", "", "", "", "0.95"]); // √(1.2 · 0.75)
    }
}
