//! The debug switch that verifies what kernels read of offsets, lengths and tables.

use crate::Result;
use blockflash_safe::{Device, Error, Stream};
use std::sync::atomic::{AtomicU8, Ordering};

const VARIABLE: &str = "BLOCKFLASH_CHECK";

const UNREAD: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// The switch for the CPU and for GPUs. The variable is read once for each of them, at the first
/// call that has something to verify: reading it at each call would cost the host time, and race
/// with other code that sets variables.
static SWITCHES: [AtomicU8; 2] = [const { AtomicU8::new(UNREAD) }; 2];

/// Switches verification on or off for all later calls of the process, whatever the environment
/// says; it is off at the start unless the variable `BLOCKFLASH_CHECK` is `1`.
///
/// Kernels read the offsets of packed sequences, the lengths of a cache, its block table and lists
/// of pages on the device, and clamp what is wrong: nothing outside the tensors is touched, but
/// rows of the result are. While the switch is on, every call that has such data copies it to the
/// host first, which waits for the stream, and verifies it as
/// [`Operation::check`](crate::Operation::check) does. It is meant for debugging: a call costs tens
/// of microseconds more, and cannot be captured in a graph.
pub fn set_checks(on: bool) {
    let switch = if on { ON } else { OFF };
    SWITCHES.iter().for_each(|at| at.store(switch, Ordering::Relaxed));
}

/// Whether calls on this device verify their data: see [`set_checks`].
pub fn checks(device: &Device) -> bool {
    let switch = &SWITCHES[usize::from(!device.is_cpu())];
    match switch.load(Ordering::Relaxed) {
        UNREAD => {
            let found = if std::env::var_os(VARIABLE).is_some_and(|v| v == "1") { ON } else { OFF };
            // A switch that another thread has set meanwhile stays.
            let _ = switch.compare_exchange(UNREAD, found, Ordering::Relaxed, Ordering::Relaxed);
            switch.load(Ordering::Relaxed) == ON
        }
        switch => switch == ON,
    }
}

/// Refuses to verify during a capture: the host cannot read what the graph will.
pub(crate) fn outside_of_captures(stream: &Stream) -> Result<()> {
    if stream.is_capturing()? {
        let what = "verifying offsets, lengths and tables (BLOCKFLASH_CHECK)";
        return Err(Error::InCapture { what }.into());
    }
    Ok(())
}
