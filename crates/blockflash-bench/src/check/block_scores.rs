use super::{Comparison, Element, Mismatch, Rounding, ensure};
use crate::io::Array;
use blockflash_sys::DType;
use rayon::prelude::*;

/// The mean of a block of rows of one head.
struct Mean {
    exact: Vec<f64>,
    plain: Vec<f32>,
    /// The root of the sum of squares of its terms, or the mean if that is larger.
    magnitude: Vec<f64>,
}

/// Compares scores of square blocks, f32 `[1, heads, blocks, blocks]`, with the means of q and k,
/// both `[1, seqlen, heads, head_dim]`.
///
/// # Errors
/// If shapes do not belong together.
pub fn block_scores(
    q: &Array,
    k: &Array,
    block: usize,
    scores: &Array,
) -> Result<Comparison, Mismatch> {
    let &[1, seqlen, heads, head_dim] = q.shape() else {
        return Err(Mismatch(format!("q is {:?}, not [1, seqlen, heads, head_dim]", q.shape())));
    };
    ensure(k.shape() == q.shape(), || format!("k is {:?}, not {:?}", k.shape(), q.shape()))?;
    ensure(block > 0, || "a block has a size of 0".to_owned())?;
    let blocks = seqlen.div_ceil(block);
    let expected = [1, heads, blocks, blocks];
    ensure(scores.shape() == expected, || {
        format!("scores are {:?}, not {expected:?}", scores.shape())
    })?;
    let means = |of: &Array| -> Vec<Mean> {
        (0..heads * blocks)
            .into_par_iter()
            .map(|at| mean(of, at / blocks, at % blocks * block, block))
            .collect()
    };
    let (of_q, of_k) = (means(q), means(k));
    // CUDA cores add: one rounding for each row of a block and each product, then that of the
    // result.
    let rounding = Rounding::of_products(0, block + head_dim, DType::F32);
    let compare_row = |row: usize| {
        let found = scores.to_f32(row * blocks..(row + 1) * blocks);
        let keys = &of_k[row / blocks * blocks..][..blocks];
        let elements =
            found.into_iter().zip(keys).map(|(result, key)| element(&of_q[row], key, result));
        let mut comparison = Comparison::default();
        comparison.add_row(elements, |sizes| rounding.largest(sizes));
        comparison
    };
    let rows: Vec<_> = (0..heads * blocks).into_par_iter().map(compare_row).collect();
    Ok(rows.into_iter().fold(Comparison::default(), Comparison::merge).finish(scores.len()))
}

fn mean(of: &Array, head: usize, first: usize, block: usize) -> Mean {
    let (seqlen, heads, head_dim) = (of.shape()[1], of.shape()[2], of.shape()[3]);
    let rows = first..(first + block).min(seqlen);
    let count = rows.len() as f64;
    let (mut exact, mut plain) = (vec![0f64; head_dim], vec![0f32; head_dim]);
    let mut squares = vec![0f64; head_dim];
    for row in rows {
        let start = (row * heads + head) * head_dim;
        let sums = exact.iter_mut().zip(&mut plain).zip(&mut squares);
        for (((exact, plain), squares), value) in sums.zip(of.to_f32(start..start + head_dim)) {
            *exact += f64::from(value);
            *plain += value;
            *squares += f64::from(value).powi(2);
        }
    }
    exact.iter_mut().for_each(|sum| *sum /= count);
    plain.iter_mut().for_each(|sum| *sum /= count as f32);
    let magnitude = exact
        .iter()
        .zip(squares)
        .map(|(mean, squares)| mean.abs().max(squares.sqrt() / count))
        .collect();
    Mean { exact, plain, magnitude }
}

fn element(q: &Mean, k: &Mean, result: f32) -> Element {
    Element {
        result,
        reference: q.exact.iter().zip(&k.exact).map(|(q, k)| q * k).sum(),
        plain: q.plain.iter().zip(&k.plain).map(|(q, k)| q * k).sum(),
        magnitude: q
            .magnitude
            .iter()
            .zip(&k.magnitude)
            .map(|(q, k)| (q * k).powi(2))
            .sum::<f64>()
            .sqrt(),
        partial: 0.0,
    }
}
