//! What appends to caches whose values are columns of their keys ask of the driver.
#![cfg(target_os = "linux")]

use blockflash_fake_driver::{FakeDriver, Launch};
use blockflash_ops::{AppendKv, DType, Device, KvCacheMut, Operation, Tensor};
use blockflash_sys::params::{blockflash_kv_append_params, blockflash_kv_cache};
use std::mem::offset_of;

const CACHE: usize = offset_of!(blockflash_kv_append_params, cache);

fn bytes<const N: usize>(launch: &Launch, at: usize) -> [u8; N] {
    launch.params[at..at + N].try_into().unwrap()
}

/// Where the parts of new rows and of the cache are, in elements from their beginnings, how many
/// elements the parts have, and how far apart slots and tokens are.
fn fields(launch: &Launch, [new, rows]: [u64; 2]) -> [u64; 8] {
    let word = |at| u64::from_ne_bytes(bytes(launch, at));
    let size = |at| u32::from_ne_bytes(bytes(launch, at)).into();
    [
        (word(offset_of!(blockflash_kv_append_params, v_new)) - new) / 2,
        (word(offset_of!(blockflash_kv_append_params, k_new)) - new) / 2,
        (word(CACHE + offset_of!(blockflash_kv_cache, v)) - rows) / 2,
        (word(CACHE + offset_of!(blockflash_kv_cache, k)) - rows) / 2,
        size(offset_of!(blockflash_kv_append_params, head_dim_v)),
        size(offset_of!(blockflash_kv_append_params, head_dim_qk)),
        word(CACHE + offset_of!(blockflash_kv_cache, k_stride_slot)),
        word(offset_of!(blockflash_kv_append_params, k_new_stride_batch)),
    ]
}

#[test]
fn each_column_of_a_row_is_written_once() {
    let (driver, device) = (FakeDriver::load(), Device::cuda(0).unwrap());
    let stream = device.stream().unwrap();
    let lengths = Tensor::from_slice(&stream, &[5, 9], &[2]).unwrap();
    let tensor = |shape: &[usize]| Tensor::zeros(&stream, DType::BF16, shape).unwrap();
    for (row, columns, [values, behind]) in
        [(576, 512, [512, 64]), (512, 512, [256, 256]), (24, 24, [16, 8])]
    {
        let (mut rows, new) = (tensor(&[2, 64, 1, row]), tensor(&[2, 1, 1, row]));
        let begin = [&new, &rows].map(|tensor| tensor.view().device_ptr().unwrap());
        let cache = KvCacheMut {
            seqused_kv: Some(lengths.view()),
            ..KvCacheMut::latent(rows.view_mut(), columns).unwrap()
        };
        let append = AppendKv::latent(new.view());
        let (result, calls) = driver.calls(|| append.run(cache, &stream));
        result.unwrap();
        let launches: Vec<&Launch> = calls.iter().filter_map(|call| call.launch.as_ref()).collect();
        let [launch] = launches[..] else { panic!("{calls:?}") };
        assert!(launch.symbol.contains("kv_append"), "{}", launch.symbol);
        let of_row = row as u64;
        let expected = [0, values, 0, values, values, behind, of_row, of_row];
        assert_eq!(fields(launch, begin), expected, "{row}");
    }
}

#[test]
fn views_of_columns_alternate_on_a_gpu_only() {
    let _driver = FakeDriver::load();
    let stream = Device::cuda(0).unwrap().stream().unwrap();
    let mut rows = Tensor::zeros(&stream, DType::F32, &[3, 8]).unwrap();
    let begin = rows.view().device_ptr().unwrap();
    let (first, rest) = rows.view_mut().split_columns(6).unwrap();
    assert_eq!((first.shape(), rest.shape()), (&[3, 6][..], &[3, 2][..]));
    assert_eq!((first.strides(), rest.strides()), (&[8, 1][..], &[8, 1][..]));
    assert_eq!([first.device_ptr(), rest.device_ptr()], [Some(begin), Some(begin + 24)]);
    let (all, none) = rows.view_mut().split_columns(8).unwrap();
    assert_eq!((all.shape(), none.shape()), (&[3, 8][..], &[3, 0][..]));
    assert!(rows.view_mut().split_columns(9).is_err());
    let mut host = [0f32; 24];
    let host = blockflash_ops::ViewMut::from_slice(&mut host, &[3, 8]).unwrap();
    let message = host.split_columns(6).unwrap_err().to_string();
    assert!(message.contains("a split into columns needs a GPU"), "{message}");
}
