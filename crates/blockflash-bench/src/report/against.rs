//! What has changed since a commit: the newest run of each suite beside the newest one of that
//! commit.

use super::cells::{NONE, Table, number};
use super::notes::{counted, day};
use super::put;
use super::runs::{Row, Run, all as runs_of, fastest, mean, newest};
use crate::record::Record;
use std::fmt::Write;

/// A comparison with an older commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Against {
    /// Markdown.
    pub text: String,
    /// Cases that became slower beyond their spread, or were lost.
    pub regressions: usize,
}

/// Why nothing can be compared.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum AgainstError {
    /// Too short to name one commit.
    #[error("{0:?} is not a commit: give at least 4 of its digits")]
    Short(String),
    /// No run besides the newest one has the commit.
    #[error("no earlier run has commit {commit}; there are {present}")]
    Unknown {
        /// As it was asked for.
        commit: String,
        /// Commits of the records that could be named, newest first.
        present: String,
    },
}

/// A case is slower only if it is by more than this, and no window of now was as fast as any of
/// before.
const TOLERANCE: f64 = 0.02;

/// Compares the newest run of each suite and GPU with the newest earlier one of `commit`.
///
/// # Errors
/// [`AgainstError`].
pub fn against(records: &[Record], commit: &str) -> Result<Against, AgainstError> {
    if commit.len() < 4 {
        return Err(AgainstError::Short(commit.to_owned()));
    }
    let mut all = runs_of(records);
    all.sort_by_key(Run::date);
    let mut comparison = Against::default();
    let mut skipped = Vec::new();
    for now in newest(records) {
        let earlier = |run: &&Run<'_>| {
            run.key() == now.key()
                && run.first().run != now.first().run
                && is_of(run.first(), commit)
        };
        match all.iter().rfind(earlier) {
            Some(before) => comparison.add(before, &now),
            None => skipped.push(format!("`{}` on {}", now.key().1, now.key().0)),
        }
    }
    if comparison.text.is_empty() {
        let present = commits(&all);
        return Err(AgainstError::Unknown { commit: commit.to_owned(), present });
    }
    if !skipped.is_empty() {
        let _ = writeln!(comparison.text, "No earlier run of {commit}: {}.\n", skipped.join(", "));
    }
    comparison.text.truncate(comparison.text.trim_end().len());
    Ok(comparison)
}

/// Records have the first digits of a commit, and `-dirty` behind them if there were changes.
fn is_of(record: &Record, commit: &str) -> bool {
    let known = record.commit.trim_end_matches("-dirty");
    record.commit.starts_with(commit) || (!known.is_empty() && commit.starts_with(known))
}

fn commits(oldest_first: &[Run<'_>]) -> String {
    let mut commits: Vec<&Record> = Vec::new();
    for run in oldest_first.iter().rev() {
        if !commits.iter().any(|other| other.commit == run.first().commit) {
            commits.push(run.first());
        }
    }
    let named = |record: &&Record| format!("{} ({})", record.commit, day(record));
    commits.iter().map(named).collect::<Vec<_>>().join(", ")
}

/// How a case has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Faster,
    Slower,
    Lost,
}

struct Change {
    verdict: Verdict,
    /// `now / before`.
    time: Option<f64>,
    /// Ratio to the best competitor that both runs have, before and now.
    ratio: Option<[f64; 2]>,
}

impl Change {
    /// `None` where before there was nothing either.
    fn of(before: &Row<'_>, now: &Row<'_>) -> Option<Self> {
        let old = before.best()?;
        let Some(new) = now.best() else {
            return Some(Self { verdict: Verdict::Lost, time: None, ratio: None });
        };
        let time = new.us? / old.us?;
        // A record without a spread is as wide as its median.
        let [old_range, new_range] = [old, new].map(|r| (r.us_min.or(r.us), r.us_max.or(r.us)));
        let verdict = match () {
            () if time > 1.0 + TOLERANCE && new_range.0 > old_range.1 => Verdict::Slower,
            () if time < 1.0 / (1.0 + TOLERANCE) && new_range.1 < old_range.0 => Verdict::Faster,
            () => Verdict::Same,
        };
        let timed =
            |row: &Row<'_>, name: &str| row.peer(name).is_some_and(|peer| peer.us.is_some());
        let ratio = |row: &Row<'_>, ours: f64| {
            let common = row.competitors().filter(|peer| {
                timed(before, &peer.implementation) && timed(now, &peer.implementation)
            });
            Some(fastest(common)?.us? / ours)
        };
        let ratio =
            ratio(before, old.us?).zip(ratio(now, new.us?)).map(|(before, now)| [before, now]);
        Some(Self { verdict, time: Some(time), ratio })
    }

    /// A slower machine slows competitors as well.
    fn others_too(&self) -> bool {
        self.verdict == Verdict::Slower
            && self.ratio.is_some_and(|[before, now]| now * (1.0 + TOLERANCE) >= before)
    }

    fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Same => "",
            Verdict::Faster => "faster",
            Verdict::Slower if self.others_too() => "**slower**, as is the competitor",
            Verdict::Slower => "**slower**",
            Verdict::Lost => "**lost**",
        }
    }
}

impl Against {
    fn add(&mut self, before: &Run<'_>, now: &Run<'_>) {
        let (gpu, suite) = now.key();
        let [old_rows, new_rows] = [before.rows(), now.rows()];
        let pair = |new| {
            let same = |old: &&Row<'_>| old.name() == Row::name(new);
            old_rows.iter().find(same).map(|old| (old, new))
        };
        let both: Vec<_> = new_rows.iter().filter_map(pair).collect();
        let [fresh, gone] = [&new_rows, &old_rows].map(|rows| rows.len() - both.len());
        let change = |(old, new)| Some((old, new, Change::of(old, new)?));
        let items: Vec<_> = both.into_iter().filter_map(change).collect();
        let or_none = |text: Option<String>| Some(text.unwrap_or(NONE.to_owned()));
        let us = |row: &Row<'_>| or_none(row.best().and_then(|ours| ours.us).map(number));
        let ratio =
            |[before, now]: [f64; 2]| format!("{before:.2} → {now:.2} ({})", percent(now / before));
        let table = Table::of(&items)
            .column("case", |(_, new, _)| Some(new.name()))
            .column("before µs", |(old, ..)| us(old))
            .column("now µs", |(_, new, _)| us(new))
            .column("time", |(.., change)| or_none(change.time.map(percent)))
            .column("× best common competitor", |(.., change)| or_none(change.ratio.map(ratio)))
            .column("", |(.., change)| Some(change.word().to_owned()));
        let heading =
            format!("### `{suite}` on {gpu}: {} against {}\n\n", named(now), named(before));
        self.text += &heading;
        put(&mut self.text, &table.cells);
        let changes: Vec<_> = items.into_iter().map(|(.., change)| change).collect();
        self.regressions += changes.iter().filter(|change| is_regression(change)).count();
        self.text += &format!("{}\n\n", sentence(&changes, fresh, gone));
    }
}

fn is_regression(change: &Change) -> bool {
    matches!(change.verdict, Verdict::Slower | Verdict::Lost)
}

fn sentence(changes: &[Change], fresh: usize, gone: usize) -> String {
    let count = |verdict| changes.iter().filter(|change| change.verdict == verdict).count();
    let mut parts = vec![format!(
        "{}: {} slower, {} faster, {} within spread and {:.0} %",
        counted(changes.len(), "case"),
        count(Verdict::Slower),
        count(Verdict::Faster),
        count(Verdict::Same),
        TOLERANCE * 100.0
    )];
    let lost = count(Verdict::Lost);
    parts.extend((lost > 0).then(|| format!("{lost} lost their result")));
    let times: Vec<_> = changes.iter().filter_map(|change| change.time).collect();
    parts.extend(mean(&times).map(|mean| format!("time {} as geometric mean", percent(mean))));
    let ratios: Vec<_> =
        changes.iter().filter_map(|c| c.ratio.map(|[before, now]| now / before)).collect();
    parts.extend(mean(&ratios).map(|mean| format!("× best common competitor {}", percent(mean))));
    let drifted = changes.iter().filter(|change| change.others_too()).count();
    parts.extend((drifted > 0).then(|| {
        format!(
            "{drifted} of the slower ones no slower relative to the competitor, so perhaps the \
                 machine was"
        )
    }));
    parts.extend((fresh > 0).then(|| format!("{} only in the newer run", counted(fresh, "case"))));
    parts.extend((gone > 0).then(|| format!("{} only in the older run", counted(gone, "case"))));
    format!("{}.", parts.join("; "))
}

fn named(run: &Run<'_>) -> String {
    format!("{} ({})", run.first().commit, day(run.first()))
}

/// `+3.1 %`.
fn percent(factor: f64) -> String {
    format!("{:+.1} %", (factor - 1.0) * 100.0)
}
