use crate::driver::check;
use crate::stream::Kept;
use crate::view::Source;
use crate::{Layout, MAX_RANK, Result, Stream, Tensor, View};
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
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch); the errors of [`Tensor::empty`].
    pub fn to_tensor(&self, stream: &Stream) -> Result<Tensor> {
        self.device().expect(stream.device())?;
        let size = self.dtype().size();
        let mut copy = Tensor::empty(stream, self.dtype(), self.shape())?;
        if self.layout().is_empty() {
            return Ok(copy);
        }
        let rows = Rows::of(self.layout(), size)?;
        let mut target = copy.view_mut();
        match (self.source(), target.host_bytes()) {
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
                let to = target.as_view();
                for memory in [owner, to.owner()].into_iter().flatten() {
                    memory.prepare(stream)?;
                }
                let Some(mut session) = stream.session()? else { return Ok(copy) };
                [owner, to.owner()].into_iter().flatten().for_each(|memory| session.keep(memory));
                let address = to.device_ptr().unwrap_or(0);
                for (start, end) in rows.starts() {
                    let both = [ptr + (start * size) as u64, address + (end * size) as u64];
                    // SAFETY:
                    // 1. Prepared above; `keep` lets a graph hold both. The context is current.
                    // 2. The rows lie inside the spans of the two layouts, which both memories
                    //    hold; the new one is used by nobody else.
                    unsafe { rows.queue(both, size, session.raw())? };
                }
            }
            // Both are on the device of the stream.
            _ => {}
        }
        Ok(copy)
    }
}

/// The elements of a layout as rows that are contiguous both there and in a contiguous copy: groups
/// of `count` rows that are a pitch apart. All numbers are in elements.
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
    /// For a layout with elements of `size` bytes.
    fn of(layout: &Layout, size: usize) -> Result<Rows> {
        // Size, stride, and stride in the copy, the inner dimension first. Neighbouring dimensions
        // that lie in memory as one are merged.
        let mut dims: Vec<[usize; 3]> = Vec::with_capacity(MAX_RANK);
        let mut to_stride = 1;
        for (&length, &stride) in layout.shape().iter().zip(layout.strides()).rev() {
            match dims.last_mut() {
                _ if length == 1 => {}
                Some([inner, step, _]) if *step * *inner == stride => *inner *= length,
                _ => dims.push([length, stride, to_stride]),
            }
            to_stride *= length;
        }
        let width = match dims.first() {
            Some(&[length, 1, _]) => {
                dims.remove(0);
                length
            }
            _ => 1,
        };
        let fits = |&(_, dim): &(usize, &[usize; 3])| {
            dim[1] >= width && dim[1].max(dim[2]) <= MAX_PITCH / size
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

    /// The first element of each group, in the layout and in the copy.
    fn starts(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        self.from.offsets().zip(self.to.offsets())
    }

    /// Queues the copy of a group.
    ///
    /// # Safety
    /// Both memories are on the device of the stream, which lives and whose context is current, and
    /// were prepared for it. All rows lie inside of them, and they are different allocations.
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
    use crate::{DType, Device, Error};

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
                        groups += Rows::of(repeated.layout(), 4).unwrap().starts().count();
                    }
                }
            }
        }
        assert!(groups < 24 * 16 * 20, "{groups} calls of the driver");
    }

    #[test]
    fn the_fewest_calls() {
        let calls = |shape: &[usize], strides: &[usize], size| {
            let rows = Rows::of(&Layout::strided(shape, strides).unwrap(), size).unwrap();
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
