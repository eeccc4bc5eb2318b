use super::*;
use crate::{DType, Device, Error, Stream, Tensor};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&cpu(), dtype, shape).unwrap()
}

fn message(cache: KvCache<'_>) -> String {
    cache.sizes().unwrap_err().to_string()
}

#[test]
fn sizes_of_both_layouts() {
    let (k, table) = (zeros(DType::F16, &[9, 32, 2, 64]), zeros(DType::I32, &[3, 5]));
    let lengths = zeros(DType::I32, &[3]);
    let contiguous = KvCache::new(k.view(), k.view());
    let sizes = contiguous.sizes().unwrap();
    assert_eq!((sizes.batch, sizes.capacity, sizes.pages, sizes.table), (9, 32, 9, None));
    assert_eq!(CacheSizes { seqused_kv: true, shared: false, ..sizes }, {
        CacheSizes::contiguous(DType::F16, [9, 32], 2, 64)
    });
    let paged =
        KvCache { block_table: Some(table.view()), seqused_kv: Some(lengths.view()), ..contiguous };
    let sizes = paged.sizes().unwrap();
    assert_eq!((sizes.batch, sizes.capacity, sizes.page_size, sizes.pages), (3, 160, 32, 9));
    assert_eq!(sizes.table, Some(TableSizes { max_pages: 5, stride: 5 }));
    // Heads before slots, and a part of a wider table.
    let (k, wide) = (zeros(DType::F16, &[9, 2, 32, 64]), zeros(DType::I32, &[3, 40]));
    let k = k.view().permute(&[0, 2, 1, 3]).unwrap();
    let block_table = Some(wide.view().slice(1, 3..8).unwrap());
    let sizes = KvCache { k, v: k, block_table, ..paged }.sizes().unwrap();
    assert_eq!((sizes.k.batch, sizes.k.seq, sizes.k.head), (4096, 64, 2048));
    assert_eq!(sizes.table, Some(TableSizes { max_pages: 5, stride: 40 }));
    // Without a page no sequence can have a key.
    let none = zeros(DType::F16, &[0, 32, 2, 64]);
    let sizes = KvCache { k: none.view(), v: none.view(), ..paged }.sizes().unwrap();
    assert_eq!(sizes.capacity, 0);
}

#[test]
fn values_that_are_the_first_columns_of_the_keys_are_shared() {
    let (rows, other) = (zeros(DType::BF16, &[9, 32, 2, 96]), zeros(DType::BF16, &[9, 32, 2, 96]));
    let (k, other) = (rows.view(), other.view());
    let shared = |k, v| KvCache::new(k, v).sizes().unwrap().shared;
    let columns = |range| k.slice(3, range).unwrap();
    assert!(shared(k, columns(0..64)) && shared(k, k));
    assert!(!shared(k, other) && !shared(k, other.slice(3, 0..64).unwrap()));
    assert!(!shared(k, columns(1..65)), "other columns");
    assert!(!shared(columns(0..64), k), "values that are longer than keys");
    // Keys and values of other heads, slots and pages.
    let slices = |range: std::ops::Range<usize>| [0, 1, 2].map(|dim| (dim, range.clone()));
    for ((dim, of_k), (_, of_v)) in slices(0..1).into_iter().zip(slices(1..2)) {
        let [of_k, of_v] = [of_k, of_v].map(|range| k.slice(dim, range).unwrap());
        assert!(shared(of_k, of_k) && !shared(of_k, of_v), "{dim}");
    }
    // The same address with other strides: slots in the order of a turned view.
    let square = zeros(DType::BF16, &[32, 32, 1, 96]);
    let square = square.view();
    assert!(!shared(square, square.permute(&[1, 0, 2, 3]).unwrap()));
    // A stride counts only where there is a second index.
    let data = vec![0f32; 4 * 96];
    let view = |width, strides: [usize; 4]| {
        View::from_slice_strided(&data, &[1, 4, 1, width], &strides).unwrap()
    };
    assert!(shared(view(96, [384, 96, 96, 1]), view(64, [1, 96, 7, 1])));
    assert!(!shared(view(96, [384, 96, 96, 1]), view(64, [384, 64, 64, 1])));
}

#[test]
fn wrong_tensors_are_named() {
    let (k, table) = (zeros(DType::F16, &[9, 32, 2, 64]), zeros(DType::I32, &[3, 5]));
    let cache = KvCache { block_table: Some(table.view()), ..KvCache::new(k.view(), k.view()) };
    let other = zeros(DType::BF16, &[9, 32, 2, 64]);
    assert!(message(KvCache { v: other.view(), ..cache }).contains("cache.v is bf16"));
    let other = zeros(DType::F16, &[9, 32, 1, 64]);
    assert!(message(KvCache { v: other.view(), ..cache }).contains("cache.v has shape"));
    let ints = zeros(DType::I32, &[9, 32, 2, 64]);
    assert!(message(KvCache { k: ints.view(), ..cache }).contains("cache.k is i32"));
    let flat = zeros(DType::F16, &[9, 32, 64]);
    assert!(message(KvCache { k: flat.view(), ..cache }).contains("[pages, page_size, "));
    assert!(message(KvCache::new(flat.view(), flat.view())).contains("[batch, capacity, "));
    let turned = k.view().permute(&[0, 1, 3, 2]).unwrap();
    assert!(message(KvCache { k: turned, v: turned, ..cache }).contains("contiguous"));
    let flat = zeros(DType::I32, &[15]);
    let message_of = |view| message(KvCache { block_table: Some(view), ..cache });
    assert!(message_of(flat.view()).contains("[batch, max_pages]"));
    assert!(message_of(table.view().permute(&[1, 0]).unwrap()).contains("contiguous"));
    assert!(message_of(k.view()).contains("cache.block_table is f16"));
    for wrong in [zeros(DType::I32, &[4]), zeros(DType::F32, &[3]), zeros(DType::I32, &[3, 1])] {
        let message = message(KvCache { seqused_kv: Some(wrong.view()), ..cache });
        assert!(message.contains("cache.seqused_kv"), "{message}");
    }
    let nothing = zeros(DType::F16, &[9, 0, 2, 64]);
    assert!(
        message(KvCache { k: nothing.view(), v: nothing.view(), ..cache })
            .contains("page_size of at least 1")
    );
    let nothing = zeros(DType::F16, &[9, 32, 2, 0]);
    assert!(message(KvCache::new(nothing.view(), nothing.view())).contains("head_dim"));
    let long = table.view().slice(1, 0..1).unwrap().expand(1, 1 << 27).unwrap();
    assert!(matches!(
        KvCache { block_table: Some(long), ..cache }.sizes(),
        Err(Error::Stride { what: "cache.block_table", .. })
    ));
    let one = zeros(DType::F16, &[1, 1, 1, 8]);
    let long = one.view().expand(1, 1 << 31).unwrap();
    assert!(matches!(
        KvCache::new(long, long).sizes(),
        Err(Error::TooLarge { what: "capacity", .. })
    ));
}

#[test]
fn wrong_rotary_tables_are_named() {
    let tables = |shape: &[usize]| zeros(DType::F32, shape);
    let sizes = |cos: &Tensor, sin: &Tensor| {
        let (cos, sin) = (cos.view(), sin.view());
        let rotary = Rotary { cos, sin, pairs: RotaryPairs::Halves };
        rotary.sizes(DType::BF16, 64, 100)
    };
    let good = tables(&[100, 32]);
    assert_eq!(sizes(&good, &good).unwrap().rotary_dim, 64);
    let half = zeros(DType::BF16, &[120, 8]);
    assert_eq!(sizes(&half, &half).unwrap().rotary_dim, 16);
    for (cos, sin, what) in [
        (tables(&[99, 32]), tables(&[99, 32]), "rotary.cos has shape [99, 32], expected [at least"),
        (tables(&[100, 33]), tables(&[100, 33]), "1 to 32"),
        (tables(&[100, 0]), tables(&[100, 0]), "1 to 32"),
        (tables(&[100]), tables(&[100]), "[positions, rotary_dim / 2]"),
        (tables(&[100, 32]), tables(&[101, 32]), "rotary.sin has shape"),
        (zeros(DType::F16, &[100, 32]), tables(&[100, 32]), "rotary.cos is f16"),
        (tables(&[100, 32]), zeros(DType::BF16, &[100, 32]), "rotary.sin is bf16"),
    ] {
        let message = sizes(&cos, &sin).unwrap_err().to_string();
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn scales_have_one_of_three_shapes() {
    let (k, table) = (zeros(DType::E4M3, &[9, 32, 4, 64]), zeros(DType::I32, &[3, 5]));
    let paged = KvCache { block_table: Some(table.view()), ..KvCache::new(k.view(), k.view()) };
    let strides = |sequence, page, slot, head| ScaleStrides { sequence, page, slot, head };
    let f32s = |shape: &[usize]| zeros(DType::F32, shape);
    for (shape, expected) in [
        (&[1][..], strides(0, 0, 0, 0)),
        (&[3, 4], strides(4, 0, 0, 1)),
        (&[3, 1], strides(1, 0, 0, 0)),
        (&[1, 4], strides(0, 0, 0, 1)),
        (&[9, 32, 4], strides(0, 128, 4, 1)),
        (&[9, 1, 4], strides(0, 4, 0, 1)),
        (&[1, 32, 1], strides(0, 0, 1, 0)),
        (&[1, 1, 1], strides(0, 0, 0, 0)),
    ] {
        let scale = f32s(shape);
        let sizes = KvCache { k_scale: Some(scale.view()), ..paged }.sizes().unwrap();
        assert_eq!((sizes.k_scale, sizes.v_scale), (Some(expected), None), "{shape:?}");
        let sizes = KvCache { v_scale: Some(scale.view()), ..paged }.sizes().unwrap();
        assert_eq!((sizes.k_scale, sizes.v_scale), (None, Some(expected)), "{shape:?}");
    }
    // Of a contiguous cache, sequences are pages.
    let scale = f32s(&[9, 32, 4]);
    let contiguous = KvCache { k_scale: Some(scale.view()), ..KvCache::new(k.view(), k.view()) };
    assert_eq!(contiguous.sizes().unwrap().k_scale, Some(strides(0, 128, 4, 1)));
    // Strides are free, 0 among them.
    let one = f32s(&[1, 4]);
    let all = Some(one.view().expand(0, 3).unwrap());
    let sizes = KvCache { k_scale: all, ..paged }.sizes().unwrap();
    assert_eq!(sizes.k_scale, Some(strides(0, 0, 0, 1)));
    let heads_first = f32s(&[4, 9, 32]);
    let turned = Some(heads_first.view().permute(&[1, 2, 0]).unwrap());
    let sizes = KvCache { k_scale: turned, ..paged }.sizes().unwrap();
    assert_eq!(sizes.k_scale, Some(strides(0, 32, 1, 288)));
    for shape in [&[2][..], &[4], &[9, 4], &[3, 2], &[3, 32, 4], &[9, 5, 4], &[1, 1, 1, 1], &[]] {
        let scale = f32s(shape);
        let message = message(KvCache { v_scale: Some(scale.view()), ..paged });
        let expected = "expected [1], [3 or 1, 4 or 1] or [9 or 1, 32 or 1, 4 or 1]";
        assert!(message.contains("cache.v_scale") && message.contains(expected), "{message}");
    }
    let half = zeros(DType::F16, &[1]);
    let message_of = message(KvCache { k_scale: Some(half.view()), ..paged });
    assert!(message_of.contains("cache.k_scale is f16, expected f32"), "{message_of}");
    let (k, scale) = (zeros(DType::BF16, &[9, 32, 4, 64]), f32s(&[1]));
    let cache = KvCache { v_scale: Some(scale.view()), ..KvCache::new(k.view(), k.view()) };
    let message = message(cache);
    assert!(message.contains("cache.v is bf16, expected e4m3 or e5m2 or i8, since"), "{message}");
}
