//! What is said of a suite: its result, how it was measured, what failed, and what its table does
//! not show.

use super::runs::{Row, Run, grouped, mean, peers, range};
use super::tables::{spread, unit};
use crate::record::Record;
use crate::timing::Cache;
use std::cmp::Reverse;

/// The whole suite in a sentence.
pub(super) fn sentence(rows: &[Row<'_>]) -> String {
    let ratios: Vec<_> = rows.iter().filter_map(Row::ratio).collect();
    let mut text = counted(rows.len(), "case");
    match rows.iter().filter(|row| row.best().is_some()).count() {
        0 => text += ", none with a result of blockflash",
        some if some < rows.len() => text += &format!(", {some} with a result of blockflash"),
        _ => {}
    }
    if let (Some(mean), Some((least, most))) = (mean(&ratios), range(ratios.iter().copied())) {
        let faster = ratios.iter().filter(|&&ratio| ratio > 1.0).count();
        text += &format!(": {mean:.2} × the best competitor");
        if ratios.len() > 1 {
            text += &format!(
                " as geometric mean, {least:.2} to {most:.2}, faster than every competitor in \
                 {faster}"
            );
        }
    }
    let ratios: Vec<_> = rows.iter().filter_map(|row| row.over(row.best_deterministic())).collect();
    if let (Some(mean), Some(spread)) = (mean(&ratios), spread(ratios.iter().copied())) {
        text += &format!("; {mean:.2} × the best deterministic competitor, {spread}");
    }
    text + "."
}

/// Paragraphs of notes.
pub(super) fn notes(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<String> {
    let mut notes = vec![measured(run, rows)];
    notes.extend(missing(rows));
    notes.extend(failed(rows));
    if let Some((record, size)) = run.fuller {
        let of = |[cases, others]: [usize; 2]| {
            format!("{} and {}", counted(cases, "case"), counted(others, "competitor"))
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
        "× is the competitor's time over ours".to_owned(),
    ];
    let caches = match rows.iter().filter(|row| row.is_cold()).count() {
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
    let marks = peers(run.records.iter().copied().filter(|record| record.reference));
    if let [_, others @ ..] = &marks[..] {
        let marks: Vec<_> = marks.iter().map(|mark| about(mark)).collect();
        let verbs = if others.is_empty() {
            "does another job (the dense product) and is no competitor"
        } else {
            "do another job (the dense product) and are no competitors"
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

/// Competitors that failed or are missing in some cases, and why.
fn failed(rows: &[Row<'_>]) -> Option<String> {
    let names = peers(rows.iter().flat_map(|row| row.peers.iter().copied()));
    let of = |name: &str| {
        let all: Vec<_> = rows.iter().filter_map(|row| row.peer(name)).collect();
        let without: Vec<_> = all.iter().copied().filter(|record| record.us.is_none()).collect();
        let reasons = reasons(without.iter().copied());
        match without.len() {
            0 => None,
            some if some == all.len() => Some(format!("`{name}` in every case ({reasons})")),
            some => Some(format!("`{name}` in {some} of {} cases ({reasons})", all.len())),
        }
    };
    let failures: Vec<_> = names.into_iter().filter_map(of).collect();
    (!failures.is_empty()).then(|| format!("Absent or failed: {}.", failures.join("; ")))
}

/// The most frequent errors.
fn reasons<'r>(records: impl Iterator<Item = &'r Record>) -> String {
    const SHOWN: usize = 2;
    let errors = records.filter_map(|record| record.error.as_deref()).map(plain);
    let mut reasons = grouped(errors, String::clone);
    reasons.sort_by_key(|(_, alike)| Reverse(alike.len()));
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
pub(super) fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The date without the time.
pub(super) fn day(record: &Record) -> &str {
    record.date.split('T').next().unwrap_or_default()
}

/// Number and length of windows with the number of cases that had them, the most frequent first.
/// Failed implementations had no windows.
fn windows(rows: &[Row<'_>]) -> Vec<(usize, f64, usize)> {
    let of = |row: &&Row<'_>| {
        let rounds = row.ours.iter().chain(&row.peers).map(|record| record.rounds).max();
        (rounds.unwrap_or(0), row.any.window_ms)
    };
    let mut found = grouped(rows, of);
    found.sort_by_key(|((rounds, _), rows)| Reverse((rows.len(), *rounds)));
    found.into_iter().map(|((rounds, ms), rows)| (rounds, ms, rows.len())).collect()
}
