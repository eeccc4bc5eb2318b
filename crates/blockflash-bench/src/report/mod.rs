//! Reports from records: Markdown tables and charts of the newest runs, and changes since a commit.

mod against;
mod cells;
mod charts;
mod compare;
mod dense;
mod drawn;
mod notes;
mod runs;
mod sketch;
mod tables;
#[cfg(test)]
mod tests;

pub use against::{Against, AgainstError, against};
pub use cells::Cells;
pub use charts::{Plot, plots};
pub use dense::{BreakEven, break_even};
pub use drawn::drawn_cells;
pub use tables::{cells, energy_cells, rate, unit};

use crate::record::Record;
use runs::{Row, Run, groups};
use std::fmt::Write;

/// Start marker of the part that `blockflash report --into` replaces.
pub const BEGIN: &str = "<!-- results:begin -->";
/// End marker of that part.
pub const END: &str = "<!-- results:end -->";
/// Columns of prose in a document.
const COLUMNS: usize = 100;

/// Level of detail of a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// One line for each group of cases and each competitor.
    Groups,
    /// One line for each case.
    Cases,
}

/// A chart to show with its suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The suite that it belongs to.
    pub suite: String,
    /// Alternative text for readers who do not see the image.
    pub alt: String,
    /// Path of the image in Markdown links.
    pub path: String,
    /// Whether the chart represents its suite where only one is shown.
    pub cover: bool,
}

// Writing into a String cannot fail, so results of `write!` are dropped in this module.

/// The newest run of each suite on each GPU, then the ceilings of the GPUs and the host time of
/// calls.
pub fn markdown(records: &[Record], detail: Detail, images: &[Image]) -> String {
    let runs = runs::newest(records);
    let mut gpus: Vec<_> = records.iter().map(|record| record.gpu.as_str()).collect();
    gpus.sort_unstable();
    gpus.dedup();
    let mut text = String::new();
    for gpu in gpus {
        let of_gpu: Vec<_> = runs.iter().filter(|run| run.key().0 == gpu).collect();
        let drawn = drawn::overview(&of_gpu);
        section(&mut text, &format!("### Drawn shapes on {gpu}"), drawn, drawn::NOTE);
        for run in &of_gpu {
            suite(&mut text, run, detail, images);
        }
        let ceilings = tables::ceilings(&of_gpu, records, gpu);
        section(&mut text, &format!("### Ceilings of {gpu}"), ceilings, tables::CEILINGS);
        let host = tables::host(&of_gpu, detail);
        section(&mut text, &format!("### Host cost per call, {gpu}"), host, tables::HOST);
    }
    text.truncate(text.trim_end().len());
    text
}

fn suite(text: &mut String, run: &Run<'_>, detail: Detail, images: &[Image]) {
    let (gpu, name) = run.key();
    let (rows, full) = (run.rows(), detail == Detail::Cases);
    let _ = writeln!(text, "### `{name}` on {gpu}\n");
    let shown = |image: &&Image| image.suite == name && (image.cover || full);
    for Image { alt, path, .. } in images.iter().filter(shown) {
        let _ = writeln!(text, "![{alt}]({path})\n");
    }
    let _ = writeln!(text, "{}\n", notes::sentence(&rows));
    let of_cases = |rows: &[&Row<'_>]| tables::of_cases(rows, |best| format!("**{best}**"));
    if drawn::is_drawn(name) {
        drawn::tables(&rows).iter().for_each(|cells| put(text, cells));
        if full {
            put(text, &of_cases(&rows.iter().collect::<Vec<_>>()));
        }
        put(text, &tables::by_competitor(&rows));
    } else if rows.len() <= 8 || rows.len() < 3 * groups(&rows).len() {
        // A table of all cases that is hardly longer than its summary is never condensed. Each
        // operation has competitors of its own.
        for of_op in rows.chunk_by(|a, b| a.any.op == b.any.op) {
            put(text, &of_cases(&of_op.iter().collect::<Vec<_>>()));
        }
    } else {
        match full {
            false => put(text, &tables::by_group(&rows)),
            true => groups(&rows).into_iter().for_each(|(label, rows)| {
                let _ = writeln!(text, "#### {label}\n");
                put(text, &of_cases(&rows));
            }),
        }
        put(text, &tables::by_competitor(&rows));
    }
    if full {
        section(text, "#### Millijoules of a launch", tables::energy(&rows), tables::ENERGY);
        let products = dense::tables(&rows);
        let last = products.len().saturating_sub(1);
        for (at, (heading, cells)) in products.into_iter().enumerate() {
            let note = if at == last { dense::NOTE } else { "" };
            section(text, &format!("#### {heading}"), cells, note);
        }
    }
    for note in notes::notes(run, &rows) {
        let _ = writeln!(text, "{note}\n");
    }
}

fn section(text: &mut String, heading: &str, cells: Cells, note: &str) {
    if !cells.rows.is_empty() {
        let _ = writeln!(text, "{heading}\n");
        put(text, &cells);
        let _ = if note.is_empty() { Ok(()) } else { writeln!(text, "{note}\n") };
    }
}

fn put(text: &mut String, Cells { header, rows }: &Cells) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "| {} |", header.join(" | "));
    // Text is left-aligned, numbers are right-aligned so that their digits line up.
    let _ = writeln!(text, "|---|{}", "---:|".repeat(header.len() - 1));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text.push('\n');
}

/// Pads the cells of all tables to equal widths, for a terminal.
pub fn align(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::new();
    for block in lines.chunk_by(|a, b| a.starts_with('|') == b.starts_with('|')) {
        if !block[0].starts_with('|') {
            block.iter().for_each(|line| out.extend([*line, "\n"]));
            continue;
        }
        let cells = |line: &str| -> Vec<String> {
            line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        let rows: Vec<_> = block.iter().map(|line| cells(line)).collect();
        let rule = |cell: &str| cell.starts_with("---");
        let width = |column: usize| {
            let texts = rows.iter().filter_map(|row| row.get(column)).filter(|cell| !rule(cell));
            texts.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        for row in &rows {
            for (column, cell) in row.iter().enumerate() {
                let width = width(column);
                let _ = match (rule(cell), column) {
                    (true, 0) => write!(out, "|{}", "-".repeat(width + 2)),
                    (true, _) => write!(out, "|{}:", "-".repeat(width + 1)),
                    (false, 0) => write!(out, "| {cell:width$} "),
                    (false, _) => write!(out, "| {cell:>width$} "),
                };
            }
            out.push_str("|\n");
        }
    }
    out.truncate(out.trim_end().len());
    out
}

/// The document with the text between the markers replaced, with prose broken into lines of at most
/// 100 columns; `None` if it has no markers.
pub fn insert(document: &str, text: &str) -> Option<String> {
    let begin = document.find(BEGIN)? + BEGIN.len();
    let end = begin + document[begin..].find(END)?;
    let text: Vec<String> = text.lines().map(folded).collect();
    Some(format!("{}\n{}\n{}", &document[..begin], text.join("\n"), &document[end..]))
}

/// A long line broken between words, unless it is one of a table, a heading or an image.
fn folded(line: &str) -> String {
    if line.chars().count() <= COLUMNS || line.starts_with(['|', '#', '!']) {
        return line.to_owned();
    }
    let mut lines = vec![String::new()];
    for word in line.split_whitespace() {
        let last = lines.last_mut().expect("there is always a line");
        if last.is_empty() {
            *last += word;
        } else if last.chars().count() + 1 + word.chars().count() <= COLUMNS {
            *last += &format!(" {word}");
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n")
}
