//! Lines of a record.

use super::Likeness;
use blockflash_sys::{Kernel, manifest};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::LazyLock;

/// What a line of `blockflash tune` says beyond a line of `blockflash bench`, in its field
/// `tuning`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Name of the image that was launched.
    pub image: String,
    /// Number of SMs of the GPU.
    pub multiprocessors: u32,
    /// Whether it is the kernel that is selected without a record.
    pub selected: bool,
    /// What was computed.
    pub problem: Likeness,
}

/// The fields of a line that count. It may have more.
#[derive(Deserialize)]
struct Fields {
    gpu: String,
    #[serde(default)]
    run: String,
    us: Option<f64>,
    #[serde(default)]
    verified: bool,
    tuning: Option<Measured>,
}

/// A measurement.
pub(super) struct Line {
    pub(super) gpu: String,
    pub(super) run: String,
    /// Microseconds of a launch; none if it failed or was wrong.
    pub(super) us: Option<f64>,
    pub(super) measured: Measured,
}

/// The lines of `blockflash tune`; those of `blockflash bench` are left out. An error names the
/// line.
pub(super) fn read_lines(text: &str) -> impl Iterator<Item = Result<Line, String>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.filter_map(|(index, line)| {
        read(line).map_err(|problem| format!("line {}: {problem}", index + 1)).transpose()
    })
}

fn read(line: &str) -> Result<Option<Line>, String> {
    let Fields { gpu, run, us, verified, tuning } =
        serde_json::from_str(line).map_err(|error| error.to_string())?;
    let Some(measured) = tuning else { return Ok(None) };
    if let Some(us) = us.filter(|us| !(us.is_finite() && *us > 0.0)) {
        return Err(format!("{us} µs is no time of a launch"));
    }
    if !measured.problem.is_valid() {
        return Err(format!("a size is not positive: {:?}", measured.problem));
    }
    Ok(Some(Line { gpu, run, us: us.filter(|_| verified), measured }))
}

/// The kernel with this image; `None` if this version has none.
pub(super) fn kernel(image: &str) -> Option<&'static Kernel> {
    static IMAGES: LazyLock<HashMap<String, &Kernel>> = LazyLock::new(|| {
        manifest::kernels().iter().map(|kernel| (kernel.image_name(), kernel)).collect()
    });
    IMAGES.get(image).copied()
}
