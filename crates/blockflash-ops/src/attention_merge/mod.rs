//! Merges attention over disjoint sets of keys, or adds the gradients of such sets.

mod cpu;
mod plan;
mod problem;
mod select;

pub use plan::plan;
pub use problem::AttentionMergeProblem;
pub use select::{accepts, select};

use crate::Result;
use crate::check::{Operand, aligned};
use crate::operation::{Operation, Prepared, Steps};
use blockflash_safe::{
    AttentionMergeOperands, CudaProperties, LaunchConfig, Stream, View, ViewMut,
};
use blockflash_sys::Kernel;

/// The attention of queries to all keys from their attention to parts of the keys: of the parts of
/// a long sequence on several GPUs, or of a prefix that sequences share and of what follows it.
///
/// With the log-sum-exp `lse[i]` of each part, `lse = ln Σ exp(lse[i])` and
/// `o = Σ exp(lse[i] - lse) · o[i]`, in f32, in the order of the parts. A part in which a query
/// sees nothing, of lse −∞, does not count, whatever it holds. Without any other part the output is
/// 0 and lse −∞. At most one part may have a sink.
///
/// ```
/// # use blockflash_ops::{AttentionMerge, Device, DType, Tensor};
/// # let stream = Device::cpu().stream()?;
/// // Two parts of one query of one head: o is 1 and 3, with equal weights.
/// let parts = Tensor::from_slice(&stream, &[1f32, 1.0, 3.0, 3.0], &[2, 1, 1, 2])?;
/// let parts_lse = Tensor::from_slice(&stream, &[0f32, 0.0], &[2, 1, 1])?;
/// let mut o = Tensor::empty(&stream, DType::F32, &[1, 1, 2])?;
/// AttentionMerge::new(parts.view(), parts_lse.view()).merge_into(o.view_mut(), None, &stream)?;
/// assert_eq!(o.to_vec::<f32>(&stream)?, [2.0, 2.0]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AttentionMerge<'a> {
    /// The outputs, `[parts, rows, num_heads, head_dim]`, f16, bf16 or f32. All strides but the
    /// last are free.
    pub o: View<'a>,
    /// Their log-sum-exps, f32 `[parts, num_heads, rows]`, with any strides: where each sequence
    /// has one query, `[parts, batch, num_heads]` is a permuted view. `None`: `o` is the sum of the
    /// parts, in f32 and in their order, as gradients of parts of the keys need it.
    pub lse: Option<View<'a>>,
}

/// See [`Operation::prepare`].
pub type PreparedAttentionMerge = Prepared<AttentionMergeProblem>;

impl<'a> AttentionMerge<'a> {
    /// A merge of these parts.
    pub const fn new(o: View<'a>, lse: View<'a>) -> Self {
        Self { o, lse: Some(lse) }
    }

    /// The sum of these parts.
    pub const fn sum(o: View<'a>) -> Self {
        Self { o, lse: None }
    }

    /// Merges into `o`, `[rows, num_heads, head_dim]` in any of the element types, and into `lse`,
    /// f32 `[num_heads, rows]` with any strides, which a sum does not have. On a GPU nothing is
    /// allocated and the stream is not synchronised, so a graph can capture the call. On the CPU it
    /// returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`;
    /// `Error::DeviceMismatch` if an operand is not on the stream's
    /// device.
    pub fn merge_into(
        &self,
        o: ViewMut<'_>,
        lse: Option<ViewMut<'_>>,
        stream: &Stream,
    ) -> Result<()> {
        self.run((o, lse), stream)
    }
}

impl Steps for AttentionMerge<'_> {
    type Problem = AttentionMergeProblem;
    type Plan = LaunchConfig;
    type Out<'o> = (ViewMut<'o>, Option<ViewMut<'o>>);

    fn is_empty(problem: &AttentionMergeProblem) -> bool {
        problem.is_empty()
    }

    fn checked(&self, (o, lse): &Self::Out<'_>, stream: &Stream) -> Result<AttentionMergeProblem> {
        let problem = self.problem(o, lse.as_ref())?;
        let device = stream.device();
        Operand::new("parts.o", &self.o).on(device)?;
        self.lse.as_ref().map_or(Ok(()), |lse| Operand::new("parts.lse", lse).on(device))?;
        Operand::of_mut("o", o).on(device)?;
        lse.as_ref().map_or(Ok(()), |lse| Operand::of_mut("lse", lse).on(device))?;
        Ok(problem)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &AttentionMergeProblem,
        gpu: &CudaProperties,
    ) -> Result<LaunchConfig> {
        plan::plan(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        config: &LaunchConfig,
        _: &AttentionMergeProblem,
        (o, lse): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        aligned("o", &o.as_view())?;
        let operands = AttentionMergeOperands { parts: self.o, parts_lse: self.lse, o, lse };
        stream.launch::<blockflash_safe::AttentionMerge>(kernel, config, &(), operands)?;
        Ok(())
    }

    fn compute(
        &self,
        problem: &AttentionMergeProblem,
        (o, lse): Self::Out<'_>,
        _stream: &Stream,
    ) -> Result<()> {
        cpu::merge(self, problem, o, lse)
    }
}

#[cfg(test)]
mod tests;
