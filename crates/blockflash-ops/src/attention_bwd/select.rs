use super::AttentionBackwardProblem;
use crate::Result;
use crate::attention::AttentionProblem;
use crate::selection::{self, Candidate, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
use blockflash_sys::{DType, Kernel};
use std::convert::Infallible;

/// The kernel for a problem on a GPU. There is none yet.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported).
pub fn select(problem: &AttentionBackwardProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for AttentionBackwardProblem {
    const OP: &'static str = "attention_bwd";
    const RULES: &'static [Rule<Self>] = &[];

    /// No kernel computes gradients yet.
    type Tile = Infallible;
    type Rank = ();

    fn tile(_: &Kernel) -> Option<Infallible> {
        None
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        &[]
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.forward.dtype, 0)
    }

    fn key_of(tile: &Infallible) -> (DType, usize) {
        match *tile {}
    }
}

/// Lines of the support table.
pub(crate) fn support(dtype: DType) -> Vec<(String, AttentionBackwardProblem)> {
    let forward = AttentionProblem::dense(dtype, [1; 3], [1; 2], 64);
    vec![("other head_dim (64)".into(), AttentionBackwardProblem::of(forward))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::fixtures::gpus;
    use blockflash_sys::manifest;

    #[test]
    fn gpus_have_no_kernel_yet() {
        for (gpu, dtype) in gpus().iter().flat_map(|gpu| [DType::F16, DType::F32].map(|d| (gpu, d)))
        {
            let (_, problem) = support(dtype).remove(0);
            let error = select(&problem, gpu).unwrap_err();
            assert!(matches!(error, Error::Unsupported { op: "attention_bwd", .. }), "{error}");
            assert!(error.to_string().contains("there is no kernel"), "{error}");
            for kernel in manifest::kernels().iter().take(3) {
                let error = accepts(kernel, &problem, gpu).unwrap_err().to_string();
                assert!(error.contains("computes something else"), "{error}");
            }
        }
    }
}
