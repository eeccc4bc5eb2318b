//! Charts of suites: speed over lengths and densities, and bytes over the size of caches.

use super::compare::{ratios, roofline};
use super::drawn::is_drawn;
use super::runs::{Row, Run, grouped, groups, newest, range};
use super::sketch::{SPEED, Sketch, chart};
use super::tables::rate;
use crate::case::{AttentionShape, BlockLists, BsrShape, Case, MaskKind, Pass, Pattern};
use crate::chart::{
    Axis, CEILING, ChartError, DENSE, LIMIT, Line, Panel, Style, length, of as style_of, plain,
};
use crate::record::{OURS, Record};
use blockflash_ops::HeadDims;
use std::cmp::Reverse;

/// A chart and its file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plot {
    /// File name: the suite and the content of the chart.
    pub file: String,
    /// The suite.
    pub suite: String,
    /// Alternative text for readers who do not see the image.
    pub alt: String,
    /// Whether the chart represents its suite where only one is shown.
    pub cover: bool,
    /// The image.
    pub svg: String,
}

/// A product.
type Product<'a, 'r> = (BsrShape, &'a Row<'r>);
/// A case of attention.
type Shaped<'a, 'r> = (&'a AttentionShape, &'a Row<'r>);
/// Cases of attention, with a heading.
type Series<'a, 'r> = (String, Vec<Shaped<'a, 'r>>);
/// The same with its lists of blocks.
type Listed<'a, 'r> = (BlockLists, &'a AttentionShape, &'a Row<'r>);
/// A case at its place on the x axis.
type Point<'a, 'r> = (f64, &'a Row<'r>);

const ABOUT_SPEED: &str = "TFLOP/s by useful operations, higher is better";
/// Fewer points make no line.
const FEWEST: usize = 3;

/// Charts of the newest run of each suite. File names do not contain the GPU, so pass the records
/// of one GPU only.
///
/// # Errors
/// [`ChartError::Drawing`].
pub fn plots(records: &[Record]) -> Result<Vec<Plot>, ChartError> {
    let mut plots: Vec<Plot> = Vec::new();
    for run in newest(records) {
        let rows = run.rows();
        let mut sketches = Vec::new();
        // Drawn shapes form no lines.
        if !is_drawn(run.key().1) {
            sketches.extend(lengths(&run, &rows));
            sketches.extend(bandwidth(&run, &rows));
            sketches.extend(products(&run, &rows));
            sketches.extend(sparse_attention(&run, &rows));
        }
        sketches.extend(ratios(&run, &rows));
        sketches.extend(roofline(&run, &rows));
        let most = sketches.iter().map(|sketch| sketch.2).max().unwrap_or(0);
        let cover = sketches.iter().position(|sketch| most > 0 && sketch.2 == most);
        for (index, (name, chart, _)) in sketches.into_iter().enumerate() {
            let suite = run.key().1.to_owned();
            let mut file = format!("{suite}_{name}.svg");
            // Two operations of a suite may have the same head dimension.
            if plots.iter().any(|plot| plot.file == file) {
                file = format!("{suite}_{name}_{index}.svg");
            }
            let (cover, svg) = (cover == Some(index), chart.svg()?);
            plots.push(Plot { file, suite, alt: chart.title, cover, svg });
        }
    }
    Ok(plots)
}

/// A line per implementation: ours on top, then competitors, then references. `y` is in the unit of
/// the axis.
fn lines(points: &[Point<'_, '_>], y: fn(&Record) -> Option<f64>) -> Vec<Line> {
    let all = points.iter().flat_map(|(_, row)| row.peers.iter().copied());
    let mut names: Vec<(&str, bool)> = vec![(OURS, false)];
    let others = grouped(all, |peer| (peer.implementation.as_str(), peer.reference));
    names.extend(others.into_iter().map(|(name, _)| name));
    names.sort_by_key(|(_, reference)| *reference);
    let line = |(name, reference): (&str, bool)| {
        let point = |(x, row): &Point<'_, '_>| {
            Some((*x, y(row.record(name).filter(|record| record.us.is_some())?)?))
        };
        let points = points.iter().filter_map(point).collect();
        // A dense product runs at a higher rate than its useful part: it multiplies the zeros, too.
        let about = if reference { " (dense product, useful part)" } else { "" };
        let style = style_of(name, reference);
        Line { name: format!("{name}{about}"), points, style, apart: false }
    };
    names.into_iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

/// One scale for all panels, so that their heights can be compared.
fn same_height(panels: &mut [Panel], label: &str, at_least: f64) {
    let most = panels.iter().map(Panel::highest).fold(at_least, f64::max);
    panels.iter_mut().for_each(|panel| panel.y = Axis::from_zero(label, most));
}

/// Cases of attention of some kind, by pass and head dimension in their order.
fn attention<'a, 'r>(
    rows: &'a [Row<'r>],
    wanted: fn(&AttentionShape) -> bool,
) -> Vec<((Pass, HeadDims), Vec<Shaped<'a, 'r>>)> {
    let shaped = |row| Some((Row::case(row)?.attention()?, row));
    let shaped = rows.iter().filter_map(shaped).filter(|(shape, _)| wanted(shape));
    let mut kinds = grouped(shaped, |(shape, _)| (shape.pass, shape.head_dims));
    kinds.sort_by_key(|(kind, _)| *kind);
    kinds
}

/// Dense attention: speed over the sequence length. A chart per pass and head dimension, with a
/// panel for each series of cases that differ only in length.
fn lengths(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<Sketch> {
    // Dense runs that are measured beside block-sparse attention as its reference get no chart.
    if rows.iter().any(|row| row.dense.is_some()) {
        return Vec::new();
    }
    // Decoding has few queries for any number of keys, and belongs in another chart.
    let kinds = attention(rows, |shape| {
        shape.lists.is_none() && shape.lengths.is_none() && shape.seqlen_q == shape.seqlen_kv
    });
    let sketch = |((pass, head_dims), cases): ((Pass, HeadDims), Vec<Shaped<'_, '_>>)| {
        let series = series(cases);
        let (shape, row) = series.first()?.1[0];
        let panel = |(title, cases): &Series<'_, '_>| {
            let points: Vec<Point<'_, '_>> =
                cases.iter().map(|&(shape, row)| (shape.seqlen_q as f64, row)).collect();
            let x = Axis::log_at("sequence length", points.iter().map(|point| point.0));
            let lines = lines(&points, |record| record.tflops);
            Panel { title: title.clone(), x, lines, ..Panel::default() }
        };
        let mut panels: Vec<_> = series.iter().map(panel).collect();
        let limits = limits(run, shape, row);
        same_height(&mut panels, SPEED, limits.iter().map(|limit| limit.1).fold(0.0, f64::max));
        for panel in &mut panels {
            for &(name, limit, style) in &limits {
                panel.level(format!("{name} ceiling"), limit, style);
                panel.note(limit, format!("{name} {limit:.0}"));
            }
        }
        let title = format!("Attention {pass}, head_dim {head_dims}");
        // The head dimension of most models represents the suite.
        let weight = if head_dims == HeadDims::all(128) { 3 } else { 2 };
        Some((format!("d{head_dims}"), chart(run, title, ABOUT_SPEED, panels, 290), weight))
    };
    kinds.into_iter().filter_map(sketch).collect()
}

/// TFLOP/s at which matrix instructions or exponentials would limit these cases.
fn limits(run: &Run<'_>, shape: &AttentionShape, row: &Row<'_>) -> Vec<(&'static str, f64, Style)> {
    let matmul = run.matmul(shape.dtype).map(|rate| rate * 1e-12);
    let exp = run.rate("exp2").filter(|_| row.any.exps > 0.0);
    let exp = exp.map(|rate| rate * row.any.flops / row.any.exps * 1e-12);
    // A limit far above the other one is never reached and is not drawn.
    let exp = exp.filter(|exp| matmul.is_none_or(|matmul| *exp < matmul * 1.5));
    let limits = [matmul.map(|at| ("matmul", at, CEILING)), exp.map(|at| ("exp", at, LIMIT))];
    limits.into_iter().flatten().collect()
}

/// Cases that differ only in length, under the property that they share: the tokens of the batch,
/// or else the batch size.
fn series<'a, 'r>(mut left: Vec<Shaped<'a, 'r>>) -> Vec<Series<'a, 'r>> {
    let mut series = Vec::new();
    for by_tokens in [true, false] {
        let title = |(shape, row): &Shaped<'_, '_>| {
            let AttentionShape { batch, seqlen_q, num_heads_q: q, num_heads_kv: kv, .. } = **shape;
            let heads = if q == kv { format!("{q} heads") } else { format!("{q} heads on {kv}") };
            let extent = match by_tokens {
                true => format!("{} tokens", batch * seqlen_q),
                false => format!("batch {batch}"),
            };
            format!("{}, {heads}, {extent}, {}{}", shape.mask, shape.dtype, row.cold())
        };
        for (title, mut cases) in grouped(std::mem::take(&mut left), title) {
            cases.sort_by_key(|(shape, _)| shape.seqlen_q);
            match cases.len() >= FEWEST {
                true => series.push((title, cases)),
                false => left.extend(cases),
            }
        }
    }
    series
}

/// Attention to a cache: bytes per second over the size of the cache, with a panel for each group.
fn bandwidth(run: &Run<'_>, rows: &[Row<'_>]) -> Option<Sketch> {
    let limit = run.rate("hbm_read").map(|rate| rate * 1e-12);
    let mut panels = Vec::new();
    for (title, rows) in groups(rows) {
        let megabytes = |row: &Row<'_>| Some(row.decode()?.cache_bytes() as f64 * 1e-6);
        let mut points: Vec<_> =
            rows.iter().filter_map(|row| Some((megabytes(row)?, *row))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(ends) = range(points.iter().map(|&(x, _)| x)) else { continue };
        if points.len() < FEWEST {
            continue;
        }
        let x = Axis::log("MB of keys and values (logarithmic)", (ends.0 / 1.3, ends.1 * 1.3));
        let mut panel = Panel { title, x, lines: lines(&points, rate), ..Panel::default() };
        // Caches of equal size that differ in lengths are not joined.
        let apart = points.windows(2).any(|pair| pair[0].0 == pair[1].0);
        panel.lines.iter_mut().for_each(|line| line.apart = apart);
        if let Some(limit) = limit {
            panel.level("reading device memory", limit, CEILING);
            panel.note(limit, format!("memory {limit:.2}"));
        }
        panels.push(panel);
    }
    same_height(&mut panels, "TB/s", 0.0);
    let title = "Attention to a cache of keys and values".to_owned();
    let some = !panels.is_empty();
    let chart = chart(run, title, "TB/s, higher is better", panels, 260);
    some.then(|| ("bandwidth".to_owned(), chart, 3))
}

/// The ceiling that binds, case by case; `None` if it is unknown.
fn binding(points: &[Point<'_, '_>]) -> Option<Line> {
    let limit = |&(x, row): &Point<'_, '_>| {
        let records = row.ours.iter().chain(&row.peers);
        let us = records.filter_map(|record| record.ceiling_us).reduce(f64::min)?;
        Some((x, row.any.flops / us * 1e-6))
    };
    let points = points.iter().map(limit).collect::<Option<_>>()?;
    Some(Line { name: "binding ceiling".to_owned(), points, style: CEILING, apart: false })
}

/// Sparse products: speed over the density. A chart per size, with a panel for each block size.
fn products(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<Sketch> {
    let product = |row| match Row::case(row)? {
        Case::BsrMatmul(shape) => Some((*shape, row)),
        _ => None,
    };
    let mut sizes =
        grouped(rows.iter().filter_map(product), |(shape, _)| (shape.m, shape.k, shape.n));
    sizes.sort_by_key(|(size, _)| *size);
    let sketch = |((m, k, n), cases): ((usize, usize, usize), Vec<Product<'_, '_>>)| {
        let title = |(shape, row): &Product<'_, '_>| {
            let BsrShape { block_size, pattern, dtype, .. } = shape;
            let title = format!("blocks of {block_size} × {block_size}, {pattern}, {dtype}");
            (*block_size, title + row.cold())
        };
        let mut blocks = grouped(cases, title);
        blocks.retain(|(_, cases)| cases.len() > 1);
        blocks.sort_by(|a, b| a.0.cmp(&b.0));
        let panel = |((_, title), cases): ((usize, String), Vec<Product<'_, '_>>)| {
            let mut points: Vec<_> =
                cases.into_iter().map(|(shape, row)| (shape.density, row)).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let label = "density (part of the blocks that is stored)";
            let x = Axis::log_at(label, points.iter().map(|point| point.0));
            let mut panel = Panel { title, x, ..Panel::default() };
            panel.lines = lines(&points, |record| record.tflops);
            panel.lines.extend(binding(&points));
            panel.y = Axis::from_zero(SPEED, panel.highest());
            panel
        };
        let panels: Vec<_> = blocks.into_iter().map(panel).collect();
        let some = !panels.is_empty();
        let title = format!("Block-sparse matmul, {m} × {k} times {k} × {n}");
        let weight = if n == 1024 { 3 } else { 2 };
        let chart = chart(run, title, ABOUT_SPEED, panels, 250);
        some.then(|| (format!("m{m}_k{k}_n{n}"), chart, weight))
    };
    sizes.into_iter().filter_map(sketch).collect()
}

/// Attention with block masks. Lengths and densities form no grid, so cases are side by side;
/// those of one length that differ in nothing else are joined.
fn sparse_attention(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<Sketch> {
    let kinds = attention(rows, |shape| shape.lists.is_some());
    let sketch = |((pass, head_dims), cases): ((Pass, HeadDims), Vec<Shaped<'_, '_>>)| {
        let listed = |(shape, row)| Some((AttentionShape::block_sparse(shape)?.lists, shape, row));
        let cases = cases.into_iter().filter_map(listed);
        let title = |(lists, shape, row): &Listed<'_, '_>| {
            let (BlockLists { block_q, block_kv, .. }, dtype) = (lists, shape.dtype);
            let title = format!("blocks of {block_q} × {block_kv}, {dtype}{}", row.cold());
            (Reverse([*block_q, *block_kv]), title)
        };
        let mut blocks = grouped(cases, title);
        blocks.sort_by(|a, b| a.0.cmp(&b.0));
        let panels = blocks.into_iter().map(|((_, title), cases)| blocks_panel(title, cases));
        let title = format!("Block-sparse attention {pass}, head_dim {head_dims}");
        let mut chart = chart(run, title, ABOUT_SPEED, panels.collect(), 270);
        chart.columns = 1;
        (format!("d{head_dims}"), chart, if head_dims == HeadDims::all(128) { 3 } else { 2 })
    };
    kinds.into_iter().map(sketch).collect()
}

fn blocks_panel(title: String, cases: Vec<Listed<'_, '_>>) -> Panel {
    let mut panel = Panel { title, ..Panel::default() };
    let mut at = 0.0;
    let mut alike = grouped(cases, |(lists, shape, _)| (variant(lists, shape), shape.seqlen_kv));
    alike.sort_by(|a, b| a.0.cmp(&b.0));
    for ((variant, seqlen), mut cases) in alike {
        cases.sort_by(|a, b| b.0.density.total_cmp(&a.0.density));
        let points: Vec<_> =
            (0..).zip(&cases).map(|(i, case)| (at + f64::from(i), case.2)).collect();
        let last = points.len() as f64 - 1.0;
        let dense = |(x, row): &Point<'_, '_>| Some((*x, row.dense?.tflops?));
        let dense = points.iter().map(dense).collect::<Option<_>>().map(|points| Line {
            name: "blockflash, dense".to_owned(),
            points,
            style: DENSE,
            apart: false,
        });
        panel.lines.extend(lines(&points, |record| record.tflops));
        for mut level in dense.into_iter().chain(binding(&points)) {
            // A single point becomes a visible line.
            let [first, end] = [0, level.points.len() - 1].map(|at| level.points[at].1);
            level.points.insert(0, (at - 0.4, first));
            level.points.push((at + last + 0.4, end));
            panel.lines.push(level);
        }
        let ticks = points.iter().zip(&cases).map(|((x, _), case)| (*x, plain(case.0.density)));
        panel.x.ticks.extend(ticks);
        let label = format!("{} {variant}", length(seqlen));
        panel.x_groups.push((at + last / 2.0, label.trim_end().to_owned()));
        // Leaves a gap between groups.
        at += last + 1.6;
    }
    (panel.x.low, panel.x.high) = (-0.8, at - 0.8);
    panel.x.label = "density, then the sequence length and special properties".to_owned();
    panel.y = Axis::from_zero(SPEED, panel.highest());
    panel
}

/// The properties that differ from most cases; empty for lists of equal length for each head
/// without a causal mask.
fn variant(lists: &BlockLists, shape: &AttentionShape) -> String {
    let BlockLists { pattern, mask_heads, .. } = *lists;
    let AttentionShape { mask, num_heads_q: q, num_heads_kv: kv, .. } = *shape;
    let words = [
        (mask != MaskKind::Full).then(|| mask.to_string()),
        (pattern != Pattern::Uniform).then(|| pattern.to_string()),
        (kv != q).then(|| format!("{q} on {kv}")),
        (![q, kv].contains(&mask_heads)).then(|| "one list".to_owned()),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(" ")
}
