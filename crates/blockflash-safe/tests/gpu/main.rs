//! What only a GPU can show. Without one each test prints `SKIPPED (no GPU)` and passes, unless
//! `BLOCKFLASH_REQUIRE_GPU=1`.

mod foreign;
mod graphs;
mod kernels;
mod memory;
mod streams;

use blockflash_safe::{Device, cuda_status};
use std::io::Write;

/// The first usable GPU; `None` after saying that the test is skipped.
fn gpu(test: &str) -> Option<Device> {
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
fn required() -> bool {
    std::env::var("BLOCKFLASH_REQUIRE_GPU").is_ok_and(|value| value == "1")
}

/// A line that the test harness does not hide.
fn say(line: &str) {
    // Nothing is lost when stderr is closed.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// `count` different f32 values.
fn ramp(count: usize) -> Vec<f32> {
    (0..count).map(|value| value as f32).collect()
}
