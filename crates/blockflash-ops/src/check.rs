//! Checks that all operations share. Each error names the operand and states the requirement.

use crate::{Error, Result};
use blockflash_safe::{CudaProperties, Device, View, ViewMut};
use blockflash_sys::{DType, Kernel, Major};

/// The properties of a borrowed tensor, read-only or exclusive, that checks need.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) what: &'static str,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [usize],
    pub(crate) strides: &'a [usize],
    pub(crate) device: &'a Device,
}

impl<'a> Operand<'a> {
    #[inline]
    pub(crate) fn new(what: &'static str, view: &'a View<'_>) -> Self {
        let (dtype, shape, strides, device) =
            (view.dtype(), view.shape(), view.strides(), view.device());
        Self { what, dtype, shape, strides, device }
    }

    #[inline]
    pub(crate) fn of_mut(what: &'static str, view: &'a ViewMut<'_>) -> Self {
        let (dtype, shape, strides, device) =
            (view.dtype(), view.shape(), view.strides(), view.device());
        Self { what, dtype, shape, strides, device }
    }

    /// The element type must be one of `accepted`.
    #[inline]
    pub(crate) fn dtype_in(&self, accepted: &[DType]) -> Result<()> {
        if accepted.contains(&self.dtype) {
            return Ok(());
        }
        let expected = accepted.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ");
        Err(Error::DType { what: self.what, expected, found: self.dtype })
    }

    /// The shape must be exactly this.
    #[inline]
    pub(crate) fn shape_is(&self, expected: &[usize]) -> Result<()> {
        // Compares element by element: wide loads of a shape that was just written would wait for
        // the stores.
        let is = self.shape.iter().eq(expected);
        if is { Ok(()) } else { Err(self.wrong_shape(format!("{expected:?}"))) }
    }

    pub(crate) fn wrong_shape(&self, expected: impl Into<String>) -> Error {
        Error::Shape { what: self.what, expected: expected.into(), found: self.shape.to_vec() }
    }

    /// The innermost dimension must be contiguous, which it always is with one element.
    #[inline]
    pub(crate) fn last_dim_contiguous(&self) -> Result<()> {
        match (self.shape.last(), self.strides.last()) {
            (Some(&extent), Some(&stride)) if extent > 1 && stride != 1 => Err(Error::Stride {
                what: self.what,
                expected: "the last dimension must be contiguous (stride 1)",
                found: self.strides.to_vec(),
            }),
            _ => Ok(()),
        }
    }

    /// Whether the rows or the columns of a matrix are contiguous, and the stride from one to the
    /// next in elements. A single row or column has no next one: its own length, rounded up to a
    /// multiple of 8, stands in, which keeps it aligned if possible. Where both are contiguous the
    /// result is rows, unless the stride of rows is `worse` and the stride of columns is not.
    #[inline]
    pub(crate) fn lines(&self, worse: impl Fn(usize) -> bool) -> Result<(Major, usize)> {
        let stride = |along: usize, across: usize| {
            let contiguous = self.shape[along] <= 1 || self.strides[along] == 1;
            let own = self.shape[along].next_multiple_of(8);
            contiguous.then(|| if self.shape[across] > 1 { self.strides[across] } else { own })
        };
        match (stride(1, 0), stride(0, 1)) {
            (Some(row), Some(column)) if worse(row) && !worse(column) => {
                Ok((Major::Column, column))
            }
            (Some(row), _) => Ok((Major::Row, row)),
            (None, Some(column)) => Ok((Major::Column, column)),
            (None, None) => {
                let expected = "its rows or its columns must be contiguous (stride 1)";
                Err(Error::Stride { what: self.what, expected, found: self.strides.to_vec() })
            }
        }
    }

    /// The operand must live where the stream works.
    #[inline]
    pub(crate) fn on(&self, device: &Device) -> Result<()> {
        if self.device == device {
            return Ok(());
        }
        Err(Error::DeviceMismatch { what: self.what, expected: *device, found: *self.device })
    }
}

/// A size that crosses the kernel ABI as a 32-bit integer.
pub(crate) fn to_i32(what: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::TooLarge { what, value, limit: i32::MAX as usize })
}

/// A size or stride that crosses the kernel ABI as a 64-bit integer.
#[inline]
pub(crate) fn to_i64(what: &'static str, value: usize) -> Result<i64> {
    i64::try_from(value).map_err(|_| Error::TooLarge { what, value, limit: i64::MAX as usize })
}

/// Upper bound on the sizes that Hopper kernels and the kernels of the sampled product take: they
/// add a tile to a size in 32 bits.
const SIZE_LIMIT: usize = (1 << 31) - 1024;

/// The first of these sizes that such kernels do not take.
pub(crate) fn too_large([m, n, k]: [usize; 3]) -> Option<(&'static str, usize)> {
    [("m", m), ("n", n), ("k", k)].into_iter().find(|&(_, size)| size >= SIZE_LIMIT)
}

/// Describes the size that `too_large` finds.
pub(crate) fn size_refusal(mnk: [usize; 3]) -> String {
    let (what, size) = too_large(mnk).unwrap_or_default();
    format!("{what} is {size}, not below {SIZE_LIMIT}")
}

/// Whether a dimension of a tensor map can have this stride in elements: it must be positive and
/// less than 2^40 bytes.
pub(crate) fn is_tensor_map_stride(stride: usize, dtype: DType) -> bool {
    stride > 0 && stride < (1 << 40) / dtype.size()
}

/// A one-dimensional grid of CTAs; each factor is a number of tiles.
pub(crate) fn grid_x(factors: &[usize]) -> Result<u32> {
    let limit = i32::MAX as usize;
    let blocks = factors.iter().try_fold(1usize, |product, &factor| product.checked_mul(factor));
    match blocks {
        Some(blocks) if blocks <= limit => Ok(blocks as u32),
        blocks => Err(Error::TooLarge { what: "grid", value: blocks.unwrap_or(usize::MAX), limit }),
    }
}

/// A grid of persistent CTAs, which take tile after tile: one for each tile, and at most as many as
/// the GPU has room for. Each asks once for a tile past the last one, which the counter has to
/// count.
pub(crate) fn persistent_grid(tiles: usize, room: usize) -> Result<u32> {
    grid_x(&[tiles.saturating_add(2 * room)])?;
    grid_x(&[tiles.min(room)])
}

/// The grid of a kernel for this many tiles: persistent, if the kernel is.
pub(crate) fn grid_of(kernel: &Kernel, tiles: usize, gpu: &CudaProperties) -> Result<u32> {
    let family = kernel.family();
    if !family.is_persistent() {
        return grid_x(&[tiles]);
    }
    let room = gpu.multiprocessors.max(1).saturating_mul(family.blocks_per_multiprocessor());
    persistent_grid(tiles, room as usize)
}

/// Memory that kernels read 16 bytes at a time; on the CPU it may start anywhere.
pub(crate) fn aligned(what: &'static str, view: &View<'_>) -> Result<()> {
    if view.is_cpu() || view.is_aligned(16) {
        return Ok(());
    }
    let address = view.device_ptr().unwrap_or(0);
    let problem = format!("the address {address:#x} is not a multiple of 16");
    Err(Error::Misaligned { what, problem })
}

/// A product as a count of FLOPs, saturating. Only necessary work counts: masked pairs, blocks that
/// are not stored, padding and tile waste do not.
pub(crate) fn scaled(count: u64, factors: &[usize]) -> u64 {
    factors.iter().fold(count, |product, &factor| product.saturating_mul(factor as u64))
}

/// A factor that must be finite.
#[inline]
pub(crate) fn finite(what: &'static str, value: f32) -> Result<f32> {
    if value.is_finite() {
        // Without a sign of zero, so that calls that compare as equal have the same bits.
        Ok(value + 0.0)
    } else {
        Err(Error::InvalidScale { what, value, expected: "finite" })
    }
}

/// A factor that must be finite and greater than 0.
pub(crate) fn finite_positive(what: &'static str, value: f32) -> Result<f32> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(Error::InvalidScale { what, value, expected: "finite and greater than 0" })
}

/// A contiguous one-dimensional operand.
pub(crate) fn vector(
    what: &'static str,
    view: &View<'_>,
    dtype: DType,
    shape: &[usize],
) -> Result<()> {
    let operand = Operand::new(what, view);
    operand.dtype_in(&[dtype])?;
    operand.shape_is(shape)?;
    operand.last_dim_contiguous()
}

/// A contiguous operand of this type and shape.
#[inline]
pub(crate) fn contiguous(
    what: &'static str,
    view: &View<'_>,
    dtype: DType,
    shape: &[usize],
) -> Result<()> {
    let operand = Operand::new(what, view);
    operand.dtype_in(&[dtype])?;
    operand.shape_is(shape)?;
    if view.layout().is_contiguous() {
        return Ok(());
    }
    let expected = "it must be row-major without gaps";
    Err(Error::Stride { what, expected, found: view.strides().to_vec() })
}

/// An empty list with room for `count` elements; more than there is memory for is an error.
pub(crate) fn reserved<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match list.try_reserve_exact(count) {
        Ok(()) => Ok(list),
        Err(_) => Err(no_memory::<T>(count)),
    }
}

/// A list of this shape filled with a value; more than this machine has memory for is an error.
pub(crate) fn filled<T: Clone>(value: T, shape: &[usize]) -> Result<Vec<T>> {
    let count = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
    let count = count.unwrap_or(usize::MAX);
    let mut list = reserved(count)?;
    list.resize(count, value);
    Ok(list)
}

/// Appends copies of a value to a list; more than this machine has memory for is an error.
pub(crate) fn extend<T: Clone>(list: &mut Vec<T>, count: usize, value: T) -> Result<()> {
    let count = list.len().saturating_add(count);
    list.try_reserve(count - list.len()).map_err(|_| no_memory::<T>(count))?;
    list.resize(count, value);
    Ok(())
}

/// Appends to a list; more than this machine has memory for is an error.
pub(crate) fn append<T: Copy>(list: &mut Vec<T>, more: &[T]) -> Result<()> {
    let count = list.len().saturating_add(more.len());
    list.try_reserve(more.len()).map_err(|_| no_memory::<T>(count))?;
    list.extend_from_slice(more);
    Ok(())
}

fn no_memory<T>(count: usize) -> Error {
    blockflash_safe::Error::OutOfMemory { bytes: count.saturating_mul(size_of::<T>()) }.into()
}
