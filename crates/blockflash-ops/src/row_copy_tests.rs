use super::*;
use crate::fixtures::gpu;
use crate::{DType, Device, Error, Tensor};

fn tensor(shape: &[usize]) -> Tensor {
    let stream = Device::cpu().stream().unwrap();
    let values: Vec<i32> = (0..shape.iter().product()).map(|i: usize| i as i32).collect();
    Tensor::from_slice(&stream, &values, shape).unwrap()
}

fn plan_on_hopper(copies: &[(ViewMut<'_>, View<'_>)]) -> Option<Plan> {
    let gpu = gpu(9, 0);
    plan(select(&Copies, &gpu).unwrap(), copies, &gpu).unwrap()
}

/// Heads of a part go to the rows of a slot, as keys do on their way to a window.
#[test]
fn what_few_sms_can_copy() {
    let (from, mut to) = (tensor(&[1, 5, 4, 8]), tensor(&[3, 10, 2, 8]));
    let mut plan_of = |heads: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
        let from = from.view().slice(2, heads.clone()).unwrap().slice(3, columns.clone()).unwrap();
        let to = to.view_mut().slice(0, 1..2).unwrap().slice(1, 5..10).unwrap();
        let to = to.slice(2, 0..heads.len()).unwrap().slice(3, columns).unwrap();
        plan_on_hopper(&[(to, from)])
    };
    let plan = plan_of(2..4, 0..8).unwrap();
    let copy = plan.params.copies[0];
    assert_eq!((plan.splits[0], copy.rows, copy.pieces), (2, 5, 4));
    assert_eq!((copy.from_pitch, copy.to_pitch), (128, 64));
    assert_eq!(plan.config.grid, [1, 1, 1]);
    // Half a head is rows of 16 bytes, a quarter is not.
    assert_eq!(plan_of(1..2, 0..4).unwrap().params.copies[0].pieces, 1);
    assert!(plan_of(1..2, 0..2).is_none());
    let many = |count| {
        let mut targets: Vec<_> = (0..count).map(|_| tensor(&[40, 4096])).collect();
        let from = tensor(&[40, 4096]);
        let copies = targets.iter_mut().map(|to| (to.view_mut(), from.view()));
        plan_on_hopper(&copies.collect::<Vec<_>>())
    };
    assert_eq!(many(4).unwrap().config.grid[0], gpu(9, 0).multiprocessors.div_ceil(8));
    assert!(many(0).is_none() && many(5).is_none());
}

#[test]
fn a_copy_is_a_copy_or_an_error() {
    let stream = Device::cpu().stream().unwrap();
    let (from, mut to, mut other) = (tensor(&[2, 8]), tensor(&[3, 8]), tensor(&[2, 8]));
    other.fill_bytes(&stream, 0).unwrap();
    let copies = vec![(other.view_mut(), from.view()), (to.view_mut(), from.view())];
    let error = copy_beside(copies, &stream).unwrap_err();
    assert!(matches!(error, Error::Shape { what: "to", .. }), "{error}");
    assert_eq!(other.to_vec::<i32>(&stream).unwrap(), [0; 16], "nothing is copied");
    let mut floats = Tensor::zeros(&stream, DType::F32, &[2, 8]).unwrap();
    let error = copy_beside(vec![(floats.view_mut(), from.view())], &stream).unwrap_err();
    assert!(matches!(error, Error::DType { what: "to", .. }), "{error}");
    let rows = to.view_mut().slice(0, 1..3).unwrap();
    assert!(
        !copy_beside(vec![(other.view_mut(), from.view()), (rows, from.view())], &stream).unwrap()
    );
    assert_eq!(to.to_vec::<i32>(&stream).unwrap()[8..], from.to_vec::<i32>(&stream).unwrap());
    assert_eq!(other.to_vec::<i32>(&stream).unwrap(), from.to_vec::<i32>(&stream).unwrap());
}
