//! Block-sparse operations: speed over the density, with a panel for each block size.

use super::figure::{Axis, Figure, Line, Panel, length, plain};
use super::series::{
    ABOUT_SPEED, SPEED, Sketch, highest, implementations, legend, lines, subtitle,
};
use super::style;
use crate::case::{BlockSparseShape, BsrShape, Case, MaskKind, Pass, Pattern};
use crate::report::run::{Row, Run};
use crate::report::shape::is_cold;

/// Number of columns of the dense matrix whose figure represents the suite.
const USUAL_COLUMNS: usize = 1024;
/// Head dimension whose figure represents the suite.
const USUAL_HEAD_DIM: usize = 128;

type Product<'a, 'r> = (BsrShape, &'a Row<'r>);
type Attention<'a, 'r> = (BlockSparseShape, &'a Row<'r>);

/// A figure for each size of the matrices, and for each head dimension.
pub(super) fn sketches(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<Sketch> {
    let products = rows.iter().filter_map(|row| match row.case()? {
        Case::BsrMatmul(shape) => Some((shape, row)),
        _ => None,
    });
    let attention = rows.iter().filter_map(|row| {
        let case = row.case()?;
        let (shape, pass) = case.block_sparse_attention()?;
        Some((pass, (*shape, row)))
    });
    let products = grouped(products.collect(), |(shape, _)| [shape.m, shape.k, shape.n]);
    let attention = grouped(attention.collect(), |(pass, (shape, _))| (*pass, shape.head_dim));
    let mut sketches: Vec<_> =
        products.into_iter().filter_map(|cases| product(run, cases)).collect();
    sketches.extend(attention.into_iter().filter_map(|cases| {
        let pass = cases.first()?.0;
        sparse_attention(run, pass, cases.into_iter().map(|(_, case)| case).collect())
    }));
    sketches
}

/// Groups by key, in the order of the keys.
fn grouped<T, K: Ord>(mut all: Vec<T>, key: impl Fn(&T) -> K) -> Vec<Vec<T>> {
    all.sort_by_key(&key);
    let mut groups: Vec<Vec<T>> = Vec::new();
    for one in all {
        match groups.last_mut() {
            Some(group) if key(&group[0]) == key(&one) => group.push(one),
            _ => groups.push(vec![one]),
        }
    }
    groups
}

fn cold(row: &Row<'_>) -> &'static str {
    if is_cold(row.any) { ", cold caches" } else { "" }
}

/// Products of one size. `None` if no block size has several densities.
fn product(run: &Run<'_>, cases: Vec<Product<'_, '_>>) -> Option<Sketch> {
    let BsrShape { m, n, k, .. } = cases.first()?.0;
    let title = |(shape, row): &Product<'_, '_>| {
        let BsrShape { block_size, pattern, dtype, .. } = shape;
        format!("blocks of {block_size} × {block_size}, {pattern}, {dtype}{}", cold(row))
    };
    let mut blocks = grouped(cases, |case| (case.0.block_size, title(case)));
    blocks.retain(|cases| cases.len() > 1);
    let shown: Vec<_> = blocks.iter().flatten().map(|(_, row)| *row).collect();
    let implementations = implementations(&shown);
    let panel = |cases: &Vec<Product<'_, '_>>| {
        let mut densities: Vec<_> =
            cases.iter().map(|(shape, row)| (shape.density, *row)).collect();
        densities.sort_by(|a, b| a.0.total_cmp(&b.0));
        let points: Vec<_> =
            densities.iter().map(|&(density, row)| (density.log2(), row)).collect();
        let mut panel_lines: Vec<_> = limits(&points).into_iter().collect();
        panel_lines.extend(lines(&points, &implementations));
        let densities: Vec<_> = densities.iter().map(|&(density, _)| density).collect();
        Panel {
            title: title(&cases[0]),
            x: Axis::of_values("density (part of the blocks that is stored)", &densities),
            y: Axis::from_zero(SPEED, highest(panel_lines.iter())),
            lines: panel_lines,
            ..Panel::default()
        }
    };
    let panels: Vec<_> = blocks.iter().map(panel).collect();
    let figure = Figure {
        title: format!("Block-sparse matmul, {m} × {k} times {k} × {n}"),
        subtitle: subtitle(run, ABOUT_SPEED),
        legend: with_ceiling(legend(&implementations), &panels),
        columns: panels.len().min(2),
        panel_height: 250,
        y_labels: 54,
        panels,
    };
    let weight = if n == USUAL_COLUMNS { 3 } else { 2 };
    (!blocks.is_empty()).then(|| Sketch { name: format!("m{m}_k{k}_n{n}"), figure, weight })
}

/// Lengths and densities form no grid, so cases stand side by side; cases of one length that differ
/// in nothing else are joined by lines.
fn sparse_attention(run: &Run<'_>, pass: Pass, cases: Vec<Attention<'_, '_>>) -> Option<Sketch> {
    let head_dim = cases.first()?.0.head_dim;
    let title = |(shape, row): &Attention<'_, '_>| {
        let BlockSparseShape { block_q, block_kv, dtype, .. } = shape;
        format!("blocks of {block_q} × {block_kv}, {dtype}{}", cold(row))
    };
    let shown: Vec<_> = cases.iter().map(|(_, row)| *row).collect();
    let implementations = implementations(&shown);
    let largest_first =
        |(shape, _): &Attention<'_, '_>| std::cmp::Reverse([shape.block_q, shape.block_kv]);
    let panel = |cases: Vec<Attention<'_, '_>>| {
        let mut panel = Panel { title: title(&cases[0]), ..Panel::default() };
        let mut at = 0.0;
        for mut alike in grouped(cases, |(shape, _)| (variant(shape), shape.seqlen_kv)) {
            alike.sort_by(|(a, _), (b, _)| b.density.total_cmp(&a.density));
            let points: Vec<_> = alike
                .iter()
                .enumerate()
                .map(|(index, (_, row))| (at + index as f64, *row))
                .collect();
            panel.lines.extend(limits(&points).map(widened));
            panel.lines.extend(dense(&points).map(widened));
            panel.lines.extend(lines(&points, &implementations));
            let ticks = points.iter().zip(&alike);
            panel.x.ticks.extend(ticks.map(|((x, _), (shape, _))| (*x, plain(shape.density))));
            let last = points.len() as f64 - 1.0;
            let label = format!("{} {}", length(alike[0].0.seqlen_kv), variant(&alike[0].0));
            panel.x_groups.push((at + last / 2.0, label.trim_end().to_owned()));
            // Leaves a gap between groups.
            at += last + 1.6;
        }
        (panel.x.low, panel.x.high) = (-0.8, at - 0.8);
        panel.x.label = "density, then the sequence length and special properties".to_owned();
        panel.y = Axis::from_zero(SPEED, highest(panel.lines.iter()));
        panel
    };
    let panels: Vec<_> =
        grouped(cases, |case| (largest_first(case), title(case))).into_iter().map(panel).collect();
    let mut legend = legend(&implementations);
    if panels.iter().flat_map(|panel| &panel.lines).any(|line| line.style == style::DENSE) {
        legend.push(("blockflash, dense".to_owned(), style::DENSE));
    }
    let figure = Figure {
        title: format!("Block-sparse attention {pass}, head_dim {head_dim}"),
        subtitle: subtitle(run, ABOUT_SPEED),
        legend: with_ceiling(legend, &panels),
        columns: 1,
        panel_height: 270,
        y_labels: 54,
        panels,
    };
    let weight = if head_dim == USUAL_HEAD_DIM { 3 } else { 2 };
    Some(Sketch { name: format!("d{head_dim}"), figure, weight })
}

/// A short label of the properties that differ from most cases; empty for lists of equal length for
/// each head without a causal mask.
fn variant(shape: &BlockSparseShape) -> String {
    let BlockSparseShape { pattern, mask, num_heads_q, num_heads_kv, mask_heads, .. } = *shape;
    let mut parts = Vec::new();
    parts.extend((mask != MaskKind::Full).then(|| mask.to_string()));
    parts.extend((pattern != Pattern::Uniform).then(|| pattern.to_string()));
    parts.extend((num_heads_kv != num_heads_q).then(|| format!("{num_heads_q} on {num_heads_kv}")));
    parts.extend(
        (![num_heads_q, num_heads_kv].contains(&mask_heads)).then(|| "one list".to_owned()),
    );
    parts.join(" ")
}

/// Our attention without a block mask, case by case; `None` if it was not measured.
fn dense(points: &[(f64, &Row<'_>)]) -> Option<Line> {
    let points: Option<Vec<_>> =
        points.iter().map(|(x, row)| Some((*x, row.dense?.tflops?))).collect();
    points.map(|points| Line { points, style: style::DENSE, joined: true })
}

/// The ceiling that binds, case by case; `None` if it is unknown.
fn limits(points: &[(f64, &Row<'_>)]) -> Option<Line> {
    let limit = |&(x, row): &(f64, &Row<'_>)| {
        let records = row.ours.iter().chain(&row.peers);
        let us = records.filter_map(|record| record.ceiling_us).reduce(f64::min)?;
        Some((x, row.any.flops / us * 1e-6))
    };
    let points: Option<Vec<_>> = points.iter().map(limit).collect();
    points.map(|points| Line { points, style: style::CEILING, joined: true })
}

/// Widens a single point to a visible line.
fn widened(mut line: Line) -> Line {
    if let (Some(&(left, first)), Some(&(right, last))) = (line.points.first(), line.points.last())
    {
        line.points.insert(0, (left - 0.4, first));
        line.points.push((right + 0.4, last));
    }
    line
}

fn with_ceiling(
    mut legend: Vec<(String, style::Style)>,
    panels: &[Panel],
) -> Vec<(String, style::Style)> {
    if panels.iter().flat_map(|panel| &panel.lines).any(|line| line.style == style::CEILING) {
        legend.push(("binding ceiling".to_owned(), style::CEILING));
    }
    legend
}
