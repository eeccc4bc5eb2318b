//! Attention to a cache: bytes per second over the size of the cache, with a panel for each group
//! of cases. Points of caches of equal sizes, which differ in lengths, are not joined.

use super::figure::{Axis, Figure, Line, Note, Panel, Side};
use super::series::{Sketch, highest, implementations, legend, subtitle};
use super::style;
use crate::case::DecodeShape;
use crate::record::OURS;
use crate::report::rate;
use crate::report::run::{Row, Run, groups, range};

/// Fewer sizes make no line.
const FEWEST: usize = 3;

/// `None` without enough cases of attention to a cache.
pub(super) fn sketch(run: &Run<'_>, rows: &[Row<'_>]) -> Option<Sketch> {
    let limit = run.rates.rate("hbm_read").map(|rate| rate * 1e-12);
    let (mut panels, mut drawn) = (Vec::new(), Vec::new());
    for (title, rows) in groups(rows) {
        let mut points: Vec<_> =
            rows.iter().filter_map(|row| Some((megabytes(&row.decode()?), *row))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some((least, most)) = range(points.iter().map(|&(x, _)| x)) else { continue };
        if points.len() < FEWEST {
            continue;
        }
        let label = "MB of keys and values (logarithmic)";
        let mut panel =
            Panel { title, x: Axis::decades(label, least / 1.5, most * 1.5), ..Panel::default() };
        if let Some(limit) = limit {
            let points = vec![(panel.x.low, limit), (panel.x.high, limit)];
            panel.lines.push(Line { points, style: style::CEILING, joined: true });
            let (at, text) = ((panel.x.high, limit), format!("memory {limit:.2}"));
            panel.notes.push(Note { at, text, side: Side::AboveLeft, bold: false });
        }
        panel.lines.extend(lines(&points));
        drawn.extend(points.into_iter().map(|(_, row)| row));
        panels.push(panel);
    }
    let most = highest(panels.iter().flat_map(|panel| &panel.lines));
    panels.iter_mut().for_each(|panel| panel.y = Axis::from_zero("TB/s", most));
    let mut legend = legend(&implementations(&drawn));
    legend.extend(limit.map(|_| ("reading device memory".to_owned(), style::CEILING)));
    (!panels.is_empty()).then(|| Sketch {
        name: "bandwidth".to_owned(),
        figure: Figure {
            title: "Attention to a cache of keys and values".to_owned(),
            subtitle: subtitle(run, "TB/s, higher is better"),
            legend,
            columns: panels.len().min(2),
            panels,
            panel_height: 260,
            y_labels: 48,
        },
        weight: 3,
    })
}

fn megabytes(shape: &DecodeShape) -> f64 {
    shape.cache_bytes() as f64 * 1e-6
}

fn lines(points: &[(f64, &Row<'_>)]) -> Vec<Line> {
    let joined = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
    let rows: Vec<_> = points.iter().map(|&(_, row)| row).collect();
    let line = |(name, style)| {
        let point = |&(x, row): &(f64, &Row<'_>)| {
            let record = if name == OURS { row.best() } else { row.peer(name) };
            Some((x.log10(), rate(record?)?))
        };
        Line { points: points.iter().filter_map(point).collect(), style, joined }
    };
    implementations(&rows).into_iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::report::run::newest;
    use crate::report::sample::record;

    #[test]
    fn groups_with_enough_sizes_have_a_panel() {
        let case = |batch, layout: &str| {
            format!("decode_b{batch}_q1_kv8192_h32kv8_d128_{layout}_full_bf16")
        };
        let of = |batch, layout, name, us| {
            let record = record(&case(batch, layout), name, Some(us));
            Record { op: "attention_decode".into(), bytes: f64::from(batch) * 33.6e6, ..record }
        };
        let mut records = vec![of(1, "page16", OURS, 10.0), of(8, "page16", OURS, 65.0)];
        for (batch, us) in [(64, 480.0), (1, 10.0), (8, 65.0)] {
            records.push(of(batch, "contiguous", OURS, us));
            records.push(of(batch, "contiguous", "fa3", us * 1.1));
        }
        let runs = newest(&records);
        let figure = sketch(&runs[0], &runs[0].rows()).unwrap().figure;
        let [panel] = &figure.panels[..] else { panic!("{} panels", figure.panels.len()) };
        assert_eq!(panel.title, "head_dim 128, 32 heads on 8, one query, contiguous");
        assert_eq!(panel.lines.len(), 2);
        let ours = &panel.lines[1].points;
        assert!((ours[0].1 - 3.36).abs() < 1e-9 && ours[0].0 < ours[1].0 && ours[1].0 < ours[2].0);
        assert!(panel.lines.iter().all(|line| line.joined));
        assert!(sketch(&runs[0], &runs[0].rows()[..2]).is_none());

        let twice = ["decode_b8_q1_kv1024_h32kv8_d128_contiguous_full_bf16".to_owned()];
        let short = twice.map(|case| {
            let record = record(&case, OURS, Some(9.0));
            Record { op: "attention_decode".into(), bytes: 33.6e6, ..record }
        });
        records.extend(short);
        let runs = newest(&records);
        let figure = sketch(&runs[0], &runs[0].rows()).unwrap().figure;
        assert!(figure.panels[0].lines.iter().all(|line| !line.joined));
    }
}
