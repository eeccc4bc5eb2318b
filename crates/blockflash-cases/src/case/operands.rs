//! Our implementation of a case: its memory, its launches and the verification of its results.

use crate::error::{Error, Result};
use crate::io::Array;
use crate::random;
use blockflash_ops::tuning::Likeness;
use blockflash_ops::{CudaProperties, DType, Kernel, Stream, Tensor};
use blockflash_oracle::{Comparison, Mismatch};
use std::fmt::Debug;

/// Inputs and outputs on a device.
pub trait Operands: Debug {
    /// Selects the kernel as the library does on this GPU.
    fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel>;
    /// Whether this kernel computes the operands on this GPU.
    fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool>;
    /// What a record of measurements is looked up by; `None` where no record decides.
    fn likeness(&mut self) -> Result<Option<Likeness>> {
        Ok(None)
    }
    /// Launches the given kernel, or the selected one.
    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()>;
    /// Output tensors that the given kernel, or the selected one, writes.
    fn outputs(&mut self, kernel: Option<&Kernel>) -> Vec<&mut Tensor>;
    /// Compares the outputs with the oracle.
    fn compare(&self, outputs: &[Array], seed: u64) -> Result<Vec<Comparison>, Mismatch>;

    /// Selects the kernel for [`launch_prepared`](Self::launch_prepared). Returns false if the
    /// kernel was already chosen when the memory was allocated.
    fn prepare(&mut self, _stream: &Stream) -> Result<bool> {
        Ok(false)
    }

    /// Launches the kernel that [`prepare`](Self::prepare) has selected.
    fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
        self.launch(None, stream)
    }

    /// Makes so many copies of what a launch reads that an L2 cache does not hold them; launches
    /// take them in turn.
    fn rotate(&mut self, _stream: &Stream) -> Result<()> {
        let message = "launches take copies in turn only of a cache of keys and values";
        Err(Error::Option(message.to_owned()))
    }

    /// Whether allocating the memory already loaded the kernel: its load time is unknown then.
    fn is_loaded(&self) -> bool {
        false
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
        for output in self.outputs(kernel) {
            output.fill_bytes(stream, 0xFF)?;
        }
        self.launch(kernel, stream)?;
        let outputs =
            self.outputs(kernel).into_iter().map(|output| Array::download(output, stream));
        let outputs = outputs.collect::<blockflash_safe::Result<Vec<_>>>()?;
        let complete = !outputs.iter().any(Array::has_nan);
        let comparisons = self.compare(&outputs, seed)?;
        let right = !comparisons.is_empty() && comparisons.iter().all(Comparison::passed);
        Ok((complete && right, comparisons.first().map_or(f64::NAN, |output| output.relative)))
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
