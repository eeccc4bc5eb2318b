//! A run of a suite into its record.

use crate::failure::{Result, warn};
use crate::output::print;
use crate::pace::{announce, each, failures};
use crate::rest::Rest;
use crate::table;
use blockflash_bench::order::Order;
use blockflash_bench::peers::Peers;
use blockflash_bench::record::{Record, Writer};
use blockflash_bench::report;
use blockflash_bench::rounds::Run;
use indicatif::ProgressBar;
use std::path::Path;
use std::time::Duration;

/// Measures ceilings and cases into a file, and prints what came out.
pub fn record(mut run: Run, mut rest: Rest, mut peers: Peers, out: &Path) -> Result<bool> {
    let mut writer = appending(out)?;
    let mut failed = false;
    if !run.stream.device().is_cpu() {
        let path = if run.suite.cases.is_empty() {
            out.to_owned()
        } else {
            out.with_file_name("ceilings.jsonl")
        };
        failed |= !measure_ceilings(&mut run, &mut appending(&path)?)?;
    }
    if run.suite.cases.is_empty() {
        return Ok(failed);
    }
    announce(&run, &peers, &[Order::Balanced])?;
    let records = measure(&run, &mut rest, &mut peers, &mut writer)?;

    let all: Vec<_> = records.iter().collect();
    if !all.is_empty() {
        print(&grid(report::cells(&all)))?;
    }
    if run.suite.energy && !all.is_empty() {
        print(&format!("millijoules of a launch\n{}", grid(report::energy_cells(&all))))?;
    }
    for cells in report::drawn_cells(&all) {
        print(&grid(cells))?;
    }
    failed |= failures(&records)?;
    rest.announce()?;
    print(&format!("{} records appended to {}", records.len(), writer.path().display()))?;
    Ok(failed)
}

/// Opens a record for further lines.
pub fn appending(path: &Path) -> Result<Writer> {
    let writer = Writer::open(path)?;
    if let Some(line) = writer.removed() {
        let path = path.display();
        warn(format!("{path}, line {line}: the last line was torn, and is removed"));
    }
    Ok(writer)
}

/// What the GPU does at best, into a file of its own beside the suite's. False if a probe computed
/// something wrong.
fn measure_ceilings(run: &mut Run, writer: &mut Writer) -> Result<bool> {
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let records = run.measure_ceilings(|step| bar.set_message(step.to_owned()))?;
    bar.finish_and_clear();
    let rates = records.iter().map(|record| match (record.rate, record.unit.as_deref()) {
        (Some(rate), Some(unit)) => {
            format!("{} {} T{unit}", record.case, table::number(rate * 1e-12))
        }
        _ => format!("{} {}", record.case, record.error.as_deref().unwrap_or("not measured")),
    });
    print(&format!("ceilings: {}", rates.collect::<Vec<_>>().join(", ")))?;
    records.iter().try_for_each(|record| writer.append(record))?;
    Ok(records.iter().all(|record| record.error.is_none()))
}

/// All cases; each result is on the disk before the next case begins.
fn measure(
    run: &Run,
    rest: &mut Rest,
    peers: &mut Peers,
    writer: &mut Writer,
) -> Result<Vec<Record>> {
    let mut all = Vec::new();
    each(run, |case, cache, bar| {
        if !rest.takes(case, cache, &run.competitors(case, peers)) {
            return Ok(());
        }
        let step = |step: &str| bar.set_message(format!("{case}, {step}"));
        let records = run.measure(case, cache, peers, step);
        bar.suspend(|| print(&line(&records)))?;
        for record in records {
            writer.append(&record)?;
            all.push(record);
        }
        Ok(())
    })?;
    Ok(all)
}

/// One case as it is measured, for a log without a terminal.
fn line(records: &[Record]) -> String {
    let speed = |record: &Record| match (record.us, report::rate(record)) {
        (Some(us), Some(rate)) => {
            format!("{} {} {}", table::time(us), table::number(rate), report::unit([record]))
        }
        (Some(us), None) => table::time(us),
        _ => "error".to_owned(),
    };
    let results =
        records.iter().map(|record| format!("{} {}", record.implementation, speed(record)));
    let case = records.first().map_or("", |record| record.case.as_str());
    format!("{case}: {}", results.collect::<Vec<_>>().join(", "))
}

fn grid(cells: report::Cells) -> String {
    let header: Vec<_> = cells.header.iter().map(String::as_str).collect();
    table::grid(&header, cells.rows).to_string()
}
