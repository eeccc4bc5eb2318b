//! One row of attention from its rows over disjoint sets of keys.

use crate::attention_row::AttentionRow;
use crate::elements::{Element, round};
use blockflash_sys::DType;

/// The merged row of parts with outputs `o` and log-sum-exps `lse`; its output is of type `dtype`.
/// The output of a part without keys, whose log-sum-exp is -inf, does not matter.
pub fn merged_row(dtype: DType, parts: &[(&[f32], f32)], head_dim: usize) -> AttentionRow {
    let filled: Vec<_> = parts.iter().filter(|(_, lse)| *lse != f32::NEG_INFINITY).collect();
    let max = filled.iter().map(|(_, lse)| *lse).fold(f32::NEG_INFINITY, f32::max);
    if filled.is_empty() {
        let nothing = Element { exact: max.into(), plain: max.into(), ..Element::default() };
        let lse = Element { magnitude: 1.0, ..nothing };
        return AttentionRow { o: vec![Element::default(); head_dim], lse };
    }
    let weight = |lse: f32| (f64::from(lse) - f64::from(max)).exp();
    let sum: f64 = filled.iter().map(|(_, lse)| weight(*lse)).sum();
    let plain_sum: f32 = filled.iter().map(|(_, lse)| (lse - max).exp()).sum();
    let element = |at: usize| {
        let terms = || filled.iter().map(|(o, lse)| weight(*lse) / sum * f64::from(o[at]));
        let plain: f32 = filled.iter().map(|(o, lse)| (lse - max).exp() * o[at]).sum();
        Element {
            exact: terms().sum(),
            plain: f64::from(round(dtype, plain / plain_sum)),
            magnitude: terms().map(|term| term * term).sum::<f64>().sqrt(),
            partial: 0.0,
        }
    };
    let lse = Element {
        exact: f64::from(max) + sum.ln(),
        plain: f64::from(max + plain_sum.ln()),
        magnitude: f64::from(max.abs()).max(1.0),
        partial: 0.0,
    };
    AttentionRow { o: (0..head_dim).map(element).collect(), lse }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_the_sums() {
        let parts = [(&[1.0][..], 0.0), (&[f32::NAN], f32::NEG_INFINITY), (&[4.0], 2f32.ln())];
        let AttentionRow { o, lse } = merged_row(DType::F32, &parts, 1);
        assert!((o[0].exact - 3.0).abs() < 1e-6 && (lse.exact - 3f64.ln()).abs() < 1e-6);
        let AttentionRow { o, lse } = merged_row(DType::F32, &parts[1..2], 1);
        assert_eq!((o[0].exact, lse.exact), (0.0, f64::NEG_INFINITY));
    }
}
