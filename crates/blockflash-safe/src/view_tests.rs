use crate::*;
use half::f16;

#[test]
fn views_of_slices() -> Result<()> {
    let data = [0i32, 1, 2, 3, 4, 5];
    let view = View::from_slice(&data, &[2, 3])?;
    assert_eq!(
        (view.dtype(), view.shape(), view.strides()),
        (DType::I32, &[2, 3][..], &[3, 1][..])
    );
    assert!(view.is_cpu() && view.device_ptr().is_none());
    assert_eq!(view.as_slice::<i32>()?, data);
    assert!(matches!(
        view.as_slice::<f32>(),
        Err(Error::DType { expected: DType::F32, found: DType::I32 })
    ));
    for shape in [&[2, 2][..], &[7]] {
        assert!(matches!(
            View::from_slice(&data, shape),
            Err(Error::OutOfBounds { available: 6, .. })
        ));
    }
    Ok(())
}

#[test]
fn strided_views_hold_exactly_their_span() -> Result<()> {
    let data: Vec<i32> = (0..20).collect();
    let view = View::from_slice_strided(&data, &[2, 3], &[8, 2])?;
    assert_eq!(view.as_slice::<i32>()?.len(), 13);
    let out_of_bounds = View::from_slice_strided(&data, &[3, 3], &[8, 2]);
    assert!(matches!(out_of_bounds, Err(Error::OutOfBounds { needed: 21, available: 20 })));
    let stream = Device::cpu().stream()?;
    assert_eq!(view.to_vec::<i32>(&stream)?, [0, 2, 4, 8, 10, 12]);
    assert_eq!(view.permute(&[1, 0])?.to_vec::<i32>(&stream)?, [0, 8, 2, 10, 4, 12]);
    let part = view.slice(1, 1..3)?;
    assert_eq!((part.as_slice::<i32>()?[0], part.to_vec::<i32>(&stream)?), (2, vec![2, 4, 10, 12]));
    assert_eq!(view.slice(0, 2..2)?.to_vec::<i32>(&stream)?, []);
    // A repeated row may be read.
    let repeated = View::from_slice_strided(&data, &[2, 2], &[0, 1])?;
    assert_eq!(repeated.to_vec::<i32>(&stream)?, [0, 1, 0, 1]);
    Ok(())
}

#[test]
fn exclusive_views_write_through() -> Result<()> {
    let mut data = vec![0f32; 6];
    let mut view = ViewMut::from_slice(&mut data, &[2, 3])?;
    view.reborrow().slice(0, 1..2)?.as_mut_slice::<f32>()?.fill(1.0);
    view.reborrow().permute(&[1, 0])?.slice(0, 0..1)?.as_mut_slice::<f32>()?[0] = 2.0;
    assert_eq!(view.as_view().as_slice::<f32>()?, [2.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    assert!(view.as_mut_slice::<i32>().is_err());
    assert_eq!(data[0], 2.0);
    Ok(())
}

#[test]
fn batches_are_flattened() -> Result<()> {
    let stream = Device::cpu().stream()?;
    let mut data: Vec<i32> = (0..18).collect();
    let batch = View::from_slice(&data, &[2, 3, 3])?;
    let matrix = batch.slice(2, 0..2)?.flatten(0..2)?;
    assert_eq!((matrix.shape(), matrix.strides()), (&[6, 2][..], &[3, 1][..]));
    assert_eq!(matrix.to_vec::<i32>(&stream)?, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16]);
    assert!(matches!(
        batch.slice(1, 0..2)?.flatten(0..2),
        Err(Error::Flatten { start: 0, end: 2, .. })
    ));
    let batch = ViewMut::from_slice(&mut data, &[2, 3, 3])?;
    batch.flatten(0..2)?.slice(0, 4..5)?.as_mut_slice::<i32>()?.fill(-1);
    assert_eq!(data[11..16], [11, -1, -1, -1, 15]);
    Ok(())
}

#[test]
fn exclusive_views_must_not_overlap_themselves() {
    let mut data = [f16::ZERO; 8];
    let overlapping = ViewMut::from_slice_strided(&mut data, &[2, 3], &[2, 1]);
    assert!(matches!(overlapping, Err(Error::OverlappingOutput { .. })));
    assert!(ViewMut::from_slice_strided(&mut data, &[2, 3], &[4, 1]).is_ok());
}

#[test]
fn two_parts_of_an_exclusive_view() -> Result<()> {
    let mut data: Vec<i32> = (0..12).collect();
    let columns = ViewMut::from_slice(&mut data, &[3, 4])?.slice(1, 1..3)?;
    let (mut first, mut rest) = columns.split(1)?;
    assert_eq!((first.shape(), rest.shape()), (&[1, 2][..], &[2, 2][..]));
    first.as_mut_slice::<i32>()?.fill(-1);
    rest.as_mut_slice::<i32>()?[4] = -2;
    assert_eq!(data, [0, -1, -1, 3, 4, 5, 6, 7, 8, -2, 10, 11]);
    let (all, none) = ViewMut::from_slice(&mut data, &[3, 4])?.split(3)?;
    assert_eq!((all.shape(), none.shape()), (&[3, 4][..], &[0, 4][..]));
    let mut view = ViewMut::from_slice(&mut data, &[3, 4])?;
    let (none, all) = view.reborrow().split(0)?;
    assert_eq!((none.shape(), all.shape()), (&[0, 4][..], &[3, 4][..]));
    assert!(matches!(view.reborrow().split(4), Err(Error::Slice { .. })));
    // Columns of a row-major matrix interleave.
    let turned = view.permute(&[1, 0])?.split(2);
    assert!(matches!(turned, Err(Error::OverlappingOutput { .. })));
    let scalar = ViewMut::from_slice(&mut data, &[12])?.slice(0, 0..1)?;
    let (one, none) = scalar.split(1)?;
    assert_eq!((one.shape(), none.shape()), (&[1][..], &[0][..]));
    Ok(())
}

#[test]
fn alignment_is_of_the_first_element() -> Result<()> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, DType::F16, &[4, 8])?;
    assert!(tensor.view().is_aligned(64));
    assert!(tensor.view().slice(0, 1..2)?.is_aligned(16));
    assert!(!tensor.view().slice(1, 1..2)?.is_aligned(4));
    assert!(tensor.view().slice(1, 1..1)?.is_aligned(4), "nothing is aligned to anything");
    Ok(())
}

#[test]
fn everything_crosses_threads() {
    fn check<T: Send + Sync>() {}
    check::<Device>();
    check::<Stream>();
    check::<Event>();
    check::<Graph>();
    check::<Tensor>();
    check::<View<'_>>();
    check::<ViewMut<'_>>();
    check::<TensorMapSpec<'_>>();
    check::<Error>();
}
