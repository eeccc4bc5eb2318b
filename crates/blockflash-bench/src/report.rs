//! Tables from records: one line per kernel of ours, one column per rival.

use crate::record::{OURS, Record};
use std::fmt::Write;

/// Marks between which `blockflash report --into` writes.
pub const BEGIN: &str = "<!-- results:begin -->";
/// The other one.
pub const END: &str = "<!-- results:end -->";

/// Cells of a table, all rows as long as the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cells {
    /// Names of the columns.
    pub header: Vec<String>,
    /// Lines in the order of measuring.
    pub rows: Vec<Vec<String>>,
}

/// The newest run of each suite on each GPU, with the records of a run in the order of measuring.
pub fn newest(records: &[Record]) -> Vec<Vec<&Record>> {
    let mut groups: Vec<(&str, &str, &Record)> = Vec::new();
    for record in records {
        match groups.iter_mut().find(|(gpu, suite, _)| (*gpu, *suite) == (&record.gpu, &record.suite)) {
            // Equal dates: the later line.
            Some((_, _, newest)) if record.date >= newest.date => *newest = record,
            Some(_) => {}
            None => groups.push((&record.gpu, &record.suite, record)),
        }
    }
    groups.sort_by_key(|&(gpu, suite, _)| (gpu, suite));
    let of_run = |newest: &Record| {
        let same = |record: &&Record| {
            (&record.run, &record.suite, &record.gpu) == (&newest.run, &newest.suite, &newest.gpu)
        };
        records.iter().filter(same).collect()
    };
    groups.into_iter().map(|(_, _, newest)| of_run(newest)).collect()
}

/// How many times as fast as the fastest rival we are. Marks that do another job are no rivals.
fn ratio<'r>(ours: &Record, peers: impl Iterator<Item = &'r Record>) -> Option<(f64, &'r str)> {
    let us = ours.us?;
    let rivals = peers
        .filter(|peer| !peer.reference)
        .filter_map(|peer| Some((peer.us?, peer.implementation.as_str())));
    let (best, name) = rivals.min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some((best / us, name))
}

/// The table of one run.
pub fn cells(records: &[&Record]) -> Cells {
    let mut peers: Vec<&str> = Vec::new();
    for record in records.iter().filter(|record| record.implementation != OURS) {
        if !peers.contains(&record.implementation.as_str()) {
            peers.push(&record.implementation);
        }
    }
    let ours: Vec<_> = records.iter().filter(|record| record.implementation == OURS).collect();
    let several = ours.windows(2).any(|pair| pair[0].case == pair[1].case);
    let mut header = vec!["case".to_owned()];
    header.extend(several.then(|| "kernel".to_owned()));
    header.extend(["µs", "TFLOP/s"].map(str::to_owned));
    header.extend(peers.iter().map(|&peer| peer.to_owned()));
    header.extend((!peers.is_empty()).then(|| "× best rival".to_owned()));
    header.push("verified".to_owned());

    let row = |ours: &&&Record| {
        let of_case = || records.iter().copied().filter(|r| r.case == ours.case && r.implementation != OURS);
        let mut row = vec![ours.case.clone()];
        if several {
            let symbol = ours.symbol.as_deref().unwrap_or_default();
            row.push(symbol.strip_prefix("blockflash_").unwrap_or(symbol).to_owned());
        }
        row.push(ours.us.map_or("—".to_owned(), number));
        row.push(speed(ours));
        for &peer in &peers {
            row.push(of_case().find(|r| r.implementation == peer).map_or("—".to_owned(), speed));
        }
        if !peers.is_empty() {
            row.push(
                ratio(ours, of_case()).map_or("—".to_owned(), |(ratio, name)| format!("{ratio:.2} {name}")),
            );
        }
        let all = std::iter::once(**ours).chain(of_case()).filter(|r| r.us.is_some()).all(|r| r.verified);
        row.push(
            if ours.us.is_none() {
                "no"
            } else if all {
                "yes"
            } else {
                "NO"
            }
            .to_owned(),
        );
        row
    };
    Cells { header, rows: ours.iter().map(row).collect() }
}

/// TFLOP/s, or that it failed.
fn speed(record: &Record) -> String {
    match record.tflops {
        Some(tflops) => number(tflops),
        None => "error".to_owned(),
    }
}

/// Three or four significant digits.
fn number(value: f64) -> String {
    let decimals = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

/// Markdown of the newest run of each suite on each GPU.
pub fn markdown(records: &[Record]) -> String {
    let mut text = String::new();
    for run in newest(records) {
        let Some(first) = run.first() else { continue };
        let Cells { header, rows } = cells(&run);
        // Writing into a String does not fail.
        let _ = writeln!(text, "### `{}` on {}\n", first.suite, first.gpu);
        let _ = writeln!(text, "| {} |", header.join(" | "));
        let _ = writeln!(text, "|{}", "---|".repeat(header.len()));
        for row in &rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        let _ = writeln!(text, "\n{}\n", footnote(&run));
    }
    text.truncate(text.trim_end().len());
    text
}

/// Where, when and how: what a number means nothing without.
fn footnote(run: &[&Record]) -> String {
    let Some(first) = run.first() else { return String::new() };
    let mut parts = vec!["TFLOP/s by useful operations".to_owned()];
    let rounds = run.iter().map(|record| record.rounds).max().unwrap_or(0);
    parts.push(format!(
        "median of {rounds} interleaved windows of {} ms after {} ms idle, caches {}",
        first.window_ms, first.gap_ms, first.cache
    ));
    if let Some(driver) = &first.driver {
        parts.push(format!("driver {driver}"));
    }
    let range = |field: fn(&Record) -> Option<f64>| {
        let values: Vec<_> = run.iter().filter_map(|record| field(record)).collect();
        let (least, most) =
            (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
        Some(format!("{least:.0}–{most:.0}"))
    };
    parts.extend(range(|record| record.clock_mhz).map(|clock| format!("{clock} MHz")));
    parts.extend(range(|record| record.power_w).map(|power| format!("{power} W")));
    parts.push(format!("commit {}", first.commit));
    parts.push(first.date.split('T').next().unwrap_or_default().to_owned());
    let marks: Vec<_> =
        run.iter().filter(|r| r.reference).map(|r| format!("`{}`", r.implementation)).collect();
    if let Some(mark) = marks.first() {
        parts.push(format!("{mark} computes the dense product and is no rival"));
    }
    format!("{}.", parts.join("; "))
}

/// The document with the text between the marks replaced; `None` if it has no marks.
pub fn insert(document: &str, text: &str) -> Option<String> {
    let begin = document.find(BEGIN)? + BEGIN.len();
    let end = begin + document[begin..].find(END)?;
    Some(format!("{}\n{text}\n{}", &document[..begin], &document[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(case: &str, implementation: &str, us: Option<f64>) -> Record {
        Record {
            suite: "s".into(),
            case: case.into(),
            implementation: implementation.into(),
            us,
            tflops: us.map(|us| 100.0 / us),
            verified: us.is_some(),
            run: "r1".into(),
            rounds: 3,
            gpu: "G".into(),
            commit: "abc".into(),
            cache: "warm".into(),
            date: "2026-11-21T08:00:00Z".into(),
            ..Record::default()
        }
    }

    fn sample() -> Vec<Record> {
        let dense = Record { reference: true, ..record("a", "dense", Some(0.1)) };
        vec![
            record("a", OURS, Some(2.0)),
            record("a", "x", Some(3.0)),
            record("a", "y", Some(4.0)),
            dense,
            record("b", OURS, None),
            record("b", "x", Some(5.0)),
        ]
    }

    #[test]
    fn a_line_compares_with_the_best_rival_and_not_with_a_mark() {
        let records = sample();
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(cells.header, ["case", "µs", "TFLOP/s", "x", "y", "dense", "× best rival", "verified"]);
        assert_eq!(cells.rows[0], ["a", "2.00", "50.0", "33.3", "25.0", "1000", "1.50 x", "yes"]);
        assert_eq!(cells.rows[1], ["b", "—", "error", "20.0", "—", "—", "—", "no"]);
    }

    #[test]
    fn several_kernels_get_a_line_each() {
        let forced = |symbol: &str| Record { symbol: Some(symbol.into()), ..record("a", OURS, Some(1.0)) };
        let records = [forced("blockflash_p"), forced("blockflash_q")];
        let cells = cells(&records.iter().collect::<Vec<_>>());
        assert_eq!(cells.header[1], "kernel");
        assert_eq!((cells.rows[0][1].as_str(), cells.rows[1][1].as_str()), ("p", "q"));
    }

    #[test]
    fn only_the_newest_run_is_reported() {
        let mut records = sample();
        let newer =
            Record { run: "r2".into(), date: "2026-11-22T08:00:00Z".into(), ..record("c", OURS, Some(1.0)) };
        records.insert(0, newer);
        records.push(Record { gpu: "F".into(), ..record("d", OURS, Some(1.0)) });
        let runs = newest(&records);
        let cases: Vec<Vec<_>> =
            runs.iter().map(|run| run.iter().map(|r| r.case.as_str()).collect()).collect();
        assert_eq!(cases, [vec!["d"], vec!["c"]]);
    }

    #[test]
    fn markdown_names_where_and_when() {
        let text = markdown(&sample());
        assert!(text.starts_with("### `s` on G\n\n| case | µs |"), "{text}");
        assert!(text.contains("|---|---|---|---|---|---|---|---|\n| a | 2.00 |"));
        assert!(text.contains("commit abc; 2026-11-21; `dense` computes the dense product"));
        let document = format!("x\n{BEGIN}\nold\n{END}\ny\n");
        assert_eq!(insert(&document, "new").unwrap(), format!("x\n{BEGIN}\nnew\n{END}\ny\n"));
        assert_eq!(insert("no marks", "new"), None);
    }
}
