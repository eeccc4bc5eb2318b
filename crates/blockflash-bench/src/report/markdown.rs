//! The report as Markdown.

use super::cells::{Cells, Detail, table};
use super::run::{Row, Run, groups, newest};
use super::{break_even, energy, host, limits, notes, summary};
use crate::record::Record;
use std::fmt::Write;

/// A plot to show with its suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The suite that it belongs to.
    pub suite: String,
    /// Alternative text for readers who do not see the image.
    pub alt: String,
    /// Path of the image in Markdown links.
    pub path: String,
    /// Whether the plot represents its suite where only one is shown.
    pub cover: bool,
}

/// Whether a table of all cases is hardly longer than its summary; such a table is never condensed.
fn is_short(rows: &[Row<'_>]) -> bool {
    rows.len() <= 8 || rows.len() < 3 * groups(rows).len()
}

/// The newest run of each suite on each GPU, then the ceilings of the GPUs and the host time of
/// calls.
pub fn markdown(records: &[Record], detail: Detail, images: &[Image]) -> String {
    let runs = newest(records);
    let mut gpus: Vec<_> = records.iter().map(|record| record.gpu.as_str()).collect();
    gpus.sort_unstable();
    gpus.dedup();
    let mut text = String::new();
    for gpu in gpus {
        let of_gpu: Vec<_> = runs.iter().filter(|run| run.key().0 == gpu).collect();
        for run in &of_gpu {
            suite(&mut text, run, detail, images);
        }
        let ceilings = limits::cells(limits::of(&of_gpu, records, gpu).into_iter());
        section(&mut text, &format!("Ceilings of {gpu}"), &ceilings, limits::NOTE);
        section(
            &mut text,
            &format!("Host cost per call, {gpu}"),
            &host::cells(&of_gpu, detail),
            host::NOTE,
        );
    }
    text.truncate(text.trim_end().len());
    text
}

// Writing into a String cannot fail, so results of `write!` are dropped in this file.

fn suite(text: &mut String, run: &Run<'_>, detail: Detail, images: &[Image]) {
    let (gpu, name) = run.key();
    let rows = run.rows();
    let _ = writeln!(text, "### `{name}` on {gpu}\n");
    for image in images
        .iter()
        .filter(|image| image.suite == name && (image.cover || detail == Detail::Cases))
    {
        let _ = writeln!(text, "![{}]({})\n", image.alt, image.path);
    }
    let _ = writeln!(text, "{}\n", summary::sentence(&rows));
    match detail {
        _ if is_short(&rows) => {
            // Each operation has rivals of its own.
            for of_op in rows.chunk_by(|a, b| a.any.op == b.any.op) {
                put(text, &of_cases(&of_op.iter().collect::<Vec<_>>()));
            }
        }
        Detail::Groups => {
            put(text, &summary::by_group(&rows));
            put(text, &summary::by_rival(&rows));
        }
        Detail::Cases => {
            for (label, rows) in groups(&rows) {
                let _ = writeln!(text, "#### {label}\n");
                put(text, &of_cases(&rows));
            }
            put(text, &summary::by_rival(&rows));
        }
    }
    if detail == Detail::Cases {
        of_energy(text, &rows);
        against_dense(text, &rows);
    }
    for note in notes::notes(run, &rows) {
        let _ = writeln!(text, "{note}\n");
    }
}

fn of_energy(text: &mut String, rows: &[Row<'_>]) {
    let cells = energy::table(rows);
    if !cells.rows.is_empty() {
        let _ = writeln!(text, "#### Millijoules of a launch\n");
        put(text, &cells);
        let _ = writeln!(text, "{}\n", energy::NOTE);
    }
}

fn against_dense(text: &mut String, rows: &[Row<'_>]) {
    let tables = break_even::tables(rows);
    for (heading, cells) in &tables {
        let _ = writeln!(text, "#### {heading}\n");
        put(text, cells);
    }
    if !tables.is_empty() {
        let _ = writeln!(text, "{}\n", break_even::NOTE);
    }
}

fn of_cases(rows: &[&Row<'_>]) -> Cells {
    table(rows, |best| format!("**{best}**"))
}

fn section(text: &mut String, heading: &str, cells: &Cells, note: &str) {
    if !cells.rows.is_empty() {
        let _ = writeln!(text, "### {heading}\n");
        put(text, cells);
        let _ = writeln!(text, "{note}\n");
    }
}

fn put(text: &mut String, Cells { header, rows }: &Cells) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "| {} |", header.join(" | "));
    // Text is left-aligned, numbers are right-aligned so that their digits line up.
    let rule = header.iter().enumerate().map(|(at, _)| if at == 0 { "---|" } else { "---:|" });
    let _ = writeln!(text, "|{}", rule.collect::<String>());
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
        let rows: Vec<Vec<&str>> = block
            .iter()
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>())
            .collect();
        let cells =
            rows.iter().flat_map(|row| row.iter().enumerate()).filter(|(_, cell)| !is_rule(cell));
        let mut widths = vec![0; rows[0].len()];
        for (column, cell) in cells {
            if let Some(width) = widths.get_mut(column) {
                *width = cell.chars().count().max(*width);
            }
        }
        for row in &rows {
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                let _ = match (is_rule(cell), column) {
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

fn is_rule(cell: &str) -> bool {
    cell.starts_with("---") && cell.chars().all(|c| matches!(c, '-' | ':'))
}

#[cfg(test)]
mod tests {
    use super::super::sample::{grid, record, suite};
    use super::*;
    use crate::record::OURS;

    #[test]
    fn markdown_names_where_and_when() {
        let text = markdown(&suite(), Detail::Groups, &[]);
        assert!(
            text.starts_with("### `s` on G\n\n2 cases, 1 with a result of blockflash: 1.50 ×"),
            "{text}"
        );
        assert!(text.contains("\n| case | µs |"), "a short suite is not condensed: {text}");
        assert!(
            text.contains("|---|---:|---:|---:|---:|---:|---:|---:|\n| a | 2.00 | **50.0** |"),
            "{text}"
        );
        assert!(text.contains("commit abcdef012345, 2026-11-21"), "{text}");
        assert!(!text.contains("Ceilings") && !text.contains("Host cost"), "{text}");
    }

    #[test]
    fn long_suites_are_condensed_unless_all_cases_are_wanted() {
        let records = grid();
        let short = markdown(&records, Detail::Groups, &[]);
        assert!(short.contains("| head_dim 64, causal | 3 |"), "{short}");
        assert!(!short.contains("b8_s2048_h16_d64_causal_bf16"), "{short}");
        let full = markdown(&records, Detail::Cases, &[]);
        assert!(full.contains("#### head_dim 64, causal\n\n| case |"), "{full}");
        assert!(full.contains("| b8_s2048_h16_d64_causal_bf16 |"), "{full}");
        let break_even = "| block | N | at 0.05 | at 0.1 | at 0.5 | break-even |";
        assert!(full.contains(break_even) && !short.contains(break_even), "{full}");
        for text in [short, full] {
            assert!(
                text.contains("### Ceilings of G") && text.contains("| wgmma_f16 | 832 TFLOP/s |"),
                "{text}"
            );
            // A ceiling is not listed as a case.
            assert!(!text.contains("`ceilings`"), "{text}");
        }
    }

    #[test]
    fn a_condensed_report_shows_one_plot_of_a_suite() {
        let image = |alt: &str, cover| Image {
            suite: "attention_fwd".into(),
            alt: alt.into(),
            path: format!("{alt}.svg"),
            cover,
        };
        let images = [image("a", false), image("b", true)];
        let short = markdown(&grid(), Detail::Groups, &images);
        assert!(short.contains("![b](b.svg)") && !short.contains("a.svg"), "{short}");
        let full = markdown(&grid(), Detail::Cases, &images);
        assert!(full.contains("![a](a.svg)") && full.matches(".svg").count() == 2, "{full}");
    }

    #[test]
    fn every_gpu_has_its_section() {
        let mut records = suite();
        records.push(Record { gpu: "F".into(), ..record("d", OURS, Some(1.0)) });
        let text = markdown(&records, Detail::Cases, &[]);
        assert!(text.find("### `s` on F").unwrap() < text.find("### `s` on G").unwrap());
    }

    #[test]
    fn tables_are_aligned_for_a_terminal() {
        let aligned = align("x\n\n| case | µs |\n|---|---:|\n| long name | 1 |\n| b | — |\n\ny");
        let expected = "x\n\n| case      | µs |\n|-----------|---:|\n\
                        | long name |  1 |\n| b         |  — |\n\ny";
        assert_eq!(aligned, expected);
    }
}
