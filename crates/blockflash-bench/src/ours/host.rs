//! Host time of a call.

use crate::case::Operands;
use crate::error::Result;
use crate::timing::median;
use blockflash_ops::{Kernel, Stream};
use blockflash_safe::driver_time;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of calls that are timed one by one while the device works on them.
const CALLS: usize = 200;
/// Limit of the device time of these calls, which reduces their number.
const DEVICE_US: f64 = 50e3;

/// Median host time of a call in microseconds, from validation to launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostCost {
    /// Every call validates and finds its plan.
    pub us: Option<f64>,
    /// The call was prepared; only where it can be.
    pub prepared_us: Option<f64>,
    /// The part of these calls that the driver takes for launches: of prepared calls where there
    /// are such.
    pub driver_us: Option<f64>,
    /// A launch of a graph that holds one call.
    pub graph_us: Option<f64>,
}

/// Times calls of the selected kernel, whose launch takes `launch_us` on the device.
pub(super) fn cost(
    operands: &mut dyn Operands,
    stream: &Stream,
    launch_us: f64,
) -> Result<HostCost> {
    let calls = ((DEVICE_US / launch_us.max(1.0)) as usize).clamp(10, CALLS);
    // Median in microseconds of what a call says about its time.
    let times = |call: &mut dyn FnMut() -> Result<Duration>| {
        stream.synchronize()?;
        let mut times = Vec::with_capacity(calls);
        for _ in 0..calls {
            times.push(call()?.as_secs_f64() * 1e6);
        }
        stream.synchronize()?;
        Ok::<_, crate::Error>(median(&mut times))
    };
    let can_prepare = operands.prepare(stream)?;
    let us = times(&mut || taken(|| Ok(operands.launch(None, stream)?)))?;
    let mut call = || -> Result<()> {
        match can_prepare {
            true => operands.launch_prepared(stream)?,
            false => operands.launch(None, stream)?,
        }
        Ok(())
    };
    let prepared_us = if can_prepare { times(&mut || taken(&mut call))? } else { None };
    let driver_us = times(&mut || {
        let (result, taken) = driver_time(&mut call);
        result.map(|()| taken)
    })?;
    let graph = stream.capture(|_| call())?;
    let graph_us = times(&mut || {
        // The driver would wait for the last launch of the same graph.
        stream.synchronize()?;
        taken(|| Ok(graph.launch(stream)?))
    })?;
    Ok(HostCost { us, prepared_us, driver_us, graph_us })
}

fn taken(call: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    call().map(|()| start.elapsed())
}

/// Microseconds that loading a kernel takes, unless this process has used it before.
pub(super) fn load(kernel: &Kernel, stream: &Stream) -> Result<Option<f64>> {
    static LOADED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if !loaded.insert(kernel.image_name()) {
        return Ok(None);
    }
    let taken = taken(|| Ok(stream.device().preload(kernel).map(drop)?))?;
    Ok(Some(taken.as_secs_f64() * 1e6))
}
