//! Merging on the CPU, in parallel over rows; each is computed by one thread.

use super::{AttentionMerge, AttentionMergeProblem};
use crate::float::Float;
use crate::{Result, math};
use blockflash_safe::ViewMut;
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;

/// Merges a problem that was checked.
pub(super) fn merge(
    op: &AttentionMerge<'_>,
    problem: &AttentionMergeProblem,
    o: ViewMut<'_>,
    lse: Option<ViewMut<'_>>,
) -> Result<()> {
    match problem.parts_dtype {
        DType::F16 => from::<f16>(op, problem, o, lse),
        DType::BF16 => from::<bf16>(op, problem, o, lse),
        _ => from::<f32>(op, problem, o, lse),
    }
}

fn from<P: Float>(
    op: &AttentionMerge<'_>,
    problem: &AttentionMergeProblem,
    o: ViewMut<'_>,
    lse: Option<ViewMut<'_>>,
) -> Result<()> {
    match problem.o_dtype {
        DType::F16 => run::<P, f16>(op, problem, o, lse),
        DType::BF16 => run::<P, bf16>(op, problem, o, lse),
        _ => run::<P, f32>(op, problem, o, lse),
    }
}

fn run<P: Float, O: Float>(
    op: &AttentionMerge<'_>,
    problem: &AttentionMergeProblem,
    mut o: ViewMut<'_>,
    mut lse: Option<ViewMut<'_>>,
) -> Result<()> {
    let AttentionMergeProblem { rows, num_heads, head_dim, .. } = *problem;
    let parts = op.o.as_slice::<P>()?;
    let logs = op.lse.map_or(Ok(&[][..]), |lse| lse.as_slice::<f32>())?;
    let merged: Vec<(Vec<O>, f32)> = (0..rows * num_heads)
        .into_par_iter()
        .map_init(
            || (vec![0f32; head_dim], vec![0f32; head_dim]),
            |(part, sum), at| {
                let log = row(problem, (parts, logs), [at / num_heads, at % num_heads], part, sum);
                let mut rounded = vec![O::zeroed(); head_dim];
                O::narrow(sum, &mut rounded);
                (rounded, log)
            },
        )
        .collect();
    let target = o.as_mut_slice::<O>()?;
    let mut logs = lse.as_mut().map(|lse| lse.as_mut_slice::<f32>()).transpose()?;
    for (at, (values, log)) in merged.into_iter().enumerate() {
        let (row, head) = (at / num_heads, at % num_heads);
        target[row * problem.o[0] + head * problem.o[1]..][..head_dim].copy_from_slice(&values);
        if let (Some(logs), Some([of_head, of_row])) = (&mut logs, problem.lse) {
            logs[head * of_head + row * of_row] = log;
        }
    }
    Ok(())
}

/// The merged row in `sum`, and its log-sum-exp.
fn row<P: Float>(
    problem: &AttentionMergeProblem,
    (parts, logs): (&[P], &[f32]),
    [row, head]: [usize; 2],
    part: &mut [f32],
    sum: &mut [f32],
) -> f32 {
    let log = |at: usize| match problem.parts_lse {
        Some([of_part, of_head, of_row]) => logs[at * of_part + head * of_head + row * of_row],
        None => 0.0,
    };
    sum.fill(0.0);
    let largest = (0..problem.parts).map(log).fold(f32::NEG_INFINITY, f32::max);
    // −∞ − (−∞) is NaN. A part whose log-sum-exp is NaN is no maximum, but it is added below.
    let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    let mut total = 0.0;
    for at in (0..problem.parts).filter(|&at| log(at) != f32::NEG_INFINITY) {
        let weight = math::exp(log(at) - shift);
        total += weight;
        let [of_part, of_row, of_head] = problem.parts_o;
        let start = at * of_part + row * of_row + head * of_head;
        P::widen(&parts[start..][..part.len()], part);
        sum.iter_mut().zip(&*part).for_each(|(sum, part)| *sum += weight * part);
    }
    if total == 0.0 {
        return f32::NEG_INFINITY;
    }
    if problem.parts_lse.is_some() {
        sum.iter_mut().for_each(|sum| *sum /= total);
    }
    shift + total.ln()
}
