use super::*;
use crate::Stream;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    for (ptr, reason) in [
        (ptr::null_mut(), "is null, but the tensor has 2 elements"),
        (odd, "expected a multiple of 2 bytes"),
    ] {
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

/// Counts its drops.
struct Owner {
    drops: Arc<AtomicUsize>,
    _data: Vec<i32>,
}

fn owned(shape: &[usize], data: Vec<i32>) -> (Result<Tensor>, Arc<AtomicUsize>) {
    let (mut data, drops) = (data, Arc::default());
    let ptr = data.as_mut_ptr().cast();
    let owner = Owner { drops: Arc::clone(&drops), _data: data };
    // SAFETY: 1. As many elements as `shape` says, which the owner keeps. 2. Nobody else has them.
    (unsafe { Tensor::from_raw(&cpu().1, ptr, DType::I32, shape, owner) }, drops)
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn an_owner_is_dropped_once() -> Result<()> {
    let (_, stream) = cpu();
    let (tensor, drops) = owned(&[2, 3], (0..6).collect());
    let mut tensor = tensor?;
    assert_eq!(tensor.view().slice(0, 1..2)?.to_vec::<i32>(&stream)?, [3, 4, 5]);
    tensor.copy_from_slice(&stream, &[7; 6])?;
    let mut copy = tensor.copy_to(&stream)?;
    copy.fill_bytes(&stream, 0)?;
    let tensor = std::thread::spawn(move || tensor).join().unwrap();
    assert_eq!(tensor.to_vec::<i32>(&stream)?, [7; 6]);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(tensor);
    stream.synchronize()?;
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    assert_eq!(copy.to_vec::<i32>(&stream)?, [0; 6]);
    Ok(())
}

#[test]
fn an_owner_of_nothing_and_one_that_is_refused() -> Result<()> {
    let (_, stream) = cpu();
    let (tensor, drops) = owned(&[4, 0], Vec::new());
    let mut tensor = tensor?;
    tensor.fill_bytes(&stream, 1)?;
    assert!(tensor.view().as_slice::<i32>()?.is_empty());
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(tensor);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    let (refused, drops) = owned(&[1; 9], vec![0]);
    assert!(matches!(refused, Err(Error::Rank { .. })));
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    let drops = Arc::<AtomicUsize>::default();
    let owner = Owner { drops: Arc::clone(&drops), _data: Vec::new() };
    // SAFETY: refused before the pointer is used.
    let refused = unsafe { Tensor::from_raw(&stream, ptr::null_mut(), DType::I32, &[1], owner) };
    assert!(matches!(refused, Err(Error::Pointer { .. })));
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    Ok(())
}
