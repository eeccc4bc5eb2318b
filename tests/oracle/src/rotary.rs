//! Rotary position embedding of one row.

use crate::elements::{Element, round};
use blockflash_sys::DType;

/// A row after rotation: pair `i` is turned by the angle whose cosine and sine are `cos[i]` and
/// `sin[i]`. Pairs are neighbours if `interleaved`, else elements `i` and `i + cos.len()`. Elements
/// without a pair stay as they are.
pub fn rotated(
    dtype: DType,
    row: &[f32],
    [cos, sin]: [&[f32]; 2],
    interleaved: bool,
) -> Vec<Element> {
    let kept = |&x: &f32| {
        let (exact, plain) = (f64::from(x), f64::from(x));
        Element { exact, plain, magnitude: exact.abs(), partial: 0.0 }
    };
    let mut turned: Vec<Element> = row.iter().map(kept).collect();
    for (i, (&c, &s)) in cos.iter().zip(sin).enumerate() {
        let [first, second] = if interleaved { [2 * i, 2 * i + 1] } else { [i, i + cos.len()] };
        let (x, y) = (row[first], row[second]);
        turned[first] = sum_of_two(dtype, [x, c], [-y, s]);
        turned[second] = sum_of_two(dtype, [x, s], [y, c]);
    }
    turned
}

fn sum_of_two(dtype: DType, a: [f32; 2], b: [f32; 2]) -> Element {
    let [exact_a, exact_b] = [a, b].map(|[x, y]| f64::from(x) * f64::from(y));
    Element {
        exact: exact_a + exact_b,
        plain: f64::from(round(dtype, a[0] * a[1] + b[0] * b[1])),
        magnitude: exact_a.hypot(exact_b),
        partial: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn() {
        let row = [1.0, 2.0, 3.0, 4.0, 5.0];
        let exact = |interleaved| -> Vec<f64> {
            let turned = rotated(DType::F32, &row, [&[0.0, 1.0], &[1.0, 0.0]], interleaved);
            turned.iter().map(|element| element.exact).collect()
        };
        assert_eq!(exact(true), [-2.0, 1.0, 3.0, 4.0, 5.0]);
        assert_eq!(exact(false), [-3.0, 2.0, 1.0, 4.0, 5.0]);
    }
}
