//! Tensors of candle as arrays of the oracle.

use super::blockflash_candle::Mask;
use super::candle_core::{DType, Device, Result, Tensor, bail};
use blockflash_oracle::{AttentionCase, Comparison, Elements, Scores};
use std::io::Write;
use std::ops::Range;

#[derive(Debug)]
pub(crate) struct Array {
    shape: Vec<usize>,
    dtype: blockflash_ops::DType,
    data: Vec<f32>,
}

impl Array {
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        let dtype = match tensor.dtype() {
            DType::F16 => blockflash_ops::DType::F16,
            DType::BF16 => blockflash_ops::DType::BF16,
            DType::F32 => blockflash_ops::DType::F32,
            dtype => bail!("{dtype:?}"),
        };
        let data = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let data = data.flatten_all()?.to_vec1()?;
        Ok(Self { shape: tensor.dims().to_vec(), dtype, data })
    }
}

impl Elements for Array {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> blockflash_ops::DType {
        self.dtype
    }

    fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        self.data.get(range).unwrap_or_default().to_vec()
    }
}

/// Where the tests run: on the CPU and, with the feature `cuda`, on a GPU, there on both kinds of
/// streams that candle has. Without a GPU a line on stderr says so; with `BLOCKFLASH_REQUIRE_GPU=1`
/// in the environment that is an error.
pub(crate) fn devices() -> Result<Vec<Device>> {
    let mut devices = vec![Device::Cpu];
    if cfg!(feature = "cuda") {
        match Device::new_cuda(0) {
            Ok(device) => devices.extend([device, Device::new_cuda_with_stream(0)?]),
            Err(error) if std::env::var("BLOCKFLASH_REQUIRE_GPU").is_ok_and(|is| is == "1") => {
                return Err(error);
            }
            Err(error) => {
                let thread = std::thread::current();
                let test = thread.name().unwrap_or("a test");
                // Without the backtrace that candle may add. A closed stderr is no reason to fail.
                let error = error.to_string().lines().next().unwrap_or_default().to_owned();
                let _ = writeln!(std::io::stderr(), "SKIPPED (no GPU): {test}: {error}");
            }
        }
    }
    Ok(devices)
}

/// Element types that a device takes.
pub(crate) fn types(device: &Device) -> &'static [DType] {
    let all = &[DType::F16, DType::BF16, DType::F32];
    if device.is_cpu() { all } else { &all[..2] }
}

/// N(0, 1) on the CPU.
pub(crate) fn normal(shape: &[usize], dtype: DType) -> Result<Tensor> {
    normal_on(&Device::Cpu, shape, dtype)
}

/// N(0, 1).
pub(crate) fn normal_on(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The two sides of a mask that is aligned at the last query and key.
pub(crate) fn sides(mask: Mask) -> [Option<usize>; 2] {
    match mask {
        Mask::Causal { .. } => [None, Some(0)],
        Mask::Window { left, right, .. } => [left, right],
        _ => [None, None],
    }
}

/// q, k and v as the oracle's case, with default options.
pub(crate) fn case<'a>(
    [q, k, v]: [&'a Array; 3],
    mask: Mask,
    softmax_scale: f32,
) -> AttentionCase<'a> {
    let [left, right] = sides(mask);
    AttentionCase {
        q,
        k,
        v,
        sink: None,
        bias: None,
        alibi: None,
        lengths: None,
        blocks: None,
        bottom_right: true,
        left,
        right,
        scores: Scores::new(softmax_scale, None),
    }
}

#[track_caller]
pub(crate) fn passed(what: &str, comparison: &Comparison) {
    assert!(comparison.checked > 0, "{what}: nothing was compared");
    assert!(comparison.passed(), "{what}: {comparison:?}");
}
