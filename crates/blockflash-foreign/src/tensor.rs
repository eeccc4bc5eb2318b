use crate::{Error, Result};
use blockflash_safe::{DType, Device, Footprint, Layout, MAX_RANK, Stream, Tensor, View, ViewMut};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// A tensor of another library, whose memory is somebody else's during `'a`. [`views`] gives access
/// to it.
///
/// ```
/// # use blockflash_foreign::{Described, Foreign, layout, views};
/// # use blockflash_safe::{DType, Device};
/// let mut kv = vec![0.0f32; 2 * 3 * 4];
/// let first = kv.as_mut_ptr();
/// // K and V of one buffer, `[token, 2, head_dim]`: they interleave, but share no element.
/// let part = |what, at: usize| Described {
///     address: first.wrapping_add(4 * at).expose_provenance(),
///     ..Described::new(what, Device::cpu(), DType::F32, layout(what, &[3, 4], &[8, 1]).unwrap())
/// };
/// // SAFETY: 1. Their layouts span elements of `kv`, which outlives the views. 2. There is no
/// // stream. 3. Nobody else uses `kv` meanwhile.
/// let [k, v] = [part("k", 0), part("v", 1)].map(|part| unsafe { Foreign::new(part) });
/// let error = views(([&Some(k)], []), [Some(v)]).unwrap_err();
/// // Views on the CPU are slices. On a GPU there is nothing to refuse.
/// assert_eq!(error.to_string(), "v is between elements of k");
/// ```
#[derive(Debug)]
pub struct Foreign<'a> {
    described: Described,
    /// Addresses from the first element to the end of the last one, gaps included.
    span: Range<usize>,
    memory: PhantomData<&'a ()>,
}

/// What a library says about a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Described {
    /// Names the operand in errors.
    pub what: &'static str,
    /// Where its memory is.
    pub device: Device,
    /// Element type.
    pub dtype: DType,
    /// Shape, and strides in elements: see [`layout`].
    pub layout: Layout,
    /// Of the first element; 0 for a tensor without memory.
    pub address: usize,
    /// The address of the `CUstream` on which the library works now; 0 on the CPU.
    pub stream: usize,
}

impl Described {
    /// A tensor without memory and stream.
    pub fn new(what: &'static str, device: Device, dtype: DType, layout: Layout) -> Self {
        Self { what, device, dtype, layout, address: 0, stream: 0 }
    }

    #[inline]
    fn footprint(&self) -> Footprint<'_> {
        Footprint { address: self.address, dtype: self.dtype, layout: &self.layout }
    }
}

/// The layout of an operand from signed sizes and strides, as most libraries have them.
///
/// # Errors
/// [`Error::Layout`]; [`Error::Operand`] for one that is larger than memory.
#[inline]
pub fn layout(what: &'static str, shape: &[i64], strides: &[i64]) -> Result<Layout> {
    let sizes = |numbers: &[i64]| {
        let mut sizes = [0; MAX_RANK];
        let fit = numbers.len() <= MAX_RANK && numbers.iter().all(|&number| number >= 0);
        sizes.iter_mut().zip(numbers).for_each(|(size, &number)| *size = number as usize);
        fit.then_some(sizes)
    };
    let (Some(sizes), Some(steps)) = (sizes(shape), sizes(strides)) else {
        return Err(Error::Layout { what, shape: shape.to_vec(), strides: strides.to_vec() });
    };
    Layout::strided(&sizes[..shape.len()], &steps[..strides.len()])
        .map_err(|source| Error::Operand { what, source })
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_DEFAULT_STREAM: usize = 2;

impl<'a> Foreign<'a> {
    /// # Safety
    /// 1. Unless the address is 0, the elements are memory of the device that stays valid for `'a`,
    ///    gaps between them included, and on a GPU until the work is done that is queued during
    ///    `'a`. Graphs that such work was captured into are launched only while it is valid.
    /// 2. The stream belongs to the device's primary context and lives for the rest of the process,
    ///    or longer than all that is made with [`stream`](Self::stream). What is captured from it
    ///    fulfils point 3 of [`Stream::from_raw`].
    /// 3. Others use the memory only as [`View::from_raw`] and, where it is written,
    ///    [`ViewMut::from_raw`] allow. Tensors that go into one call of [`views`] need not promise
    ///    this of each other, since the call checks them.
    #[inline]
    pub unsafe fn new(described: Described) -> Foreign<'a> {
        let span = described.footprint().span();
        Foreign { described, span, memory: PhantomData }
    }

    /// The same tensor with dimension `order[i]` in place `i`.
    ///
    /// # Errors
    /// [`Error::Operand`] for an order that is none of its dimensions.
    pub fn permute(mut self, order: &[usize]) -> Result<Foreign<'a>> {
        let Described { what, layout, .. } = self.described;
        let permuted = layout.permute(order);
        self.described.layout = permuted.map_err(|source| Error::Operand { what, source })?;
        Ok(self)
    }

    /// The same tensor for a shorter time, during which this value is not used.
    pub fn reborrow(&mut self) -> Foreign<'_> {
        Foreign { described: self.described, span: self.span.clone(), memory: PhantomData }
    }

    /// Shape, and strides in elements.
    pub fn layout(&self) -> &Layout {
        &self.described.layout
    }

    /// The device of the memory.
    pub fn device(&self) -> &Device {
        &self.described.device
    }

    /// The stream on which the library works, on the device of this tensor.
    ///
    /// # Errors
    /// [`Error::PerThreadStream`].
    #[inline]
    pub fn stream(&self) -> Result<Stream> {
        let Described { device, stream, .. } = self.described;
        if device.is_cpu() {
            return Ok(device.stream()?);
        }
        if stream == PER_THREAD_DEFAULT_STREAM {
            return Err(Error::PerThreadStream);
        }
        // SAFETY: 1. to 3. Point 2 of `new`; the per-thread default stream is refused above.
        Ok(unsafe { Stream::from_raw(&device, with_exposed_provenance_mut(stream)) }?)
    }

    /// The elements, for a call that writes no tensor. The view borrows this value, so safe code
    /// cannot have the memory written meanwhile by [`views`].
    ///
    /// # Errors
    /// [`Error::Operand`] for an address that is 0 or not aligned.
    #[inline]
    pub fn view(&self) -> Result<View<'_>> {
        self.read()
    }

    /// The same for the whole of `'a`.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn into_view(self) -> Result<View<'a>> {
        self.read()
    }

    #[inline]
    fn read(&self) -> Result<View<'a>> {
        let &Described { what, ref device, dtype, layout, address, .. } = &self.described;
        let pointer = with_exposed_provenance(address);
        // SAFETY: 1. and 2. Points 1 and 3 of `new`. No tensor of the call that is written has
        // memory of the elements, or on the CPU of their span (`views`), and while this view
        // exists, this value is borrowed or gone, so no later call writes to them either.
        let made = unsafe { View::from_raw(device, pointer, dtype, layout) };
        made.map_err(|source| Error::Operand { what, source })
    }

    /// `views` takes what is written by value, so it is called once.
    #[inline]
    fn view_mut(&self) -> Result<ViewMut<'a>> {
        let &Described { what, ref device, dtype, layout, address, .. } = &self.described;
        let pointer = with_exposed_provenance_mut(address);
        // SAFETY: 1. and 2. Points 1 and 3 of `new`. No other tensor of the call has memory of the
        // elements, or on the CPU of their span (`views`).
        let made = unsafe { ViewMut::from_raw(device, pointer, dtype, layout) };
        made.map_err(|source| Error::Operand { what, source })
    }

    /// The memory of a contiguous tensor as a workspace of work that is queued on this stream
    /// during `'a`.
    ///
    /// # Safety
    /// 1. The memory was allocated for one call alone: others use it before that and afterwards
    ///    only, in the order of the stream.
    /// 2. No work is queued with the workspace after `'a`.
    ///
    /// # Errors
    /// [`Error::Operand`] as for [`view`](Self::view).
    pub unsafe fn scratch(&self, stream: &Stream) -> Result<Tensor> {
        let &Described { what, dtype, ref layout, address, .. } = &self.described;
        let pointer = with_exposed_provenance_mut(address);
        // SAFETY: 1. The memory is valid for work that is queued during `'a` (point 1 of `new`),
        // and there is no other (point 2). 2. Point 1.
        let tensor = unsafe { Tensor::from_raw(stream, pointer, dtype, layout.shape(), ()) };
        tensor.map_err(|source| Error::Operand { what, source })
    }

    /// Refuses a tensor that is written if it shares memory with another one, or on the CPU is in
    /// the gaps of the other.
    #[inline]
    fn apart_from(&self, other: &Foreign<'_>) -> Result<()> {
        let (own, others) = (&self.span, &other.span);
        // Nearly always.
        if own.start.max(others.start) >= own.end.min(others.end) || self.device() != other.device()
        {
            return Ok(());
        }
        let (what, is_cpu) = (self.described.what, self.device().is_cpu());
        let overlap = self.described.footprint().overlaps(&other.described.footprint());
        let other = other.described.what;
        match (overlap, is_cpu) {
            (true, _) => Err(Error::SharedMemory { what, other }),
            (false, true) => Err(Error::Interleaved { what, other }),
            (false, false) => Ok(()),
        }
    }
}

/// Some tensors of a call, of which some may be missing.
pub type Operands<'a, const N: usize> = [Option<Foreign<'a>>; N];
/// The same where they are.
pub type Borrowed<'f, 'a, const N: usize> = [&'f Option<Foreign<'a>>; N];
/// The views of some tensors.
pub type Views<'a, const N: usize> = [Option<View<'a>>; N];
/// The views of some tensors that are written.
pub type ViewsMut<'a, const N: usize> = [Option<ViewMut<'a>>; N];

/// The views of one call: of the tensors that it reads, in two groups as they come, and of those
/// that it writes.
///
/// A tensor that is written must share no element with another one of the call, which is decided
/// exactly for all strides: see [`Footprint::overlaps`]. It is taken by value, and views of what is
/// read borrow it, so a tensor that is being read cannot be written by another call:
///
/// ```compile_fail
/// # use blockflash_foreign::{Foreign, Result, views};
/// fn wrong(x: Foreign<'_>) -> Result<()> {
///     let x = Some(x);
///     let ([read], [], []) = views(([&x], []), [])?;
///     let ([], [], [written]) = views(([], []), [x])?;
///     drop((read, written));
///     Ok(())
/// }
/// ```
///
/// # Errors
/// [`Error::SharedMemory`]; [`Error::Interleaved`] on the CPU; [`Error::Operand`] as for
/// [`Foreign::view`], and for a tensor that is written and has an element twice.
pub fn views<'f, 'a, const A: usize, const B: usize, const W: usize>(
    (first, second): (Borrowed<'f, 'a, A>, Borrowed<'f, 'a, B>),
    write: Operands<'a, W>,
) -> Result<(Views<'f, A>, Views<'f, B>, ViewsMut<'a, W>)> {
    for (at, written) in write.iter().enumerate() {
        let Some(written) = written else { continue };
        let read = first.iter().chain(&second).copied();
        for other in read.chain(&write[..at]).flatten() {
            written.apart_from(other)?;
        }
    }
    let mut made = [const { None }; W];
    for (view, foreign) in made.iter_mut().zip(&write) {
        *view = foreign.as_ref().map(Foreign::view_mut).transpose()?;
    }
    Ok((read(first)?, read(second)?, made))
}

/// The views of the tensors of a call that writes none.
fn read<'f, const N: usize>(operands: Borrowed<'f, '_, N>) -> Result<Views<'f, N>> {
    let mut views = [None; N];
    for (view, foreign) in views.iter_mut().zip(operands) {
        *view = foreign.as_ref().map(Foreign::view).transpose()?;
    }
    Ok(views)
}

#[cfg(test)]
#[path = "tensor_tests.rs"]
mod tests;
