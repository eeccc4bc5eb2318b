//! Arrays of the crate ndarray through the operations on the CPU, against the same in ndarray.

use approx::assert_abs_diff_eq;
use blockflash_ops::{Attention, Device, Tensor, View};
use ndarray::{Array, Array2, Array4, ArrayD, Axis, Ix3, Ix4, s};

const SHAPE: (usize, usize, usize, usize) = (2, 17, 3, 16);

/// `[batch, sequence, head, head_dim]`, of another shape for each seed.
fn numbers(seed: f32) -> Array4<f32> {
    Array::from_shape_fn(SHAPE, |(b, s, h, d)| {
        (seed * (1 + b * 700 + s * 40 + h * 17 + d) as f32).sin()
    })
}

#[test]
fn attention_is_a_softmax_of_products() {
    let stream = &Device::cpu().stream().unwrap();
    let [q, k, v] = [0.37, 0.71, 1.13].map(numbers);
    // Heads before the sequence in memory: a view has any order of dimensions.
    let k_by_heads = k.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
    let k_view = View::try_from(k_by_heads.view().permuted_axes([0, 2, 1, 3])).unwrap();
    let operands = [View::try_from(q.view()).unwrap(), k_view, View::try_from(v.view()).unwrap()];
    let [q_view, k_view, v_view] = operands;
    let found = Attention::new(q_view, k_view, v_view).forward(stream).unwrap();
    let o: ArrayD<f32> = found.o.to_array(stream).unwrap();
    let lse: ArrayD<f32> = found.lse.to_array(stream).unwrap();
    let (o, lse) =
        (o.into_dimensionality::<Ix4>().unwrap(), lse.into_dimensionality::<Ix3>().unwrap());
    for (b, h) in (0..2).flat_map(|b| (0..3).map(move |h| (b, h))) {
        let head =
            |array: &Array4<f32>| -> Array2<f32> { array.slice(s![b, .., h, ..]).to_owned() };
        let [q, k, v] = [&q, &k, &v].map(head);
        let weights: Array2<f32> = (q.dot(&k.t()) / 4.0).exp();
        let sums = weights.sum_axis(Axis(1));
        let expected = weights.dot(&v) / sums.view().insert_axis(Axis(1));
        assert_abs_diff_eq!(head(&o), expected, epsilon = 1e-6);
        assert_abs_diff_eq!(lse.slice(s![b, h, ..]), sums.ln(), epsilon = 1e-6);
    }
    // A tensor takes what no view can be of.
    let even = q.slice(s![.., ..;2, .., ..]);
    assert!(View::try_from(even).is_err());
    assert_eq!(Tensor::from_array(stream, even).unwrap().shape(), even.shape());
}
