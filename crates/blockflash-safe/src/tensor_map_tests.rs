use super::*;
use crate::{Device, View};

fn spec() -> TensorMapSpec<'static> {
    TensorMapSpec {
        dtype: DType::F16,
        shape: &[128, 4096],
        strides_bytes: &[256],
        box_shape: &[64, 128],
        swizzle: Swizzle::B128,
    }
}

#[test]
fn what_the_hardware_takes_is_accepted() {
    let accepted = [
        spec(),
        TensorMapSpec { strides_bytes: &[4096], ..spec() },
        TensorMapSpec { shape: &[64], strides_bytes: &[], box_shape: &[64], ..spec() },
        TensorMapSpec {
            shape: &[8; 5],
            strides_bytes: &[16, 128, 1024, 8192],
            box_shape: &[8, 8, 8, 8, 8],
            ..spec()
        },
        // (head_dim, sequence, head, batch) of a [batch, sequence, head, head_dim] tensor: strides
        // need not grow.
        TensorMapSpec {
            shape: &[64, 1000, 8, 2],
            strides_bytes: &[1024, 128, 1_024_000],
            box_shape: &[64, 128, 1, 1],
            ..spec()
        },
        TensorMapSpec { box_shape: &[256, 256], swizzle: Swizzle::None, ..spec() },
        TensorMapSpec { dtype: DType::F32, strides_bytes: &[512], box_shape: &[32, 1], ..spec() },
    ];
    for spec in accepted {
        assert!(spec.check().is_ok(), "{spec:?}: {:?}", spec.check());
    }
}

#[test]
fn each_rule_is_named() {
    let refused = [
        (
            TensorMapSpec { shape: &[], strides_bytes: &[], box_shape: &[], ..spec() },
            "0 dimensions",
        ),
        (
            TensorMapSpec { shape: &[8; 6], strides_bytes: &[16; 5], box_shape: &[8; 6], ..spec() },
            "6 dimensions, not 1 to 5",
        ),
        (TensorMapSpec { strides_bytes: &[], ..spec() }, "need 1 strides"),
        (TensorMapSpec { box_shape: &[64], ..spec() }, "as many box extents"),
        (TensorMapSpec { shape: &[128, 0], ..spec() }, "a dimension of 0"),
        (TensorMapSpec { shape: &[128, (1 << 32) + 1], ..spec() }, "not 1 to 2^32"),
        (TensorMapSpec { strides_bytes: &[264], ..spec() }, "264 bytes, not a multiple of 16"),
        (TensorMapSpec { strides_bytes: &[1 << 40], ..spec() }, "not below 2^40"),
        (TensorMapSpec { box_shape: &[64, 257], ..spec() }, "a box extent of 257"),
        (TensorMapSpec { box_shape: &[0, 1], ..spec() }, "a box extent of 0"),
        (TensorMapSpec { box_shape: &[4, 1], ..spec() }, "8 bytes, not a multiple of 16"),
        (TensorMapSpec { box_shape: &[128, 1], ..spec() }, "256 bytes with a swizzle of 128"),
        (
            TensorMapSpec { box_shape: &[64, 1], swizzle: Swizzle::B64, ..spec() },
            "128 bytes with a swizzle of 64",
        ),
    ];
    for (spec, expected) in refused {
        let error = spec.check().unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    }
}

#[test]
fn maps_stay_inside_the_view_and_on_a_gpu() -> Result<()> {
    let data = vec![0f32; 128 * 16];
    let view = View::from_slice(&data, &[16, 128])?;
    let spec = TensorMapSpec {
        dtype: DType::F32,
        shape: &[128, 16],
        strides_bytes: &[512],
        box_shape: &[32, 16],
        swizzle: Swizzle::B128,
    };
    assert!(matches!(spec.encode(&view), Err(Error::NotOnGpu { .. })));
    let larger = TensorMapSpec { shape: &[128, 17], ..spec };
    assert!(matches!(
        larger.encode(&view),
        Err(Error::OutOfBounds { needed: 2176, available: 2048 })
    ));
    let other = TensorMapSpec { dtype: DType::I32, ..spec };
    assert!(matches!(other.encode(&view), Err(Error::DType { .. })));
    assert_eq!(Device::cpu(), *view.device());
    Ok(())
}

/// Rows of 128 bytes that touch five sectors where four would do are fetched as they are.
#[test]
fn rows_that_begin_within_a_sector_are_not_promoted() {
    use sys::CUtensorMapL2promotion as Promotion;
    let of = |spec: TensorMapSpec<'_>, address| spec.promotion(address);
    let (all, none) =
        (Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B, Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE);
    for (stride, expected) in [(256, all), (32, all), (6016, all), (400, none), (6000, none)] {
        assert_eq!(of(TensorMapSpec { strides_bytes: &[stride], ..spec() }, 1 << 20), expected);
    }
    assert_eq!(of(spec(), (1 << 20) + 16), none);
    // The stride of a dimension that is never stepped over does not matter.
    let single = TensorMapSpec { shape: &[128, 1], strides_bytes: &[400], ..spec() };
    assert_eq!(of(single, 1 << 20), all);
}
