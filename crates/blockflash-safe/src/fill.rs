use crate::driver::check;
use crate::stream::Kept;
use crate::{Error, Result, Stream, ViewMut};
use cudarc::driver::sys;

impl ViewMut<'_> {
    /// Sets every byte of the elements, for example to 0, or to poison an output before a test.
    /// Queued, not waited for.
    ///
    /// ```
    /// # use blockflash_safe::{Device, ViewMut};
    /// let stream = Device::cpu().stream()?;
    /// let mut ones = [1.0f32; 6];
    /// ViewMut::from_slice(&mut ones, &[2, 3])?.fill_bytes(&stream, 0)?;
    /// assert_eq!(ones, [0.0; 6]);
    /// # Ok::<(), blockflash_safe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Flatten`] if there are gaps between the elements, [`Error::DeviceMismatch`],
    /// [`Error::Cuda`].
    pub fn fill_bytes(&mut self, stream: &Stream, value: u8) -> Result<()> {
        stream.device().expect(self.device())?;
        let layout = *self.layout();
        if layout.span() != layout.elements() {
            let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
            return Err(Error::Flatten { start: 0, end: layout.rank(), shape, strides });
        }
        if let Some(bytes) = self.host_bytes() {
            bytes.fill(value);
            return Ok(());
        }
        let view = self.as_view();
        let bytes = layout.span() * view.dtype().size();
        let (Some(address), 1..) = (view.device_ptr(), bytes) else { return Ok(()) };
        if let Some(memory) = view.owner() {
            memory.prepare(stream)?;
        }
        let Some(mut session) = stream.session()? else { return Ok(()) };
        if let Some(memory) = view.owner() {
            session.keep(memory);
        }
        // SAFETY:
        // 1. The memory holds the span of the layout, which has no gaps, is borrowed exclusively,
        //    and was prepared for the stream.
        // 2. A graph that captures this keeps the memory alive.
        // 3. The stream lives and its context is current.
        let code = unsafe { sys::cuMemsetD8Async(address, value, bytes, session.raw()) };
        check("cuMemsetD8Async", code)
    }
}
