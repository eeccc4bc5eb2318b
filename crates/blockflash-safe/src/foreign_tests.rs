use super::*;
use crate::Stream;
use std::ptr;

fn cpu() -> (Device, Stream) {
    (Device::cpu(), Device::cpu().stream().unwrap())
}

#[test]
fn host_memory_with_strides() -> Result<()> {
    let (device, stream) = cpu();
    let mut data: Vec<i32> = (0..24).collect();
    let layout = Layout::strided(&[3, 2, 2], &[8, 1, 4])?;
    // SAFETY: 1. The layout spans 22 of 24 elements. 2. `data` outlives the view, and nobody
    // writes to it meanwhile.
    let view = unsafe { View::from_raw(&device, data.as_ptr().cast(), DType::I32, layout)? };
    let expected = [0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21];
    assert_eq!(view.to_vec::<i32>(&stream)?, expected);
    assert_eq!(view.slice(0, 1..2)?.to_vec::<i32>(&stream)?, expected[4..8]);
    // SAFETY: as above, and nobody else uses `data` meanwhile.
    let mut view =
        unsafe { ViewMut::from_raw(&device, data.as_mut_ptr().cast(), DType::I32, layout)? };
    view.as_mut_slice::<i32>()?[21] = 7;
    assert_eq!((data[21], data[22]), (7, 22));
    Ok(())
}

#[test]
fn pointers_that_no_tensor_has() -> Result<()> {
    let (device, _) = cpu();
    let layout = Layout::contiguous(&[2])?;
    let mut data = [0u32; 4];
    let odd = data.as_mut_ptr().wrapping_byte_add(1).cast::<c_void>();
    for (ptr, reason) in [(ptr::null_mut(), "null"), (odd, "not aligned")] {
        // SAFETY: refused before the pointer is used.
        let view = unsafe { View::from_raw(&device, ptr, DType::F16, layout) };
        assert!(view.unwrap_err().to_string().contains(reason));
        // SAFETY: as above.
        let view = unsafe { ViewMut::from_raw(&device, ptr, DType::F16, layout) };
        assert!(matches!(view, Err(Error::Pointer { .. })));
    }
    // SAFETY: 1. Two bytes at any address of `data`. 2. It outlives the view.
    let bytes = unsafe { View::from_raw(&device, odd, DType::U8, layout)? };
    assert_eq!(bytes.as_slice::<u8>()?, [0, 0]);
    // SAFETY: refused before the pointer is used.
    let twice = unsafe {
        let layout = Layout::strided(&[2, 2], &[0, 1])?;
        ViewMut::from_raw(&device, data.as_mut_ptr().cast(), DType::F32, layout)
    };
    assert!(matches!(twice, Err(Error::OverlappingOutput { .. })));
    Ok(())
}

#[test]
fn any_pointer_will_do_without_elements() -> Result<()> {
    let (device, stream) = cpu();
    let layout = Layout::contiguous(&[3, 0])?;
    for ptr in [ptr::null_mut(), ptr::without_provenance_mut(1)] {
        // SAFETY: there are no elements.
        let view = unsafe { View::from_raw(&device, ptr, DType::F32, layout)? };
        assert!(view.as_slice::<f32>()?.is_empty() && view.to_tensor(&stream)?.shape() == [3, 0]);
        // SAFETY: there are no elements.
        let mut view = unsafe { ViewMut::from_raw(&device, ptr, DType::F32, layout)? };
        assert!(view.as_mut_slice::<f32>()?.is_empty());
    }
    Ok(())
}
