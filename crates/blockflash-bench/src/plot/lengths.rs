//! Dense attention: speed over the sequence length, with a panel for each series of cases that
//! differ only in length.

use super::figure::{Axis, Figure, Line, Note, Panel, Side};
use super::series::{
    ABOUT_SPEED, SPEED, Sketch, highest, implementations, legend, lines, subtitle,
};
use super::style;
use crate::case::{AttentionShape, Pass};
use crate::report::run::{Row, Run};
use crate::report::shape::is_cold;

/// Fewer lengths make no line.
const FEWEST: usize = 3;
/// The head dimension of most models: its figure represents the suite.
const USUAL: usize = 128;

/// One figure per pass and head dimension.
pub(super) fn sketches(run: &Run<'_>, rows: &[Row<'_>]) -> Vec<Sketch> {
    // Dense runs that are measured beside block-sparse attention as its reference get no plot of
    // their own.
    if rows.iter().any(|row| row.dense.is_some()) {
        return Vec::new();
    }
    let dense: Vec<((AttentionShape, Pass), &Row<'_>)> =
        rows.iter().filter_map(|row| Some((dense(row)?, row))).collect();
    let kind = |&(shape, pass): &(AttentionShape, Pass)| (pass, shape.head_dim);
    let mut kinds: Vec<_> = dense.iter().map(|(case, _)| kind(case)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of = |wanted| {
        let cases = dense.iter().filter(|(case, _)| kind(case) == wanted);
        sketch(run, wanted, cases.map(|((shape, _), row)| (shape, *row)).collect())
    };
    kinds.into_iter().filter_map(of).collect()
}

fn dense(row: &Row<'_>) -> Option<(AttentionShape, Pass)> {
    let case = row.case()?;
    let (shape, pass) = case.dense_attention()?;
    // Decoding has few queries for any number of keys, and belongs in another plot.
    (shape.seqlen_q == shape.seqlen_kv).then_some((*shape, pass))
}

type Point<'a, 'r> = (&'a AttentionShape, &'a Row<'r>);

fn sketch(
    run: &Run<'_>,
    (pass, head_dim): (Pass, usize),
    cases: Vec<Point<'_, '_>>,
) -> Option<Sketch> {
    let all = series(cases);
    let rows: Vec<_> =
        all.iter().flat_map(|(_, cases)| cases.iter().map(|(_, row)| *row)).collect();
    let implementations = implementations(&rows);
    let mut panels: Vec<_> = all
        .iter()
        .map(|(title, cases)| {
            let lengths: Vec<_> = cases.iter().map(|(shape, _)| shape.seqlen_q as f64).collect();
            let points: Vec<_> = cases
                .iter()
                .zip(&lengths)
                .map(|((_, row), length)| (length.log2(), *row))
                .collect();
            Panel {
                title: title.clone(),
                x: Axis::of_values("sequence length", &lengths),
                lines: lines(&points, &implementations),
                ..Panel::default()
            }
        })
        .collect();
    let first = all.first()?.1[0];
    // One scale for all panels, so that their heights can be compared.
    let mut most = highest(panels.iter().flat_map(|panel| &panel.lines));
    let mut legend = legend(&implementations);
    for (name, limit, style) in limits(run, first) {
        most = most.max(limit);
        legend.push((format!("{name} ceiling"), style));
        for panel in &mut panels {
            let ends = vec![(panel.x.low, limit), (panel.x.high, limit)];
            panel.lines.insert(0, Line { points: ends, style, joined: true });
            let text = format!("{name} {limit:.0}");
            panel.notes.push(Note {
                at: (panel.x.high, limit),
                text,
                side: Side::AboveLeft,
                bold: false,
            });
        }
    }
    panels.iter_mut().for_each(|panel| panel.y = Axis::from_zero(SPEED, most));
    let figure = Figure {
        title: format!("Attention {pass}, head_dim {head_dim}"),
        subtitle: subtitle(run, ABOUT_SPEED),
        legend,
        columns: panels.len().min(2),
        panels,
        panel_height: 290,
        y_labels: 54,
    };
    Some(Sketch {
        name: format!("d{head_dim}"),
        figure,
        weight: if head_dim == USUAL { 3 } else { 2 },
    })
}

/// TFLOP/s at which matrix instructions or exponentials would limit these cases.
fn limits(run: &Run<'_>, (shape, row): Point<'_, '_>) -> Vec<(&'static str, f64, style::Style)> {
    let mut limits = Vec::new();
    let matmul = run.rates.matmul(shape.dtype).map(|rate| rate * 1e-12);
    limits.extend(matmul.map(|limit| ("matmul", limit, style::CEILING)));
    if let Some(rate) = run.rates.rate("exp2").filter(|_| row.any.exps > 0.0) {
        let limit = rate * row.any.flops / row.any.exps * 1e-12;
        // A limit far above the other one is never reached and is not drawn.
        if matmul.is_none_or(|matmul| limit < matmul * 1.5) {
            limits.push(("exp", limit, style::CEILING_OF_EXP));
        }
    }
    limits
}

/// Cases that differ only in length, grouped by the property they share: the tokens of the batch or
/// the batch size.
fn series<'a, 'r>(cases: Vec<Point<'a, 'r>>) -> Vec<(String, Vec<Point<'a, 'r>>)> {
    let same = |(a, row): Point<'_, '_>, (b, other): Point<'_, '_>| {
        (a.mask, a.dtype, a.num_heads_q, a.num_heads_kv)
            == (b.mask, b.dtype, b.num_heads_q, b.num_heads_kv)
            && is_cold(row.any) == is_cold(other.any)
    };
    let mut series: Vec<(String, Vec<Point<'_, '_>>)> = Vec::new();
    let mut left = cases;
    for by_tokens in [true, false] {
        let extent = |shape: &AttentionShape| {
            if by_tokens { shape.batch * shape.seqlen_q } else { shape.batch }
        };
        let mut rest = Vec::new();
        while let Some(&case) = left.first() {
            let alike =
                |other: &Point<'_, '_>| same(case, *other) && extent(case.0) == extent(other.0);
            let (mut taken, others): (Vec<_>, Vec<_>) = left.into_iter().partition(alike);
            left = others;
            taken.sort_by_key(|(shape, _)| shape.seqlen_q);
            match taken.len() >= FEWEST {
                true => series.push((title(case, by_tokens), taken)),
                false => rest.extend(taken),
            }
        }
        left = rest;
    }
    series
}

fn title((shape, row): Point<'_, '_>, by_tokens: bool) -> String {
    let heads = match shape.num_heads_kv {
        kv if kv == shape.num_heads_q => format!("{} heads", shape.num_heads_q),
        kv => format!("{} heads on {kv}", shape.num_heads_q),
    };
    let extent = match by_tokens {
        true => format!("{} tokens", shape.batch * shape.seqlen_q),
        false => format!("batch {}", shape.batch),
    };
    let cold = if is_cold(row.any) { ", cold caches" } else { "" };
    format!("{}, {heads}, {extent}, {}{cold}", shape.mask, shape.dtype)
}
