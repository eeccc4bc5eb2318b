//! Tensors of random numbers.

use blockflash_dist::Result;
use blockflash_ops::{DType, Stream, Tensor};
use half::bf16;

/// Numbers of N(0,1).
pub fn normal(seed: u64, count: usize) -> Vec<bf16> {
    let numbers = blockflash_cases::random::normals(count, seed);
    numbers.into_iter().map(bf16::from_f32).collect()
}

/// `[1, rows, heads, head_dim]` of N(0,1). Rows repeat after 4093, which takes less time to make.
pub fn tensor(
    stream: &Stream,
    seed: u64,
    rows: usize,
    heads: usize,
    head_dim: usize,
) -> Result<Tensor> {
    let period = rows.min(4093);
    let some = normal(seed, period * heads * head_dim);
    let some = Tensor::from_slice(stream, &some, &[1, period, heads, head_dim])?;
    let mut all = Tensor::empty(stream, DType::BF16, &[1, rows, heads, head_dim])?;
    for start in (0..rows).step_by(period.max(1)) {
        let range = start..rows.min(start + period);
        let source = some.view().slice(1, 0..range.len())?;
        all.view_mut().slice(1, range)?.copy_from(&source, stream)?;
    }
    Ok(all)
}
