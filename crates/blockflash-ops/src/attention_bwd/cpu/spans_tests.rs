use crate::fixtures::values;
use crate::{Align, Attention, Device, Mask, View};
use blockflash_safe::Tensor;

/// Heads of queries and of keys, and their elements.
const HEADS: [usize; 2] = [4, 2];
const D: usize = 40;

/// Operands of `sizes`: batch, queries and keys.
fn operands([batch, queries, keys]: [usize; 3]) -> [Vec<f32>; 4] {
    let [q, kv] = [queries * HEADS[0], keys * HEADS[1]].map(|rows| batch * rows * D);
    [values(q, 1), values(kv, 2), values(kv, 3), values(q, 4)]
}

fn dq(sizes: [usize; 3], [q, k, v, d_o]: &[Vec<f32>; 4], mask: Mask) -> Vec<f32> {
    let [batch, queries, keys] = sizes;
    let stream = Device::cpu().stream().unwrap();
    let view = |data, rows, heads| View::from_slice(data, &[batch, rows, heads, D]).unwrap();
    let (q, d_o) = (view(q, queries, HEADS[0]), view(d_o, queries, HEADS[0]));
    let (k, v) = (view(k, keys, HEADS[1]), view(v, keys, HEADS[1]));
    let attention = Attention { scores: mask.into(), ..Attention::new(q, k, v) };
    let output = attention.forward(&stream).unwrap();
    let found = attention.backward(&output, d_o, &stream).unwrap();
    let download = |tensor: &Tensor| tensor.to_vec(&stream).unwrap();
    download(&found.dq)
}

/// The definition, for one batch entry: `[queries, heads, D]`.
fn reference(
    [_, queries, keys]: [usize; 3],
    [q, k, v, d_o]: &[Vec<f32>; 4],
    mask: Mask,
) -> Vec<f64> {
    let row = |data: &[f32], at: usize| -> Vec<f64> {
        data[at * D..][..D].iter().map(|&x| f64::from(x)).collect()
    };
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let scale = (D as f64).sqrt().recip();
    let mut found = Vec::new();
    for at in 0..queries * HEADS[0] {
        let (query, head) = (at / HEADS[0], at % HEADS[0] / (HEADS[0] / HEADS[1]));
        let (q, d_o) = (row(q, at), row(d_o, at));
        let visible = mask.visible(query, queries, keys);
        let rows: Vec<[Vec<f64>; 2]> =
            visible.map(|key| [k, v].map(|data| row(data, key * HEADS[1] + head))).collect();
        let p: Vec<f64> = rows.iter().map(|[k, _]| (scale * dot(&q, k)).exp()).collect();
        let sum: f64 = p.iter().sum();
        let p = p.iter().map(|p| p / sum);
        let dp: Vec<f64> = rows.iter().map(|[_, v]| dot(&d_o, v)).collect();
        let delta: f64 = p.clone().zip(&dp).map(|(p, dp)| p * dp).sum();
        let mut dq = vec![0.0; D];
        for ((p, dp), [k, _]) in p.zip(&dp).zip(&rows) {
            dq.iter_mut().zip(k).for_each(|(dq, k)| *dq += scale * p * (dp - delta) * k);
        }
        found.extend(dq);
    }
    found
}

/// Lengths below, at and above those of one span, and more blocks than spans.
#[test]
fn spans_add_up() {
    let window = Mask::Window { left: Some(300), right: Some(5), align: Align::BottomRight };
    for (sizes, mask) in [
        ([1, 21, 255], Mask::Full),
        ([1, 130, 257], Mask::causal()),
        ([1, 301, 600], window),
        ([1, 13, 2500], Mask::Full),
    ] {
        let operands = operands(sizes);
        let (found, expected) = (dq(sizes, &operands, mask), reference(sizes, &operands, mask));
        for (found, expected) in found.iter().zip(expected) {
            let close = approx::abs_diff_eq!(f64::from(*found), expected, epsilon = 2e-6);
            assert!(close, "{sizes:?}: {found} {expected}");
        }
    }
}

#[test]
fn neither_threads_nor_the_batch_matter() {
    let sizes = [2, 70, 700];
    let of_batch = operands(sizes);
    let first = of_batch.each_ref().map(|data| data[..data.len() / 2].to_vec());
    let alone = dq([1, 70, 700], &first, Mask::causal());
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let found = pool.install(|| dq(sizes, &of_batch, Mask::causal()));
        assert_eq!(found[..alone.len()], alone);
        assert_ne!(found[alone.len()..], alone);
    }
}
