//! A chart of a run, as it is named and chosen.

use super::notes::day;
use super::runs::Run;
use crate::chart::{Chart, Panel};

/// Suffix of the file's name, chart, and how well it represents the suite: the first of the
/// greatest weight becomes the cover, 0 never does.
pub(super) type Sketch = (String, Chart, usize);

/// The unit of rates.
pub(super) const SPEED: &str = "TFLOP/s";

/// A chart of a run; of two columns if it has several panels.
pub(super) fn chart(
    run: &Run<'_>,
    title: String,
    about: &str,
    panels: Vec<Panel>,
    height: u32,
) -> Chart {
    let first = run.first();
    let subtitle = format!("{} · {} · commit {} · {about}", first.gpu, day(first), run.commits());
    Chart { title, subtitle, columns: panels.len().min(2), panels, panel_height: height }
}
