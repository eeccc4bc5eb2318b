//! Which rows are shipped: an image without a recorded GPU pass is not, and its row is on trial until then.

use crate::{Row, image::IMAGES_VARIABLE, manifest::all_rows};
use std::sync::LazyLock;

/// Sources whose rows are on trial. A family is released by taking its line out, `cargo xtask kernels`, and the record of its pass.
const ON_TRIAL: &[&str] = &[];

static RELEASED: LazyLock<Vec<Row>> = LazyLock::new(|| having(|row| !row.is_on_trial()));
static TRIAL: LazyLock<Vec<Row>> = LazyLock::new(|| having(Row::is_on_trial));

impl Row {
    /// Whether its image is not embedded, since no pass on a GPU is recorded for it yet.
    pub fn is_on_trial(&self) -> bool {
        ON_TRIAL.contains(&self.source())
    }
}

/// The rows to choose kernels from, the preferred targets first: [`released_rows`], and [`trial_rows`] among them in a process that
/// starts with [`IMAGES_VARIABLE`] set, since the folder that it names can hold images of kernels under development.
pub fn rows() -> &'static [Row] {
    // Asked once: selection happens at every launch.
    static HAS_FOLDER: LazyLock<bool> = LazyLock::new(|| std::env::var_os(IMAGES_VARIABLE).is_some());
    if *HAS_FOLDER { all_rows() } else { &RELEASED }
}

/// The rows that are shipped, whatever the environment says: each has a committed image, a line in `kernels.lock` and a recorded
/// GPU pass.
pub fn released_rows() -> &'static [Row] {
    &RELEASED
}

/// The rows that are compiled, checked and tested, but not shipped: no GPU pass is recorded for them yet.
pub fn trial_rows() -> &'static [Row] {
    &TRIAL
}

fn having(holds: impl Fn(&Row) -> bool) -> Vec<Row> {
    all_rows().iter().filter(|row| holds(row)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_released_or_on_trial() {
        assert!(!released_rows().is_empty() && released_rows().iter().all(|row| !row.is_on_trial()));
        assert!(trial_rows().iter().all(Row::is_on_trial));
        assert_eq!(released_rows().len() + trial_rows().len(), all_rows().len());
        let expected = if std::env::var_os(IMAGES_VARIABLE).is_some() { all_rows() } else { released_rows() };
        assert_eq!(rows(), expected);
    }

    #[test]
    fn what_is_on_trial_exists() {
        for source in ON_TRIAL {
            assert!(trial_rows().iter().any(|row| row.source() == *source), "no row has the source {source}");
        }
    }

    #[test]
    fn exactly_the_released_images_are_embedded() {
        let mut released: Vec<String> = released_rows().iter().map(Row::image_name).collect();
        released.sort();
        assert!(crate::image::names().eq(released));
    }
}
