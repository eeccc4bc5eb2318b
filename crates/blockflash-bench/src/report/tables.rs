//! The tables of a report: cases, groups, competitors, energy, host time, ceilings and break-even.

use super::Detail;
use super::cells::{Cells, Table, number, two};
use super::dense::part_of_rate;
use super::runs::{CEILING, Row, Run, grouped, groups, mean, peers, range, rows};
use crate::record::{OURS, Record};
use crate::timing::median;
use std::cmp::Reverse;

/// Attention of few queries to a cache is limited by what it reads.
const BY_BYTES: &str = "attention_decode";
const COMPETITOR: &str = "× best competitor";
const DETERMINISTIC: &str = "× best deterministic";
const SPREAD: &str = "least to most";

/// TFLOP/s, or TB/s of an operation that is limited by what it reads; `None` without a time.
pub fn rate(record: &Record) -> Option<f64> {
    match record.op == BY_BYTES {
        true => record.us.map(|us| record.bytes / us * 1e-6),
        false => record.us.and(record.tflops),
    }
}

/// The unit of [`rate`] of some records, which have one operation as a rule.
pub fn unit<'r>(records: impl IntoIterator<Item = &'r Record>) -> &'static str {
    let by_bytes: Vec<_> = records.into_iter().map(|record| record.op == BY_BYTES).collect();
    match (by_bytes.contains(&true), by_bytes.contains(&false)) {
        (true, false) => "TB/s",
        (true, true) => "TFLOP/s or TB/s",
        _ => "TFLOP/s",
    }
}

/// Table of records of one run, for a terminal.
pub fn cells(records: &[&Record]) -> Cells {
    let rows = rows(records);
    of_cases(&rows.iter().collect::<Vec<_>>(), |text| text)
}

/// The table of `rows`: a line for each kernel of ours. `mark` is applied to the best speed.
pub(super) fn of_cases(rows: &[&Row<'_>], mark: fn(String) -> String) -> Cells {
    type Line<'a, 'r> = (&'a Row<'r>, Option<&'r Record>);
    let mut lines: Vec<Line<'_, '_>> = Vec::new();
    for &row in rows {
        lines.extend(row.ours.iter().map(|&ours| (row, Some(ours))));
        lines.extend(row.ours.is_empty().then_some((row, None)));
    }
    let us = |ours: Option<&Record>| ours.and_then(|ours| ours.us);
    let speed = |(row, ours): &Line<'_, '_>, record: Option<&Record>| {
        let record = record?;
        let Some(time) = record.us else { return Some("error".to_owned()) };
        let text = number(rate(record)?);
        let competitor = us(row.best_competitor());
        let best = [us(*ours), competitor].into_iter().flatten().reduce(f64::min);
        Some(if !record.reference && best == Some(time) { mark(text) } else { text })
    };
    let over = |other: Option<&Record>, ours: &Option<&Record>| Some(us(other)? / us(*ours)?);
    let several = rows.iter().any(|row| row.ours.len() > 1);
    let mut table = Table::of(&lines)
        .column("case", |(row, _)| Some(row.name()))
        .column("kernel", |(_, ours)| ours.filter(|_| several).map(kernel))
        .column("µs", |(_, ours)| us(*ours).map(number))
        .column(OURS, |line| speed(line, line.1));
    let timed = rows.iter().flat_map(|row| row.peers.iter().copied());
    for peer in peers(timed.filter(|peer| peer.us.is_some())) {
        table = table.column(peer, |line| speed(line, line.0.peer(peer)));
    }
    let table = table
        .column(COMPETITOR, |(row, ours)| over(row.best_competitor(), ours).map(two))
        .column(DETERMINISTIC, |(row, ours)| over(row.best_deterministic(), ours).map(two))
        .column("of dense", |(row, ours)| ours.and_then(|ours| row.part_of_dense(ours)).map(two))
        .column("ceiling", |(_, ours)| {
            let (name, fraction) = ours.map(|r| (r.ceiling.as_ref(), r.ceiling_fraction))?;
            Some(fraction.map_or(name?.clone(), |part| format!("{} {part:.2}", name.unwrap())))
        })
        // Outputs that were not verified are flagged, so that their times do not pass for valid
        // ones.
        .column("verified", |(row, ours)| {
            let timed = |record: &&Record| record.us.is_some();
            let mut all = ours.iter().copied().chain(row.peers.iter().copied()).filter(timed);
            let wrong = all.any(|record| !record.verified);
            let text = if wrong {
                "NO"
            } else if us(*ours).is_some() {
                "yes"
            } else {
                "no"
            };
            Some(text.to_owned())
        });
    let [all, deterministic] = [Row::best_competitor, Row::best_deterministic]
        .map(|best| rows.iter().filter_map(|row| row.over(best(row))).collect());
    table.cells.with_means(&[(COMPETITOR, all), (DETERMINISTIC, deterministic)])
}

/// Name of the kernel without the prefix that all kernels share.
pub(super) fn kernel(record: &Record) -> String {
    let symbol = record.symbol.as_deref().unwrap_or_default();
    symbol.strip_prefix("blockflash_").unwrap_or(symbol).to_owned()
}

/// `303–627`, or one number if both ends look alike.
fn between(values: impl IntoIterator<Item = f64>, text: fn(f64) -> String) -> Option<String> {
    let (least, most) = range(values)?;
    let [least, most] = [least, most].map(text);
    Some(if least == most { most } else { format!("{least}–{most}") })
}

/// `0.98–1.10`.
pub(super) fn spread(values: impl IntoIterator<Item = f64>) -> Option<String> {
    range(values).map(|(least, most)| format!("{least:.2}–{most:.2}"))
}

fn bold_mean(values: &[f64]) -> Option<String> {
    mean(values).map(|mean| format!("**{mean:.2}**"))
}

/// One line per group, and one for all cases.
pub(super) fn by_group(rows: &[Row<'_>]) -> Cells {
    type Group<'a, 'r> = (String, Vec<&'a Row<'r>>);
    let mut items: Vec<Group<'_, '_>> = groups(rows);
    if items.len() > 1 {
        items.push(("all".to_owned(), rows.iter().collect()));
    }
    let unit = unit(rows.iter().map(|row| row.any));
    let mut table = Table::of(&items)
        .column("group", |(label, _)| Some(label.clone()))
        .column("cases", |(_, rows)| Some(rows.len().to_string()))
        .column(format!("{OURS} {unit}"), |(_, rows)| {
            between(rows.iter().filter_map(|row| rate(row.best()?)), number)
        })
        .column(format!("best competitor {unit}"), |(_, rows)| {
            between(rows.iter().filter_map(|row| rate(row.best_competitor()?)), number)
        });
    for (name, deterministic) in [(COMPETITOR, false), (DETERMINISTIC, true)] {
        let best = |row: &Row<'_>| match deterministic {
            true => row.over(row.best_deterministic()),
            false => row.ratio(),
        };
        let ratios =
            |rows: &[&Row<'_>]| -> Vec<f64> { rows.iter().filter_map(|row| best(row)).collect() };
        table = table
            .column(name, |(_, rows)| bold_mean(&ratios(rows)))
            .column(SPREAD, |(_, rows)| spread(ratios(rows)));
    }
    table = table.column("of dense", |(_, rows)| {
        spread(rows.iter().filter_map(|row| row.part_of_dense(row.best()?)))
    });
    for name in peers(rows.iter().flat_map(Row::references)) {
        table = table.column(format!("of `{name}`"), |(_, rows)| {
            spread(rows.iter().filter_map(|row| part_of_rate(row, row.peer(name)?)))
        });
    }
    table.column("ceiling", |(_, rows)| binding(rows)).cells
}

/// `matmul 0.42–0.61, l2 0.50`: each ceiling that binds somewhere, the most frequent first.
fn binding(rows: &[&Row<'_>]) -> Option<String> {
    let limits = rows.iter().filter_map(|row| row.best());
    let limits = limits.filter_map(|r| Some((r.ceiling.as_deref()?, r.ceiling_fraction?)));
    let mut kinds = grouped(limits, |(kind, _)| *kind);
    kinds.sort_by_key(|(_, fractions)| Reverse(fractions.len()));
    let text = |(kind, fractions): (&str, Vec<(&str, f64)>)| {
        format!("{kind} {}", between(fractions.iter().map(|pair| pair.1), two).unwrap_or_default())
    };
    (!kinds.is_empty()).then(|| kinds.into_iter().map(text).collect::<Vec<_>>().join(", "))
}

/// One line per competitor, with ratios over the cases that both have measured.
pub(super) fn by_competitor(rows: &[Row<'_>]) -> Cells {
    type Item<'a, 'r> = (&'r str, Vec<(&'a Row<'r>, &'r Record)>);
    let of = |name| {
        let timed = |row| Some((row, Row::peer(row, name).filter(|peer| peer.us.is_some())?));
        (name, rows.iter().filter_map(timed).collect::<Vec<_>>())
    };
    let names = peers(rows.iter().flat_map(Row::competitors));
    let items: Vec<Item<'_, '_>> =
        names.into_iter().map(of).filter(|(_, timed)| !timed.is_empty()).collect();
    let ratios = |timed: &[(&Row<'_>, &Record)]| -> Vec<f64> {
        timed.iter().filter_map(|(row, peer)| row.over(Some(peer))).collect()
    };
    Table::of(&items)
        .column("competitor", |(name, _)| Some(format!("`{name}`")))
        .column("cases", |(_, timed)| Some(timed.len().to_string()))
        .column(unit(rows.iter().map(|row| row.any)), |(_, timed)| {
            between(timed.iter().filter_map(|(_, peer)| rate(peer)), number)
        })
        .column("× competitor", |(_, timed)| bold_mean(&ratios(timed)))
        .column(SPREAD, |(_, timed)| spread(ratios(timed)))
        .column(format!("{OURS} faster in"), |(_, timed)| {
            let ratios = ratios(timed);
            let faster = ratios.iter().filter(|&&ratio| ratio > 1.0).count();
            (!ratios.is_empty()).then(|| faster.to_string())
        })
        .cells
}

/// The table of the cases whose energy was measured, for a terminal; one line per case, ours being
/// the fastest kernel.
pub fn energy_cells(records: &[&Record]) -> Cells {
    energy(&rows(records))
}

pub(super) const ENERGY: &str = "Mean power of the whole GPU within the windows, by its own \
                                 counter of energy, times the time of a launch; × is the energy of \
                                 the competitor that needs least over ours.";

pub(super) fn energy(rows: &[Row<'_>]) -> Cells {
    const THRIFTIEST: &str = "× thriftiest competitor";
    let joules = |record: Option<&Record>| record.and_then(|record| record.joules);
    let rows: Vec<_> = rows.iter().filter(|row| joules(row.best()).is_some()).collect();
    let ratio = |row: &Row<'_>| {
        let least = row.competitors().filter_map(|record| record.joules).reduce(f64::min)?;
        Some(least / joules(row.best())?)
    };
    let millijoules = |record| joules(record).map(|joules| number(joules * 1e3));
    let mut table = Table::of(&rows)
        .column("case", |row| Some(row.name()))
        .column(OURS, |row| millijoules(row.best()))
        // TFLOP/J are TFLOP/s per watt.
        .column("TFLOP/J", |row| {
            let rate = row.best().and_then(|ours| Some(ours.flops / ours.joules? * 1e-12))?;
            (rate > 0.0).then(|| number(rate))
        });
    let measured = rows.iter().flat_map(|row| row.peers.iter().copied());
    for peer in peers(measured.filter(|peer| peer.joules.is_some())) {
        table = table.column(peer, |row| millijoules(row.peer(peer)));
    }
    let table = table.column(THRIFTIEST, |row| ratio(row).map(two));
    let ratios = rows.iter().filter_map(|row| ratio(row)).collect();
    table.cells.with_means(&[(THRIFTIEST, ratios)])
}

pub(super) const HOST: &str = "Time that a call keeps the host, medians over the cases: from \
                               validation to launch, with a prepared plan, and loading the kernel \
                               on its first use. In the driver: the part of a prepared call that \
                               the driver takes for its launches; graph: launching a graph of one \
                               call, where that did not wait for the launch before it, as it did \
                               in records before 2026-11-27.";

/// What a call costs the host: a line per operation, or per kernel where all cases are listed.
pub(super) fn host(runs: &[&Run<'_>], detail: Detail) -> Cells {
    let records = runs.iter().flat_map(|run| run.records.iter().copied());
    let records = records.filter(|record| record.host_us.or(record.host_prepared_us).is_some());
    let items = grouped(records, |record| {
        (record.op.clone(), (detail == Detail::Cases).then(|| kernel(record)))
    });
    let mut table = Table::of(&items)
        .column("operation", |((op, _), _)| Some(op.clone()))
        .column("kernel", |((_, kernel), _)| kernel.clone())
        .column("cases", |(_, records)| Some(records.len().to_string()));
    type Time = fn(&Record) -> Option<f64>;
    let times: [(_, Time); 5] = [
        ("call µs", |r| r.host_us),
        ("prepared µs", |r| r.host_prepared_us),
        ("in the driver µs", |r| r.host_driver_us),
        // Without launches that took about as long as the kernel, since they waited for it.
        ("graph µs", |r| r.host_graph_us.filter(|us| *us < r.us.unwrap_or(0.0).max(20.0) / 2.0)),
        ("load ms", |r| Some(r.load_us? * 1e-3)),
    ];
    for (name, time) in times {
        table = table.column(name, |(_, records)| {
            let mut times: Vec<_> = records.iter().filter_map(|record| time(record)).collect();
            median(&mut times).map(number)
        });
    }
    table.cells
}

pub(super) const CEILINGS: &str =
    "Rates of loops that do nothing else, measured in the same runs as the suites.";

/// One line per ceiling that was measured along with the runs; where there are none, the newest of
/// the GPU. A range where several runs measured it.
pub(super) fn ceilings(runs: &[&Run<'_>], records: &[Record], gpu: &str) -> Cells {
    let mut along: Vec<_> = runs.iter().flat_map(|run| run.ceilings.iter().copied()).collect();
    if along.is_empty() {
        along.extend(records.iter().filter(|r| r.op == CEILING && r.gpu == gpu));
        let newest = along.iter().max_by_key(|record| &record.date).map(|record| &record.run);
        let newest = newest.cloned();
        along.retain(|record| Some(&record.run) == newest.as_ref());
    }
    let items = grouped(along.into_iter().filter(|r| r.rate.is_some()), |r| r.case.as_str());
    Table::of(&items)
        .column("ceiling", |(name, _)| Some((*name).to_owned()))
        .column("rate", |(_, records)| {
            let unit = match records[0].unit.as_deref().unwrap_or_default() {
                unit @ ("FLOP/s" | "B/s") => format!("T{unit}"),
                other => format!("T {other}"),
            };
            let rates = records.iter().filter_map(|record| Some(record.rate? * 1e-12));
            Some(format!("{} {unit}", between(rates, number)?))
        })
        .column("clock MHz", |(_, r)| between(r.iter().filter_map(|r| r.clock_mhz), number))
        .column("power W", |(_, r)| between(r.iter().filter_map(|r| r.power_w), number))
        .cells
}
