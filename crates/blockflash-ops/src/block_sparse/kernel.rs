//! Which kernel makes block masks on a GPU.

use crate::{Error, Result, arch};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::{BlockMaskKernel, Row};

/// Name of the operation in errors.
pub(super) const OP: &str = "block_mask";

/// The preferred one of the rows that the GPU runs and that are `wanted`.
///
/// # Errors
/// [`Error::Unsupported`].
pub(super) fn select(
    gpu: &CudaProperties,
    wanted: impl Fn(BlockMaskKernel) -> bool,
) -> Result<&'static Row> {
    select_among(manifest::rows(), gpu, wanted)
}

fn select_among<'r>(
    rows: &'r [Row],
    gpu: &CudaProperties,
    wanted: impl Fn(BlockMaskKernel) -> bool,
) -> Result<&'r Row> {
    rows.iter()
        .filter(|row| matches!(row.variant, Variant::BlockMask(kernel) if wanted(kernel)))
        .filter(|row| arch::runs(row, gpu).is_ok())
        .min_by_key(|row| arch::preference(row.target))
        .ok_or_else(|| {
            unsupported(gpu, "no kernel makes such masks on this GPU: make them on the CPU".into())
        })
}

pub(super) fn unsupported(gpu: &CudaProperties, what: String) -> Error {
    Error::Unsupported { op: OP, arch: gpu.compute_capability.to_string(), what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::gpu;
    use blockflash_sys::{DType, Target};

    #[test]
    fn machine_code_before_ptx() {
        let is_build = |kernel| matches!(kernel, BlockMaskKernel::Build { .. });
        let found = |major, minor| select_among(manifest::rows(), &gpu(major, minor), is_build);
        for (gpu, target) in
            [((8, 0), Target::Sm80), ((9, 0), Target::Sm90), ((10, 0), Target::Ptx80)]
        {
            assert_eq!(found(gpu.0, gpu.1).unwrap().target, target);
        }
        assert!(matches!(found(7, 5), Err(Error::Unsupported { op: OP, .. })));
        let is_f32 = |kernel| matches!(kernel, BlockMaskKernel::Scores { dtype: DType::F32, .. });
        assert!(select_among(manifest::rows(), &gpu(9, 0), is_f32).is_err());
    }
}
