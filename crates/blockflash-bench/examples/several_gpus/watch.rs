//! A communicator that looks at the work of another one.

use blockflash_dist::{Communicator, Mark, Nccl, Result};
use blockflash_ops::{DType, Event, Stream, Tensor, View, ViewMut};
use std::cell::{Cell, RefCell};

/// What is done with exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They happen.
    Exchange,
    /// They happen, and their times are kept.
    Watch,
    /// They are left out: results are wrong, and the time is that of the computation.
    LeaveOut,
}

/// What a bar of a timeline is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Attention,
    Exchange,
}

struct Bar {
    kind: Kind,
    start: Event,
    end: Event,
}

/// Ranks with a GPU each, and what they do.
pub struct Watched {
    pub nccl: Nccl,
    mode: Cell<Mode>,
    bars: RefCell<Vec<Bar>>,
}

impl Watched {
    pub fn new(nccl: Nccl) -> Watched {
        Watched { nccl, mode: Cell::new(Mode::Exchange), bars: RefCell::default() }
    }

    /// Changes what is done with exchanges from here on; returns what was done before.
    pub fn set(&self, mode: Mode) -> Mode {
        self.mode.replace(mode)
    }

    /// The bars since the last call: beginning and end in microseconds after an event.
    ///
    /// # Errors
    /// The device's errors.
    pub fn bars(&self, base: &Event) -> Result<Vec<(Kind, [f64; 2])>> {
        let bars = self.bars.take();
        let times = |bar: &Bar| -> Result<_> {
            Ok([base.elapsed_us(&bar.start)?, base.elapsed_us(&bar.end)?])
        };
        bars.iter().map(|bar| Ok((bar.kind, times(bar)?))).collect()
    }

    fn event(&self, stream: &Stream) -> Result<Event> {
        let event = Event::new(stream.device(), true)?;
        event.record(stream)?;
        Ok(event)
    }
}

impl Communicator for Watched {
    fn rank(&self) -> usize {
        self.nccl.rank()
    }

    fn world(&self) -> usize {
        self.nccl.world()
    }

    fn stream(&self) -> &Stream {
        self.nccl.stream()
    }

    fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
    ) -> Result<()> {
        match self.mode.get() {
            Mode::LeaveOut => Ok(()),
            Mode::Exchange => self.nccl.exchange(sends, receives),
            Mode::Watch => {
                let start = self.event(self.stream())?;
                self.nccl.exchange(sends, receives)?;
                let end = self.event(self.stream())?;
                self.bars.borrow_mut().push(Bar { kind: Kind::Exchange, start, end });
                Ok(())
            }
        }
    }

    fn lends(&self) -> bool {
        self.nccl.lends()
    }

    fn reserve(&self, bytes: usize) -> Result<()> {
        self.nccl.reserve(bytes)
    }

    fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.nccl.tensor(dtype, shape)
    }

    fn wait(&self, stream: &Stream) -> Result<()> {
        self.nccl.wait(stream)
    }

    fn give_up(&self, why: &str) {
        self.nccl.give_up(why);
    }

    fn head_start(&self, stream: &Stream) -> Result<()> {
        match self.mode.get() {
            Mode::LeaveOut => Ok(()),
            Mode::Exchange | Mode::Watch => self.nccl.head_start(stream),
        }
    }

    fn mark(&self, mark: Mark, stream: &Stream) -> Result<()> {
        if self.mode.get() != Mode::Watch {
            return Ok(());
        }
        let now = self.event(stream)?;
        let mut bars = self.bars.borrow_mut();
        match mark {
            Mark::Begin(_) => {
                let end = Event::new(stream.device(), true)?;
                bars.push(Bar { kind: Kind::Attention, start: now, end });
            }
            Mark::End(_) => {
                let begun = bars.iter_mut().rev().find(|bar| bar.kind == Kind::Attention);
                if let Some(bar) = begun {
                    bar.end = now;
                }
            }
        }
        Ok(())
    }
}
