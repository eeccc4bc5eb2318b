use super::*;
use crate::launch::{LaunchConfig, checked};
use crate::{Device, Tensor};
use blockflash_sys::manifest;

/// 2 sequences with 3 new tokens and 3 queries each, 4 and 2 heads of 24 elements, 5 pages of 16
/// slots, 4 for each sequence, and angles for 64 positions of which 18 elements are turned.
fn params() -> blockflash_kv_append_params {
    let rotary = blockflash_rotary {
        cos: null(),
        sin: null(),
        cos_stride: 9,
        sin_stride: 9,
        positions: 64,
        dim: 18,
        pairs: BLOCKFLASH_ROTARY_INTERLEAVED,
        dtype: DType::F32 as i32,
    };
    blockflash_kv_append_params {
        cache: blockflash_kv_cache {
            k: null(),
            v: null(),
            block_table: null(),
            seqused: null(),
            k_stride_page: 16 * 48,
            k_stride_slot: 48,
            k_stride_head: 24,
            v_stride_page: 16 * 48,
            v_stride_slot: 48,
            v_stride_head: 24,
            block_table_stride: 4,
            pages: 5,
            page_size: 16,
            capacity: 64,
        },
        k_new: null(),
        v_new: null(),
        cu_seqlens_new: null(),
        q: null(),
        q_turned: null_mut(),
        cu_seqlens_q: null(),
        rotary_new: rotary,
        rotary_q: rotary,
        k_new_stride_batch: 3 * 48,
        k_new_stride_seq: 48,
        k_new_stride_head: 24,
        v_new_stride_batch: 3 * 48,
        v_new_stride_seq: 48,
        v_new_stride_head: 24,
        q_stride_batch: 3 * 96,
        q_stride_seq: 96,
        q_stride_head: 24,
        q_turned_stride_batch: 3 * 96,
        q_turned_stride_seq: 96,
        q_turned_stride_head: 24,
        batch: 2,
        num_heads_q: 4,
        num_heads_kv: 2,
        head_dim_qk: 24,
        head_dim_v: 24,
        seqlen_new: 3,
        total_new: 0,
        seqlen_q: 3,
        total_q: 0,
    }
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

/// 6 rows of new keys with 2 heads and 6 of queries with 4, in pieces of 8 elements.
const BLOCKS: u32 = (6 * (2 + 4) * 3u32).div_ceil(256);

fn fit(p: &blockflash_kv_append_params, blocks: u32, early: bool, is_sm90: bool) -> Fit {
    let f16 = |row: &&Kernel| {
        row.variant == Variant::KvAppend(KvAppend { dtype: DType::F16 })
            && (row.target == crate::Target::Sm90) == is_sm90
    };
    let row = manifest::kernels().iter().find(f16).ok_or("no row")?;
    // `fit` looks at sizes and strides only.
    let mut cache = [(); 2].map(|()| zeros(DType::F16, &[5, 16, 2, 24]));
    let new = [(); 2].map(|()| zeros(DType::F16, &[2, 3, 2, 24]));
    let (q, mut turned) = (zeros(DType::F16, &[2, 3, 4, 24]), zeros(DType::F16, &[2, 3, 4, 24]));
    let (table, lengths) = (zeros(DType::I32, &[2, 4]), zeros(DType::I32, &[2]));
    let angles = zeros(DType::F32, &[64, 9]);
    let rotary = [angles.view(), angles.view()];
    let [cache_k, cache_v] = cache.each_mut().map(Tensor::view_mut);
    let operands = KvAppendOperands {
        seqused: Some(lengths.view()),
        new: Some(NewKeys {
            cache_k,
            cache_v,
            block_table: Some(table.view()),
            k: new[0].view(),
            v: new[1].view(),
            cu_seqlens: None,
            rotary: Some(rotary),
        }),
        queries: Some(TurnedQueries {
            q: q.view(),
            turned: turned.view_mut(),
            cu_seqlens: None,
            rotary,
        }),
    };
    checked::fit::<KvAppend>(row, &LaunchConfig::of(row, blocks, early), p, &operands).map(drop)
}

#[test]
fn an_append_that_fits() {
    assert_eq!(fit(&params(), BLOCKS, false, false), Ok(()));
    assert_eq!(fit(&params(), BLOCKS, true, true), Ok(()));
    // Only machine code for Hopper waits for its predecessor.
    let error = fit(&params(), BLOCKS, true, false).unwrap_err();
    assert!(error.contains("predecessor"), "{error}");
    assert!(fit(&params(), BLOCKS + 1, false, true).is_err());
}

#[test]
fn appends_that_do_not_fit() {
    type Spoil = fn(&mut blockflash_kv_append_params);
    let cases: [(&str, Spoil); 20] = [
        ("not positive", |p| p.batch = 0),
        ("head_dim_qk is -8, expected a positive multiple of 8", |p| p.head_dim_qk = -8),
        ("head_dim_v is 0, expected a positive multiple of 8", |p| p.head_dim_v = 0),
        ("head_dim_qk is 20, expected a positive multiple of 8", |p| p.head_dim_qk = 20),
        ("head_dim_v is 20, expected a positive multiple of 8", |p| p.head_dim_v = 20),
        ("k is f16", |p| p.head_dim_qk = 16),
        ("v is f16", |p| p.head_dim_v = 16),
        ("not positive", |p| p.seqlen_new = 0),
        ("not positive", |p| p.num_heads_q = 0),
        ("k is f16", |p| p.cache.pages = 6),
        ("v is f16", |p| p.cache.v_stride_slot = 56),
        ("the capacity is 65, and the table has", |p| p.cache.capacity = 65),
        ("seqused is i32", |p| p.batch = 3),
        ("k_new is f16", |p| p.seqlen_new = 4),
        ("v_new is f16", |p| p.v_new_stride_seq = 56),
        ("q_turned is f16", |p| p.q_turned_stride_head = 32),
        ("cos is f32", |p| p.rotary_new.positions = 65),
        ("rotary dimension", |p| p.rotary_q.dim = 26),
        ("rotary dimension", |p| p.rotary_q.dim = 9),
        ("pairs is 2, expected one of", |p| p.rotary_new.pairs = 2),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = fit(&params, BLOCKS, false, true).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}
