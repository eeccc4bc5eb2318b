//! Gradients on the CPU, in f32: a thread computes a head of keys of a sequence, query by query, so
//! that sums have one order.

use super::{IndexAttentionBackward, IndexAttentionBackwardProblem};
use crate::attention::cpu::sequence::Sequence;
use crate::attention_bwd::cpu::{Operands, Output};
use crate::attention_bwd::{AttentionBackward, AttentionGradientsMut};
use crate::attention_index::lists::HostLists;
use crate::float::Float;
use crate::panels::LANES;
use crate::{Result, math};
use blockflash_safe::Stream;
use blockflash_sys::{DType, HeadDims};
use half::{bf16, f16};
use rayon::prelude::*;

/// Computes a problem that was checked and has outputs.
pub(super) fn backward(
    op: &IndexAttentionBackward<'_>,
    problem: &IndexAttentionBackwardProblem,
    gradients: AttentionGradientsMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let sequences = op.sequences(problem, stream)?;
    let lists = HostLists::new(&op.attention.lists, problem.lists, stream)?;
    let dense = op.dense()?;
    match problem.dense.forward.types.q {
        DType::F16 => run::<f16>(&dense, problem, &sequences, &lists, gradients),
        DType::BF16 => run::<bf16>(&dense, problem, &sequences, &lists, gradients),
        _ => run::<f32>(&dense, problem, &sequences, &lists, gradients),
    }
}

fn run<T: Float>(
    dense: &AttentionBackward<'_>,
    problem: &IndexAttentionBackwardProblem,
    sequences: &[Sequence],
    lists: &HostLists,
    gradients: AttentionGradientsMut<'_>,
) -> Result<()> {
    let operands = Operands::<T>::new(dense, &problem.dense, sequences)?;
    let AttentionGradientsMut { mut dq, mut dk, mut dv, d_sink, .. } = gradients;
    operands.sink_gradient(dense, sequences, d_sink)?;
    let outputs = Output::<T>::all([&mut dq, &mut dk, &mut dv], &problem.dense, sequences)?;
    let heads_kv = problem.dense.forward.num_heads_kv;
    let tasks: Vec<_> = sequences
        .iter()
        .flat_map(|sequence| (0..heads_kv).map(move |head| (sequence, head)))
        .collect();
    tasks.par_iter().for_each(|&(sequence, head_kv)| {
        let sums = HeadSums::compute(&operands, problem, lists, sequence, head_kv);
        sums.store(&outputs, problem, sequence, head_kv);
    });
    Ok(())
}

/// Gradients of a head of keys of a sequence, and of the query heads that share it.
struct HeadSums {
    /// `[heads, seqlen_q, head_dims.qk]`
    dq: Vec<f32>,
    /// `[seqlen_kv, head_dims.qk]`
    dk: Vec<f32>,
    /// `[seqlen_kv, head_dims.v]`
    dv: Vec<f32>,
}

/// Widens a row.
fn load<T: Float>(source: &[T], start: usize, row: &mut [f32]) {
    T::widen(&source[start..][..row.len()], row);
}

/// Adds a multiple of a row to another one.
fn add(sums: &mut [f32], factor: f32, row: &[f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
}

impl HeadSums {
    fn compute<T: Float>(
        operands: &Operands<'_, T>,
        problem: &IndexAttentionBackwardProblem,
        lists: &HostLists,
        sequence: &Sequence,
        head_kv: usize,
    ) -> Self {
        let forward = &problem.dense.forward;
        let HeadDims { qk, v } = forward.head_dims;
        let Sequence { seqlen_q, seqlen_kv, .. } = *sequence;
        let of_head = forward.num_heads_q / forward.num_heads_kv;
        let units = problem.lists.units(forward.num_heads_kv);
        let group = forward.num_heads_q / units;
        let (mut keys, mut values) = (vec![0.0; seqlen_kv * qk], vec![0.0; seqlen_kv * v]);
        for key in 0..seqlen_kv {
            let at = [forward.k, forward.v].map(|strides| sequence.kv_row(strides, head_kv, key));
            load(operands.k, at[0], &mut keys[key * qk..][..qk]);
            load(operands.v, at[1], &mut values[key * v..][..v]);
        }
        let mut sums = Self {
            dq: vec![0.0; of_head * seqlen_q * qk],
            dk: vec![0.0; keys.len()],
            dv: vec![0.0; values.len()],
        };
        let (mut q, mut d_o) = (vec![0.0; qk], vec![0.0; v]);
        let first = problem.first_query(sequence);
        for query in 0..seqlen_q {
            let shown = forward.scores.mask.visible(query, seqlen_q, seqlen_kv);
            for unit in
                head_kv * units / forward.num_heads_kv..(head_kv + 1) * units / forward.num_heads_kv
            {
                let list = unit * problem.lists.groups / units;
                let listed = lists.keys([list, first + query], &shown);
                for head in unit * group..(unit + 1) * group {
                    let [lse, delta] = operands.statistics(sequence, head, query);
                    // Nothing is visible to the query.
                    if lse == f32::NEG_INFINITY {
                        continue;
                    }
                    load(operands.q, sequence.q_row(forward.q, head, query), &mut q);
                    load(operands.d_o, sequence.q_row(problem.dense.d_o, head, query), &mut d_o);
                    let row = (head - head_kv * of_head) * seqlen_q + query;
                    let dq = &mut sums.dq[row * qk..][..qk];
                    for (at, some) in listed.keys.chunks(LANES).enumerate() {
                        let (mut p, mut ds) = ([0.0; LANES], [0.0; LANES]);
                        let mut repeats = [0.0; LANES];
                        for (lane, &key) in some.iter().enumerate() {
                            p[lane] = forward.scores.softmax_scale
                                * math::dot(&q, &keys[key * qk..][..qk]);
                            ds[lane] = math::dot(&d_o, &values[key * v..][..v]);
                            let listed = listed.repeats.get(at * LANES + lane);
                            repeats[lane] = listed.copied().unwrap_or(0.0);
                        }
                        let statistics = [lse, delta].map(|x| [x; LANES]);
                        forward.scores.gradients(
                            [&mut p, &mut ds],
                            Some(&repeats),
                            statistics.each_ref(),
                            false,
                        );
                        for (lane, &key) in some.iter().enumerate() {
                            add(dq, ds[lane], &keys[key * qk..][..qk]);
                            add(&mut sums.dk[key * qk..][..qk], ds[lane], &q);
                            add(&mut sums.dv[key * v..][..v], p[lane], &d_o);
                        }
                    }
                }
            }
        }
        let scale = forward.scores.softmax_scale;
        sums.dq.iter_mut().chain(&mut sums.dk).for_each(|x| *x *= scale);
        sums
    }

    fn store<T: Float>(
        &self,
        [dq, dk, dv]: &[Output<'_, T>; 3],
        problem: &IndexAttentionBackwardProblem,
        sequence: &Sequence,
        head_kv: usize,
    ) {
        let dense = &problem.dense;
        let mut rounded = Vec::new();
        let of_head = dense.forward.num_heads_q / dense.forward.num_heads_kv;
        let Sequence { seqlen_q, seqlen_kv, .. } = *sequence;
        let width = seqlen_q * dense.forward.head_dims.qk;
        for member in 0..of_head {
            let head = head_kv * of_head + member;
            let start = |query| sequence.q_row(dense.dq, head, query);
            dq.store(&self.dq[member * width..][..width], &(0..seqlen_q), start, &mut rounded);
        }
        for (output, sums, strides) in [(dk, &self.dk, dense.dk), (dv, &self.dv, dense.dv)] {
            let start = |key| sequence.kv_row(strides, head_kv, key);
            output.store(sums, &(0..seqlen_kv), start, &mut rounded);
        }
    }
}
