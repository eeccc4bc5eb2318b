//! What appends to caches whose values are columns of their keys ask of the driver.
#![cfg(target_os = "linux")]

use blockflash_fake_driver::{FakeDriver, Launch};
use blockflash_ops::{
    AppendKv, AppendLatentCodes, AttentionDecode, DType, Device, KvCache, KvCacheMut,
    LatentCodesMut, Operation, Tensor,
};
use blockflash_sys::params::{
    blockflash_attention_decode_params, blockflash_cache_scales, blockflash_kv_append_codes_params,
    blockflash_kv_append_params, blockflash_kv_cache,
};
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

/// Codes are appended as four heads of 128, with scales in the row, and what is behind them apart.
#[test]
fn rows_of_codes_are_written_by_two_launches() {
    let (driver, device) = (FakeDriver::load(), Device::cuda(0).unwrap());
    let stream = device.stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let mut rows = tensor(DType::U8, &[2, 64, 1, 656]);
    let (values, turned) =
        (tensor(DType::BF16, &[2, 3, 1, 512]), tensor(DType::BF16, &[2, 3, 1, 64]));
    let begin = [&rows, &values, &turned].map(|tensor| tensor.view().device_ptr().unwrap());
    let cache = LatentCodesMut { rows: rows.view_mut(), block_table: None, seqused_kv: None };
    let append = AppendLatentCodes::new(values.view(), turned.view());
    let (result, calls) = driver.calls(|| append.append_into(cache, &stream));
    result.unwrap();
    let launches: Vec<&Launch> = calls.iter().filter_map(|call| call.launch.as_ref()).collect();
    let [codes, behind] = launches[..] else { panic!("{calls:?}") };
    assert!(codes.symbol.contains("kv_append_codes"), "{}", codes.symbol);
    assert!(!behind.symbol.contains("codes"), "{}", behind.symbol);
    let word = |launch: &Launch, at| u64::from_ne_bytes(bytes(launch, at));
    let cached = |launch: &Launch, at: usize| word(launch, CACHE + at);
    for (launch, [k, v], [k_new, v_new], slot) in [
        (codes, [0, 256], [begin[1], begin[1] + 512], 656),
        (behind, [528, 592], [begin[2], begin[2] + 64], 328),
    ] {
        let found = [offset_of!(blockflash_kv_cache, k), offset_of!(blockflash_kv_cache, v)]
            .map(|at| cached(launch, at) - begin[0]);
        assert_eq!(found, [k, v], "{}", launch.symbol);
        assert_eq!(cached(launch, offset_of!(blockflash_kv_cache, k_stride_slot)), slot);
        let of = |at| word(launch, at);
        assert_eq!(of(offset_of!(blockflash_kv_append_params, k_new)), k_new);
        assert_eq!(of(offset_of!(blockflash_kv_append_params, v_new)), v_new);
    }
    assert_eq!(cached(codes, offset_of!(blockflash_kv_cache, k_stride_head)), 128);
    let scales = offset_of!(blockflash_kv_append_codes_params, scales);
    let scale = |at: usize| word(codes, scales + at);
    assert_eq!(scale(offset_of!(blockflash_cache_scales, k)), begin[0] + 512);
    assert_eq!(scale(offset_of!(blockflash_cache_scales, v)), begin[0] + 520);
    assert_eq!(scale(offset_of!(blockflash_cache_scales, k_stride_slot)), 164);
    assert_eq!(scale(offset_of!(blockflash_cache_scales, k_stride_head)), 1);
}

#[test]
fn rows_of_codes_are_read_as_bytes() {
    let (driver, device) = (FakeDriver::load(), Device::cuda(0).unwrap());
    let stream = device.stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let (rows, q) = (tensor(DType::U8, &[2, 64, 1, 656]), tensor(DType::BF16, &[2, 1, 16, 576]));
    let decode = AttentionDecode::new(q.view());
    let (output, calls) =
        driver.calls(|| decode.forward(KvCache::latent_codes(rows.view()).unwrap(), &stream));
    assert_eq!(output.unwrap().o.shape(), [2, 1, 16, 512]);
    let launches: Vec<&Launch> = calls.iter().filter_map(|call| call.launch.as_ref()).collect();
    let [launch] = launches[..] else { panic!("{calls:?}") };
    assert!(launch.symbol.contains("attention_latent_sm80_e4m3"), "{}", launch.symbol);
    let cache = offset_of!(blockflash_attention_decode_params, cache);
    let of_slot = cache + offset_of!(blockflash_kv_cache, k_stride_slot);
    assert_eq!(u64::from_ne_bytes(bytes(launch, of_slot)), 656);
    let columns = [
        offset_of!(blockflash_attention_decode_params, head_dim_qk),
        offset_of!(blockflash_attention_decode_params, head_dim_v),
    ];
    assert_eq!(columns.map(|at| u32::from_ne_bytes(bytes(launch, at))), [576, 512]);
    // Other kernels take no such rows, and this one no others.
    let half = tensor(DType::F16, &[2, 1, 16, 576]);
    let refused = AttentionDecode::new(half.view())
        .forward(KvCache::latent_codes(rows.view()).unwrap(), &stream);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("beside latent rows of codes it takes bf16"), "{message}");
}

#[test]
fn bytes_are_split_into_elements_on_a_gpu_only() {
    let _driver = FakeDriver::load();
    let stream = Device::cuda(0).unwrap().stream().unwrap();
    let mut rows = Tensor::zeros(&stream, DType::U8, &[3, 20]).unwrap();
    let begin = rows.view().device_ptr().unwrap();
    let parts = [(DType::E4M3, 4), (DType::F32, 2), (DType::BF16, 4)];
    let parts = rows.view_mut().split_bytes(parts).unwrap();
    let found = parts.each_ref().map(|part| (part.dtype(), part.shape().to_vec()));
    let expected = [(DType::E4M3, vec![3, 4]), (DType::F32, vec![3, 2]), (DType::BF16, vec![3, 4])];
    assert_eq!(found, expected);
    assert_eq!(parts.each_ref().map(|part| part.strides()[0]), [20, 5, 10]);
    let addresses = parts.each_ref().map(|part| part.device_ptr());
    assert_eq!(addresses, [Some(begin), Some(begin + 4), Some(begin + 12)]);
    for (parts, text) in [
        ([(DType::F32, 1), (DType::F32, 5)], "not inside the shape"),
        ([(DType::U8, 2), (DType::F32, 1)], "not at multiples of 4"),
        ([(DType::U8, usize::MAX), (DType::F32, 1)], "not inside the shape"),
    ] {
        let message = rows.view_mut().split_bytes(parts).unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    }
    let mut host = [0u8; 60];
    let host = blockflash_ops::ViewMut::from_slice(&mut host, &[3, 20]).unwrap();
    let message = host.split_bytes([(DType::U8, 1)]).unwrap_err().to_string();
    assert!(message.contains("a split into elements needs a GPU"), "{message}");
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
