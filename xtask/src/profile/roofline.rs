//! The roofline as a picture: attainable speed over FLOP per byte, and where the kernel stands.

use super::page::Page;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 480.0;
/// Left, right, top and bottom edge of the plot.
const FRAME: [f64; 4] = [70.0, 740.0, 60.0, 430.0];

/// Both axes are logarithmic and span whole decades.
struct Axes {
    x: [i32; 2],
    y: [i32; 2],
}

impl Axes {
    /// Room for all of these points.
    fn around(points: &[[f64; 2]]) -> Self {
        let decades = |axis: usize| {
            let logs = points.iter().map(|point| point[axis].log10());
            let (low, high) =
                logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
            let low = low.floor() as i32;
            [low, (high.ceil() as i32).max(low + 1)]
        };
        Self { x: decades(0), y: decades(1) }
    }

    fn place(&self, point: [f64; 2]) -> [f64; 2] {
        let [left, right, top, bottom] = FRAME;
        let along = |value: f64, [low, high]: [i32; 2]| {
            (value.log10() - f64::from(low)) / f64::from(high - low)
        };
        [
            left + along(point[0], self.x) * (right - left),
            bottom - along(point[1], self.y) * (bottom - top),
        ]
    }
}

/// The picture as SVG; `None` without a time, or without any limit to hold it against.
pub fn svg(page: &Page) -> Option<String> {
    let figure = |key: &str| page.figures.get(key).copied().filter(|&value| value > 0.0);
    let speed = figure("flop_rate")?;
    let ceilings = &page.ceilings;
    let tensor = ceilings.matmul;
    let exps = (page.launch.exps > 0.0).then_some(ceilings.exp).flatten();
    let flat = [
        ("matrix units", tensor),
        ("exponentials", exps.map(|rate| rate * page.launch.flops / page.launch.exps)),
    ];
    let sloped = [
        ("L2", ceilings.l2, figure("per_l2_byte")),
        ("device memory", ceilings.hbm, figure("per_hbm_byte")),
    ];
    let marks: Vec<(&str, [f64; 2])> = sloped
        .iter()
        .filter_map(|(name, _, per_byte)| Some((*name, [(*per_byte)?, speed])))
        .collect();
    // Slopes end at the lowest flat roof.
    let top =
        flat.iter().filter_map(|(_, rate)| *rate).reduce(f64::min).unwrap_or(speed).max(speed);
    if flat.iter().all(|(_, rate)| rate.is_none())
        && sloped.iter().all(|(_, rate, _)| rate.is_none())
    {
        return None;
    }
    // Each slope is shown with its corner, where it meets the highest flat roof, and a decade
    // before it.
    let corners: Vec<[f64; 2]> =
        sloped.iter().filter_map(|(_, rate, _)| Some([top / (*rate)?, top])).collect();
    let mut room: Vec<[f64; 2]> =
        marks.iter().map(|(_, point)| *point).chain(corners.iter().copied()).collect();
    room.extend(corners.iter().map(|[x, y]| [x / 10.0, y / 10.0]));
    room.extend(flat.iter().filter_map(|(_, rate)| Some([marks.first()?.1[0], (*rate)?])));
    let axes = Axes::around(&room);
    let edge = |decade: i32| 10f64.powi(decade);

    let mut svg = frame(page, &axes);
    for (name, rate) in flat {
        let Some(rate) = rate else { continue };
        svg += &line(&axes, [edge(axes.x[0]), rate], [edge(axes.x[1]), rate], "#555");
        let [x, y] = axes.place([edge(axes.x[1]), rate]);
        svg += &text(x - 4.0, y - 5.0, "end", &format!("{name}: {:.0} TFLOP/s", rate / 1e12));
    }
    for (name, rate, _) in sloped {
        let Some(rate) = rate else { continue };
        let low = edge(axes.x[0]).max(edge(axes.y[0]) / rate);
        let high = edge(axes.x[1]).min(top / rate);
        svg += &line(&axes, [low, low * rate], [high, high * rate], "#06c");
        // L2 is the upper slope: its name stands above, the other one below.
        let shift = if name == "L2" { -7.0 } else { 16.0 };
        let ([x, y], [x2, y2]) = (axes.place([low, low * rate]), axes.place([high, high * rate]));
        let angle = (y2 - y).atan2(x2 - x).to_degrees();
        let words = text(16.0, shift, "start", &format!("{name}: {:.2} TB/s", rate / 1e12));
        svg += &format!(
            "<g transform=\"translate({x:.1} {y:.1}) rotate({angle:.1})\">{}</g>\n",
            words.trim_end()
        );
    }
    for (name, point) in &marks {
        let [x, y] = axes.place(*point);
        svg += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"#c30\"/>\n");
        let (beside, anchor) = if x < WIDTH / 2.0 { (x + 9.0, "start") } else { (x - 9.0, "end") };
        svg += &text(beside, y + 4.0, anchor, &format!("by bytes of {name}"));
    }
    Some(svg + "</svg>\n")
}

/// Title, axes and grid.
fn frame(page: &Page, axes: &Axes) -> String {
    let [left, right, top, bottom] = FRAME;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    svg += &text(left, 22.0, "start", &page.launch.symbol);
    svg += &text(
        left,
        40.0,
        "start",
        &format!("{} on {}; ceilings {}", page.launch.case, page.gpu, page.ceilings.origin),
    );
    for decade in axes.x[0]..=axes.x[1] {
        let value = 10f64.powi(decade);
        let [x, _] = axes.place([value, 1.0]);
        svg += &format!("<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#ddd\"/>\n");
        svg += &text(x, bottom + 18.0, "middle", &tick(value));
    }
    for decade in axes.y[0]..=axes.y[1] {
        let value = 10f64.powi(decade);
        let [_, y] = axes.place([1.0, value]);
        svg += &format!("<path d=\"M{left} {y:.1}H{right}\" stroke=\"#ddd\"/>\n");
        svg += &text(left - 6.0, y + 4.0, "end", &tick(value / 1e12));
    }
    svg += &text((left + right) / 2.0, bottom + 40.0, "middle", "FLOP per byte");
    svg + &text(left - 6.0, top - 8.0, "end", "TFLOP/s")
}

fn tick(value: f64) -> String {
    let decimals = (-value.log10().round()).max(0.0) as usize;
    format!("{value:.decimals$}")
}

fn line(axes: &Axes, from: [f64; 2], to: [f64; 2], colour: &str) -> String {
    let ([x1, y1], [x2, y2]) = (axes.place(from), axes.place(to));
    format!(
        "<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" stroke=\"{colour}\" stroke-width=\"2\"/>\n"
    )
}

fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>\n")
}

#[cfg(test)]
mod tests {
    use super::super::page::tests::sample;
    use super::*;

    /// All numbers after `name="`.
    fn numbers(svg: &str, name: &str) -> Vec<f64> {
        let begin = format!(" {name}=\"");
        let parts = svg.split(&begin).skip(1);
        parts.filter_map(|part| part.split('"').next()?.parse().ok()).collect()
    }

    #[test]
    fn the_kernel_stands_within_the_frame_and_below_the_roof() {
        let page = sample();
        let svg = svg(&page).unwrap();
        let (xs, ys) = (numbers(&svg, "cx"), numbers(&svg, "cy"));
        assert_eq!((xs.len(), ys.len()), (2, 2));
        let [left, right, top, bottom] = FRAME;
        assert!(
            xs.iter().all(|x| (left..=right).contains(x))
                && ys.iter().all(|y| (top..=bottom).contains(y))
        );
        assert!(xs[0] < xs[1], "more FLOP per byte of device memory than per byte from L2");
        assert_eq!(svg.matches("TB/s").count(), 2);
        assert!(
            svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("946 TFLOP/s")
        );
    }

    #[test]
    fn without_limits_there_is_no_picture() {
        let mut page = sample();
        page.ceilings = Default::default();
        assert_eq!(svg(&page), None);
        let mut page = sample();
        page.figures.remove("flop_rate");
        assert_eq!(svg(&page), None);
    }

    #[test]
    fn ticks() {
        assert_eq!([tick(0.01), tick(1.0), tick(1000.0)], ["0.01", "1", "1000"]);
    }
}
