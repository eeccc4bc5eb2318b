use crate::mark::Mark;
use crate::{Device, Error, Result, Stream, lock::lock};
use std::sync::Mutex;
use std::time::Instant;

/// A mark in a stream: to wait for, to ask whether it has been reached, and to measure time between
/// two of them.
#[derive(Debug)]
pub struct Event {
    device: Device,
    timing: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Work on the CPU is done when its call returns, so a mark is a point in time.
    Cpu(Mutex<Option<Instant>>),
    Cuda {
        mark: Mark,
        /// The number of the capture that the mark was last recorded in. The lock is held while
        /// the event is recorded or waited for, so that this is true of the mark that is meant; it
        /// is taken before the lock of a stream.
        captured: Mutex<Option<u64>>,
    },
}

impl Event {
    /// An event that has not been recorded. With `timing` two of them measure time; without, they
    /// are cheaper.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &Device, timing: bool) -> Result<Event> {
        let kind = match device.context() {
            None => Kind::Cpu(Mutex::default()),
            Some(context) => {
                Kind::Cuda { mark: Mark::new(context, timing)?, captured: Mutex::default() }
            }
        };
        Ok(Event { device: *device, timing, kind })
    }

    /// Puts the mark behind everything queued on `stream` so far. Recording again moves the mark.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Cuda`].
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.expect(stream.device())?;
        match &self.kind {
            Kind::Cpu(instant) => *lock(instant) = Some(Instant::now()),
            Kind::Cuda { mark, captured } => {
                let mut captured = lock(captured);
                let Some(session) = stream.session()? else { return Ok(()) };
                mark.record(session.raw())?;
                *captured = session.capture_number();
            }
        }
        Ok(())
    }

    /// Waits until the mark is reached; at once when it was never recorded.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the first failure of the work before the mark.
    pub fn synchronize(&self) -> Result<()> {
        match &self.kind {
            Kind::Cpu(_) => Ok(()),
            Kind::Cuda { mark, .. } => mark.synchronize(),
        }
    }

    /// Whether the mark is reached; true when it was never recorded. Does not wait, so that a
    /// caller can give up on work that takes too long.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the first failure of the work before the mark.
    pub fn is_done(&self) -> Result<bool> {
        match &self.kind {
            Kind::Cpu(_) => Ok(true),
            Kind::Cuda { mark, .. } => mark.is_done(),
        }
    }

    /// Microseconds of device time from this mark to `end`. Waits for both. The resolution is about
    /// half a microsecond.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Event`] for an event that was not recorded or has no
    /// timing, [`Error::Cuda`].
    pub fn elapsed_us(&self, end: &Event) -> Result<f64> {
        self.device.expect(&end.device)?;
        if !self.timing || !end.timing {
            return Err(Error::Event { what: "was created without timing" });
        }
        match (&self.kind, &end.kind) {
            (Kind::Cuda { mark: first, .. }, Kind::Cuda { mark: last, .. }) => {
                first.synchronize()?;
                last.synchronize()?;
                Ok(f64::from(first.elapsed_ms(last)?) * 1e3)
            }
            (Kind::Cpu(first), Kind::Cpu(last)) => {
                // One after the other: they may be the same event.
                let first = *lock(first);
                let last = *lock(last);
                let (Some(first), Some(last)) = (first, last) else {
                    return Err(Error::Event { what: "has not been recorded" });
                };
                // The order may be reversed, as on the GPU.
                let forward = last.saturating_duration_since(first).as_secs_f64();
                Ok((forward - first.saturating_duration_since(last).as_secs_f64()) * 1e6)
            }
            _ => Err(Error::DeviceMismatch { expected: self.device, found: end.device }),
        }
    }
}

impl Stream {
    /// Lets later work on this stream wait for the event, which may be of another stream or device.
    /// On the CPU the calling thread waits.
    ///
    /// # Errors
    /// [`Error::InCapture`] when one of stream and event is part of a capture and the other is not,
    /// [`Error::Cuda`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        let Kind::Cuda { mark, captured } = &event.kind else { return Ok(()) };
        let captured = lock(captured);
        match self.session()? {
            Some(session) => session.wait(mark, *captured),
            None => mark.synchronize(),
        }
    }

    /// Lets later work on this stream wait for everything that is queued on `other` now.
    ///
    /// # Errors
    /// As [`wait`](Stream::wait).
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        if other.device().is_cpu() || self.is_same_queue(other) {
            return Ok(());
        }
        let event = Event::new(other.device(), false)?;
        event.record(other)?;
        self.wait(&event)
    }
}
