use super::{LANES, Lanes};
use std::ops::{Deref, DerefMut};

/// Elements of a cache line.
const LINE: usize = 16;

/// Rows of f32 that begin at cache lines, as far as their length permits, so that no
/// vector is in two.
#[derive(Default)]
pub(crate) struct Buffer {
    values: Vec<f32>,
    first: usize,
    len: usize,
}

impl Buffer {
    /// Zeros.
    pub(crate) fn new(len: usize) -> Self {
        let values = vec![0.0f32; len + LINE - 1];
        let first = values.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE - 1);
        Self { values, first, len }
    }

    /// Makes room for `len` elements, whose values are arbitrary.
    pub(crate) fn reserve(&mut self, len: usize) {
        if len > self.len {
            *self = Self::new(len);
        }
    }

    /// As rows of panels.
    pub(crate) fn panels(&self) -> &[Lanes] {
        self.as_chunks::<LANES>().0
    }

    /// As rows of panels.
    pub(crate) fn panels_mut(&mut self) -> &mut [Lanes] {
        self.as_chunks_mut::<LANES>().0
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[self.first..][..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.first..][..self.len]
    }
}
