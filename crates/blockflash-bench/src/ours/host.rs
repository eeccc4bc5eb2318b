//! Host time of a call.

use crate::case::Operands;
use crate::error::Result;
use crate::timing::median;
use blockflash_ops::{Kernel, Stream};
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Number of calls that are timed one by one while the device works on them.
const CALLS: usize = 200;
/// Limit of the device time of these calls, which reduces their number.
const DEVICE_US: f64 = 50e3;

/// Median host time of a call in microseconds, from validation to launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostCost {
    /// Every call validates and selects anew.
    pub us: Option<f64>,
    /// The kernel was selected in advance; only where a call can be prepared.
    pub prepared_us: Option<f64>,
}

/// Times calls of the selected kernel, whose launch takes `launch_us` on the device.
pub(super) fn cost(
    operands: &mut dyn Operands,
    stream: &Stream,
    launch_us: f64,
) -> Result<HostCost> {
    let calls = ((DEVICE_US / launch_us.max(1.0)) as usize).clamp(10, CALLS);
    let can_prepare = operands.prepare(stream)?;
    let us = times(stream, calls, || operands.launch(None, stream))?;
    let prepared_us = match can_prepare {
        true => times(stream, calls, || operands.launch_prepared(stream))?,
        false => None,
    };
    Ok(HostCost { us, prepared_us })
}

fn times(
    stream: &Stream,
    calls: usize,
    mut call: impl FnMut() -> Result<()>,
) -> Result<Option<f64>> {
    stream.synchronize()?;
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    stream.synchronize()?;
    Ok(median(&mut times))
}

/// Microseconds that loading a kernel takes, unless this process has used it before.
pub(super) fn load(kernel: &Kernel, stream: &Stream) -> Result<Option<f64>> {
    static LOADED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if !loaded.get_or_insert_default().insert(kernel.image_name()) {
        return Ok(None);
    }
    let start = Instant::now();
    stream.device().preload(kernel)?;
    Ok(Some(start.elapsed().as_secs_f64() * 1e6))
}
