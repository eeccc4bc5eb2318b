use super::*;
use std::ptr::null_mut;

fn described(of: impl FnOnce(&mut DLTensor)) -> Result<Foreign<'static>> {
    static MEMORY: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    let (mut shape, mut strides) = ([2i64, 3], [4i64, 1]);
    let mut tensor = DLTensor {
        data: MEMORY.as_ptr().cast_mut().cast(),
        device: DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
        ndim: 2,
        dtype: DLDataType::F32,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 4,
    };
    of(&mut tensor);
    // SAFETY: 1. The arrays live during the call. 2. The elements are static, and read only.
    unsafe { Foreign::from_dlpack("x", &tensor, null_mut()) }
}

/// What a descriptor's view holds, or the text of its error.
fn outcome(of: impl FnOnce(&mut DLTensor)) -> Result<Vec<f32>, String> {
    let read = described(of).and_then(|foreign| {
        let view = foreign.view()?;
        Ok(view.to_vec::<f32>(&foreign.stream()?)?)
    });
    read.map_err(|error| error.to_string())
}

#[test]
fn elements_are_where_the_descriptor_says() {
    assert_eq!(outcome(|_| {}).unwrap(), [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]);
    // Without strides it is compact.
    let found = outcome(|tensor| tensor.strides = null_mut());
    assert_eq!(found.unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let pinned = outcome(|tensor| tensor.device.device_type = DLDeviceType::CUDAHOST);
    assert_eq!(pinned.unwrap().len(), 6);
}

#[test]
fn elements_of_8_bits() {
    for (code, expected) in [
        (DLDataTypeCode::UINT, DType::U8),
        (DLDataTypeCode::INT, DType::I8),
        (DLDataTypeCode::FLOAT8_E4M3FN, DType::E4M3),
        (DLDataTypeCode::FLOAT8_E5M2, DType::E5M2),
    ] {
        let found = described(|tensor| (tensor.dtype.code, tensor.dtype.bits) = (code, 8));
        assert_eq!(found.unwrap().view().unwrap().dtype(), expected);
    }
    for code in [DLDataTypeCode::FLOAT8_E4M3FNUZ, DLDataTypeCode::FLOAT8_E5M2FNUZ] {
        let found = described(|tensor| (tensor.dtype.code, tensor.dtype.bits) = (code, 8));
        assert!(matches!(found, Err(Error::DType { .. })));
    }
}

#[test]
fn what_no_operation_takes_is_named() {
    let error = |of: fn(&mut DLTensor)| outcome(of).unwrap_err();
    let of_type = |found: &str| {
        format!(
            "x is {found}: float16, bfloat16 and float32 are possible, and int32 for indices and \
             offsets"
        )
    };
    let long = |tensor: &mut DLTensor| (tensor.dtype.code, tensor.dtype.bits) = int(64);
    assert_eq!(error(long), of_type("int64"));
    assert_eq!(error(|tensor| tensor.dtype.bits = 64), of_type("float64"));
    assert_eq!(error(|tensor| tensor.dtype.code = DLDataTypeCode::COMPLEX), of_type("complex32"));
    assert_eq!(
        error(|tensor| tensor.device.device_type = DLDeviceType::ROCM),
        "x is on a device of another kind than CPU and CUDA (DLPack's number 10)"
    );
    assert!(error(|tensor| tensor.ndim = -1).starts_with("x: "));
    assert!(error(|tensor| tensor.shape = null_mut()).starts_with("x: "));
    assert!(error(|tensor| tensor.data = null_mut()).contains("null"));
}

const fn int(bits: u8) -> (DLDataTypeCode, u8) {
    (DLDataTypeCode::INT, bits)
}
