//! What attention over codes asks of the driver: maps of bytes, and scales.
#![cfg(target_os = "linux")]

use blockflash_fake_driver::{FakeDriver, Launch};
use blockflash_ops::{Attention, DType, Device, OperandScales, Operation, Tensor};
use blockflash_sys::params::{
    blockflash_attention_fwd_e4m3_params, blockflash_attention_fwd_tma_params,
    blockflash_operand_scales,
};
use std::mem::offset_of;

fn bytes<const N: usize>(launch: &Launch, at: usize) -> [u8; N] {
    launch.params[at..at + N].try_into().unwrap()
}

/// Columns and rows of the boxes of a map of the fake driver, its element type, and its swizzle.
fn map(launch: &Launch, at: usize) -> [u32; 4] {
    let word = |word: usize| u32::from_ne_bytes(bytes(launch, at + 4 * word));
    // An address, 4 sizes and 3 strides of two words each.
    let (boxes, options) = (16, 20);
    [word(boxes), word(boxes + 1), word(options) & 0xff, word(options) >> 16 & 0xf]
}

#[test]
fn maps_are_of_bytes_and_scales_are_where_they_are() {
    const SCALES: usize = offset_of!(blockflash_attention_fwd_e4m3_params, scales);
    let (driver, device) = (FakeDriver::load(), Device::cuda(0).unwrap());
    let stream = device.stream().unwrap();
    let scale = |shape: &[usize]| Tensor::zeros(&stream, DType::F32, shape).unwrap();
    let (of_q, of_v) = (scale(&[2, 4]), scale(&[1]));
    // Columns of a box, and the swizzle of as many bytes.
    for (head_dim, columns, swizzle) in [(48, 64, 2), (64, 64, 2), (80, 128, 3), (256, 128, 3)] {
        let codes =
            |heads| Tensor::zeros(&stream, DType::E4M3, &[2, 1024, heads, head_dim]).unwrap();
        let (q, k) = (codes(8), codes(4));
        for o_dtype in [DType::BF16, DType::F16] {
            let mut o = Tensor::empty(&stream, o_dtype, &[2, 1024, 8, head_dim]).unwrap();
            let call = Attention {
                scales: OperandScales { q: Some(of_q.view()), k: None, v: Some(of_v.view()) },
                o_dtype: Some(o_dtype),
                ..Attention::new(q.view(), k.view(), k.view())
            };
            let (result, calls) = driver.calls(|| call.run((o.view_mut(), None), &stream));
            result.unwrap();
            let launches: Vec<&Launch> =
                calls.iter().filter_map(|call| call.launch.as_ref()).collect();
            let [launch] = launches[..] else { panic!("{calls:?}") };
            let name = format!("blockflash_attention_fwd_e4m3_sm90a_{o_dtype}_d");
            assert!(launch.symbol.starts_with(&name), "{}", launch.symbol);
            assert_eq!(launch.params.len(), size_of::<blockflash_attention_fwd_e4m3_params>());
            let of_q = map(launch, offset_of!(blockflash_attention_fwd_tma_params, q));
            assert_eq!(of_q, [columns, 64, 0, swizzle]);
            for at in [
                offset_of!(blockflash_attention_fwd_tma_params, k),
                offset_of!(blockflash_attention_fwd_tma_params, v),
            ] {
                let [found, rows, dtype, kind] = map(launch, at);
                assert_eq!([found, dtype, kind], [columns, 0, swizzle]);
                assert!(launch.symbol.contains(&format!("_kv{rows}_")), "{rows}");
            }
            let pointer = |field| u64::from_ne_bytes(bytes(launch, SCALES + field));
            let [q, k, v] = [
                offset_of!(blockflash_operand_scales, q),
                offset_of!(blockflash_operand_scales, k),
                offset_of!(blockflash_operand_scales, v),
            ]
            .map(pointer);
            assert_eq!((k, q == 0, v == 0), (0, false, false));
            let stride = pointer(offset_of!(blockflash_operand_scales, q_stride_batch));
            let shared = offset_of!(blockflash_operand_scales, q_heads_per_scale);
            assert_eq!(stride, 4);
            assert_eq!(i32::from_ne_bytes(bytes(launch, SCALES + shared)), 2);
        }
    }
}
