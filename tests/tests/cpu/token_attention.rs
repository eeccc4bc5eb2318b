//! Attention under a block mask of pairs, held against a boolean for each pair.

use blockflash_ops::{Attention, BlockMask, Scores, Stream, Tensor, View};
use blockflash_tests::host::cpu;
use blockflash_tests::number::normal;

const HEAD_DIM: usize = 4;

/// Attention and its gradients see the pairs, `[batch, heads, seqlen_q, seqlen_kv]`, and no others.
pub(crate) fn assert_attends(mask: &BlockMask, pairs: &[bool]) {
    let (stream, [batch, heads]) = (cpu(), [mask.batch(), mask.heads()]);
    let [of_q, of_kv] = [mask.seqlen_q(), mask.seqlen_kv()].map(|n| [batch, n, heads, HEAD_DIM]);
    let [q, d_o] = [1, 2].map(|seed| normal(seed, of_q.iter().product()));
    let [k, v] = [3, 4].map(|seed| normal(seed, of_kv.iter().product()));
    let [q, d_o] = [&q, &d_o].map(|values| View::from_slice(values, &of_q).unwrap());
    let [k, v] = [&k, &v].map(|values| View::from_slice(values, &of_kv).unwrap());
    // The same by a bias, without a mask.
    let hiding: Vec<f32> =
        pairs.iter().map(|&seen| if seen { 0.0 } else { f32::NEG_INFINITY }).collect();
    let hiding =
        View::from_slice(&hiding, &[batch, heads, mask.seqlen_q(), mask.seqlen_kv()]).unwrap();
    let of = |bias, block_mask| {
        let scores = Scores { bias, ..Scores::default() };
        let call = Attention { scores, block_mask, ..Attention::new(q, k, v) };
        let output = call.forward(&stream).unwrap();
        let gradients = call.backward(&output, d_o, &stream).unwrap();
        [output.o, output.lse, gradients.dq, gradients.dk, gradients.dv]
            .map(|tensor| values(&tensor, &stream))
    };
    let names = ["o", "lse", "dq", "dk", "dv"];
    let results = of(None, Some(mask)).into_iter().zip(of(Some(hiding), None));
    for (name, (found, expected)) in names.iter().zip(results) {
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            let close = (found - expected).abs() < 1e-5 * (1.0 + expected.abs());
            assert!(*found == expected || close, "{name}[{at}] is {found}, expected {expected}");
        }
    }
}

fn values(tensor: &Tensor, stream: &Stream) -> Vec<f32> {
    tensor.to_vec(stream).unwrap()
}
