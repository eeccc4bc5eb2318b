use super::super::reference::{Case, assert_close, case, cpu};
use crate::fixtures::values;
use crate::{Align, Attention, Mask, Scores, View};
use half::f16;

type Outputs = (Vec<f32>, Vec<f32>);

/// Few rows of queries, and many.
const SIZES: [[usize; 3]; 2] = [[2, 3, 300], [2, 70, 300]];

fn run(case: &Case, scores: Scores<View<'_>>) -> Outputs {
    let stream = cpu();
    let output = Attention { scores, ..case.attention() }.forward(&stream).unwrap();
    (output.o.to_vec(&stream).unwrap(), output.lse.to_vec(&stream).unwrap())
}

fn with_bias(case: &Case, bias: View<'_>) -> Outputs {
    run(case, Scores { bias: Some(bias), ..case.attention().scores })
}

/// A case of 4 and 2 heads, and its bias for each pair.
fn biased(sizes: [usize; 3], mask: Mask) -> (Case, Vec<f32>, [usize; 4]) {
    let case = Case { softcap: Some(5.0), ..case(sizes, [4, 2], 8, mask) };
    let shape = [sizes[0], 4, sizes[1], sizes[2]];
    (case, values(shape.iter().product(), 7), shape)
}

#[test]
fn a_bias_is_added_after_the_cap() {
    for (sizes, mask) in SIZES.into_iter().flat_map(|s| [(s, Mask::Full), (s, Mask::causal())]) {
        let (case, bias, shape) = biased(sizes, mask);
        let ((o, lse), (o_reference, lse_reference)) = (
            with_bias(&case, View::from_slice(&bias, &shape).unwrap()),
            Case { added: Some(bias.clone()), ..case.clone() }.reference(),
        );
        assert_close(&o, &o_reference, 3e-6);
        assert_close(&lse, &lse_reference, 3e-6);
        let with_sink = Case { sink: Some(vec![0.5, -1.0, 2.0, 0.0]), ..case };
        let (o, _) = with_bias(&with_sink, View::from_slice(&bias, &shape).unwrap());
        let (o_reference, _) = Case { added: Some(bias), ..with_sink }.reference();
        assert_close(&o, &o_reference, 3e-6);
    }
}

#[test]
fn equal_numbers_in_another_place_have_equal_bits() {
    for sizes in SIZES {
        let (case, _, [b, h, q, k]) = biased(sizes, Mask::causal());
        let row = values(k, 3);
        let full = row.repeat(b * h * q);
        let expected = with_bias(&case, View::from_slice(&full, &[b, h, q, k]).unwrap());
        let one = View::from_slice(&row, &[1, 1, 1, k]).unwrap();
        assert!(with_bias(&case, one) == expected, "broadcast");
        let expanded = one.expand(0, b).unwrap().expand(1, h).unwrap().expand(2, q).unwrap();
        assert!(with_bias(&case, expanded) == expected, "strides of 0");
        let spread: Vec<f32> = row.iter().flat_map(|&x| [x, f32::NAN, f32::NAN]).collect();
        let spread = View::from_slice_strided(&spread, &[1, 1, 1, k], &[0, 0, 0, 3]).unwrap();
        assert!(with_bias(&case, spread) == expected, "gaps");
        let halves: Vec<f16> = row.iter().map(|&x| f16::from_f32(x)).collect();
        let rounded: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
        let found = with_bias(&case, View::from_slice(&halves, &[1, 1, 1, k]).unwrap());
        let expected = with_bias(&case, View::from_slice(&rounded, &[1, 1, 1, k]).unwrap());
        assert!(found == expected, "f16");
    }
}

#[test]
fn slopes_act_by_the_distance_from_the_last_key() {
    for (sizes, mask) in SIZES.into_iter().flat_map(|sizes| {
        [Mask::Full, Mask::causal(), Mask::Causal { align: Align::TopLeft }]
            .map(|mask| (sizes, mask))
    }) {
        let (case, _, [b, h, q, k]) = biased(sizes, mask);
        let slopes = [0.05, 0.025, 0.0, -0.0125, 0.03, 0.02, 0.01, 0.1];
        for per_entry in [false, true] {
            let shape = if per_entry { vec![b, h] } else { vec![h] };
            let alibi = View::from_slice(&slopes[..shape.iter().product()], &shape).unwrap();
            let term = |at: usize| {
                let (entry, head, i, j) = (at / (h * q * k), at / (q * k) % h, at / k % q, at % k);
                let slope = slopes[if per_entry { entry * h + head } else { head }];
                -slope * ((i + k - q) as f32 - j as f32).abs()
            };
            let added: Vec<f32> = (0..b * h * q * k).map(term).collect();
            let scores = Scores { alibi: Some(alibi), ..case.attention().scores };
            let ((o, lse), (o_reference, lse_reference)) =
                (run(&case, scores), Case { added: Some(added), ..case.clone() }.reference());
            assert_close(&o, &o_reference, 3e-6);
            assert_close(&lse, &lse_reference, 3e-6);
        }
    }
}

#[test]
fn what_is_added_to_masked_pairs_does_not_matter() {
    for sizes in SIZES {
        let window = Mask::Window { left: Some(70), right: Some(3), align: Align::BottomRight };
        let (case, mut bias, shape) = biased(sizes, window);
        let clean = with_bias(&case, View::from_slice(&bias, &shape).unwrap());
        for (row, bias) in bias.chunks_mut(sizes[2]).enumerate() {
            let seen = window.visible(row % sizes[1], sizes[1], sizes[2]);
            bias[..seen.start].fill(f32::NAN);
            bias[seen.end..].fill(f32::INFINITY);
        }
        assert!(with_bias(&case, View::from_slice(&bias, &shape).unwrap()) == clean);
    }
}

#[test]
fn rows_without_a_finite_score_are_empty() {
    for sizes in SIZES {
        let (case, mut bias, shape) = biased(sizes, Mask::Full);
        let none = f32::NEG_INFINITY;
        // Query 1 has no key in any head, query 2 only the last.
        for row in bias.chunks_mut(sizes[1] * sizes[2]) {
            row[sizes[2]..2 * sizes[2]].fill(none);
            row[2 * sizes[2]..3 * sizes[2] - 1].fill(none);
        }
        let bias = View::from_slice(&bias, &shape).unwrap();
        let (o, lse) = with_bias(&case, bias);
        for (entry, head) in (0..2).flat_map(|b| (0..4).map(move |h| (b, h))) {
            let row = |query: usize| &o[((entry * sizes[1] + query) * 4 + head) * 8..][..8];
            let lse = |query: usize| lse[(entry * 4 + head) * sizes[1] + query];
            assert!(row(1) == [0.0; 8] && lse(1) == none);
            let value = &case.v[((entry * sizes[2] + sizes[2] - 1) * 2 + head / 2) * 8..][..8];
            assert!(row(2) == value && lse(2).is_finite() && lse(0).is_finite());
        }
        let (o, lse) = with_bias(&Case { sink: Some(vec![0.5; 4]), ..case }, bias);
        assert!(o[4 * 8..5 * 8] == [0.0; 8] && lse[1] == 0.5);
    }
}
