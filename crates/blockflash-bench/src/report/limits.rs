//! What the machine can do: the table of ceilings.

use super::cells::{Cells, NONE, number};
use super::run::{CEILING, Run, range};
use crate::record::Record;

/// What the table means.
pub(crate) const NOTE: &str =
    "Rates of loops that do nothing else, measured in the same runs as the suites.";

/// Ceilings that were measured along with the runs; where there are none, the newest of the GPU.
pub(crate) fn of<'r>(runs: &[&Run<'r>], records: &'r [Record], gpu: &str) -> Vec<&'r Record> {
    let along: Vec<_> = runs.iter().flat_map(|run| run.rates.0.iter().copied()).collect();
    let of_gpu = || records.iter().filter(|record| record.op == CEILING && record.gpu == gpu);
    match of_gpu().max_by_key(|record| &record.date) {
        Some(newest) if along.is_empty() => {
            of_gpu().filter(|record| record.run == newest.run).collect()
        }
        _ => along,
    }
}

/// One line per ceiling; a range where several runs measured it.
pub(crate) fn cells<'r>(records: impl Iterator<Item = &'r Record>) -> Cells {
    let mut limits: Vec<(&str, Vec<&Record>)> = Vec::new();
    for record in records.filter(|record| record.rate.is_some()) {
        match limits.iter_mut().find(|(name, _)| *name == record.case) {
            Some((_, records)) => records.push(record),
            None => limits.push((&record.case, vec![record])),
        }
    }
    let line = |(name, records): &(&str, Vec<&Record>)| {
        let over = |field: fn(&Record) -> Option<f64>| {
            let values = records.iter().filter_map(|record| field(record));
            range(values).map(|(least, most)| match (number(least), number(most)) {
                (least, most) if least == most => most,
                (least, most) => format!("{least}–{most}"),
            })
        };
        let unit = match records[0].unit.as_deref() {
            Some("FLOP/s") => "TFLOP/s".to_owned(),
            Some("B/s") => "TB/s".to_owned(),
            other => format!("T {}", other.unwrap_or_default()),
        };
        let rate = over(|record| Some(record.rate? * 1e-12)).unwrap_or_default();
        let [clock, power] = [over(|record| record.clock_mhz), over(|record| record.power_w)]
            .map(|cell| cell.unwrap_or(NONE.into()));
        vec![(*name).to_owned(), format!("{rate} {unit}"), clock, power]
    };
    let header = ["ceiling", "rate", "clock MHz", "power W"].map(str::to_owned).to_vec();
    Cells { header, rows: limits.iter().map(line).collect() }
}

#[cfg(test)]
mod tests {
    use super::super::sample::ceiling;
    use super::*;

    #[test]
    fn ceilings_may_stand_alone() {
        let records = [
            ceiling("exp2", 4e12, "exp/s"),
            Record {
                run: "r2".into(),
                date: "2026-12-01".into(),
                ..ceiling("exp2", 5e12, "exp/s")
            },
        ];
        let rows = |gpu| cells(of(&[], &records, gpu).into_iter()).rows;
        assert_eq!(rows("G"), [["exp2", "5.00 T exp/s", "—", "—"]]);
        assert!(rows("F").is_empty());
    }

    #[test]
    fn rates_have_units_and_ranges() {
        let hot = Record { power_w: Some(699.6), ..ceiling("wgmma_f16", 832e12, "FLOP/s") };
        let records = [
            hot,
            ceiling("wgmma_f16", 840.2e12, "FLOP/s"),
            ceiling("hbm_read", 4.21e12, "B/s"),
            ceiling("exp2", 4.18e12, "exp/s"),
        ];
        let cells = cells(records.iter());
        assert_eq!(cells.rows[0], ["wgmma_f16", "832–840 TFLOP/s", "—", "700"]);
        assert_eq!(
            (cells.rows[1][1].as_str(), cells.rows[2][1].as_str()),
            ("4.21 TB/s", "4.18 T exp/s")
        );
    }
}
