//! The roofline plot: attainable speed over FLOP per byte, with the position of the kernel.

use super::measurement::{Measurement, ratio};
use anyhow::Result;
use plotters::prelude::*;

/// A limit of the GPU, as a line in double logarithmic axes.
struct Roof {
    label: String,
    points: [(f64, f64); 2],
}

/// Content of the plot.
struct Picture {
    x: (f64, f64),
    y: (f64, f64),
    roofs: Vec<Roof>,
    /// Speed of the kernel over its FLOP per byte, for each memory.
    marks: Vec<(&'static str, (f64, f64))>,
}

/// The plot as SVG; `None` without a time or without any ceiling.
pub fn svg(measurement: &Measurement) -> Result<Option<String>> {
    let Some(picture) = picture(measurement) else { return Ok(None) };
    let mut svg = String::new();
    draw(measurement, &picture, &mut svg)?;
    Ok(Some(svg))
}

fn picture(measurement: &Measurement) -> Option<Picture> {
    let Measurement { launch, ceilings, .. } = measurement;
    let speed = measurement.flop_rate()?;
    let exps = ceilings.exp.and_then(|rate| ratio(rate * launch.flops, Some(launch.exps)));
    let flat = [("tensor cores", ceilings.matmul), ("exponentials", exps)]
        .into_iter()
        .filter_map(|(name, rate)| Some((name, rate?)));
    let memories = [
        ("L2", ceilings.l2, measurement.l2_bytes()),
        ("device memory", ceilings.hbm, measurement.hbm_bytes()),
    ];
    let sloped = memories.into_iter().filter_map(|(name, rate, _)| Some((name, rate?)));
    let marks = memories
        .into_iter()
        .filter_map(|(name, _, bytes)| Some((name, (ratio(launch.flops, bytes)?, speed))));
    if flat.clone().count() + sloped.clone().count() == 0 {
        return None;
    }
    // Slopes end at the lowest flat roof; each is shown with its corner and one decade before it.
    let top = flat.clone().map(|(_, rate)| rate).reduce(f64::min).unwrap_or(speed).max(speed);
    let corners = sloped.clone().flat_map(|(_, rate)| [top / rate, top / rate / 10.0]);
    let x = decades(corners.chain(marks.clone().map(|(_, (x, _))| x)));
    let y = decades(flat.clone().map(|(_, rate)| rate).chain([speed, top, top / 10.0]));
    let across = flat.map(|(name, rate)| Roof {
        label: format!("{name}: {:.0} TFLOP/s", rate / 1e12),
        points: [(x.0, rate), (x.1, rate)],
    });
    let up = sloped.map(|(name, rate)| {
        let ends = [x.0.max(y.0 / rate), x.1.min(top / rate)];
        let label = format!("{name}: {:.2} TB/s", rate / 1e12);
        Roof { label, points: ends.map(|x| (x, x * rate)) }
    });
    Some(Picture { x, y, roofs: across.chain(up).collect(), marks: marks.collect() })
}

/// The smallest range of whole decades that contains all values.
fn decades(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let logs = values.map(f64::log10);
    let (low, high) =
        logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
    let low = low.floor();
    (10f64.powf(low), 10f64.powf(high.ceil().max(low + 1.0)))
}

fn draw(measurement: &Measurement, picture: &Picture, svg: &mut String) -> Result<()> {
    let Picture { x, y, roofs, marks } = picture;
    let Measurement { launch, gpu, ceilings, .. } = measurement;
    let root = SVGBackend::with_string(svg, (760, 500)).into_drawing_area();
    root.fill(&WHITE)?;
    let below = root.titled(&launch.symbol, ("sans-serif", 14))?;
    let title = format!("{} on {}; ceilings {}", launch.case, gpu.name, ceilings.origin);
    let mut chart = ChartBuilder::on(&below)
        .caption(title, ("sans-serif", 12))
        .margin(10)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d((x.0..x.1).log_scale(), (y.0 / 1e12..y.1 / 1e12).log_scale())?;
    chart.configure_mesh().x_desc("FLOP per byte").y_desc("TFLOP/s").draw()?;
    let place = |(x, y): (f64, f64)| (x, y / 1e12);
    for (at, roof) in roofs.iter().enumerate() {
        let colour = Palette99::pick(at).stroke_width(2);
        chart
            .draw_series(LineSeries::new(roof.points.map(place), colour))?
            .label(&roof.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour));
    }
    for (name, point) in marks {
        let dot = Circle::new((0, 0), 5, RED.filled());
        let words = Text::new(format!("by bytes of {name}"), (9, -5), ("sans-serif", 12));
        chart.draw_series([EmptyElement::at(place(*point)) + dot + words])?;
    }
    let legend = SeriesLabelPosition::LowerRight;
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::measurement::tests::sample, *};

    #[test]
    fn the_kernel_stands_within_the_frame_and_below_the_roof() {
        let measurement = sample();
        let Picture { x, y, roofs, marks } = picture(&measurement).unwrap();
        let roof_at = |roof: &Roof, at: f64| {
            let [(x, y), (_, end)] = roof.points;
            if y == end { y } else { y / x * at }
        };
        assert_eq!((roofs.len(), marks.len()), (3, 2));
        for ((_, (flop_per_byte, speed)), slope) in marks.iter().zip(&roofs[1..]) {
            assert!((x.0..=x.1).contains(flop_per_byte) && (y.0..=y.1).contains(speed));
            assert!(*speed <= roof_at(&roofs[0], 1.0) && *speed <= roof_at(slope, *flop_per_byte));
        }
        assert!(marks[0].1.0 < marks[1].1.0, "more FLOP per byte of device memory than of L2");
        let svg = svg(&measurement).unwrap().unwrap();
        assert_eq!((svg.matches("<circle").count(), svg.matches("TB/s").count()), (2, 2));
        assert!(svg.starts_with("<svg") && svg.contains("946 TFLOP/s"));
    }

    #[test]
    fn without_limits_there_is_no_picture() {
        let mut measurement = sample();
        measurement.ceilings = Default::default();
        assert_eq!(svg(&measurement).unwrap(), None);
        let mut measurement = sample();
        measurement.raw = Default::default();
        assert_eq!(svg(&measurement).unwrap(), None);
    }
}
