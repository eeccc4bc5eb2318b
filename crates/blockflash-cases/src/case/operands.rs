//! Our implementation of a case: its memory, its launches and the verification of its results.

use crate::error::{Error, Result};
use crate::io::Array;
use crate::random;
use blockflash_ops::{CudaProperties, DType, Kernel, Stream, Tensor, View};
use blockflash_oracle::Comparison;
use std::fmt::Debug;

/// A tensor as a report names it: name, shape and element type.
pub type TensorInfo = (&'static str, Vec<usize>, DType);

/// Is told the fraction of a long computation that is done.
pub type Progress<'a> = &'a (dyn Fn(f64) + Sync);

/// Inputs and outputs on a device: all that a suite and the command need of an operation.
pub trait Operands: Debug {
    /// The tensors to report.
    fn inputs(&self) -> Vec<TensorInfo> {
        Vec::new()
    }
    /// The options to report, in words.
    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        Ok(Vec::new())
    }
    /// Useful floating-point operations of a launch.
    fn flops(&mut self) -> Result<f64> {
        Ok(0.0)
    }
    /// Whether there is nothing to compute, so that no kernel runs.
    fn is_empty(&mut self) -> Result<bool> {
        Ok(false)
    }
    /// Selects the kernel as the library does on this GPU.
    fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel>;
    /// Whether this kernel computes the operands on this GPU.
    fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool>;
    /// Launches the given kernel, or the selected one.
    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()>;
    /// Output tensors that the given kernel, or the selected one, writes, and their names; none
    /// where the library lends them for reading only.
    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        Vec::new()
    }
    /// Compares results with the oracle, in their order. `progress` is told the fraction that is
    /// done.
    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>>;

    /// The outputs in host memory, as files hold them and [`compare`](Self::compare) takes them.
    fn results(
        &mut self,
        kernel: Option<&Kernel>,
        stream: &Stream,
    ) -> Result<Vec<(&'static str, Array)>> {
        downloaded(self.outputs(kernel), stream)
    }

    /// Selects the kernel for [`launch_prepared`](Self::launch_prepared). Returns false if the
    /// kernel was already chosen when the memory was allocated.
    fn prepare(&mut self, _stream: &Stream) -> Result<bool> {
        Ok(false)
    }

    /// Launches the kernel that [`prepare`](Self::prepare) has selected.
    fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
        self.launch(None, stream)
    }

    /// Makes enough copies of what a launch reads that an L2 cache does not hold them; launches
    /// take them in turn.
    fn rotate(&mut self, _stream: &Stream) -> Result<()> {
        let message = "launches take copies in turn only of a cache of keys and values";
        Err(Error::Option(message.to_owned()))
    }

    /// Whether allocating the memory already loaded the kernel: its load time is unknown then.
    fn is_loaded(&self) -> bool {
        false
    }

    /// Makes the outputs what they are before a launch: NaN, unless the launch reads them.
    fn reset(&mut self, kernel: Option<&Kernel>, stream: &Stream) -> Result<()> {
        for (_, output) in self.outputs(kernel) {
            output.fill_bytes(stream, 0xFF)?;
        }
        Ok(())
    }

    /// Launches once into outputs full of NaN: the given kernel, or the selected one. Every element
    /// must be written, and a sample is compared with the oracle. Returns the verdict and the
    /// relative error.
    fn verify(
        &mut self,
        kernel: Option<&'static Kernel>,
        stream: &Stream,
        seed: u64,
    ) -> Result<(bool, f64)> {
        self.reset(kernel, stream)?;
        self.launch(kernel, stream)?;
        let results = self.results(kernel, stream)?.into_iter().map(|(_, array)| array);
        let results: Vec<_> = results.collect();
        let complete = !results.iter().any(Array::has_nan);
        let comparisons = self.compare(&results, seed, &|_| ())?;
        let right = !comparisons.is_empty() && comparisons.iter().all(Comparison::passed);
        Ok((complete && right, comparisons.first().map_or(f64::NAN, |output| output.relative)))
    }
}

/// Outputs in host memory.
pub(super) fn downloaded(
    outputs: Vec<(&'static str, &mut Tensor)>,
    stream: &Stream,
) -> Result<Vec<(&'static str, Array)>> {
    let download = |(name, tensor): (_, &mut Tensor)| Ok((name, Array::download(tensor, stream)?));
    outputs.into_iter().map(download).collect()
}

/// The methods of [`Operands`] that follow from `problem`, `call` (the call of the library with the
/// outputs that a kernel, or the selected one, writes) and the field `prepared`, for the
/// module of an operation and its function that says what a kernel computes; and perhaps a method
/// that queues what comes before each call.
macro_rules! launched {
    ($operation:ident::$accepts:ident $(, $before:ident)?) => {
        fn is_empty(&mut self) -> Result<bool> {
            Ok(self.problem(None)?.is_empty())
        }

        fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel> {
            Ok($operation::select(&self.problem(None)?, gpu)?)
        }

        fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool> {
            Ok($operation::$accepts(kernel, &self.problem(Some(kernel))?, gpu).is_ok())
        }

        fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
            $(self.$before(stream)?;)?
            let (call, out) = self.call(kernel)?;
            Ok(match kernel {
                None => call.run(out, stream)?,
                Some(kernel) => call.run_with(kernel, out, stream)?,
            })
        }

        fn prepare(&mut self, stream: &Stream) -> Result<bool> {
            let (call, out) = self.call(None)?;
            let prepared = call.prepare(&out, stream)?;
            self.prepared = Some(prepared);
            Ok(true)
        }

        fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
            let Some(prepared) = self.prepared else { return self.launch(None, stream) };
            $(self.$before(stream)?;)?
            let (call, out) = self.call(None)?;
            Ok(call.run_prepared(&prepared, out, stream)?)
        }
    };
}
pub(super) use launched;

/// An input where the operation reads it: in place on the CPU, copied on a GPU.
#[derive(Debug)]
pub(super) struct Placed {
    host: Array,
    device: Option<Tensor>,
}

impl Placed {
    /// Copies the array to the stream's device unless that is the CPU.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub(super) fn new(host: Array, stream: &Stream) -> Result<Self> {
        let on_cpu = stream.device().is_cpu();
        let device = if on_cpu { None } else { Some(host.upload(stream)?) };
        Ok(Self { host, device })
    }

    /// An array that is only compared with.
    pub(super) fn on_host(host: Array) -> Self {
        Self { host, device: None }
    }

    /// An array with the tensor that stands for it.
    pub(super) fn with(device: Tensor, host: Array) -> Self {
        Self { host, device: Some(device) }
    }

    /// A copy of the tensor that the operation reads.
    pub(super) fn copy(&self, stream: &Stream) -> Result<Tensor> {
        Ok(match &self.device {
            Some(tensor) => tensor.copy_to(stream)?,
            None => self.host.upload(stream)?,
        })
    }

    /// The array in host memory.
    pub(super) fn host(&self) -> &Array {
        &self.host
    }

    /// The tensor where the operation reads it.
    ///
    /// # Errors
    /// If the array has more dimensions than a view can have.
    pub(super) fn view(&self) -> Result<View<'_>> {
        match &self.device {
            Some(tensor) => Ok(tensor.view()),
            None => Ok(self.host.view()?),
        }
    }

    /// The tensor as a report names it.
    pub(super) fn info(&self, name: &'static str) -> TensorInfo {
        (name, self.host.shape().to_vec(), self.host.dtype())
    }
}

/// How large the copies are that launches take in turn, together: five times the L2 cache, which
/// then holds hardly anything of a copy when its turn comes again. Competitors do the same.
pub fn rotation_bytes(stream: &Stream) -> usize {
    let l2_bytes = stream.device().cuda_properties().map_or(0, |gpu| gpu.l2_bytes);
    usize::try_from(5 * l2_bytes).unwrap_or(0)
}

/// An N(0, 1) array; `lane` is the random stream, one for each input of a seed.
pub(super) fn normal(shape: &[usize], dtype: DType, seed: u64, lane: u64) -> Result<Array> {
    random::normal(dtype, shape, seed, lane, |_| ()).map_err(|bytes| {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Error::Device(blockflash_safe::Error::OutOfMemory { bytes })
    })
}

/// Prepares a result for a launch: it holds the previous one where the launch adds to it, else bits
/// that no kernel writes.
pub(super) fn reset(
    result: &mut Tensor,
    previous: Option<&Array>,
    place: &crate::placement::Placed,
    stream: &Stream,
) -> Result<()> {
    match previous {
        Some(previous) => Ok(previous.placed(place).write(result, stream)?),
        None => Ok(result.fill_bytes(stream, 0xFF)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_ops::Device;

    #[test]
    fn an_element_that_is_not_written_is_seen() {
        let stream = Device::cpu().stream().unwrap();
        let mut tensor = Tensor::zeros(&stream, DType::BF16, &[4]).unwrap();
        assert!(!Array::download(&tensor, &stream).unwrap().has_nan());
        tensor.fill_bytes(&stream, 0xFF).unwrap();
        assert!(Array::download(&tensor, &stream).unwrap().has_nan());
    }
}
