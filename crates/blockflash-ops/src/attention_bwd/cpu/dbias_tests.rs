use crate::fixtures::values;
use crate::{
    Attention, AttentionBackward, AttentionGradientsMut, DType, Device, Mask, Scores, Stream,
    Tensor, View,
};

/// Batch entries, heads, queries and keys.
const PAIRS: [usize; 4] = [2, 4, 150, 300];

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn tensor(shape: &[usize], seed: u64) -> Tensor {
    Tensor::from_slice(&cpu(), &values(shape.iter().product(), seed), shape).unwrap()
}

/// The shape of a bias with an element for several pairs.
fn shape(broadcast: [bool; 4]) -> [usize; 4] {
    std::array::from_fn(|dim| if broadcast[dim] { 1 } else { PAIRS[dim] })
}

/// The gradient of a bias that is 0 in every element.
fn gradient(broadcast: [bool; 4], mask: Mask, softcap: Option<f32>) -> Vec<f32> {
    let (stream, [batch, heads, queries, keys]) = (cpu(), PAIRS);
    let [q, d_o] = [1, 4].map(|seed| tensor(&[batch, queries, heads, 8], seed));
    let [k, v] = [2, 3].map(|seed| tensor(&[batch, keys, 2, 8], seed));
    let bias = Tensor::zeros(&stream, DType::F32, &shape(broadcast)).unwrap();
    let bias = Some(bias.view());
    let attention = Attention {
        scores: Scores { softcap, bias, ..mask.into() },
        ..Attention::new(q.view(), k.view(), v.view())
    };
    let output = attention.forward(&stream).unwrap();
    let gradients = attention.backward(&output, d_o.view(), &stream).unwrap();
    gradients.dbias.unwrap().to_vec(&stream).unwrap()
}

fn every_broadcast() -> impl Iterator<Item = [bool; 4]> {
    (0..16).map(|bits| std::array::from_fn(|dim| bits >> dim & 1 == 1))
}

#[test]
fn an_element_for_several_pairs_has_their_sum() {
    for (mask, softcap) in [(Mask::Full, None), (Mask::causal(), Some(3.0))] {
        let full = gradient([false; 4], mask, softcap);
        for broadcast in every_broadcast() {
            let shape = shape(broadcast);
            let mut sums = vec![0f64; shape.iter().product()];
            for (at, &x) in full.iter().enumerate() {
                let (mut rest, mut element, mut stride) = (at, 0, 1);
                for dim in (0..4).rev() {
                    let index = if broadcast[dim] { 0 } else { rest % PAIRS[dim] };
                    element += index * stride;
                    stride *= shape[dim];
                    rest /= PAIRS[dim];
                }
                sums[element] += f64::from(x);
            }
            for (found, sum) in gradient(broadcast, mask, softcap).iter().zip(sums) {
                let close = (f64::from(*found) - sum).abs() < 1e-5 * (1.0 + sum.abs());
                assert!(close, "{broadcast:?} {found} {sum}");
            }
        }
    }
}

#[test]
fn masked_pairs_have_none() {
    let [.., queries, keys] = PAIRS;
    for (at, dbias) in gradient([false; 4], Mask::causal(), None).iter().enumerate() {
        let seen = at % keys <= at / keys % queries + keys - queries;
        assert_eq!(*dbias != 0.0, seen, "{at}");
    }
}

#[test]
fn bits_are_equal_for_any_number_of_threads() {
    for broadcast in every_broadcast() {
        let run = || gradient(broadcast, Mask::causal(), None);
        let first = run();
        for threads in [1, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert!(pool.install(run) == first, "{broadcast:?}, {threads} threads");
        }
    }
}

#[test]
fn a_gradient_may_be_strided_and_wider_than_the_bias() {
    let (stream, queries, keys) = (cpu(), 5, 7);
    let [q, d_o] = [1, 4].map(|seed| tensor(&[1, queries, 1, 8], seed));
    let [k, v] = [2, 3].map(|seed| tensor(&[1, keys, 1, 8], seed));
    let bias = [half::f16::ONE; 35];
    let bias = View::from_slice(&bias, &[1, 1, queries, keys]).unwrap();
    let attention = Attention {
        scores: Scores { bias: Some(bias), ..Scores::default() },
        ..Attention::new(q.view(), k.view(), v.view())
    };
    let output = attention.forward(&stream).unwrap();
    let call = AttentionBackward {
        attention,
        o: output.o.view(),
        lse: output.lse.view(),
        d_o: d_o.view(),
    };
    let narrow: Vec<half::f16> =
        call.backward(&stream).unwrap().dbias.unwrap().to_vec(&stream).unwrap();
    // Keys before queries, with gaps.
    let mut wide = Tensor::zeros(&stream, DType::F32, &[1, 1, keys, queries + 2]).unwrap();
    let [mut dq, mut dk, mut dv] = [queries, keys, keys].map(|rows| tensor(&[1, rows, 1, 8], 0));
    let dbias = wide.view_mut().slice(3, 0..queries).unwrap().permute(&[0, 1, 3, 2]).unwrap();
    let gradients = AttentionGradientsMut {
        dbias: Some(dbias),
        ..AttentionGradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut())
    };
    call.backward_into(gradients, None, &stream).unwrap();
    let wide: Vec<f32> = wide.to_vec(&stream).unwrap();
    for (at, narrow) in narrow.iter().enumerate() {
        let (query, key) = (at / keys, at % keys);
        assert_eq!(half::f16::from_f32(wide[key * (queries + 2) + query]), *narrow);
    }
    assert!(wide.chunks(queries + 2).all(|row| row[queries..] == [0.0; 2]));
}
