//! What all tests that need a GPU share.

use blockflash_safe::{Device, cuda_status};
use std::io::Write;

/// The first usable GPU; `None` after saying that the test is skipped.
pub(crate) fn gpu(test: &str) -> Option<Device> {
    let device = Device::best();
    if !device.is_cpu() {
        return Some(device);
    }
    let reason =
        cuda_status().map_or_else(|error| error.to_string(), |_| "all GPUs are too old".to_owned());
    assert!(!required(), "{test} needs a GPU: {reason}");
    say(&format!("SKIPPED (no GPU): {test}"));
    None
}

/// Whether a skip is a failure.
pub(crate) fn required() -> bool {
    std::env::var("BLOCKFLASH_REQUIRE_GPU").is_ok_and(|value| value == "1")
}

/// A line that the test harness does not hide.
pub(crate) fn say(line: &str) {
    // Nothing is lost when stderr is closed.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// `count` different f32 values.
pub(crate) fn ramp(count: usize) -> Vec<f32> {
    (0..count).map(|value| value as f32).collect()
}
