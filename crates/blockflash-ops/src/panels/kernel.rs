use super::{Into, LANES, Lanes, Left, ROWS};
use pulp::{Simd, WithSimd};

/// See [`multiply`](super::multiply).
pub(super) struct Product<'a> {
    pub(super) c: &'a mut [Lanes],
    pub(super) left: Left<'a>,
    pub(super) right: &'a [Lanes],
    pub(super) into: Into<'a>,
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // As many sums as hide the latency of their additions and fit into the registers.
        match S::REGISTER_COUNT {
            0..=31 => self.tiles::<S, { ROWS / 2 }, 2>(simd),
            _ => self.tiles::<S, ROWS, 2>(simd),
        }
    }
}

impl Product<'_> {
    /// Computes tiles of `M` rows and `N` vectors.
    #[inline(always)]
    fn tiles<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        for (tile, c) in self.c.chunks_exact_mut(M).enumerate() {
            for column in (0..LANES).step_by(N * S::F32_LANES) {
                let sums = match self.left {
                    Left::Rows { values, stride } => {
                        let left = &values[tile * M * stride..];
                        rows::<S, M, N>(simd, left, stride, self.right, column)
                    }
                    Left::Columns { values, stride } => {
                        let left = &values[tile * M..];
                        columns::<S, M, N>(simd, left, stride, self.right, column)
                    }
                };
                store(simd, c, column, sums, self.into);
            }
        }
    }
}

/// The sums of a tile of a left factor with contiguous rows.
#[inline(always)]
fn rows<S: Simd, const M: usize, const N: usize>(
    simd: S,
    left: &[f32],
    stride: usize,
    right: &[Lanes],
    column: usize,
) -> [[S::f32s; N]; M] {
    let terms = right.len();
    let left: [&[f32]; M] = std::array::from_fn(|row| &left[row * stride..][..terms]);
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    for (term, right) in right.iter().enumerate() {
        let mut factors = [0.0; M];
        for row in 0..M {
            factors[row] = left[row][term];
        }
        add(simd, &mut sums, &factors, right, column);
    }
    sums
}

/// The sums of a tile of a left factor with contiguous columns.
#[inline(always)]
fn columns<S: Simd, const M: usize, const N: usize>(
    simd: S,
    left: &[f32],
    stride: usize,
    right: &[Lanes],
    column: usize,
) -> [[S::f32s; N]; M] {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    for (left, right) in left.chunks(stride).zip(right) {
        if let Some(factors) = left.first_chunk() {
            add(simd, &mut sums, factors, right, column);
        }
    }
    sums
}

/// Adds the products of one term.
#[inline(always)]
fn add<S: Simd, const M: usize, const N: usize>(
    simd: S,
    sums: &mut [[S::f32s; N]; M],
    left: &[f32; M],
    right: &Lanes,
    column: usize,
) {
    let (right, _) = S::as_simd_f32s(&right[column..][..N * S::F32_LANES]);
    for row in 0..M {
        let left = simd.splat_f32s(left[row]);
        for vector in 0..N {
            let sum = &mut sums[row][vector];
            *sum = simd.mul_add_e_f32s(left, right[vector], *sum);
        }
    }
}

#[inline(always)]
fn store<S: Simd, const M: usize, const N: usize>(
    simd: S,
    c: &mut [Lanes],
    column: usize,
    sums: [[S::f32s; N]; M],
    into: Into<'_>,
) {
    let columns = column..column + N * S::F32_LANES;
    for (c, sums) in c.iter_mut().zip(sums) {
        let (c, _) = S::as_mut_simd_f32s(&mut c[columns.clone()]);
        match into {
            Into::Set(scale) => {
                let scale = simd.splat_f32s(scale);
                c.iter_mut().zip(sums).for_each(|(c, sum)| *c = simd.mul_f32s(sum, scale));
            }
            Into::AddTo(factors) => {
                let (factors, _) = S::as_simd_f32s(&factors[columns.clone()]);
                for (c, (sum, factor)) in c.iter_mut().zip(sums.into_iter().zip(factors)) {
                    *c = simd.mul_add_e_f32s(*c, *factor, sum);
                }
            }
        }
    }
}
