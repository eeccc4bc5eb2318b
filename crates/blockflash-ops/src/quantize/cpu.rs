//! Quantising on the CPU, in parallel over sequences, heads and blocks of tokens.
//!
//! Sums run over the tokens of a sequence in order, and maxima have no order, so results do not
//! depend on the number of threads.

use super::problem::ScaleOf;
use super::{Quantize, QuantizeOutputMut, QuantizeProblem};
use crate::Result;
use crate::attention::Strides;
use crate::check::filled;
use crate::codes::{Code, chosen, encode, magnitude};
use crate::float::Float;
use crate::kv_cache::{HostScale, token_ranges};
use blockflash_safe::{E4M3, E5M2, Stream, View};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Tokens of a head that are written together.
const BLOCK: usize = 256;

/// Writes the outputs of a problem that was checked.
pub(super) fn quantize(
    op: &Quantize<'_>,
    problem: &QuantizeProblem,
    out: QuantizeOutputMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let QuantizeProblem { batch, tokens, packed, num_heads, head_dim, .. } = *problem;
    // Dense sequences need no list, which might be longer than the memory of all tensors.
    let ranges = match op.packed {
        Some(_) => token_ranges(op.packed.as_ref(), [batch, tokens], packed, stream)?,
        None => Vec::new(),
    };
    let given = op.host_scale(problem, stream)?;
    let read = match problem.dtype {
        DType::F16 => reader::<f16>(&op.x),
        DType::BF16 => reader::<bf16>(&op.x),
        _ => reader::<f32>(&op.x),
    }?;
    let mut call = Call { problem, read, ranges, means: Vec::new(), rotate: op.rotate, given };
    if op.subtract_mean {
        let zeros = filled(0.0, &[batch, num_heads, head_dim])?;
        call.means = call.means_of(zeros);
    }
    match problem.codes {
        DType::E4M3 => call.write::<E4M3>(out),
        DType::E5M2 => call.write::<E5M2>(out),
        _ => call.write::<i8>(out),
    }
}

/// Converts the row that starts at a position to f32.
type Read<'a> = Box<dyn Fn(usize, &mut [f32]) + Sync + 'a>;

fn reader<'a, T: Float>(x: &View<'a>) -> Result<Read<'a>> {
    let x = x.as_slice::<T>()?;
    Ok(Box::new(move |start, row| T::widen(&x[start..][..row.len()], row)))
}

/// A call whose inputs are in host memory.
struct Call<'a> {
    problem: &'a QuantizeProblem,
    read: Read<'a>,
    /// The tokens of each packed sequence.
    ranges: Vec<Range<usize>>,
    /// Those of each sequence and head, or nothing.
    means: Vec<f32>,
    rotate: bool,
    given: Option<HostScale<'a>>,
}

impl Call<'_> {
    /// All sequences and heads.
    fn heads(&self) -> impl IndexedParallelIterator<Item = [usize; 2]> {
        let heads = self.problem.num_heads;
        // A sequence without heads has none to divide by.
        let split = move |at: usize| [at / heads, at % heads];
        (0..self.problem.batch * heads).into_par_iter().map(split)
    }

    /// The tokens of a sequence.
    fn tokens(&self, entry: usize) -> Range<usize> {
        self.ranges.get(entry).cloned().unwrap_or(0..self.problem.tokens)
    }

    /// A row as it is divided by its scale.
    fn row(&self, [entry, token, head]: [usize; 3], row: &mut [f32]) {
        (self.read)(position(self.problem.x, [entry, token, head]), row);
        if !self.means.is_empty() {
            let mean = &self.means[(entry * self.problem.num_heads + head) * row.len()..];
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
        if self.rotate {
            rotate(row);
        }
    }

    /// The mean of each sequence and head, into `means`.
    fn means_of(&self, mut means: Vec<f32>) -> Vec<f32> {
        let width = self.problem.head_dim;
        means.par_chunks_exact_mut(width).zip(self.heads()).for_each(|(mean, [entry, head])| {
            let (mut row, mut sums) = (vec![0f32; width], vec![(0f64, 0f64); width]);
            for token in self.tokens(entry) {
                (self.read)(position(self.problem.x, [entry, token, head]), &mut row);
                for (x, (sum, count)) in row.iter().zip(&mut sums).filter(|(x, _)| x.is_finite()) {
                    *sum += f64::from(*x);
                    *count += 1.0;
                }
            }
            for (mean, (sum, count)) in mean.iter_mut().zip(sums) {
                *mean = (sum / f64::max(count, 1.0)) as f32;
            }
        });
        means
    }

    /// The greatest magnitude of each sequence and head.
    fn magnitudes(&self) -> Result<Vec<f32>> {
        let mut found = filled(0f32, &[self.problem.batch, self.problem.num_heads])?;
        found.par_iter_mut().zip(self.heads()).for_each(|(most, [entry, head])| {
            let mut row = vec![0.0; self.problem.head_dim];
            for token in self.tokens(entry) {
                self.row([entry, token, head], &mut row);
                *most = most.max(magnitude(&row));
            }
        });
        Ok(found)
    }

    fn write<C: Code>(&self, mut out: QuantizeOutputMut<'_>) -> Result<()> {
        let QuantizeProblem { num_heads, head_dim, scale, .. } = *self.problem;
        let mut of_heads = match scale {
            ScaleOf::Tensor | ScaleOf::Head => self.magnitudes()?,
            ScaleOf::Given(_) | ScaleOf::Token => Vec::new(),
        };
        if scale == ScaleOf::Tensor {
            let most = of_heads.iter().fold(0f32, |most, &x| most.max(x));
            of_heads.fill(most);
            if let Some(out) = &mut out.scale {
                out.as_mut_slice::<f32>()?[0] = chosen::<C>(most);
            }
        }
        of_heads.iter_mut().for_each(|magnitude| *magnitude = chosen::<C>(*magnitude));
        let strides = [
            strides(out.codes.strides()),
            match (&out.scale, scale) {
                (Some(out), ScaleOf::Token) => strides_of_rows(out.strides()),
                _ => Strides { batch: 0, seq: 0, head: 0 },
            },
        ];
        if let (Some(out), ScaleOf::Head) = (&mut out.scale, scale) {
            let (row, column) = (out.strides()[0], out.strides()[1]);
            let out = out.as_mut_slice::<f32>()?;
            for (at, &scale) in of_heads.iter().enumerate() {
                out[at / num_heads * row + at % num_heads * column] = scale;
            }
        }
        if let Some(mean) = &mut out.mean {
            let (row, column) = (mean.strides()[0], mean.strides()[1]);
            let out = mean.as_mut_slice::<f32>()?;
            for (at, mean) in self.means.chunks_exact(head_dim).enumerate() {
                let start = at / num_heads * row + at % num_heads * column;
                out[start..][..head_dim].copy_from_slice(mean);
            }
        }
        if self.problem.is_empty() {
            return Ok(());
        }
        let scales = out.scale.as_mut().filter(|_| scale == ScaleOf::Token);
        let scales = scales.map(|scales| scales.as_mut_slice::<f32>()).transpose()?;
        let targets = Mutex::new((out.codes.as_mut_slice::<C>()?, scales));
        let blocks = |[entry, head]: [usize; 2]| {
            let tokens = self.tokens(entry);
            let block = move |start: usize| start..(start + BLOCK).min(tokens.end);
            let starts = self.tokens(entry).into_par_iter().step_by(BLOCK);
            starts.map(move |start| (entry, head, block(start)))
        };
        self.heads().flat_map(blocks).for_each_init(
            || (vec![0.0; head_dim], Vec::new()),
            |(row, codes), (entry, head, tokens)| {
                codes.resize(tokens.len() * head_dim, C::zeroed());
                let mut chosen_scales = [1f32; BLOCK];
                for ((token, codes), of_token) in
                    tokens.clone().zip(codes.chunks_exact_mut(head_dim)).zip(&mut chosen_scales)
                {
                    self.row([entry, token, head], row);
                    *of_token = match scale {
                        ScaleOf::Given(_) => {
                            self.given.as_ref().map_or(1.0, |given| given.get(entry, [0; 2], head))
                        }
                        ScaleOf::Token => chosen::<C>(magnitude(row)),
                        ScaleOf::Tensor | ScaleOf::Head => of_heads[entry * num_heads + head],
                    };
                    encode(row, *of_token, codes);
                }
                // Rows of several heads interleave, so blocks take turns at writing.
                let mut targets = targets.lock().unwrap_or_else(PoisonError::into_inner);
                let (out, scales) = &mut *targets;
                for ((token, codes), of_token) in
                    tokens.zip(codes.chunks_exact(head_dim)).zip(chosen_scales)
                {
                    let at = [entry, token, head];
                    out[position(strides[0], at)..][..head_dim].copy_from_slice(codes);
                    if let Some(scales) = scales {
                        scales[position(strides[1], at)] = of_token;
                    }
                }
            },
        );
        Ok(())
    }
}

/// Where a row starts.
fn position(strides: Strides, [entry, token, head]: [usize; 3]) -> usize {
    entry * strides.batch + token * strides.seq + head * strides.head
}

/// Strides of `[batch, seqlen, num_heads]` or packed `[total, num_heads]`.
fn strides_of_rows(strides: &[usize]) -> Strides {
    match *strides {
        [batch, seq, head] => Strides { batch, seq, head },
        [seq, head] => Strides { batch: 0, seq, head },
        _ => Strides { batch: 0, seq: 0, head: 0 },
    }
}

/// The same of tensors that have rows of elements.
fn strides(strides: &[usize]) -> Strides {
    strides_of_rows(strides.split_last().map_or(&[], |(_, rows)| rows))
}

/// Multiplies a row, whose length is a power of 2, with the orthonormal Hadamard matrix.
fn rotate(row: &mut [f32]) {
    let mut half = 1;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = (*low + *high, *low - *high);
            }
        }
        half *= 2;
    }
    let factor = (1.0 / (row.len() as f64).sqrt()) as f32;
    row.iter_mut().for_each(|x| *x *= factor);
}
