use crate::driver::check;
use crate::stream::Kept;
use crate::view::Source;
use crate::{Error, Layout, MAX_RANK, Result, Stream, Tensor, View, ViewMut};
use cudarc::driver::sys::{self, CUmemorytype};
use std::ptr;

/// The largest distance between rows that the driver takes, in bytes.
const MAX_PITCH: usize = i32::MAX as usize;

impl View<'_> {
    /// A contiguous copy of elements with any strides, on the same device. On a GPU it is queued on
    /// `stream` and not waited for; on the CPU any stream of the CPU will do.
    ///
    /// Rows that are contiguous in both are copied as a whole, many of them by one call of the
    /// driver, so permuted and sliced tensors are fast as long as their last dimension is
    /// contiguous. Where it is not, every element is a row, which is slow on a GPU.
    ///
    /// ```
    /// # use blockflash_safe::{Device, View};
    /// let stream = Device::cpu().stream()?;
    /// let matrix = View::from_slice(&[1, 2, 3, 4, 5, 6], &[2, 3])?;
    /// let transposed = matrix.permute(&[1, 0])?.to_tensor(&stream)?;
    /// assert_eq!(transposed.shape(), [3, 2]);
    /// assert_eq!(transposed.to_vec::<i32>(&stream)?, [1, 4, 2, 5, 3, 6]);
    /// # Ok::<(), blockflash_safe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`]; the errors of [`Tensor::empty`].
    pub fn to_tensor(&self, stream: &Stream) -> Result<Tensor> {
        self.device().expect(stream.device())?;
        let mut copy = Tensor::empty(stream, self.dtype(), self.shape())?;
        copy.view_mut().copy_from(self, stream)?;
        Ok(copy)
    }
}

impl ViewMut<'_> {
    /// Overwrites the elements with those of a tensor of the same shape and element type on the
    /// same device; both may have any strides. Queued, not waited for, and as fast as
    /// [`View::to_tensor`].
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::DeviceMismatch`], [`Error::Cuda`].
    pub fn copy_from(&mut self, source: &View<'_>, stream: &Stream) -> Result<()> {
        if self.shape() != source.shape() {
            let (expected, found) = (self.shape().to_vec(), source.shape().to_vec());
            return Err(Error::Shape { expected, found });
        }
        if self.dtype() != source.dtype() {
            return Err(Error::DType { expected: self.dtype(), found: source.dtype() });
        }
        stream.device().expect(self.device())?;
        stream.device().expect(source.device())?;
        if self.layout().is_empty() {
            return Ok(());
        }
        let size = self.dtype().size();
        let rows = Rows::between(source.layout(), self.layout(), size)?;
        match (source.source(), self.host_bytes()) {
            (Source::Host(from), Some(to)) => {
                for (start, end) in rows.starts() {
                    for row in 0..rows.count {
                        let [start, end] =
                            [start + row * rows.from_pitch, end + row * rows.to_pitch];
                        to[end * size..][..rows.width * size]
                            .copy_from_slice(&from[start * size..][..rows.width * size]);
                    }
                }
            }
            (Source::Cuda { ptr, owner }, None) => {
                let to = self.as_view();
                for memory in [owner, to.owner()].into_iter().flatten() {
                    memory.prepare(stream)?;
                }
                let Some(mut session) = stream.session()? else { return Ok(()) };
                [owner, to.owner()].into_iter().flatten().for_each(|memory| session.keep(memory));
                let address = to.device_ptr().unwrap_or(0);
                for (start, end) in rows.starts() {
                    let both = [ptr + (start * size) as u64, address + (end * size) as u64];
                    // SAFETY:
                    // 1. Prepared above; `keep` lets a graph hold both. The context is current.
                    // 2. The rows are inside the spans of the two layouts, which both memories
                    //    hold. They do not overlap: the target is borrowed exclusively.
                    unsafe { rows.queue(both, size, session.raw())? };
                }
            }
            // Both are on the device of the stream.
            _ => {}
        }
        Ok(())
    }
}

/// The elements of two layouts of one shape as rows that are contiguous in both: groups of `count`
/// rows that are a pitch apart. All numbers are in elements.
struct Rows {
    width: usize,
    count: usize,
    from_pitch: usize,
    to_pitch: usize,
    /// Start of each group.
    from: Layout,
    to: Layout,
}

impl Rows {
    /// For elements of `size` bytes.
    fn between(from: &Layout, to: &Layout, size: usize) -> Result<Rows> {
        // Size and both strides, the inner dimension first. Neighbouring dimensions that are in
        // both memories as one are merged.
        let mut dims: Vec<[usize; 3]> = Vec::with_capacity(MAX_RANK);
        let strides = from.strides().iter().zip(to.strides());
        for (&length, (&from, &to)) in from.shape().iter().zip(strides).rev() {
            match dims.last_mut() {
                _ if length == 1 => {}
                Some([inner, step, to_step])
                    if *step * *inner == from && *to_step * *inner == to =>
                {
                    *inner *= length;
                }
                _ => dims.push([length, from, to]),
            }
        }
        let width = match dims.first() {
            Some(&[length, 1, 1]) => {
                dims.remove(0);
                length
            }
            _ => 1,
        };
        let fits = |&(_, dim): &(usize, &[usize; 3])| {
            dim[1].min(dim[2]) >= width && dim[1].max(dim[2]) <= MAX_PITCH / size
        };
        let most = dims.iter().enumerate().filter(fits).max_by_key(|(_, dim)| dim[0]);
        let [count, from_pitch, to_pitch] = match most.map(|(at, _)| at) {
            Some(at) => dims.remove(at),
            None => [1, width, width],
        };
        let of = |which: usize| -> Vec<usize> { dims.iter().map(|dim| dim[which]).collect() };
        let [shape, from, to] = [of(0), of(1), of(2)];
        let (from, to) = (Layout::strided(&shape, &from)?, Layout::strided(&shape, &to)?);
        Ok(Rows { width, count, from_pitch, to_pitch, from, to })
    }

    /// The first element of each group in both memories.
    fn starts(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        self.from.offsets().zip(self.to.offsets())
    }

    /// Queues the copy of a group.
    ///
    /// # Safety
    /// Both memories are on the device of the stream, which lives and whose context is current, and
    /// were prepared for it. All rows are inside of them, and they are different allocations.
    unsafe fn queue(&self, [from, to]: [u64; 2], size: usize, stream: sys::CUstream) -> Result<()> {
        let width = self.width * size;
        if self.count == 1 {
            // SAFETY: the caller's promise.
            let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, width, stream) };
            return check("cuMemcpyDtoDAsync", code);
        }
        let device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: ptr::null(),
            srcDevice: from,
            srcArray: ptr::null_mut(),
            srcPitch: self.from_pitch * size,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: ptr::null_mut(),
            dstDevice: to,
            dstArray: ptr::null_mut(),
            dstPitch: self.to_pitch * size,
            WidthInBytes: width,
            Height: self.count,
        };
        // SAFETY: the caller's promise; the driver reads the description before it returns.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};

    /// All layouts that come of slicing, permuting and repeating `[2, 3, 4, 5]`.
    #[test]
    fn a_copy_is_what_reading_gives() {
        let stream = &Device::cpu().stream().unwrap();
        let data: Vec<i32> = (0..120).collect();
        let whole = View::from_slice(&data, &[2, 3, 4, 5]).unwrap();
        let mut groups = 0;
        for order in (0..256).map(|code| [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6]) {
            let Ok(view) = whole.permute(&order) else { continue };
            for (dim, most) in view.shape().to_vec().into_iter().enumerate() {
                for range in [0..most, 1..most, 1..2, 0..0] {
                    let part = view.slice(dim, range.clone()).unwrap();
                    let repeated = match part.shape()[dim] {
                        1 => part.expand(dim, 3).unwrap(),
                        _ => part,
                    };
                    let copy = repeated.to_tensor(stream).unwrap();
                    assert_eq!(copy.shape(), repeated.shape());
                    let expected = repeated.to_vec::<i32>(stream).unwrap();
                    assert_eq!(
                        copy.view().as_slice::<i32>().unwrap(),
                        expected,
                        "{order:?} {dim} {range:?}"
                    );
                    if !repeated.layout().is_empty() {
                        let to = copy.layout();
                        groups += Rows::between(repeated.layout(), to, 4).unwrap().starts().count();
                    }
                }
            }
        }
        assert!(groups < 24 * 16 * 20, "{groups} calls of the driver");
    }

    /// Every part of every permutation, into every other part of the same shape.
    #[test]
    fn a_copy_between_strided_tensors() {
        let stream = &Device::cpu().stream().unwrap();
        let data: Vec<i32> = (0..60).collect();
        let whole = View::from_slice(&data, &[3, 4, 5]).unwrap();
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        for from in orders {
            for (dim, to) in orders.into_iter().flat_map(|to| (0..3).map(move |dim| (dim, to))) {
                let source = whole.permute(&from).unwrap().slice(dim, 1..3).unwrap();
                // The target is in the middle of memory that is larger, in the order `to`.
                let mut shape = [0; 3];
                (0..3).for_each(|i| shape[to[i]] = source.shape()[i] + 2);
                let mut target = Tensor::zeros(stream, DType::I32, &shape).unwrap();
                let mut view = target.view_mut().permute(&to).unwrap();
                for i in 0..3 {
                    view = view.slice(i, 1..1 + source.shape()[i]).unwrap();
                }
                view.copy_from(&source, stream).unwrap();
                let expected = source.to_vec::<i32>(stream).unwrap();
                assert_eq!(view.as_view().to_vec::<i32>(stream).unwrap(), expected);
                let sum: i32 = target.to_vec::<i32>(stream).unwrap().iter().sum();
                assert_eq!(sum, expected.iter().sum::<i32>(), "{from:?} {dim} {to:?}");
            }
        }
        let mut target = Tensor::zeros(stream, DType::I32, &[3, 5, 4]).unwrap();
        let error = target.view_mut().copy_from(&whole, stream).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        let mut target = Tensor::zeros(stream, DType::F32, &[3, 4, 5]).unwrap();
        let error = target.view_mut().copy_from(&whole, stream).unwrap_err();
        assert!(matches!(error, Error::DType { .. }), "{error}");
    }

    #[test]
    fn the_fewest_calls() {
        let calls = |shape: &[usize], strides: &[usize], size| {
            let from = Layout::strided(shape, strides).unwrap();
            let rows = Rows::between(&from, &Layout::contiguous(shape).unwrap(), size).unwrap();
            (rows.starts().count(), rows.count, rows.width)
        };
        // Contiguous; a slice of rows; heads before the sequence; a transposed matrix; a scalar.
        assert_eq!(calls(&[2, 3, 4, 5], &[60, 20, 5, 1], 2), (1, 1, 120));
        assert_eq!(calls(&[4, 5, 6], &[64, 8, 1], 2), (4, 5, 6));
        assert_eq!(calls(&[2, 8, 100, 64], &[51200, 64, 512, 1], 2), (16, 100, 64));
        assert_eq!(calls(&[30, 7], &[1, 30], 4), (7, 30, 1));
        assert_eq!(calls(&[], &[], 4), (1, 1, 1));
        // One element for all; rows further apart than the driver takes.
        assert_eq!(calls(&[6], &[0], 4), (6, 1, 1));
        assert_eq!(calls(&[3, 2], &[1 << 30, 1], 4), (3, 1, 2));
        assert_eq!(calls(&[1 << 31, 2], &[2, 1], 4), (1, 1, 1 << 32));
    }

    #[test]
    fn a_view_without_elements_or_with_one() {
        let stream = &Device::cpu().stream().unwrap();
        let wild = View::from_slice_strided(&[0u8; 0], &[2, 0], &[usize::MAX, usize::MAX]).unwrap();
        assert_eq!(wild.to_tensor(stream).unwrap().shape(), [2, 0]);
        let none = Tensor::zeros(stream, DType::F16, &[3, 0, 2]).unwrap();
        assert_eq!(none.view().to_tensor(stream).unwrap().shape(), [3, 0, 2]);
        let one = View::from_slice(&[7u8], &[]).unwrap().to_tensor(stream).unwrap();
        assert_eq!(one.to_vec::<u8>(stream).unwrap(), [7]);
        assert!(matches!(one.to_vec::<f32>(stream), Err(Error::DType { .. })));
    }
}
