//! What a call costs the host: the table of medians per kernel.

use super::cells::{Cells, Detail, NONE, kernel, number};
use super::run::Run;
use crate::record::Record;
use crate::timing::median;

/// What the table means.
pub(crate) const NOTE: &str = "Time that a call keeps the host, medians over the cases: from \
                               validation to launch, with a \
prepared plan, and loading the kernel on its first use. In the driver: the part of a prepared call \
that the driver takes for its launches; graph: launching a graph of one call, where that did not \
wait for the launch before it, as it did in records before 2026-11-27.";

type Time = fn(&Record) -> Option<f64>;

/// The columns of times; those that would be empty are left out.
const TIMES: [(&str, Time); 5] = [
    ("call µs", |r| r.host_us),
    ("prepared µs", |r| r.host_prepared_us),
    ("in the driver µs", |r| r.host_driver_us),
    ("graph µs", graph),
    ("load ms", |r| Some(r.load_us? * 1e-3)),
];

/// Without launches that took about as long as the kernel, since they waited for the one before.
fn graph(record: &Record) -> Option<f64> {
    let limit = record.us.unwrap_or_default().max(20.0) / 2.0;
    record.host_graph_us.filter(|us| *us < limit)
}

/// One line per operation, or per kernel where all cases are listed.
pub(crate) fn cells(runs: &[&Run<'_>], detail: Detail) -> Cells {
    let mut groups: Vec<([String; 2], Vec<&Record>)> = Vec::new();
    let records = runs.iter().flat_map(|run| run.records.iter().copied());
    for record in records.filter(|record| record.host_us.or(record.host_prepared_us).is_some()) {
        let kernel = match detail {
            Detail::Groups => String::new(),
            Detail::Cases => kernel(record),
        };
        let key = [record.op.clone(), kernel];
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, records)) => records.push(record),
            None => groups.push((key, vec![record])),
        }
    }
    let named = detail == Detail::Cases;
    let has = |field: Time| {
        groups.iter().flat_map(|(_, records)| records).any(|record| field(record).is_some())
    };
    let times: Vec<_> = TIMES.into_iter().filter(|(_, field)| has(*field)).collect();
    let mut header = vec!["operation"];
    header.extend(named.then_some("kernel"));
    header.push("cases");
    header.extend(times.iter().map(|(name, _)| name));
    let line = |([op, kernel], records): ([String; 2], Vec<&Record>)| {
        let of = |field: Time| {
            let mut values: Vec<f64> = records.iter().filter_map(|record| field(record)).collect();
            median(&mut values).map_or(NONE.to_owned(), number)
        };
        let mut line = vec![op];
        line.extend(named.then_some(kernel));
        line.push(records.len().to_string());
        line.extend(times.iter().map(|(_, field)| of(*field)));
        line
    };
    Cells {
        header: header.into_iter().map(str::to_owned).collect(),
        rows: groups.into_iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::run::newest;
    use super::super::sample::record;
    use super::*;
    use crate::record::OURS;

    #[test]
    fn medians_per_kernel_or_operation() {
        let cost = |case: &str, symbol: &str, us| Record {
            symbol: Some(format!("blockflash_{symbol}")),
            host_us: Some(us),
            host_prepared_us: Some(us / 2.0),
            host_driver_us: Some(us / 4.0),
            ..record(case, OURS, Some(1.0))
        };
        let loaded = Record { load_us: Some(2500.0), ..cost("a", "p", 3.0) };
        let records = [loaded, cost("b", "p", 5.0), cost("c", "p", 4.0), cost("d", "q", 9.0)];
        let runs = newest(&records);
        let shown: Vec<_> = runs.iter().collect();
        let kernels = cells(&shown, Detail::Cases);
        assert_eq!(kernels.rows[0], ["bsr_matmul", "p", "3", "4.00", "2.00", "1.00", "2.50"]);
        assert_eq!(kernels.rows[1], ["bsr_matmul", "q", "1", "9.00", "4.50", "2.25", "—"]);
        let header =
            ["operation", "cases", "call µs", "prepared µs", "in the driver µs", "load ms"];
        assert_eq!(cells(&shown, Detail::Groups).header, header);
        assert_eq!(
            cells(&shown, Detail::Groups).rows,
            [["bsr_matmul", "4", "4.50", "2.25", "1.12", "2.50"]]
        );
        // Two of three launches of graphs waited for the one before.
        let graph =
            |us, graph| Record { host_graph_us: Some(graph), ..record("a", OURS, Some(us)) };
        assert_eq!(
            [graph(3.0, 2.5), graph(100.0, 104.0), graph(15.0, 11.0)].map(|r| super::graph(&r)),
            [Some(2.5), None, None]
        );
        let without = [record("a", OURS, Some(1.0))];
        assert!(cells(&[&newest(&without)[0]], Detail::Cases).rows.is_empty());
    }
}
