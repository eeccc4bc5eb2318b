//! Gradients on the CPU, in f32: `dk` and `dv` in parallel over spans of keys, each of which also
//! has its part of `dq`, and that of a bias over tiles of it. Both recompute the probabilities from
//! `lse`.
//!
//! Every block is computed by one thread in a fixed order, and parts are added in a fixed order, so
//! results do not depend on the number of threads. Blocks that a block mask does not visit are not
//! even read.

mod dbias;
mod dk_dv;
mod dq;
mod pairs;
mod spans;

use super::{AttentionBackward, AttentionBackwardProblem, AttentionGradientsMut};
use crate::attention::Strides;
use crate::attention::cpu::sequence::{Sequence, sequences};
use crate::attention::cpu::terms::Terms;
use crate::float::Float;
use crate::{BlockMask, Result, math};
use blockflash_safe::{Stream, ViewMut};
use blockflash_sys::{DType, HeadDims};
use half::{bf16, f16};
use rayon::prelude::*;
use spans::{Span, heads_at_once, spans};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Keys per task: enough that converting queries to f32 is small beside the products.
const BLOCK: usize = 128;

/// Keys of one head, all in one column of the block mask.
struct KeyRows {
    sequence: Sequence,
    head: usize,
    rows: Range<usize>,
}

/// The operands as slices of their elements.
pub(crate) struct Operands<'a, T> {
    problem: &'a AttentionBackwardProblem,
    pub(crate) q: &'a [T],
    pub(crate) k: &'a [T],
    pub(crate) v: &'a [T],
    o: &'a [T],
    pub(crate) d_o: &'a [T],
    lse: &'a [f32],
    terms: Option<Terms<'a>>,
    /// The sum of `o · d_o` of each query: `[sequences][heads][queries]`.
    delta: Vec<Vec<f32>>,
    block_mask: Option<&'a BlockMask>,
    /// The mask of keys × queries.
    transposed: Option<BlockMask>,
}

/// Computes a problem that was checked and has outputs.
pub(super) fn backward(
    op: &AttentionBackward<'_>,
    problem: &AttentionBackwardProblem,
    gradients: AttentionGradientsMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let sequences = sequences(&op.attention, &problem.forward, stream)?;
    match problem.forward.types.q {
        DType::F16 => run::<f16>(op, problem, &sequences, gradients),
        DType::BF16 => run::<bf16>(op, problem, &sequences, gradients),
        _ => run::<f32>(op, problem, &sequences, gradients),
    }
}

fn run<T: Float>(
    op: &AttentionBackward<'_>,
    problem: &AttentionBackwardProblem,
    sequences: &[Sequence],
    gradients: AttentionGradientsMut<'_>,
) -> Result<()> {
    let (attention, forward) = (&op.attention, &problem.forward);
    let mut operands = Operands::<T>::new(op, problem, sequences)?;
    operands.transposed = attention.block_mask.map(BlockMask::transpose).transpose()?;
    let AttentionGradientsMut { mut dq, mut dk, mut dv, d_sink, dbias } = gradients;
    operands.sink_gradient(op, sequences, d_sink)?;
    if let (Some(mut dbias), Some(bias)) = (dbias, forward.scores.bias) {
        dbias::bias_gradient(&operands, sequences, bias.broadcast, &mut dbias)?;
    }
    let [dq, dk, dv] = Output::<T>::all([&mut dq, &mut dk, &mut dv], problem, sequences)?;
    let qk = forward.head_dims.qk;

    let group = forward.num_heads_q / forward.num_heads_kv.max(1);
    let compute = |(tile, sums, rounded): &mut Buffers<T>, span: &Span| -> Result<dq::Sums> {
        let Span { sequence, head, blocks, queries } = span;
        let mut dq = dq::Sums::new(queries.clone(), group, qk);
        for rows in blocks {
            let task = KeyRows { sequence: *sequence, head: *head, rows: rows.clone() };
            tile.compute(&operands, &task, sums, &mut dq)?;
            let outputs = [(&dk, problem.dk), (&dv, problem.dv)];
            for ((output, strides), sums) in outputs.iter().zip(&*sums) {
                let start = |key| sequence.kv_row(*strides, *head, key);
                output.store(sums, rows, start, rounded);
            }
        }
        Ok(dq)
    };
    for heads in heads_at_once(forward, sequences) {
        let of_head = |&(sequence, head)| spans(forward, operands.block_mask, sequence, head);
        let tasks: Vec<Vec<Span>> = heads.iter().map(of_head).collect();
        let all: Vec<&Span> = tasks.iter().flatten().collect();
        let sums =
            all.par_iter().map_init(Buffers::default, |buffers, span| compute(buffers, span));
        let mut sums: &[dq::Sums] = &sums.collect::<Result<Vec<_>>>()?;
        let mut of_heads = Vec::with_capacity(heads.len());
        for (head, spans) in heads.into_iter().zip(&tasks) {
            let (of_head, rest) = sums.split_at(spans.len());
            of_heads.push((head, of_head));
            sums = rest;
        }
        of_heads.par_iter().for_each(|(head, sums)| dq::store(&operands, &dq, *head, sums));
    }
    Ok(())
}

/// What a thread computes in: a tile, sums of `dk` and `dv`, and these rounded.
type Buffers<T> = (dk_dv::Tile, [Vec<f32>; 2], Vec<T>);

impl<'a, T: Float> Operands<'a, T> {
    /// Those of a call without the transpose of its block mask.
    pub(crate) fn new(
        op: &'a AttentionBackward<'a>,
        problem: &'a AttentionBackwardProblem,
        sequences: &[Sequence],
    ) -> Result<Self> {
        let attention = &op.attention;
        let mut operands = Self {
            problem,
            q: attention.q.as_slice()?,
            k: attention.k.as_slice()?,
            v: attention.v.as_slice()?,
            o: op.o.as_slice()?,
            d_o: op.d_o.as_slice()?,
            lse: op.lse.as_slice()?,
            terms: Terms::of(&attention.scores)?,
            delta: Vec::new(),
            block_mask: attention.block_mask,
            transposed: None,
        };
        operands.delta = operands.delta_of(sequences);
        Ok(operands)
    }

    /// See [`delta`](Self::delta).
    fn delta_of(&self, sequences: &[Sequence]) -> Vec<Vec<f32>> {
        let forward = &self.problem.forward;
        let (heads, head_dim) = (forward.num_heads_q, forward.head_dims.v);
        let buffers = || [vec![0.0; head_dim], vec![0.0; head_dim]];
        let of_head = |[o, d_o]: &mut [Vec<f32>; 2], at: usize| {
            let (sequence, head) = (&sequences[at / heads], at % heads);
            let of_query = |query| {
                T::widen(&self.o[sequence.q_row(forward.o, head, query)..][..head_dim], o);
                let start = sequence.q_row(self.problem.d_o, head, query);
                T::widen(&self.d_o[start..][..head_dim], d_o);
                math::dot(o, d_o)
            };
            (0..sequence.seqlen_q).map(of_query).collect()
        };
        (0..sequences.len() * heads).into_par_iter().map_init(buffers, of_head).collect()
    }

    /// Log-sum-exp and `delta` of a query.
    pub(crate) fn statistics(&self, sequence: &Sequence, head: usize, query: usize) -> [f32; 2] {
        let forward = &self.problem.forward;
        let lse = forward
            .lse
            .map_or(f32::NEG_INFINITY, |strides| self.lse[sequence.lse(strides, head, query)]);
        [lse, self.delta[sequence.entry * forward.num_heads_q + head][query]]
    }

    /// The sink has probability `exp(sink - lse)` and no value, so `d_o · v - delta` is `-delta`.
    pub(crate) fn sink_gradient(
        &self,
        op: &AttentionBackward<'_>,
        sequences: &[Sequence],
        d_sink: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let (Some(mut d_sink), Some(sink)) = (d_sink, &op.attention.scores.sink) else {
            return Ok(());
        };
        let (d_sink, sink) = (d_sink.as_mut_slice::<f32>()?, sink.as_slice::<f32>()?);
        d_sink.par_iter_mut().zip(sink).enumerate().for_each(|(head, (d_sink, &sink))| {
            let mut sum = 0f64;
            for sequence in sequences {
                for query in 0..sequence.seqlen_q {
                    let [lse, delta] = self.statistics(sequence, head, query);
                    if lse != f32::NEG_INFINITY {
                        sum -= f64::from(math::probability(sink - lse) * delta);
                    }
                }
            }
            *d_sink = sum as f32;
        });
        Ok(())
    }
}

/// A gradient. Strided rows of several tasks interleave, so that tasks take turns at writing;
/// computing takes far longer.
pub(crate) struct Output<'a, T> {
    elements: Mutex<&'a mut [T]>,
    strides: Strides,
    head_dim: usize,
}

impl<'a, T: Float> Output<'a, T> {
    fn new(view: &'a mut ViewMut<'_>, strides: Strides, head_dim: usize) -> Result<Self> {
        Ok(Self { elements: Mutex::new(view.as_mut_slice()?), strides, head_dim })
    }

    /// The gradients of q, k and v. Packed rows that belong to no sequence are 0.
    pub(crate) fn all(
        [dq, dk, dv]: [&'a mut ViewMut<'_>; 3],
        problem: &AttentionBackwardProblem,
        sequences: &[Sequence],
    ) -> Result<[Self; 3]> {
        let forward = &problem.forward;
        let HeadDims { qk, v } = forward.head_dims;
        let dq = Self::new(dq, problem.dq, qk)?;
        let dk = Self::new(dk, problem.dk, qk)?;
        let dv = Self::new(dv, problem.dv, v)?;
        if let Some(packed) = forward.packed {
            let end = sequences.last();
            let end_q = end.map_or(0, |last| last.first_q + last.seqlen_q);
            let end_kv = end.map_or(0, |last| last.first_kv + last.seqlen_kv);
            dq.clear(end_q..packed.total_q, forward.num_heads_q);
            dk.clear(end_kv..packed.total_kv, forward.num_heads_kv);
            dv.clear(end_kv..packed.total_kv, forward.num_heads_kv);
        }
        Ok([dq, dk, dv])
    }

    /// Stores rows; `start` says where.
    pub(crate) fn store(
        &self,
        sums: &[f32],
        rows: &Range<usize>,
        start: impl Fn(usize) -> usize,
        rounded: &mut Vec<T>,
    ) {
        rounded.resize(sums.len(), T::zeroed());
        T::narrow(sums, rounded);
        let mut elements = self.elements.lock().unwrap_or_else(PoisonError::into_inner);
        for (row, values) in rows.clone().zip(rounded.chunks_exact(self.head_dim)) {
            elements[start(row)..][..self.head_dim].copy_from_slice(values);
        }
    }

    /// Zeroes rows of a packed tensor.
    fn clear(&self, rows: Range<usize>, heads: usize) {
        let mut elements = self.elements.lock().unwrap_or_else(PoisonError::into_inner);
        for (row, head) in rows.flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let start = row * self.strides.seq + head * self.strides.head;
            elements[start..][..self.head_dim].fill(T::zeroed());
        }
    }
}

#[cfg(test)]
mod tests;
