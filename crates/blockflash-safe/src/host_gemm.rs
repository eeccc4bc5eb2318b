use crate::{Error, Result, View, ViewMut};

/// `c = alpha·a·b`, or `c += alpha·a·b` with `accumulate`, of f32 matrices in host memory, in the
/// calling thread. `a` is `[m, k]`, `b` `[k, n]` and `c` `[m, n]`, with any strides; a transposed
/// operand is a permuted view.
///
/// Without `accumulate` the old contents of `c` do not matter.
///
/// # Errors
/// [`Error::DType`] and [`Error::NotOnCpu`] unless all are f32 in host memory,
/// [`Error::OutOfBounds`] if the shapes do not fit.
pub fn host_gemm(
    alpha: f32,
    a: View<'_>,
    b: View<'_>,
    accumulate: bool,
    mut c: ViewMut<'_>,
) -> Result<()> {
    let ([m, k], [a_rows, a_cols]) = matrix(&a)?;
    let ([inner, n], [b_rows, b_cols]) = matrix(&b)?;
    let ([c_m, c_n], [c_rows, c_cols]) = matrix(&c.as_view())?;
    for (needed, available) in [(k, inner), (m, c_m), (n, c_n)] {
        if needed != available {
            return Err(Error::OutOfBounds { needed, available });
        }
    }
    let (a, b) = (a.as_slice::<f32>()?.as_ptr(), b.as_slice::<f32>()?.as_ptr());
    let c = c.as_mut_slice::<f32>()?.as_mut_ptr();
    // Strides fit into `isize`: no tensor spans more than `isize::MAX` bytes. Strides of dimensions
    // of size 1 are not used.
    // SAFETY:
    // 1. Each pointer is the start of a slice that is the span of its view's layout, so every
    //    element that shape and strides name is inside it. The shapes agree.
    // 2. All bits are valid f32.
    // 3. `c` is borrowed exclusively, so it overlaps neither `a` nor `b`, and by the rule of
    //    `ViewMut` its elements do not overlap each other.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            c_cols as isize,
            c_rows as isize,
            accumulate,
            a,
            a_cols as isize,
            a_rows as isize,
            b,
            b_cols as isize,
            b_rows as isize,
            1.0,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    Ok(())
}

fn matrix(view: &View<'_>) -> Result<([usize; 2], [usize; 2])> {
    match (view.shape(), view.strides()) {
        (&[rows, cols], &[row_stride, col_stride]) => Ok(([rows, cols], [row_stride, col_stride])),
        (shape, _) => Err(Error::Rank { expected: 2..=2, found: shape.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers, so that every order of summation gives the same f32.
    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed * 5) % 11) as f32 - 5.0).collect()
    }

    #[test]
    fn every_layout_is_the_triple_loop() {
        for (m, n, k) in
            [(1, 1, 1), (3, 5, 7), (16, 33, 8), (65, 17, 130), (4, 4, 0), (0, 3, 2), (2, 0, 3)]
        {
            for (transposed_a, transposed_b) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let (a, b, old) = (values(m * k, 1), values(k * n, 2), values(m * (n + 3), 3));
                let view = |data, rows, cols, transposed| match transposed {
                    false => View::from_slice(data, &[rows, cols]),
                    true => {
                        View::from_slice(data, &[cols, rows]).and_then(|view| view.permute(&[1, 0]))
                    }
                };
                let (a, b) =
                    (view(&a, m, k, transposed_a).unwrap(), view(&b, k, n, transposed_b).unwrap());
                let at = |view: &View<'_>, i: usize, j: usize| {
                    view.as_slice::<f32>().unwrap()[i * view.strides()[0] + j * view.strides()[1]]
                };
                for accumulate in [false, true] {
                    let mut c = old.clone();
                    let target = ViewMut::from_slice_strided(&mut c, &[m, n], &[n + 3, 1]).unwrap();
                    host_gemm(2.0, a, b, accumulate, target).unwrap();
                    for i in 0..m {
                        for j in 0..n + 3 {
                            let product: f32 = match j < n {
                                true => (0..k).map(|l| 2.0 * at(&a, i, l) * at(&b, l, j)).sum(),
                                false => 0.0,
                            };
                            let before =
                                if accumulate || j >= n { old[i * (n + 3) + j] } else { 0.0 };
                            assert_eq!(
                                c[i * (n + 3) + j],
                                before + product,
                                "{m}x{n}x{k} ({i}, {j})"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn old_contents_do_not_leak() {
        let (a, b, mut c) = ([1f32; 6], [2f32; 6], [f32::NAN; 4]);
        let (a, b) =
            (View::from_slice(&a, &[2, 3]).unwrap(), View::from_slice(&b, &[3, 2]).unwrap());
        host_gemm(1.0, a, b, false, ViewMut::from_slice(&mut c, &[2, 2]).unwrap()).unwrap();
        assert_eq!(c, [6.0; 4]);
    }

    #[test]
    fn shapes_must_fit() {
        let data = [0f32; 6];
        let a = View::from_slice(&data, &[2, 3]).unwrap();
        let mut c = [0f32; 9];
        let mut run = |a: View<'_>, b: View<'_>, shape: &[usize]| {
            let len = shape.iter().product();
            host_gemm(1.0, a, b, false, ViewMut::from_slice(&mut c[..len], shape).unwrap())
        };
        assert!(matches!(run(a, a, &[2, 3]), Err(Error::OutOfBounds { needed: 3, available: 2 })));
        let b = a.permute(&[1, 0]).unwrap();
        assert!(matches!(run(a, b, &[2, 3]), Err(Error::OutOfBounds { needed: 2, available: 3 })));
        assert!(matches!(run(a, b, &[3, 2]), Err(Error::OutOfBounds { needed: 2, available: 3 })));
        assert!(matches!(run(a, b, &[4]), Err(Error::Rank { found: 1, .. })));
        let halves = [half::f16::ONE; 6];
        let halves = View::from_slice(&halves, &[2, 3]).unwrap();
        assert!(matches!(run(halves, b, &[2, 2]), Err(Error::DType { .. })));
    }
}
