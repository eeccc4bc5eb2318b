//! Shapes that were drawn: how they do as a whole and by setting, and where they do worst.

use super::cells::{Cells, Table, number, two};
use super::runs::{Row, Run, mean, rows};
use super::tables::kernel;
use crate::case::{AttentionShape, BsrShape, Case, DecodeShape, MaskKind};
use crate::record::Record;
use crate::suite::DRAWN;
use blockflash_ops::HeadDims;
use std::collections::BTreeMap;

/// Cases in the table of the worst ones.
const WORST: usize = 5;

pub(super) const NOTE: &str = "10th percentile: a tenth of the shapes, rounded up, are at or \
                               below it. Behind: shapes in which the best competitor is faster.";

/// A value of a setting, after the number of the setting and one by which its values are sorted.
type Setting = (usize, usize, String);
/// Cases with something in common.
type Group<'a, 'r> = (String, Vec<&'a Row<'r>>);

/// Whether the shapes of a suite were drawn.
pub(super) fn is_drawn(suite: &str) -> bool {
    suite.strip_prefix(DRAWN).is_some_and(|rest| rest.starts_with('_'))
}

/// Tables of the records of one suite for a terminal; none unless it was drawn.
pub fn drawn_cells(records: &[&Record]) -> Vec<Cells> {
    match records.first() {
        Some(first) if is_drawn(&first.suite) => {
            let tables = tables(&rows(records));
            tables.into_iter().filter(|cells| !cells.rows.is_empty()).collect()
        }
        _ => Vec::new(),
    }
}

/// All shapes and those of each setting; the worst shapes.
pub(super) fn tables(rows: &[Row<'_>]) -> [Cells; 2] {
    let mut settings: BTreeMap<Setting, Vec<&Row<'_>>> = BTreeMap::new();
    for row in rows {
        for (number, (order, label)) in row.case().map(of_case).into_iter().flatten().enumerate() {
            settings.entry((number, order, label)).or_default().push(row);
        }
    }
    let mut groups = vec![("all".to_owned(), rows.iter().collect())];
    groups.extend(settings.into_iter().map(|((.., label), rows)| (label, rows)));
    [summary("shapes", &groups), worst(rows)]
}

/// A line for each suite that was drawn.
pub(super) fn overview(runs: &[&Run<'_>]) -> Cells {
    let drawn = runs.iter().filter(|run| is_drawn(run.key().1));
    let suites: Vec<_> = drawn.map(|run| (run.key().1.to_owned(), run.rows())).collect();
    let groups: Vec<Group<'_, '_>> =
        suites.iter().map(|(name, rows)| (format!("`{name}`"), rows.iter().collect())).collect();
    summary("suite", &groups)
}

fn summary(what: &str, groups: &[Group<'_, '_>]) -> Cells {
    let mut table = Table::of(groups)
        .column(what, |(label, _)| Some(label.clone()))
        .column("cases", |(_, rows)| Some(rows.len().to_string()))
        // Where ours or all competitors failed, there is no ratio.
        .column("compared", |(_, rows)| {
            let compared = rows.iter().filter(|row| row.ratio().is_some()).count();
            (compared < rows.len()).then(|| compared.to_string())
        });
    for (name, deterministic) in [("best competitor", false), ("best deterministic", true)] {
        let ratios = |rows: &[&Row<'_>]| -> Vec<f64> {
            let best = |row: &&Row<'_>| match deterministic {
                true => row.over(row.best_deterministic()),
                false => row.ratio(),
            };
            let mut ratios: Vec<_> = rows.iter().filter_map(best).collect();
            ratios.sort_by(f64::total_cmp);
            ratios
        };
        table = table
            .column(format!("× {name}"), |(_, rows)| Some(bold(mean(&ratios(rows))?)))
            .column("10th percentile", |(_, rows)| tenth(&ratios(rows)).map(two))
            .column("least", |(_, rows)| ratios(rows).first().copied().map(two))
            .column("behind", |(_, rows)| {
                let ratios = ratios(rows);
                let behind = ratios.iter().filter(|&&ratio| ratio < 1.0).count();
                (!ratios.is_empty()).then(|| behind.to_string())
            });
    }
    table.cells
}

fn bold(ratio: f64) -> String {
    format!("**{ratio:.2}**")
}

/// The 10th percentile of ascending values by the nearest rank.
fn tenth(ratios: &[f64]) -> Option<f64> {
    ratios.get(ratios.len().div_ceil(10).checked_sub(1)?).copied()
}

/// The shapes with the least ratios.
fn worst(rows: &[Row<'_>]) -> Cells {
    let mut compared: Vec<_> = rows.iter().filter_map(|row| Some((row.ratio()?, row))).collect();
    compared.sort_by(|a, b| a.0.total_cmp(&b.0));
    compared.truncate(WORST);
    Table::of(&compared)
        .column("worst", |(_, row)| Some(row.name()))
        .column("µs", |(_, row)| row.best()?.us.map(number))
        .column("kernel", |(_, row)| row.best().filter(|ours| ours.symbol.is_some()).map(kernel))
        .column("best competitor", |(_, row)| {
            Some(format!("`{}`", row.best_competitor()?.implementation))
        })
        .column("its µs", |(_, row)| row.best_competitor()?.us.map(number))
        .column("×", |(ratio, _)| Some(two(*ratio)))
        .column("ceiling", |(_, row)| {
            let ours = row.best()?;
            Some(format!("{} {:.2}", ours.ceiling.as_deref()?, ours.ceiling_fraction?))
        })
        .cells
}

/// The settings of a case, in the order of the table.
fn of_case(case: &Case) -> Vec<(usize, String)> {
    match case {
        Case::AttentionDecode(shape) => of_decode(shape),
        Case::Attention(shape) => of_attention(shape),
        Case::BsrMatmul(shape) => of_product(shape),
        _ => Vec::new(),
    }
}

fn of_decode(shape: &DecodeShape) -> Vec<(usize, String)> {
    let queries = if shape.seqlen_q == 1 { "one query" } else { "several queries" };
    let layout = match shape.page_size {
        None => "contiguous".to_owned(),
        Some(size) => format!("pages of {size}"),
    };
    let fill = format!("lengths: {}", shape.fill);
    let [heads, head_dim] = of_heads(shape.num_heads_q, shape.num_heads_kv, shape.head_dims);
    vec![
        (shape.seqlen_q.min(2), queries.to_owned()),
        (shape.page_size.unwrap_or(0), layout),
        (0, fill),
        of_window(shape.window),
        heads,
        head_dim,
        (0, shape.dtype.to_string()),
    ]
}

fn of_attention(shape: &AttentionShape) -> Vec<(usize, String)> {
    let mask = match shape.mask {
        MaskKind::Window(keys) => of_window(Some(keys)),
        mask => (0, mask.to_string()),
    };
    let mut settings = vec![mask];
    match &shape.lists {
        Some(lists) => {
            let block = format!("blocks of {} × {}", lists.block_q, lists.block_kv);
            let pattern = format!("pattern {}", lists.pattern);
            settings.extend([(lists.block_q + lists.block_kv, block), (0, pattern)]);
        }
        None if shape.lengths.is_none() => {
            let equal = shape.seqlen_q == shape.seqlen_kv;
            let queries = if equal { "as many queries as keys" } else { "fewer queries than keys" };
            settings.push((0, queries.to_owned()));
        }
        None => {}
    }
    settings.extend(of_heads(shape.num_heads_q, shape.num_heads_kv, shape.head_dims));
    settings.push((0, shape.dtype.to_string()));
    settings
}

fn of_product(shape: &BsrShape) -> Vec<(usize, String)> {
    let columns = match shape.n {
        n @ (1 | 8) => (n, format!("n {n}")),
        n if n <= 512 => (16, "n up to 512".to_owned()),
        _ => (513, "n above 512".to_owned()),
    };
    vec![
        (shape.block_size, format!("blocks of {0} × {0}", shape.block_size)),
        columns,
        (0, format!("pattern {}", shape.pattern)),
        (0, shape.dtype.to_string()),
    ]
}

fn of_window(window: Option<usize>) -> (usize, String) {
    match window {
        None => (0, "all keys".to_owned()),
        Some(_) => (1, "a window".to_owned()),
    }
}

/// Heads that share one of keys, and the size of a head.
fn of_heads(q: usize, kv: usize, head_dims: HeadDims) -> [(usize, String); 2] {
    let shared = match q / kv.max(1) {
        0 | 1 => (1, "a query head on a key head"),
        2..=4 => (2, "2 to 4 on one"),
        5..=8 => (5, "5 to 8 on one"),
        _ => (9, "9 and more on one"),
    };
    [(shared.0, shared.1.to_owned()), (head_dims.max(), format!("head_dim {head_dims}"))]
}
