//! Partial blocks: only the pairs whose bits are 1 count.

use super::reference::{Case, assert_close, case, cpu};
use crate::block_sparse::fixtures::random_partial;
use crate::fixtures::values;
use crate::{
    Align, Attention, AttentionGradients, BlockGeometry, BlockMask, Mask, Scores, Tensor, View,
};

/// A case of 4 and 2 heads, a mask of this many batch entries and heads, and which pairs of the
/// case it shows.
fn partial(
    sizes: [usize; 3],
    blocks: [usize; 2],
    of: [usize; 2],
    mask: Mask,
) -> (Case, BlockMask, Vec<bool>) {
    let [batch, seqlen_q, seqlen_kv] = sizes;
    let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, blocks[0], blocks[1]).unwrap();
    let (block_mask, pairs) = random_partial(geometry, of[0], of[1], seqlen_q as u64);
    let seen = (0..batch * 4).flat_map(|at| {
        let (entry, head) = (at / 4 % of[0], at % 4 / (4 / of[1]));
        let start = (entry * of[1] + head) * seqlen_q * seqlen_kv;
        pairs[start..start + seqlen_q * seqlen_kv].to_vec()
    });
    (case(sizes, [4, 2], 8, mask), block_mask, seen.collect())
}

fn window() -> Mask {
    Mask::Window { left: Some(90), right: Some(20), align: Align::BottomRight }
}

/// A value for each pair, or another where it is not seen.
fn where_seen(seen: &[bool], values: &[f32], otherwise: f32) -> Vec<f32> {
    seen.iter().zip(values).map(|(&seen, &x)| if seen { x } else { otherwise }).collect()
}

fn of_pairs<'a>(case: &Case, values: &'a [f32]) -> View<'a> {
    let [batch, seqlen_q, seqlen_kv] = case.sizes;
    View::from_slice(values, &[batch, case.heads[0], seqlen_q, seqlen_kv]).unwrap()
}

/// `dq`, `dk`, `dv` and `dbias`.
fn gradients(call: &Attention<'_>) -> [Vec<f32>; 4] {
    let stream = cpu();
    let d_o = values(call.q.shape().iter().product(), 5);
    let d_o = View::from_slice(&d_o, call.q.shape()).unwrap();
    let output = call.forward(&stream).unwrap();
    let found = call.backward(&output, d_o, &stream).unwrap();
    let AttentionGradients { dq, dk, dv, dbias, .. } = &found;
    [dq, dk, dv, dbias.as_ref().unwrap()].map(|tensor: &Tensor| tensor.to_vec(&stream).unwrap())
}

#[test]
fn only_visible_pairs_count() {
    for sizes in [[2, 3, 300], [2, 150, 333]] {
        for (blocks, of, mask) in [
            ([64, 64], [1, 1], Mask::Full),
            ([128, 64], [2, 2], Mask::causal()),
            ([64, 128], [2, 4], window()),
            ([128, 128], [1, 4], Mask::Full),
        ] {
            let (mut case, block_mask, seen) = partial(sizes, blocks, of, mask);
            // Of some keys and values, which most queries do not see.
            case.k[40 * 16..40 * 16 + 8].fill(f32::NAN);
            case.v[70 * 16 + 3] = f32::NAN;
            case.v[201 * 16 + 9] = f32::INFINITY;
            let bias = values(seen.len(), 9);
            let hidden_nan = where_seen(&seen, &bias, f32::NAN);
            let scores =
                Scores { bias: Some(of_pairs(&case, &hidden_nan)), ..case.attention().scores };
            let stream = cpu();
            let call = Attention { scores, block_mask: Some(&block_mask), ..case.attention() };
            let output = call.forward(&stream).unwrap();
            let (o, lse): (Vec<f32>, Vec<f32>) =
                (output.o.to_vec(&stream).unwrap(), output.lse.to_vec(&stream).unwrap());
            let (o_reference, lse_reference) =
                Case { seen: Some(seen), added: Some(bias), ..case.clone() }.reference();
            assert_close(&o, &o_reference, 3e-6);
            assert_close(&lse, &lse_reference, 3e-6);
        }
    }
}

/// A hidden pair is one whose bias is −∞, as long as everything else is finite.
#[test]
fn gradients_of_visible_pairs() {
    for (blocks, of, mask) in [
        ([64, 64], [1, 2], Mask::Full),
        ([128, 64], [2, 4], Mask::causal()),
        ([64, 128], [2, 1], window()),
    ] {
        let (case, block_mask, seen) = partial([2, 150, 333], blocks, of, mask);
        let bias = values(seen.len(), 9);
        let [nan, hiding] =
            [f32::NAN, f32::NEG_INFINITY].map(|hidden| where_seen(&seen, &bias, hidden));
        let of = |bias, block_mask| {
            let scores = Scores { bias: Some(of_pairs(&case, bias)), ..case.attention().scores };
            gradients(&Attention { scores, block_mask, ..case.attention() })
        };
        let (found, expected) = (of(&nan, Some(&block_mask)), of(&hiding, None));
        for (found, expected) in found.iter().zip(expected) {
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            assert_close(found, &expected, 1e-5);
        }
        for (dbias, seen) in found[3].iter().zip(&seen) {
            assert!(*seen || *dbias == 0.0);
        }
    }
}

/// Bits, a bias, ALiBi, a softcap and a token mask at once.
#[test]
fn gradients_are_finite_differences() {
    const STEP: f32 = 1.0 / 256.0;
    let (base, block_mask, seen) = partial([1, 3, 200], [64, 64], [1, 2], Mask::causal());
    let base = Case { softcap: Some(2.0), ..base };
    let slopes = [0.125, 0.0625, 0.03125, 0.0];
    let bias = values(seen.len(), 9);
    let term = |at: usize| {
        let (head, query, key) = (at / 600, at / 200 % 3, at % 200);
        -slopes[head] * (query as f32 + 197.0 - key as f32).abs()
    };
    let d_o = values(base.q.len(), 5);
    let value = |case: &Case, bias: &[f32]| -> f64 {
        let added = bias.iter().enumerate().map(|(at, bias)| bias + term(at)).collect();
        let (o, _) =
            Case { seen: Some(seen.clone()), added: Some(added), ..case.clone() }.reference();
        o.iter().zip(&d_o).map(|(o, &d_o)| o * f64::from(d_o)).sum()
    };
    let scores = Scores {
        bias: Some(of_pairs(&base, &bias)),
        alibi: Some(View::from_slice(&slopes, &[4]).unwrap()),
        ..base.attention().scores
    };
    let call = Attention { scores, block_mask: Some(&block_mask), ..base.attention() };
    for (which, found) in gradients(&call).iter().enumerate() {
        let difference = |at: usize| {
            let [up, down] = [STEP, -STEP].map(|step| {
                let (mut case, mut bias) = (base.clone(), bias.clone());
                [&mut case.q, &mut case.k, &mut case.v, &mut bias][which][at] += step;
                value(&case, &bias)
            });
            (up - down) / f64::from(2.0 * STEP)
        };
        let expected: Vec<f64> = (0..found.len()).map(difference).collect();
        assert!(expected.iter().any(|x| x.abs() > 0.01), "gradient {which}");
        assert_close(found, &expected, 5e-5);
    }
}

/// Query 1 sees no key of a block that others visit, query 2 only keys whose bias is −∞.
#[test]
fn rows_that_see_nothing_are_empty() {
    for seqlen_q in [3, 70] {
        let case = case([1, seqlen_q, 300], [4, 2], 8, Mask::Full);
        let geometry = BlockGeometry::new(seqlen_q, 300, 64, 64).unwrap();
        let sees = |query: usize, key: usize| match query {
            1 => false,
            2 => (100..110).contains(&key),
            _ => !(query + key).is_multiple_of(3),
        };
        let mask = BlockMask::from_fn(geometry, 1, 1, |_, _, query, key| sees(query, key));
        let mask = mask.unwrap();
        let bias: Vec<f32> = (0..4 * seqlen_q * 300)
            .map(|at| match (at / 300 % seqlen_q, at % 300) {
                (2, 100..110) => f32::NEG_INFINITY,
                (query, key) if !sees(query, key) => f32::NAN,
                _ => 0.5,
            })
            .collect();
        let sink = [0.5; 4];
        for sink in [None, Some(View::from_slice(&sink, &[4]).unwrap())] {
            let bias = Some(of_pairs(&case, &bias));
            let scores = Scores { bias, sink, ..Scores::default() };
            let call = Attention { scores, block_mask: Some(&mask), ..case.attention() };
            let stream = cpu();
            let output = call.forward(&stream).unwrap();
            let (o, lse): (Vec<f32>, Vec<f32>) =
                (output.o.to_vec(&stream).unwrap(), output.lse.to_vec(&stream).unwrap());
            let empty = if sink.is_some() { 0.5 } else { f32::NEG_INFINITY };
            assert!(o[32..3 * 32].iter().all(|&x| x == 0.0));
            assert!(o.iter().all(|x| x.is_finite()) && o[..32].iter().all(|&x| x != 0.0));
            for (at, &lse) in lse.iter().enumerate() {
                assert_eq!([1, 2].contains(&(at % seqlen_q)), lse == empty, "{at}");
            }
            let [dq, dk, dv, dbias] = gradients(&call);
            assert!([&dq, &dk, &dv, &dbias].iter().all(|x| x.iter().all(|x| x.is_finite())));
            assert!(dq[32..3 * 32].iter().all(|&x| x == 0.0) && dq[0] != 0.0);
            for (at, &dbias) in dbias.iter().enumerate() {
                let query = at / 300 % seqlen_q;
                assert!(![1, 2].contains(&query) || dbias == 0.0, "{at}");
            }
        }
    }
}

/// A bias of −∞ is no mask: NaN in a value stays, also where it hides all keys.
#[test]
fn a_bias_that_hides_all_keys_keeps_nan() {
    for seqlen_q in [1, 70] {
        let mut case = case([1, seqlen_q, 40], [2, 2], 8, Mask::Full);
        case.v[7 * 16 + 3] = f32::NAN;
        let bias = vec![f32::NEG_INFINITY; 2 * seqlen_q * 40];
        let scores = Scores { bias: Some(of_pairs(&case, &bias)), ..Scores::default() };
        let stream = cpu();
        let output = Attention { scores, ..case.attention() }.forward(&stream).unwrap();
        let o: Vec<f32> = output.o.to_vec(&stream).unwrap();
        for (at, o) in o.iter().enumerate() {
            assert!(if at % 16 == 3 { o.is_nan() } else { *o == 0.0 }, "{at}: {o}");
        }
    }
}
