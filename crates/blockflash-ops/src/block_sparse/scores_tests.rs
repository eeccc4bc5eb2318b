use super::super::fixtures::geometries;
use super::*;
use crate::fixtures::values;

/// `[batch, seqlen, heads, head_dim]` means and products in f64, from the definition.
fn expected(
    geometry: BlockGeometry,
    [batch, heads_q, heads_kv, dim]: [usize; 4],
    q: &[f32],
    k: &[f32],
) -> Vec<f64> {
    let mean = |x: &[f32],
                rows: std::ops::Range<usize>,
                seqlen: usize,
                heads: usize,
                at: [usize; 3]|
     -> f64 {
        let count = rows.len() as f64;
        let [entry, head, d] = at;
        rows.map(|row| f64::from(x[((entry * seqlen + row) * heads + head) * dim + d])).sum::<f64>()
            / count
    };
    let mut scores = Vec::new();
    for (entry, head) in (0..batch).flat_map(|entry| (0..heads_q).map(move |head| (entry, head))) {
        let head_kv = head * heads_kv / heads_q;
        for (row, col) in
            (0..geometry.rows()).flat_map(|row| (0..geometry.cols()).map(move |col| (row, col)))
        {
            let product = |d| {
                mean(q, geometry.queries(row), geometry.seqlen_q(), heads_q, [entry, head, d])
                    * mean(
                        k,
                        geometry.keys(col),
                        geometry.seqlen_kv(),
                        heads_kv,
                        [entry, head_kv, d],
                    )
            };
            scores.push((0..dim).map(product).sum());
        }
    }
    scores
}

fn check<T: Float>(narrow: impl Fn(&[f32]) -> Vec<T>, sizes: [usize; 4]) {
    let [batch, heads_q, heads_kv, dim] = sizes;
    for geometry in geometries() {
        let shape_q = [batch, geometry.seqlen_q(), heads_q, dim];
        let shape_k = [batch, geometry.seqlen_kv(), heads_kv, dim];
        let q = narrow(&values(shape_q.iter().product(), 1));
        let k = narrow(&values(shape_k.iter().product(), 2));
        let wide = |x: &[T]| {
            let mut wide = vec![0.0; x.len()];
            T::widen(x, &mut wide);
            wide
        };
        let expected = expected(geometry, sizes, &wide(&q), &wide(&k));
        let views =
            (View::from_slice(&q, &shape_q).unwrap(), View::from_slice(&k, &shape_k).unwrap());
        let scores = block_mean_scores(geometry, views.0, views.1).unwrap();
        assert_eq!(scores.len(), expected.len());
        for (at, (&score, expected)) in scores.iter().zip(expected).enumerate() {
            assert!(
                approx::abs_diff_eq!(f64::from(score), expected, epsilon = 1e-4),
                "{geometry:?} {at}: {score}, not {expected}"
            );
        }
    }
}

fn narrowed<T: Float>(x: &[f32]) -> Vec<T> {
    let mut narrow = vec![T::zeroed(); x.len()];
    T::narrow(x, &mut narrow);
    narrow
}

#[test]
fn scores_are_products_of_means() {
    check(narrowed::<f32>, [2, 4, 2, 13]);
    check(narrowed::<f16>, [1, 3, 1, 16]);
    check(narrowed::<bf16>, [1, 2, 2, 8]);
    check(narrowed::<f32>, [1, 2, 1, 0]);
    check(narrowed::<f32>, [0, 2, 1, 8]);
    check(narrowed::<f32>, [1, 0, 0, 8]);
}

#[test]
fn strides_do_not_matter() {
    // [batch, heads, seqlen, head_dim] in memory.
    let geometry = BlockGeometry::new(100, 150, 64, 64).unwrap();
    let (q, k) = (values(2 * 4 * 100 * 8, 1), values(2 * 2 * 150 * 8, 2));
    let q_view = View::from_slice(&q, &[2, 4, 100, 8]).unwrap().permute(&[0, 2, 1, 3]).unwrap();
    let k_view = View::from_slice(&k, &[2, 2, 150, 8]).unwrap().permute(&[0, 2, 1, 3]).unwrap();
    let scores = block_mean_scores(geometry, q_view, k_view).unwrap();
    let contiguous = |x: &[f32], heads: usize, seqlen: usize| -> Vec<f32> {
        let index =
            |at: usize| (at / 8 / heads % seqlen, at / 8 % heads, at / 8 / heads / seqlen, at % 8);
        (0..x.len())
            .map(index)
            .map(|(row, head, entry, d)| x[((entry * heads + head) * seqlen + row) * 8 + d])
            .collect()
    };
    let (q, k) = (contiguous(&q, 4, 100), contiguous(&k, 2, 150));
    let (q, k) = (
        View::from_slice(&q, &[2, 100, 4, 8]).unwrap(),
        View::from_slice(&k, &[2, 150, 2, 8]).unwrap(),
    );
    assert_eq!(block_mean_scores(geometry, q, k).unwrap(), scores);
}

#[test]
fn bad_operands_are_named() {
    let geometry = BlockGeometry::new(100, 150, 64, 64).unwrap();
    let data = vec![0f32; 100_000];
    let view = |shape: &[usize]| View::from_slice(&data[..shape.iter().product()], shape).unwrap();
    let (q, k) = (view(&[1, 100, 4, 8]), view(&[1, 150, 2, 8]));
    for (q, k, operand) in [
        (view(&[100, 4, 8]), k, "q"),
        (view(&[1, 99, 4, 8]), k, "q"),
        (q, view(&[150, 2, 8]), "k"),
        (q, view(&[2, 150, 2, 8]), "k"),
        (q, view(&[1, 151, 2, 8]), "k"),
        (q, view(&[1, 150, 2, 7]), "k"),
    ] {
        match block_mean_scores(geometry, q, k) {
            Err(Error::Shape { what, .. }) => assert_eq!(what, operand),
            other => panic!("{other:?}"),
        }
    }
    for heads in [0, 3] {
        let result = block_mean_scores(geometry, q, view(&[1, 150, heads, 8]));
        assert!(matches!(result, Err(Error::HeadGroups { num_heads_q: 4, .. })));
    }
    let half = vec![f16::ZERO; 150 * 16];
    let half = View::from_slice(&half, &[1, 150, 2, 8]).unwrap();
    assert!(matches!(block_mean_scores(geometry, q, half), Err(Error::DType { what: "k", .. })));
    let integers = View::from_slice(&[0i32; 3200], &[1, 100, 4, 8]).unwrap();
    assert!(matches!(
        block_mean_scores(geometry, integers, k),
        Err(Error::DType { what: "q", .. })
    ));
    let strided = view(&[1, 150, 8, 2]).permute(&[0, 1, 3, 2]).unwrap();
    assert!(matches!(
        block_mean_scores(geometry, q, strided),
        Err(Error::Stride { what: "k", .. })
    ));
}

#[test]
fn too_many_scores_are_out_of_memory() {
    // Broadcast views may be larger than any memory.
    let (length, heads) = (1 << 30, 1 << 15);
    let geometry = BlockGeometry::new(length, length, 64, 64).unwrap();
    let view = View::from_slice(&[1f32], &[1, 1, 1, 1]).unwrap();
    let view = view.expand(1, length).unwrap().expand(2, heads).unwrap();
    let result = block_mean_scores(geometry, view, view);
    assert!(matches!(result, Err(Error::Safe(blockflash_safe::Error::OutOfMemory { .. }))));
}
