use crate::comparison::{Comparison, Mismatch, ensure};
use crate::elements::{Element, Elements, round};
use crate::rounding::Rounding;
use blockflash_sys::DType;
use rayon::prelude::*;

/// The mean of a block of rows of one head.
#[derive(Clone, Debug)]
pub struct BlockMean {
    exact: Vec<f64>,
    plain: Vec<f32>,
    /// The root of the sum of squares of its terms, or the mean if that is larger.
    magnitude: Vec<f64>,
}

impl BlockMean {
    /// The mean of this many rows of `head_dim` elements.
    pub fn of(head_dim: usize, rows: impl ExactSizeIterator<Item = impl AsRef<[f32]>>) -> Self {
        let count = rows.len() as f64;
        let (mut exact, mut plain) = (vec![0f64; head_dim], vec![0f32; head_dim]);
        let mut magnitude = vec![0f64; head_dim];
        for row in rows {
            let sums = exact.iter_mut().zip(&mut plain).zip(&mut magnitude);
            for (((exact, plain), squares), &value) in sums.zip(row.as_ref()) {
                *exact += f64::from(value);
                *plain += value;
                *squares += f64::from(value).powi(2);
            }
        }
        exact.iter_mut().for_each(|sum| *sum /= count);
        plain.iter_mut().for_each(|sum| *sum /= count as f32);
        for (magnitude, mean) in magnitude.iter_mut().zip(&exact) {
            *magnitude = mean.abs().max(magnitude.sqrt() / count);
        }
        Self { exact, plain, magnitude }
    }

    /// The mean, as a plain computation stores it in this type.
    pub(crate) fn elements(&self, dtype: DType) -> impl Iterator<Item = Element> {
        let element = move |((&exact, &plain), &magnitude): ((&f64, &f32), &f64)| {
            let plain = f64::from(round(dtype, plain));
            Element { exact, plain, magnitude, partial: 0.0 }
        };
        self.exact.iter().zip(&self.plain).zip(&self.magnitude).map(element)
    }

    /// The score of a block of queries and one of keys, of which these are the means.
    pub fn score(&self, k: &Self) -> Element {
        let squares = self.magnitude.iter().zip(&k.magnitude).map(|(q, k)| (q * k).powi(2));
        let plain: f32 = self.plain.iter().zip(&k.plain).map(|(q, k)| q * k).sum();
        Element {
            exact: self.exact.iter().zip(&k.exact).map(|(q, k)| q * k).sum(),
            plain: f64::from(plain),
            magnitude: squares.sum::<f64>().sqrt(),
            partial: 0.0,
        }
    }
}

/// Compares scores of square blocks, f32 `[1, heads, blocks, blocks]`, with the means of q and k,
/// both `[1, seqlen, heads, head_dim]`.
///
/// # Errors
/// If shapes do not belong together.
pub fn block_scores(
    q: &dyn Elements,
    k: &dyn Elements,
    block: usize,
    scores: &dyn Elements,
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
    let means = |of: &dyn Elements| -> Vec<BlockMean> {
        (0..heads * blocks)
            .into_par_iter()
            .map(|at| {
                let (head, first) = (at / blocks, at % blocks * block);
                let row = |row: usize| (row * heads + head) * head_dim;
                let rows = first..(first + block).min(seqlen);
                BlockMean::of(head_dim, rows.map(|at| of.to_f32(row(at)..row(at) + head_dim)))
            })
            .collect()
    };
    let (of_q, of_k) = (means(q), means(k));
    // CUDA cores add: one rounding for each row of a block and each product, then one of the
    // result.
    let rounding = Rounding::of_products(0, block + head_dim, DType::F32);
    let compare_row = |row: usize| {
        let found = scores.to_f32(row * blocks..(row + 1) * blocks);
        let keys = &of_k[row / blocks * blocks..][..blocks];
        let expected =
            found.into_iter().zip(keys).map(|(result, key)| (result, of_q[row].score(key)));
        Comparison::of_row(DType::F32, expected, |sizes| rounding.largest(sizes))
    };
    let rows: Vec<_> = (0..heads * blocks).into_par_iter().map(compare_row).collect();
    Ok(rows.into_iter().fold(Comparison::default(), Comparison::merge).finish(scores.len()))
}
