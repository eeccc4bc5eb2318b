//! Arrays that are stored as placements say, with NaN in every gap.

use super::{Placed, Placement};
use crate::io::Array;
use blockflash_ops::{Stream, Tensor, View};

/// A dense operand where an operation reads it: in place on the CPU if there is no gap, otherwise
/// in memory of the device.
#[derive(Debug)]
pub struct Dense {
    placed: Placed,
    stored: Option<Tensor>,
}

impl Dense {
    /// Stores an array on the stream's device, with NaN in every gap.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(
        host: &Array,
        placement: &Placement,
        stream: &Stream,
    ) -> blockflash_safe::Result<Self> {
        let placed = placement.place(host.shape());
        let in_place = stream.device().is_cpu() && placed.is_whole();
        let stored = if in_place { None } else { Some(placed.upload(host, stream)?) };
        Ok(Self { placed, stored })
    }

    /// Replaces the operand, whose memory on a device stays where it is; `host` has the shape of
    /// what was stored, and is read from now on.
    ///
    /// # Errors
    /// If the type or the shape is another one, or the device fails.
    pub fn refill(&mut self, host: &Array, stream: &Stream) -> blockflash_safe::Result<()> {
        match &mut self.stored {
            Some(stored) => host.placed(&self.placed).write(stored, stream),
            None => Ok(()),
        }
    }

    /// The operand; `host` is the array that was stored.
    ///
    /// # Errors
    /// If the array has more dimensions than a view can have.
    pub fn view<'a>(&'a self, host: &'a Array) -> blockflash_safe::Result<View<'a>> {
        match &self.stored {
            Some(stored) => self.placed.view(stored),
            None => host.view(),
        }
    }
}

impl Placed {
    /// The logical tensor on a device, with NaN in every gap.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn upload(&self, logical: &Array, stream: &Stream) -> blockflash_safe::Result<Tensor> {
        match self.is_whole() {
            true => logical.upload(stream),
            false => logical.placed(self).upload(stream),
        }
    }
}
