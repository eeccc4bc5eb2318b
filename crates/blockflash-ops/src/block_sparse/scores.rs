//! Scores of blocks, from which the visited blocks are chosen.

use super::BlockGeometry;
use crate::check::{Operand, filled};
use crate::float::Float;
use crate::threads::parallel;
use crate::{Error, Result};
use blockflash_safe::View;
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;

/// The mean query of each block row times the mean key of each block column: f32
/// `[batch, heads_q, rows, cols]` row-major, for
/// [`BlockMask::top_k_from_scores`](super::BlockMask::top_k_from_scores). Nothing is scaled.
///
/// `q` is `[batch, seqlen_q, heads_q, head_dim]` and `k` `[batch, seqlen_kv, heads_kv, head_dim]`,
/// both f16, bf16 or f32 on the CPU. `head_dim` is contiguous, and the other strides are arbitrary.
/// `heads_q` is a multiple of `heads_kv`: neighbouring query heads share a key head. The last block
/// may be shorter and is averaged over the rows that it has. Sums are f32 in a fixed order.
///
/// # Errors
/// [`Error::Shape`] if the sizes do not fit each other or the geometry, [`Error::HeadGroups`],
/// [`Error::DType`], [`Error::Stride`]; out of memory; a view that is not on the CPU.
pub fn block_mean_scores(geometry: BlockGeometry, q: View<'_>, k: View<'_>) -> Result<Vec<f32>> {
    parallel(|| mean_scores(geometry, q, k))
}

fn mean_scores(geometry: BlockGeometry, q: View<'_>, k: View<'_>) -> Result<Vec<f32>> {
    let ScoreSizes { batch, heads_q, heads_kv, head_dim, .. } = ScoreSizes::of(geometry, &q, &k)?;
    let means = match q.dtype() {
        DType::F16 => block_means::<f16>,
        DType::BF16 => block_means::<bf16>,
        _ => block_means::<f32>,
    };
    let (rows, cols) = (geometry.rows(), geometry.cols());
    let mut scores = filled(0.0, &[batch, heads_q, rows, cols])?;
    if scores.is_empty() {
        return Ok(scores);
    }
    let (means_q, means_kv) = (means(q, geometry.block_q())?, means(k, geometry.block_kv())?);
    scores.par_chunks_mut(cols).enumerate().for_each(|(at, scores)| {
        let (entry, head) = (at / rows / heads_q, at / rows % heads_q);
        let group = entry * heads_kv + head / (heads_q / heads_kv);
        let mean_q = &means_q[at * head_dim..][..head_dim];
        for (col, score) in scores.iter_mut().enumerate() {
            *score = dot(mean_q, &means_kv[(group * cols + col) * head_dim..][..head_dim]);
        }
    });
    Ok(scores)
}

/// Sizes and element type of a q and k that fit each other and a geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScoreSizes {
    pub(super) geometry: BlockGeometry,
    pub(super) dtype: DType,
    pub(super) batch: usize,
    pub(super) heads_q: usize,
    pub(super) heads_kv: usize,
    pub(super) head_dim: usize,
}

impl ScoreSizes {
    pub(super) fn of(geometry: BlockGeometry, q: &View<'_>, k: &View<'_>) -> Result<Self> {
        let (q_operand, k_operand) = (Operand::new("q", q), Operand::new("k", k));
        q_operand.dtype_in(&[DType::F16, DType::BF16, DType::F32])?;
        k_operand.dtype_in(&[q.dtype()])?;
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let &[batch, _, heads_q, head_dim] = q.shape() else {
            return Err(q_operand.wrong_shape(format!("[batch, {seqlen_q}, heads_q, head_dim]")));
        };
        let &[_, _, heads_kv, _] = k.shape() else {
            return Err(
                k_operand.wrong_shape(format!("[{batch}, {seqlen_kv}, heads_kv, {head_dim}]"))
            );
        };
        q_operand.shape_is(&[batch, seqlen_q, heads_q, head_dim])?;
        k_operand.shape_is(&[batch, seqlen_kv, heads_kv, head_dim])?;
        q_operand.last_dim_contiguous()?;
        k_operand.last_dim_contiguous()?;
        if heads_q > 0 && (heads_kv == 0 || heads_q % heads_kv != 0) {
            return Err(Error::HeadGroups { num_heads_q: heads_q, num_heads_kv: heads_kv });
        }
        Ok(Self { geometry, dtype: q.dtype(), batch, heads_q, heads_kv, head_dim })
    }
}

/// `[batch, heads, blocks, head_dim]`: the mean of each block of rows of
/// `[batch, seqlen, heads, head_dim]`.
fn block_means<T: Float>(x: View<'_>, block: usize) -> Result<Vec<f32>> {
    let (&[batch, seqlen, heads, head_dim], &[batch_stride, row_stride, head_stride, _]) =
        (x.shape(), x.strides())
    else {
        return Err(Operand::new("x", &x).wrong_shape("[batch, seqlen, heads, head_dim]"));
    };
    let blocks = seqlen.div_ceil(block);
    let elements = x.as_slice::<T>()?;
    let mut means = filled(0.0, &[batch, heads, blocks, head_dim])?;
    // Without elements there are no chunks, whatever their size.
    means.par_chunks_mut(head_dim.max(1)).enumerate().for_each_init(
        || vec![0.0; head_dim],
        |values, (at, mean)| {
            let (entry, head, first) =
                (at / blocks / heads, at / blocks % heads, at % blocks * block);
            let rows = first..seqlen.min(first + block);
            let count = rows.len() as f32;
            for row in rows {
                let start = entry * batch_stride + row * row_stride + head * head_stride;
                T::widen(&elements[start..][..head_dim], values);
                mean.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += value);
            }
            mean.iter_mut().for_each(|sum| *sum /= count);
        },
    );
    Ok(means)
}

/// Keeps eight partial sums, which a compiler can hold in one vector register.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, rest_a), (b, rest_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|lane| sums[lane] += a[lane] * b[lane]);
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
#[path = "scores_tests.rs"]
mod tests;
