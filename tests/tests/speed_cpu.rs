//! The CPU backend is at least 20 times as fast as the naive loop in f64 that defines attention.
//!
//! The naive loop (one thread, three nested loops, softmax row by row) is measured on 32 query rows of one head, spread over
//! the sequence, and scaled by the number of rows: every row costs the same, since the mask is full. The backend is measured
//! completely, with all threads. Both take the best of several runs, so that a busy machine slows both or neither. The test is
//! the same with and without optimisation of the workspace; the dependencies that multiply matrices are always optimised.

use blockflash_ops::{Attention, DType, Device, Stream, Tensor};
use blockflash_tests::attention::{AttentionCase, AttentionData, AttentionInputs};
use std::hint::black_box;
use std::time::{Duration, Instant};

const HEADS: usize = 8;
const SEQLEN: usize = 2048;
const HEAD_DIM: usize = 64;
const NAIVE_ROWS: usize = 32;
const FACTOR: f64 = 20.0;

fn best(runs: usize, mut work: impl FnMut()) -> Duration {
    let run = |_| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..runs).map(run).min().expect("at least one run")
}

/// One row of one head, as the definition says it. Inputs are f64 already, `[seqlen, head_dim]`.
fn naive_row(q: &[f64], k: &[f64], v: &[f64], scale: f64) -> Vec<f64> {
    let mut scores = vec![0.0; SEQLEN];
    for j in 0..SEQLEN {
        let mut sum = 0.0;
        for i in 0..HEAD_DIM {
            sum += q[i] * k[j * HEAD_DIM + i];
        }
        scores[j] = sum * scale;
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for score in &mut scores {
        *score = (*score - max).exp();
        sum += *score;
    }
    let mut o = vec![0.0; HEAD_DIM];
    for j in 0..SEQLEN {
        for i in 0..HEAD_DIM {
            o[i] += scores[j] / sum * v[j * HEAD_DIM + i];
        }
    }
    o
}

#[test]
fn twenty_times_the_naive_loop() {
    let case = AttentionCase::simple(DType::F16, (HEADS, HEADS), HEAD_DIM, (SEQLEN, SEQLEN));
    let data = AttentionData::generate(&case);
    let head = |tensor: &[f32]| -> Vec<f64> {
        tensor.chunks(HEADS * HEAD_DIM).flat_map(|row| row[..HEAD_DIM].iter().map(|&x| f64::from(x))).collect()
    };
    let (q, k, v) = (head(&data.q), head(&data.k), head(&data.v));
    let naive = best(3, || {
        for row in 0..NAIVE_ROWS {
            let at = row * (SEQLEN / NAIVE_ROWS) * HEAD_DIM;
            black_box(naive_row(&q[at..at + HEAD_DIM], &k, &v, 0.125));
        }
    });
    let naive = naive.as_secs_f64() * (HEADS * SEQLEN / NAIVE_ROWS) as f64;

    let stream: &Stream = &Device::cpu().stream().unwrap();
    let inputs = AttentionInputs::upload(&case, &data, stream).unwrap();
    let call: Attention<'_> = inputs.attention();
    let mut o = Tensor::empty(stream, DType::F16, &case.shapes()[0]).unwrap();
    let backend = best(6, || call.forward_into(o.view_mut(), None, stream).unwrap()).as_secs_f64();
    let ratio = naive / backend;
    println!(
        "B1 H{HEADS} S{SEQLEN} D{HEAD_DIM} f16: naive {naive:.2} s (scaled from {NAIVE_ROWS} of {} rows), backend \
         {backend:.3} s, {ratio:.1} times as fast",
        HEADS * SEQLEN
    );
    assert!(ratio >= FACTOR, "{ratio:.1} times as fast as the naive loop, expected {FACTOR}");
}
