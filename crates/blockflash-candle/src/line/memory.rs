//! Tensors of candle as views, and results as storages of candle.

use super::candle_core::backend::BackendStorage;
use super::candle_core::op::BackpropOp;
use super::candle_core::{self, CpuStorage, Layout, Result, Storage, Tensor, bail};
use super::error::refused;
use super::held::{Reading, Scratch, Writing, unsupported};
use blockflash_ops::{
    AttentionDecodeWorkspace, DType, Device, E4M3, Element, Stream, View, ViewMut,
};
use half::{bf16, f16};
use std::any::Any;
use std::ops::Deref;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(feature = "cuda")]
use super::candle_core::CudaStorage;
#[cfg(feature = "cuda")]
use super::foreign::Fork;

/// Memory of a tensor that is locked while a call is queued.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Cpu(&'a CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(&'a CudaStorage),
}

impl<'a> Source<'a> {
    pub(crate) fn of(storage: &'a Storage) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self::Cpu(storage)),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => Ok(Self::Cuda(storage)),
            _ => no_kernels(&storage.device()),
        }
    }
}

/// A tensor of a call.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) what: &'static str,
    pub(crate) source: Source<'a>,
    pub(crate) layout: &'a Layout,
}

/// Memory of a tensor that is locked for a call that writes to it.
pub(crate) enum Target<'a> {
    Cpu(&'a mut CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(&'a mut CudaStorage),
}

impl Target<'_> {
    /// A copy of codes of 8 bits on the CPU, since candle's type of them cannot be viewed as that
    /// of this crate; nothing of other memory.
    pub(crate) fn codes(&self) -> Vec<E4M3> {
        match self {
            Self::Cpu(CpuStorage::F8E4M3(data)) => {
                data.iter().map(|code| E4M3(code.to_bits())).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Takes over what has changed in that copy.
    pub(crate) fn set_codes(&mut self, codes: &[E4M3]) {
        let Self::Cpu(CpuStorage::F8E4M3(data)) = self else { return };
        for (to, code) in data.iter_mut().zip(codes).filter(|(to, code)| to.to_bits() != code.0) {
            *to = candle_core::WithDType::from_f64(code.to_f32().into());
        }
    }
}

/// Where a call runs.
pub(crate) enum Place {
    Cpu(Stream),
    #[cfg(feature = "cuda")]
    Cuda(Fork),
}

impl Place {
    pub(crate) fn of_source(source: Source<'_>) -> Result<Self> {
        match source {
            Source::Cpu(_) => Self::cpu(),
            #[cfg(feature = "cuda")]
            Source::Cuda(storage) => Fork::new(&storage.device).map(Self::Cuda),
        }
    }

    pub(crate) fn of(device: &candle_core::Device) -> Result<Self> {
        match device {
            candle_core::Device::Cpu => Self::cpu(),
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(device) => Fork::new(device).map(Self::Cuda),
            _ => no_kernels(device),
        }
    }

    /// The device that computes.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Cpu(_) => Device::cpu(),
            #[cfg(feature = "cuda")]
            Self::Cuda(fork) => fork.device(),
        }
    }

    /// Whether calls become part of a graph instead of being run.
    pub(crate) fn is_captured(&self) -> bool {
        match self {
            Self::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            Self::Cuda(fork) => fork.is_captured(),
        }
    }

    /// Keeps what a captured call uses, but for candle's tensors, for the rest of the process: its
    /// graph may be launched at any time.
    pub(crate) fn keep<T: Send + Sync + 'static>(&self, what: &Arc<T>) {
        static KEPT: Mutex<Vec<Arc<dyn Any + Send + Sync>>> = Mutex::new(Vec::new());
        if !self.is_captured() {
            return;
        }
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if !kept.iter().any(|other| ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(what))) {
            kept.push(Arc::<T>::clone(what));
        }
    }

    fn cpu() -> Result<Self> {
        Device::cpu().stream().map(Self::Cpu).map_err(|error| refused(error.into()))
    }

    /// Queues work between what candle has queued by now and what it queues next.
    pub(crate) fn run<R>(
        &self,
        work: impl FnOnce(&Stream) -> blockflash_ops::Result<R>,
    ) -> Result<R> {
        match self {
            Self::Cpu(stream) => work(stream).map_err(refused),
            #[cfg(feature = "cuda")]
            Self::Cuda(fork) => fork.run(work),
        }
    }

    /// The view is for [`run`](Self::run) of this place.
    pub(crate) fn read<'a>(&'a self, operand: &Operand<'a>) -> Result<Reading<'a>> {
        let Operand { what, source, layout } = *operand;
        match source {
            Source::Cpu(storage) => {
                let view = match storage {
                    CpuStorage::F16(data) => strided(data, layout),
                    CpuStorage::BF16(data) => strided(data, layout),
                    CpuStorage::F32(data) => strided(data, layout),
                    CpuStorage::U8(data) => strided(data, layout),
                    CpuStorage::I32(data) => strided(data, layout),
                    CpuStorage::U32(data) => {
                        strided(bytemuck::cast_slice::<u32, i32>(data), layout)
                    }
                    _ => return unsupported(what, operand.dtype()),
                };
                let view =
                    view.map_err(|error| candle_core::Error::msg(format!("{what}: {error}")));
                Ok(Reading {
                    view: view?,
                    #[cfg(feature = "cuda")]
                    _in_use: None,
                })
            }
            #[cfg(feature = "cuda")]
            Source::Cuda(storage) => match self {
                Self::Cuda(fork) => fork.read(what, storage, layout),
                Self::Cpu(_) => bail!("{what} is on a GPU, but other tensors are on the CPU"),
            },
        }
    }

    /// [`read`](Self::read) of what may be codes of 8 bits. Those on the CPU are copied into
    /// `codes`, since candle's type of them cannot be viewed as that of this crate.
    pub(crate) fn read_cached<'a>(
        &'a self,
        operand: &Operand<'a>,
        codes: &'a mut Vec<E4M3>,
    ) -> Result<Reading<'a>> {
        let Operand { what, source: Source::Cpu(CpuStorage::F8E4M3(data)), layout } = *operand
        else {
            return self.read(operand);
        };
        let (dims, strides) = (layout.dims(), layout.stride());
        let wrong =
            |error: blockflash_ops::Error| candle_core::Error::msg(format!("{what}: {error}"));
        let span = blockflash_ops::Layout::strided(dims, strides)
            .map_err(|error| wrong(error.into()))?
            .span();
        let data = data.get(layout.start_offset()..).unwrap_or_default();
        codes.extend(data.iter().take(span).map(|code| E4M3(code.to_bits())));
        let view = View::from_slice_strided(codes, dims, strides);
        Ok(Reading {
            view: view.map_err(|error| wrong(error.into()))?,
            #[cfg(feature = "cuda")]
            _in_use: None,
        })
    }

    /// Memory for a result, which holds anything unless `zeroed`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn allocate(&self, dtype: DType, shape: &[usize], zeroed: bool) -> Result<Storage> {
        let elements = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size));
        let Some(elements) = elements else {
            bail!("a result has shape {shape:?}, expected fewer elements than can be counted");
        };
        match self {
            Self::Cpu(_) => Ok(Storage::Cpu(match dtype {
                DType::F16 => CpuStorage::F16(zeros(elements, f16::ZERO)?),
                DType::BF16 => CpuStorage::BF16(zeros(elements, bf16::ZERO)?),
                DType::F32 => CpuStorage::F32(zeros(elements, 0.0)?),
                DType::U8 => CpuStorage::U8(zeros(elements, 0)?),
                // All lines of candle have this type of indices.
                DType::I32 => CpuStorage::U32(zeros(elements, 0)?),
                dtype => bail!("a result is {dtype}, expected f16, bf16, f32, u8 or i32"),
            })),
            #[cfg(feature = "cuda")]
            Self::Cuda(fork) => fork.allocate(dtype, elements, zeroed).map(Storage::Cuda),
        }
    }

    /// Bytes that this place has allocated as memory of this crate, for [`run`](Self::run).
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn scratch<'a>(&'a self, storage: &'a mut Storage) -> Result<Scratch<'a>> {
        match (self, storage) {
            #[cfg(feature = "cuda")]
            (Self::Cuda(fork), Storage::Cuda(storage)) => fork.scratch(storage),
            _ => bail!("a workspace on the CPU"),
        }
    }

    /// [`run`](Self::run) with this many bytes of candle's memory, with none if that is 0.
    pub(crate) fn run_with_workspace(
        &self,
        bytes: usize,
        work: impl FnOnce(&Stream, Option<&AttentionDecodeWorkspace>) -> blockflash_ops::Result<()>,
    ) -> Result<()> {
        let mut memory =
            (bytes > 0).then(|| self.allocate(DType::U8, &[bytes], false)).transpose()?;
        let scratch = memory.as_mut().map(|of| self.scratch(of)).transpose()?;
        // The tensor goes with the work, the hold on candle's memory after it.
        let (tensor, _in_use) = scratch.map(|of| (of.tensor, of._in_use)).unzip();
        self.run(|stream| {
            let workspace = tensor.map(AttentionDecodeWorkspace::from_tensor).transpose()?;
            work(stream, workspace.as_ref())
        })
    }

    /// The view is for [`run`](Self::run) of this place, which has allocated the storage.
    pub(crate) fn write<'a>(
        &'a self,
        storage: &'a mut Storage,
        shape: &[usize],
    ) -> Result<Writing<'a>> {
        match storage {
            Storage::Cpu(storage) => {
                let view = match storage {
                    CpuStorage::F16(data) => ViewMut::from_slice(data, shape),
                    CpuStorage::BF16(data) => ViewMut::from_slice(data, shape),
                    CpuStorage::F32(data) => ViewMut::from_slice(data, shape),
                    CpuStorage::U8(data) => ViewMut::from_slice(data, shape),
                    CpuStorage::U32(data) => {
                        ViewMut::from_slice(bytemuck::cast_slice_mut::<u32, i32>(data), shape)
                    }
                    other => return unsupported("a result", other.dtype()),
                };
                Ok(Writing {
                    view: view.map_err(|error| refused(error.into()))?,
                    #[cfg(feature = "cuda")]
                    _in_use: None,
                })
            }
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => match self {
                Self::Cuda(fork) => fork.write(storage, shape),
                Self::Cpu(_) => bail!("a result on a GPU of a call on the CPU"),
            },
            _ => no_kernels(&storage.device()),
        }
    }

    /// The view of a tensor that exists, for [`run`](Self::run) of this place, with its
    /// [`codes`](Target::codes).
    pub(crate) fn write_to<'a>(
        &'a self,
        what: &'static str,
        target: &'a mut Target<'_>,
        layout: &Layout,
        codes: &'a mut [E4M3],
    ) -> Result<Writing<'a>> {
        let view = match target {
            Target::Cpu(CpuStorage::F16(data)) => strided_mut(data, layout),
            Target::Cpu(CpuStorage::BF16(data)) => strided_mut(data, layout),
            Target::Cpu(CpuStorage::F32(data)) => strided_mut(data, layout),
            Target::Cpu(CpuStorage::F8E4M3(_)) => strided_mut(codes, layout),
            Target::Cpu(other) => return unsupported(what, other.dtype()),
            #[cfg(feature = "cuda")]
            Target::Cuda(storage) => match self {
                Self::Cuda(fork) => return fork.write_to(what, storage, layout),
                Self::Cpu(_) => bail!("{what} is on a GPU, but other tensors are on the CPU"),
            },
        };
        Ok(Writing {
            view: view.map_err(|error| candle_core::Error::msg(format!("{what}: {error}")))?,
            #[cfg(feature = "cuda")]
            _in_use: None,
        })
    }
}

/// Tells memory of tensors apart: equal for views of one.
pub(crate) fn address_of(tensor: &Tensor) -> usize {
    ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

impl<'a> Operand<'a> {
    /// A tensor whose memory is locked by [`Tensor::storage_and_layout`].
    pub(crate) fn of(
        what: &'static str,
        locked: &'a (impl Deref<Target = Storage>, &Layout),
    ) -> Result<Self> {
        Ok(Self { what, source: Source::of(&locked.0)?, layout: locked.1 })
    }

    pub(crate) fn dtype(&self) -> candle_core::DType {
        match self.source {
            Source::Cpu(storage) => storage.dtype(),
            #[cfg(feature = "cuda")]
            Source::Cuda(storage) => storage.dtype(),
        }
    }
}

fn strided<'a, T: Element>(data: &'a [T], layout: &Layout) -> blockflash_ops::Result<View<'a>> {
    let data = data.get(layout.start_offset()..).unwrap_or_default();
    Ok(View::from_slice_strided(data, layout.dims(), layout.stride())?)
}

fn strided_mut<'a, T: Element>(
    data: &'a mut [T],
    layout: &Layout,
) -> blockflash_ops::Result<ViewMut<'a>> {
    let data = data.get_mut(layout.start_offset()..).unwrap_or_default();
    Ok(ViewMut::from_slice_strided(data, layout.dims(), layout.stride())?)
}

/// Memory of the host for a result; too much of it is an error in place of an abort.
fn zeros<T: Clone>(elements: usize, zero: T) -> Result<Vec<T>> {
    let mut data = Vec::new();
    if data.try_reserve_exact(elements).is_err() {
        let bytes = elements.saturating_mul(size_of::<T>());
        bail!("a result has {bytes} bytes, for which there is no memory");
    }
    data.resize(elements, zero);
    Ok(data)
}

/// The error for a device that is neither a CPU nor, with the feature `cuda`, an NVIDIA GPU.
fn no_kernels<T>(device: &candle_core::Device) -> Result<T> {
    let found = device.location();
    bail!(
        "a tensor is on {found:?}: blockflash runs on CPUs and, with its feature `cuda`, on NVIDIA \
         GPUs"
    )
}

/// The element type, if a result can have it.
pub(crate) fn dtype_of(what: &str, dtype: candle_core::DType) -> Result<DType> {
    match dtype {
        candle_core::DType::F16 => Ok(DType::F16),
        candle_core::DType::BF16 => Ok(DType::BF16),
        candle_core::DType::F32 => Ok(DType::F32),
        dtype => unsupported(what, dtype),
    }
}

/// A result of a call as a tensor without a gradient.
pub(crate) fn tensor(storage: Storage, shape: &[usize]) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}
