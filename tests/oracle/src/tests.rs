use super::*;
use blockflash_sys::DType;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::ops::Range;

/// f32 elements, of which a type is claimed.
#[derive(Clone, Debug)]
pub(super) struct Array {
    shape: Vec<usize>,
    dtype: DType,
    values: Vec<f32>,
}

impl Elements for Array {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn to_f32(&self, range: Range<usize>) -> Vec<f32> {
        self.values.get(range).unwrap_or_default().to_vec()
    }
}

pub(super) fn array(shape: &[usize], values: impl Into<Vec<f32>>) -> Array {
    let values = values.into();
    assert_eq!(values.len(), shape.iter().product::<usize>());
    Array { shape: shape.to_vec(), dtype: DType::F32, values }
}

/// Numbers of some type, in [-1, 1].
fn random(dtype: DType, shape: &[usize]) -> Array {
    let mut generator = SmallRng::seed_from_u64(7);
    let mut number = || round(dtype, generator.random_range(-1.0..1.0));
    let values = (0..shape.iter().product()).map(|_| number()).collect();
    Array { shape: shape.to_vec(), dtype, values }
}

/// One query, two keys: small enough for paper.
fn two_keys() -> [Array; 3] {
    let q = array(&[1, 1, 1, 1], vec![1.0]);
    let k = array(&[1, 2, 1, 1], vec![0.0, 3f32.ln()]);
    let v = array(&[1, 2, 1, 1], vec![4.0, 8.0]);
    [q, k, v]
}

pub(super) fn case<'a>([q, k, v]: &'a [Array; 3], right: Option<usize>) -> AttentionCase<'a> {
    AttentionCase {
        q,
        k,
        v,
        sink: None,
        bias: None,
        alibi: None,
        lengths: None,
        blocks: None,
        bottom_right: false,
        left: None,
        right,
        scores: Scores::new(1.0, None),
    }
}

#[test]
fn attention_on_paper() {
    let tensors = two_keys();
    let check = |right, o: f32, lse: f32| {
        let (o, lse) = (array(&[1, 1, 1, 1], vec![o]), array(&[1, 1, 1], vec![lse]));
        attention(&case(&tensors, right), &o, &lse, 0, |_| ()).unwrap().map(|c| c.passed())
    };
    // Weights 1/4 and 3/4.
    assert_eq!(check(None, 7.0, 4f32.ln()), [true, true]);
    assert_eq!(check(None, 7.0001, 1.39), [false, false]);
    assert_eq!(check(None, f32::NAN, f32::INFINITY), [false, false]);
    // The causal query sees the first key only.
    assert_eq!(check(Some(0), 4.0, 0.0), [true, true]);
    // No key, and with a sink.
    let none = [tensors[0].clone(), array(&[1, 0, 1, 1], vec![]), array(&[1, 0, 1, 1], vec![])];
    let nothing = case(&none, None);
    let (o, lse) = (array(&[1, 1, 1, 1], vec![0.0]), array(&[1, 1, 1], vec![f32::NEG_INFINITY]));
    assert!(attention(&nothing, &o, &lse, 0, |_| ()).unwrap().iter().all(Comparison::passed));
    let (sink, lse) = (array(&[1], vec![1.5]), array(&[1, 1, 1], vec![1.5]));
    let nothing = AttentionCase { sink: Some(&sink), ..nothing };
    assert!(attention(&nothing, &o, &lse, 0, |_| ()).unwrap().iter().all(Comparison::passed));
}

#[test]
fn a_sink_joins_the_sum() {
    let tensors = two_keys();
    let check = |sink: &Array, o: f32, lse: f32| {
        let (o, lse) = (array(&[1, 1, 1, 1], vec![o]), array(&[1, 1, 1], vec![lse]));
        let case = AttentionCase { sink: Some(sink), ..case(&tensors, None) };
        attention(&case, &o, &lse, 0, |_| ()).map(|results| results.map(|c| c.passed()))
    };
    // Weights 1/8, 3/8, and 4/8 for the sink, which has no value.
    let four = array(&[1], vec![4f32.ln()]);
    assert_eq!(check(&four, 3.5, 8f32.ln()).unwrap(), [true, true]);
    assert_eq!(check(&four, 7.0, 4f32.ln()).unwrap(), [false, false]);
    assert_eq!(check(&array(&[1], vec![f32::NEG_INFINITY]), 7.0, 4f32.ln()).unwrap(), [true, true]);
    assert!(check(&array(&[2], vec![0.0; 2]), 3.5, 8f32.ln()).is_err());
}

#[test]
fn samples_of_packed_sequences_visit_each() {
    let (lengths, heads) = ([300, 40, 160], 24);
    let rows: usize = lengths.iter().sum();
    let constant = |value| array(&[rows, heads, 8], vec![value; rows * heads * 8]);
    let tensors = [random(DType::F16, &[rows, heads, 8]), constant(0.0), constant(1.0)];
    let o = constant(1.0);
    let one_head: Vec<f32> =
        lengths.iter().flat_map(|&length| vec![(length as f32).ln(); length]).collect();
    let mut lse = one_head.repeat(heads);
    let case = AttentionCase { lengths: Some([&lengths; 2]), ..case(&tensors, None) };
    let check = |lse: &[f32]| {
        let lse = array(&[heads, rows], lse.to_vec());
        attention(&case, &o, &lse, 3, |_| ()).unwrap()
    };
    let [o_good, lse_good] = check(&lse);
    assert!(o_good.passed() && lse_good.passed());
    assert!(o_good.checked < o_good.total, "{o_good:?}");
    // The last query of the sequence in the middle, in the last head.
    lse[(heads - 1) * rows + 339] += 0.01;
    assert!(!check(&lse)[1].passed());
}

#[test]
fn only_listed_blocks_are_seen() {
    // Two query heads on one key head, four queries and six keys in blocks of 2: the key is the
    // place, the value ten times it.
    let q = array(&[1, 4, 2, 1], vec![0.0; 8]);
    let k = array(&[1, 6, 1, 1], vec![0.0; 6]);
    let v = array(&[1, 6, 1, 1], (0..6).map(|key| key as f32 * 10.0).collect::<Vec<_>>());
    let tensors = [q, k, v];
    // Head 0: keys 0, 1, 4, 5 for the first two queries, nothing for the others. Head 1: keys 2, 3
    // and all.
    let blocks = Blocks {
        block_q: 2,
        block_kv: 2,
        heads: 2,
        row_ptr: &[0, 2, 2, 3, 6],
        col_idx: &[0, 2, 1, 0, 1, 2],
        bits: None,
    };
    let sparse = |blocks, right| AttentionCase { blocks: Some(blocks), ..case(&tensors, right) };
    let check = |case: &AttentionCase<'_>, o: [f32; 8], lse: [f32; 8]| {
        let (o, lse) = (array(&[1, 4, 2, 1], o.to_vec()), array(&[1, 2, 4], lse.to_vec()));
        attention(case, &o, &lse, 0, |_| ()).unwrap().map(|c| (c.passed(), c.checked))
    };
    let (none, two, four, six) = (f32::NEG_INFINITY, 2f32.ln(), 4f32.ln(), 6f32.ln());
    let full = sparse(blocks, None);
    let (o, lse) = (
        [25.0, 25.0, 25.0, 25.0, 0.0, 25.0, 0.0, 25.0],
        [four, four, none, none, two, two, six, six],
    );
    assert_eq!(check(&full, o, lse), [(true, 8); 2]);
    let mut wrong = o;
    wrong[4] = 1.0;
    assert_eq!(check(&full, wrong, lse)[0], (false, 8));
    // Causal: query i sees the keys up to i + 2 of its blocks.
    let causal = AttentionCase { bottom_right: true, ..sparse(blocks, Some(0)) };
    let o = [5.0, 20.0, 5.0, 25.0, 0.0, 20.0, 0.0, 25.0];
    let lse = [two, two, none, none, 0.0, two, 5f32.ln(), six];
    assert_eq!(check(&causal, o, lse), [(true, 8); 2]);
    // One list for both heads.
    let shared = Blocks { heads: 1, row_ptr: &[0, 1, 2], col_idx: &[0, 2], ..blocks };
    let (o, lse) = ([5.0, 5.0, 5.0, 5.0, 45.0, 45.0, 45.0, 45.0], [two; 8]);
    assert_eq!(check(&sparse(shared, None), o, lse), [(true, 8); 2]);

    for (wrong, what) in [
        (Blocks { heads: 3, ..blocks }, "3 heads"),
        (Blocks { block_q: 4, ..blocks }, "5 entries"),
        (Blocks { row_ptr: &[0, 2, 1, 3, 6], ..blocks }, "does not lead"),
        (Blocks { row_ptr: &[0, 2, 2, 3, 7], ..blocks }, "does not lead"),
        (Blocks { col_idx: &[0, 2, 1, 0, 1, -2], ..blocks }, "negative"),
        (Blocks { block_kv: 0, ..blocks }, "size of 0"),
    ] {
        let (o, lse) = (array(&[1, 4, 2, 1], vec![0.0; 8]), array(&[1, 2, 4], vec![0.0; 8]));
        let refused = attention(&sparse(wrong, None), &o, &lse, 0, |_| ()).unwrap_err().to_string();
        assert!(refused.contains(what), "{refused}");
    }
}

#[test]
fn masked_nan_does_not_matter_and_seen_nan_does() {
    let [q, k, _] = two_keys();
    let tensors = [q, k, array(&[1, 2, 1, 1], vec![4.0, f32::NAN])];
    let (o, lse) = (array(&[1, 1, 1, 1], vec![4.0]), array(&[1, 1, 1], vec![0.0]));
    let check = |right| attention(&case(&tensors, right), &o, &lse, 0, |_| ()).unwrap()[0].passed();
    assert!(check(Some(0)));
    assert!(!check(None));
}

#[test]
fn samples_of_large_problems_find_a_wrong_last_row() {
    let seqlen = 500;
    let q = random(DType::F16, &[1, seqlen, 24, 8]);
    let v = array(&[1, seqlen, 24, 8], vec![1.0; seqlen * 24 * 8]);
    let zero = array(&[1, seqlen, 24, 8], vec![0.0; seqlen * 24 * 8]);
    let tensors = [q, zero, v];
    let o = array(&[1, seqlen, 24, 8], vec![1.0; seqlen * 24 * 8]);
    let mut lse = vec![(seqlen as f32).ln(); 24 * seqlen];
    let check = |lse: &[f32]| {
        let lse = array(&[1, 24, seqlen], lse.to_vec());
        attention(&case(&tensors, None), &o, &lse, 3, |_| ()).unwrap()
    };
    let [o_good, lse_good] = check(&lse);
    assert!(o_good.passed() && lse_good.passed());
    assert!(o_good.checked < o_good.total && o_good.checked > 0, "{o_good:?}");
    *lse.last_mut().unwrap() += 0.01;
    assert!(!check(&lse)[1].passed());
}

#[test]
fn scores_of_blocks_on_paper() {
    // Means of q are (1, 2) and (5, 0), of k (1, 1) and (3, −1); the second block has one row.
    let q = array(&[1, 3, 1, 2], vec![0.0, 4.0, 2.0, 0.0, 5.0, 0.0]);
    let k = array(&[1, 3, 1, 2], vec![-1.0, 1.0, 3.0, 1.0, 3.0, -1.0]);
    let scores = |last| array(&[1, 1, 2, 2], vec![3.0, 1.0, 5.0, last]);
    let right = block_scores(&q, &k, 2, &scores(15.0)).unwrap();
    assert!(right.passed() && (right.checked, right.relative) == (4, 0.0), "{right:?}");
    assert!(!block_scores(&q, &k, 2, &scores(15.001)).unwrap().passed());
    assert!(!block_scores(&q, &k, 2, &scores(f32::NAN)).unwrap().passed());
    assert!(
        block_scores(&q, &k, 3, &scores(15.0)).is_err()
            && block_scores(&q, &k, 0, &scores(15.0)).is_err()
    );
    assert!(block_scores(&q, &array(&[1, 3, 2, 1], vec![0.0; 6]), 2, &scores(15.0)).is_err());
}

#[test]
fn bsr_on_paper() {
    // A = [[1 2] [3 4]] at block column 1, B = ones: 3 and 7 in each row.
    let values = array(&[1, 2, 2], vec![1.0, 2.0, 3.0, 4.0]);
    let b = array(&[4, 3], vec![1.0; 12]);
    let c = array(&[4, 3], vec![10.0; 12]);
    let bias = array(&[4], vec![0.0, 0.0, 0.0, -50.0]);
    let case = BsrCase {
        row_ptr: &[0, 0, 1],
        col_idx: &[1],
        values: &values,
        b: &b,
        c: Some(&c),
        alpha: 2.0,
        beta: 1.0,
        bias_per_row: Some(&bias),
        bias_per_column: None,
        activation: Activation::Relu,
    };
    let expected =
        |last: f32| array(&[4, 3], [[10.0; 3], [10.0; 3], [16.0; 3], [last; 3]].concat());
    assert!(bsr_matmul(&case, &expected(0.0), 0, |_| ()).unwrap().passed());
    assert!(!bsr_matmul(&case, &expected(0.1), 0, |_| ()).unwrap().passed());
    assert!(bsr_matmul(&BsrCase { col_idx: &[], ..case }, &expected(0.0), 0, |_| ()).is_err());
    assert!(bsr_matmul(&case, &array(&[4, 2], vec![0.0; 8]), 0, |_| ()).is_err());
    // Without beta C may be NaN.
    let nan = array(&[4, 3], vec![f32::NAN; 12]);
    let case = BsrCase {
        c: Some(&nan),
        beta: 0.0,
        activation: Activation::None,
        bias_per_row: None,
        ..case
    };
    let result = array(&[4, 3], [[0.0; 3], [0.0; 3], [6.0; 3], [14.0; 3]].concat());
    assert!(bsr_matmul(&case, &result, 0, |_| ()).unwrap().passed());
}

#[test]
fn activations() {
    let close = |activation: Activation, x: f64, y: f64| {
        let found = activation.apply(x);
        assert!((found - y).abs() <= 1e-12 * y.abs().max(1e-3), "{activation:?}({x}) is {found}");
    };
    close(Activation::Gelu, 1.0, 0.841_344_746_068_542_9);
    close(Activation::Gelu, -2.0, -0.045_500_263_896_358_42);
    close(Activation::Gelu, 9.0, 9.0);
    close(Activation::Silu, 1.0, 0.731_058_578_630_004_9);
    assert!(Activation::Relu.apply(f64::NAN).is_nan());
}

#[test]
fn a_bias_and_slopes_on_paper() {
    // Scores 0 and ln 3.
    let tensors = two_keys();
    let check = |bias: Option<&Array>, alibi: Option<&Array>, o: f32, lse: f32| {
        let case = AttentionCase {
            bias: bias.map(|bias| bias as _),
            alibi: alibi.map(|slopes| slopes as _),
            ..case(&tensors, None)
        };
        let (o, lse) = (array(&[1, 1, 1, 1], vec![o]), array(&[1, 1, 1], vec![lse]));
        attention(&case, &o, &lse, 0, |_| ()).unwrap().map(|c| c.passed())
    };
    let bias = |shape: &[usize], values: &[f32]| array(shape, values.to_vec());
    let (ln3, ln9) = (3f32.ln(), 9f32.ln());
    // Weights 3 and 3; one element for all; the query stands at the last key.
    let uneven = bias(&[1, 1, 1, 2], &[ln3, 0.0]);
    assert_eq!(check(Some(&uneven), None, 6.0, 6f32.ln()), [true; 2]);
    assert_eq!(check(None, None, 6.0, 6f32.ln()), [false; 2]);
    assert_eq!(check(Some(&bias(&[1; 4], &[ln3])), None, 7.0, 12f32.ln()), [true; 2]);
    let slopes = bias(&[1], &[-ln3]);
    assert_eq!(check(None, Some(&slopes), 6.0, 6f32.ln()), [true; 2]);
    assert_eq!(check(None, Some(&bias(&[1, 1], &[-ln3])), 6.0, 6f32.ln()), [true; 2]);
    // Both: weights 9 and 3.
    assert_eq!(check(Some(&uneven), Some(&slopes), 5.0, ln9 + (4f32 / 3.0).ln()), [true; 2]);
    // A key without a part, and none at all.
    let none = f32::NEG_INFINITY;
    assert_eq!(check(Some(&bias(&[1, 1, 1, 2], &[none, 0.0])), None, 8.0, ln3), [true; 2]);
    assert_eq!(check(Some(&bias(&[1; 4], &[none])), None, 0.0, none), [true; 2]);
    let wrong = bias(&[1, 1, 1, 3], &[0.0; 3]);
    let case = AttentionCase { bias: Some(&wrong), ..case(&tensors, None) };
    let (o, lse) = (array(&[1, 1, 1, 1], vec![0.0]), array(&[1, 1, 1], vec![0.0]));
    assert!(attention(&case, &o, &lse, 0, |_| ()).is_err());
}
