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
    /// All-gathers so far, also those that were left out.
    gathered: Cell<usize>,
}

impl Watched {
    pub fn new(nccl: Nccl) -> Watched {
        let (mode, bars) = (Cell::new(Mode::Exchange), RefCell::default());
        Watched { nccl, mode, bars, gathered: Cell::new(0) }
    }

    /// All-gathers since the last call.
    pub fn gathered(&self) -> usize {
        self.gathered.take()
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

    /// Runs an exchange, in the order of the communicator's stream, or leaves it out.
    fn exchanged(&self, exchange: impl FnOnce() -> Result<()>) -> Result<()> {
        match self.mode.get() {
            Mode::LeaveOut => Ok(()),
            Mode::Exchange => exchange(),
            Mode::Watch => {
                let start = self.event(self.stream())?;
                exchange()?;
                let end = self.event(self.stream())?;
                self.bars.borrow_mut().push(Bar { kind: Kind::Exchange, start, end });
                Ok(())
            }
        }
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
        self.exchanged(|| self.nccl.exchange(sends, receives))
    }

    fn gathers(&self) -> bool {
        self.nccl.gathers()
    }

    fn reserve_gather(&self, bytes: usize) -> Result<bool> {
        self.nccl.reserve_gather(bytes)
    }

    fn window(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.nccl.window(dtype, shape)
    }

    fn all_gather(&self, slots: ViewMut<'_>) -> Result<()> {
        self.gathered.set(self.gathered.get() + 1);
        self.exchanged(|| self.nccl.all_gather(slots))
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
