//! Notes below a table: how it was measured, what failed, and what it does not show.

use super::rate::unit;
use super::run::{Fuller, Row, Run, Size, peer_names, range};
use super::shape::is_cold;
use crate::record::Record;
use crate::timing::Cache;

/// Paragraphs of notes.
pub(crate) fn notes(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<String> {
    let mut notes = vec![measured(run, rows)];
    notes.extend(missing(rows));
    notes.extend(failed(rows));
    if let Some(Fuller { record, size }) = run.fuller {
        let of = |Size { cases, rivals }: Size| {
            format!("{} and {}", counted(cases, "case"), counted(rivals, "rival"))
        };
        notes.push(format!(
            "An older run (commit {}, {}) has {}, this one {}.",
            record.commit,
            day(record),
            of(size),
            of(run.size())
        ));
    }
    notes
}

/// Place, date and method of the measurement, without which no number has a meaning.
fn measured(run: &Run<'_>, rows: &[Row<'_>]) -> String {
    let first = run.first();
    let mut parts = vec![
        match unit(rows.iter().map(|row| row.any)) {
            "TB/s" => "TB/s of keys, values, queries and outputs, each once".to_owned(),
            unit => format!("{unit} by useful operations"),
        },
        "× is the rival's time over ours".to_owned(),
    ];
    let caches = match rows.iter().filter(|row| is_cold(row.any)).count() {
        0 if rows.iter().any(|row| row.any.cache == Cache::Rotated.name()) => {
            "cold: launches take copies of what they read in turn"
        }
        0 => "warm",
        cold if cold == rows.len() => "cold",
        _ => "warm where not called cold",
    };
    let windows = windows(rows);
    let (rounds, window_ms, _) = windows[0];
    parts.push(format!(
        "median of {rounds} interleaved windows of {window_ms} ms after {} ms idle, caches \
         {caches}",
        first.gap_ms
    ));
    // Number of places in a round; 0 if all rounds had one order.
    let timed = run.records.iter().filter(|record| record.us.is_some());
    let places = timed.map(|record| record.protocol.as_ref().map_or(0, |protocol| protocol.places));
    if range(places.map(|places| places as f64))
        .is_some_and(|(least, most)| least > 0.0 && most > 1.0)
    {
        parts.push("each behind each other one equally often".to_owned());
    }
    for (rounds, window_ms, cases) in &windows[1..] {
        parts.push(format!("{} of {rounds} windows of {window_ms} ms", counted(*cases, "case")));
    }
    if rows.iter().flat_map(|row| &row.ours).any(|ours| ours.ceiling.is_some()) {
        parts.push(
            "ceiling: what limits the case, and the fraction of it that blockflash reaches"
                .to_owned(),
        );
        let above = |row: &Row<'_>| row.best().and_then(|ours| ours.ceiling_fraction) > Some(1.0);
        if rows.iter().any(above) {
            parts.push("above 1 operands are shared beyond what is counted".to_owned());
        }
    }
    if rows.iter().any(|row| row.dense.is_some()) {
        parts.push(
            "of dense: ratio to the TFLOP/s of blockflash without a block mask at the same shape"
                .to_owned(),
        );
    }
    parts.extend(first.driver.as_ref().map(|driver| format!("driver {driver}")));
    let over = |field: fn(&Record) -> Option<f64>| {
        let (least, most) = range(run.records.iter().filter_map(|record| field(record)))?;
        Some(format!("{least:.0}–{most:.0}"))
    };
    parts.extend(over(|record| record.clock_mhz).map(|clock| format!("{clock} MHz")));
    parts.extend(over(|record| record.power_w).map(|power| format!("{power} W")));
    parts.push(format!("commit {}, {}", run.commits(), day(first)));
    let marks = peer_names(run.records.iter().copied().filter(|record| record.reference));
    if let [_, others @ ..] = &marks[..] {
        let marks: Vec<_> = marks.iter().map(|mark| about(mark)).collect();
        let verbs = if others.is_empty() {
            "does another job (the dense product) and is no rival"
        } else {
            "do another job (the dense product) and are no rivals"
        };
        parts.push(format!("{} {verbs}", marks.join(" and ")));
    }
    format!("{}.", parts.join("; "))
}

/// Explains a mark and the operands that it multiplies.
fn about(mark: &str) -> String {
    match mark {
        "torch_matmul_dense" => {
            format!("`{mark}` (cuBLAS on the matrix with its zeros, which save power)")
        }
        "torch_matmul_random" => format!("`{mark}` (cuBLAS on a matrix of N(0, 1) without zeros)"),
        _ => format!("`{mark}`"),
    }
}

/// Cases without a result of ours, by reason.
fn missing(rows: &[Row<'_>]) -> Option<String> {
    let without: Vec<_> = rows.iter().filter(|row| row.best().is_none()).collect();
    let reasons = reasons(without.iter().flat_map(|row| row.ours.iter().copied()));
    let text = match without.len() {
        0 => return None,
        cases => format!("{} without a result of blockflash", counted(cases, "case")),
    };
    Some(if reasons.is_empty() { format!("{text}.") } else { format!("{text}: {reasons}.") })
}

/// Rivals that failed or are missing in some cases, and why.
fn failed(rows: &[Row<'_>]) -> Option<String> {
    let names = peer_names(rows.iter().flat_map(|row| row.peers.iter().copied()));
    let rival = |name: &str| {
        let of: Vec<_> = rows.iter().filter_map(|row| row.peer(name)).collect();
        let without: Vec<_> = of.iter().copied().filter(|record| record.us.is_none()).collect();
        let reasons = reasons(without.iter().copied());
        match without.len() {
            0 => None,
            all if all == of.len() => Some(format!("`{name}` in every case ({reasons})")),
            some => Some(format!("`{name}` in {some} of {} cases ({reasons})", of.len())),
        }
    };
    let failures: Vec<_> = names.into_iter().filter_map(rival).collect();
    (!failures.is_empty()).then(|| format!("Absent or failed: {}.", failures.join("; ")))
}

/// The most frequent errors.
fn reasons<'r>(records: impl Iterator<Item = &'r Record>) -> String {
    const SHOWN: usize = 2;
    let mut reasons: Vec<(String, usize)> = Vec::new();
    for error in records.filter_map(|record| record.error.as_deref()).map(plain) {
        match reasons.iter_mut().find(|(other, _)| *other == error) {
            Some((_, count)) => *count += 1,
            None => reasons.push((error, 1)),
        }
    }
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let more = reasons.len().saturating_sub(SHOWN);
    let mut shown: Vec<_> = reasons.into_iter().take(SHOWN).map(|(error, _)| error).collect();
    shown.extend((more > 0).then(|| format!("and {more} other errors")));
    shown.join("; ")
}

/// An error as one short line without characters that Markdown interprets.
fn plain(error: &str) -> String {
    const LONGEST: usize = 140;
    let words: Vec<_> = error.split_whitespace().collect();
    let line = words.join(" ").replace(['`', '|', '<', '>'], "'");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.trim_end_matches('.').to_owned(),
    }
}

/// `1 case`, `2 cases`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The date without the time.
pub(crate) fn day(record: &Record) -> &str {
    record.date.split('T').next().unwrap_or_default()
}

/// Number and length of windows with the number of cases that had them, the most frequent first.
/// Failed implementations had no windows.
fn windows(rows: &[Row<'_>]) -> Vec<(usize, f64, usize)> {
    let mut found: Vec<(usize, f64, usize)> = Vec::new();
    for row in rows {
        let records = || row.ours.iter().chain(&row.peers);
        let rounds = records().map(|record| record.rounds).max().unwrap_or(0);
        let window_ms = row.any.window_ms;
        match found.iter_mut().find(|(r, w, _)| (*r, *w) == (rounds, window_ms)) {
            Some((.., cases)) => *cases += 1,
            None => found.push((rounds, window_ms, 1)),
        }
    }
    found.sort_by_key(|&(rounds, _, cases)| std::cmp::Reverse((cases, rounds)));
    found
}

#[cfg(test)]
mod tests {
    use super::super::run::newest;
    use super::super::sample::{record, suite};
    use super::*;
    use crate::record::{OURS, Protocol};
    use crate::turns::Turns;

    fn of(records: &[Record]) -> Vec<String> {
        let runs = newest(records);
        notes(&runs[0], &runs[0].rows())
    }

    #[test]
    fn failures_are_named_with_their_reason() {
        let mut records = suite();
        records.push(record("b", "y", None));
        records
            .push(Record { error: Some("no\n |such| `thing`.".into()), ..record("b", "z", None) });
        let notes = of(&records);
        assert!(
            notes[0].contains("median of 3 interleaved windows")
                && notes[0].contains("caches warm;")
        );
        assert!(notes[0].contains("`dense` does another job"), "{}", notes[0]);
        assert_eq!(notes[1], "1 case without a result of blockflash: it failed.");
        let failed = "Absent or failed: `y` in 1 of 2 cases (it failed); `z` in every case (no \
                      'such' 'thing').";
        assert_eq!(notes[2], failed);
    }

    #[test]
    fn balanced_turns_and_marks_are_explained() {
        let mut records = suite();
        assert!(!of(&records)[0].contains("equally often"));
        let protocol = Some(Protocol::of(Turns::Balanced, 0, 2));
        records.iter_mut().for_each(|record| record.protocol = protocol.clone());
        let marks = ["torch_matmul_dense", "torch_matmul_random"];
        records.extend(marks.map(|mark| Record {
            reference: true,
            protocol: protocol.clone(),
            ..record("a", mark, Some(1.0))
        }));
        records.retain(|record| record.implementation != "dense");
        let note = &of(&records)[0];
        assert!(note.contains("each behind each other one equally often"), "{note}");
        let text = "with its zeros, which save power) and `torch_matmul_random` (cuBLAS on a \
                    matrix of N(0, 1) \
                    without zeros) do another job (the dense product) and are no rivals";
        assert!(note.contains(text), "{note}");
    }

    #[test]
    fn a_run_of_some_cases_says_so() {
        let mut records = suite();
        let newer = record("a", OURS, Some(1.0));
        let date = "2026-11-22T08:00:00Z".to_owned();
        records.push(Record { run: "r2".into(), commit: "other".into(), date, ..newer });
        let notes = of(&records);
        let text = "An older run (commit abcdef012345, 2026-11-21) has 2 cases and 2 rivals, this \
                    one 1 case and 0 rivals.";
        assert_eq!(notes.last().unwrap(), text);
    }

    #[test]
    fn windows_that_differ_are_listed() {
        let mut records = suite();
        let fewer = Record { rounds: 2, window_ms: 7.0, ..record("c", OURS, Some(1.0)) };
        records.push(fewer);
        let notes = of(&records);
        let text = "caches warm; 1 case of 2 windows of 7 ms;";
        assert!(
            notes[0].contains("median of 3 interleaved") && notes[0].contains(text),
            "{}",
            notes[0]
        );
    }

    #[test]
    fn long_lists_of_errors_are_cut() {
        let failing = |error: &str| Record { error: Some(error.into()), ..record("a", "x", None) };
        let records = ["a", "b", "b", "c", "d"].map(failing);
        assert_eq!(reasons(records.iter()), "b; a; and 2 other errors");
        assert!(plain(&"x".repeat(300)).chars().count() < 150);
    }
}
