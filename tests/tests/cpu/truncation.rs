//! Tensor cores truncate while they add, and with products of one sign that adds up. The rule knows
//! how much, in the tests and in `--check` of the command, and still sees what is missing from long
//! sums.

use blockflash_bench::io::Array;
use blockflash_ops::DType;
use blockflash_oracle::{self as oracle, Activation};
use blockflash_tests::bsr::{BsrCase, BsrData, BsrReference, Pattern};
use blockflash_tests::number::round;
use blockflash_tests::tolerance::{self, Reference};
use std::ops::Range;

/// How a tensor core adds, as measured by those whom `blockflash_oracle` cites.
#[derive(Clone, Copy, Debug)]
struct Core {
    /// Products that are added to the accumulator at once.
    products: usize,
    /// Bits below the 24 of f32 that are kept of aligned addends.
    extra: i32,
}

const AMPERE: Core = Core { products: 8, extra: 1 };
const HOPPER: Core = Core { products: 16, extra: 2 };

/// The exponent of a number: 2^e <= |x| < 2^(e + 1).
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7FF) as i32 - 1023
}

fn truncate(x: f64, last_bit: i32) -> f64 {
    (x * 2f64.powi(-last_bit)).trunc() * 2f64.powi(last_bit)
}

impl Core {
    fn add(self, sum: f64, products: &[f64]) -> f64 {
        let largest = products.iter().fold(sum.abs(), |largest, x| largest.max(x.abs()));
        if largest == 0.0 {
            return 0.0;
        }
        let last_bit = exponent(largest) - 23 - self.extra;
        let total: f64 = products.iter().chain([&sum]).map(|&x| truncate(x, last_bit)).sum();
        if total == 0.0 { 0.0 } else { truncate(total, exponent(total) - 23) }
    }

    /// The first row of A·B, without the products of some columns of A.
    fn first_row(self, case: &BsrCase, data: &BsrData, skipped: Range<usize>) -> Vec<f32> {
        let ([_, n, k], size) = (case.mnk, case.block_size);
        let a = |col: usize| data.values[col / size * size * size + col % size];
        let product = |col: usize, j: usize| match skipped.contains(&col) {
            true => 0.0,
            false => f64::from(a(col)) * f64::from(data.b[col * n + j]),
        };
        let sum = |j: usize| {
            (0..k).step_by(self.products).fold(0.0, |sum, first| {
                self.add(
                    sum,
                    &Vec::from_iter((first..first + self.products).map(|col| product(col, j))),
                )
            })
        };
        (0..n).map(|j| sum(j) as f32).collect()
    }
}

/// Numbers of a long sum.
#[derive(Clone, Copy, Debug)]
enum Content {
    /// |N(0, 1)|.
    Positive,
    /// All the same, and so all low bits that are cut off.
    Constant,
    /// |N(0, 1)|, the first ones a hundred times as large: partial sums are large from the
    /// beginning.
    Falling,
    /// |N(0, 1)|, in the second half of A negative: what remains is small beside its partial sums.
    Cancelling,
    /// N(0, 1).
    Normal,
}

fn problem(dtype: DType, k: usize, content: Content) -> (BsrCase, BsrData) {
    let case =
        BsrCase { c_dtype: DType::F32, ..BsrCase::simple(dtype, 16, [16, 8, k], Pattern::Full) };
    let mut data = BsrData::generate(&case);
    let columns = |at: usize| at / 256 * 16 + at % 16;
    for (at, a) in data.values.iter_mut().enumerate() {
        *a = match content {
            Content::Positive => a.abs(),
            Content::Constant => round(dtype, 0.7),
            Content::Falling if columns(at) < 64 => 100.0 * a.abs(),
            Content::Falling => a.abs(),
            Content::Cancelling if columns(at) < k / 2 => a.abs(),
            Content::Cancelling => -a.abs(),
            Content::Normal => *a,
        };
        *a = round(dtype, *a);
    }
    for b in &mut data.b {
        *b = match content {
            Content::Constant => round(dtype, 0.3),
            Content::Normal => *b,
            _ => b.abs(),
        };
    }
    (case, data)
}

/// The verdicts on a first row: of the rule of the tests, and of the command's.
fn verdicts(case: &BsrCase, data: &BsrData, row: &[f32]) -> [bool; 2] {
    let [_, n, k] = case.mnk;
    let mut reference = BsrReference::compute(case, data, f64::INFINITY).c;
    // Rows that are not looked at are as the reference has them.
    let others = reference.exact[n..].iter().map(|&x| x as f32);
    let c: Vec<f32> = row.iter().copied().chain(others).collect();
    let Reference { exact, plain, magnitude, partial, .. } = &mut reference;
    for values in [exact, plain, magnitude, partial] {
        values.truncate(n);
    }
    let got: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
    let rounding = BsrReference::rounding(case, data);
    let tests = tolerance::check(&got, &reference, &rounding, |j| format!("column {j}"));

    let array = |shape: &[usize], values: &[f32]| Array::new(shape, values.to_vec()).unwrap();
    let blocks = data.col_idx.len();
    let values = array(&[blocks, 16, 16], &data.values);
    let b = array(&[k, n], &data.b);
    let command = oracle::BsrCase {
        row_ptr: &data.row_ptr,
        col_idx: &data.col_idx,
        values: &values,
        b: &b,
        c: None,
        alpha: 1.0,
        beta: 0.0,
        bias_per_row: None,
        bias_per_column: None,
        activation: Activation::None,
    };
    let found = oracle::bsr_matmul(&command, &array(&[16, n], &c), 0, |_| ()).unwrap();
    [tests.is_ok(), found.passed()]
}

#[test]
fn truncated_sums_are_right() {
    for (dtype, k) in
        [(DType::BF16, 2048), (DType::BF16, 8192), (DType::F16, 2048), (DType::F16, 8192)]
    {
        for content in [
            Content::Positive,
            Content::Constant,
            Content::Falling,
            Content::Cancelling,
            Content::Normal,
        ] {
            let (case, data) = problem(dtype, k, content);
            for core in [AMPERE, HOPPER] {
                let row = core.first_row(&case, &data, 0..0);
                assert_eq!(
                    verdicts(&case, &data, &row),
                    [true; 2],
                    "{core:?}, {dtype}, {k}, {content:?}"
                );
            }
        }
    }
}

/// One rounding or truncation of the sum for each 16 products would not explain the error.
#[test]
fn truncation_is_more_than_rounding() {
    let (case, data) = problem(DType::BF16, 8192, Content::Positive);
    let exact = BsrReference::compute(&case, &data, f64::INFINITY).c.exact;
    for core in [AMPERE, HOPPER] {
        let row = core.first_row(&case, &data, 0..0);
        let lost = (0..8).map(|j| (exact[j] - f64::from(row[j])) / exact[j]).fold(0.0, f64::max);
        assert!(lost > 512.0 * 2f64.powi(-24), "{core:?}: {lost:.2e}");
    }
}

#[test]
fn what_is_missing_from_a_long_sum_is_seen() {
    for k in [2048, 8192] {
        let (case, data) = problem(DType::BF16, k, Content::Positive);
        for core in [AMPERE, HOPPER] {
            for first in [0, k / 2, k - 16] {
                let row = core.first_row(&case, &data, first..first + 16);
                assert_eq!(
                    verdicts(&case, &data, &row),
                    [false; 2],
                    "{core:?}, {k}: 16 at {first}"
                );
            }
            // One element of A: as large as the mean for the shorter sum, for the longer one the
            // largest.
            let a = |col: usize| data.values[col / 16 * 256 + col % 16];
            let mean = (0..k).map(a).sum::<f32>() / k as f32;
            let by_mean = |&col: &usize| ((a(col) - mean).abs() * 1e6) as i64;
            let one = match k {
                2048 => (k / 2..k).min_by_key(by_mean),
                _ => (k / 2..k).max_by(|&x, &y| a(x).total_cmp(&a(y))),
            };
            let row = core.first_row(&case, &data, one.unwrap()..one.unwrap() + 1);
            assert_eq!(verdicts(&case, &data, &row), [false; 2], "{core:?}, {k}: element {one:?}");
        }
    }
}
