use super::QuantizeProblem;
use super::problem::ScaleOf;
use crate::Result;
use crate::attention::Strides;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{Quantize, Variant};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The kernel for a problem on a GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the head
/// dimension, the architecture.
pub fn select(problem: &QuantizeProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel takes the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(kernel: &Kernel, problem: &QuantizeProblem, gpu: &CudaProperties) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for QuantizeProblem {
    const OP: &'static str = "quantize";
    const RULES: &'static [Rule<Self>] = &[HEAD_DIM];
    type Tile = Quantize;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<Quantize> {
        if let Variant::Quantize(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<QuantizeProblem> = LazyLock::new(selection::all::<QuantizeProblem>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    /// A kernel takes all element types.
    fn key(&self) -> (DType, usize) {
        (DType::F32, 0)
    }

    fn key_of(_: &Quantize) -> (DType, usize) {
        (DType::F32, 0)
    }
}

/// The widest head that kernels take.
const WIDEST: usize = Quantize::MOST_HEAD_DIM;

const HEAD_DIM: Rule<QuantizeProblem> = Rule {
    holds: |c| c.problem.head_dim <= WIDEST && c.problem.head_dim.is_multiple_of(8),
    refuses: |c| format!("head_dim {} is not a multiple of 8 up to {WIDEST}", c.problem.head_dim),
    excludes_all: None,
};

/// Lines of the support table: the head dimensions that kernels take, and one that none takes.
pub(crate) fn support(dtype: DType) -> Vec<(String, QuantizeProblem)> {
    let of = |head_dim| QuantizeProblem {
        dtype,
        codes: DType::E4M3,
        batch: 1,
        tokens: 1,
        packed: None,
        num_heads: 1,
        head_dim,
        x: Strides { batch: head_dim, seq: head_dim, head: head_dim },
        scale: ScaleOf::Head,
        subtract_mean: false,
        rotate: false,
    };
    vec![
        (format!("head_dim 8..={WIDEST} by 8"), of(WIDEST)),
        ("other head_dim (59)".into(), of(59)),
    ]
}
