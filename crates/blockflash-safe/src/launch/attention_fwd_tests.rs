use super::super::attention_fixtures::{NO_MASK, attention};
use super::*;
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::params::blockflash_block_mask;
use blockflash_sys::{DType, ElementTypes, HeadDims};

/// 64 queries and keys of one head; they are one sequence, packed or not.
fn plan(packed: bool) -> blockflash_attention_fwd_params {
    let dense = attention(1, [64; 2], [1; 2]);
    let block_mask = blockflash_block_mask {
        rows: 1,
        block_q: 64,
        block_kv: 64,
        groups_per_batch: 1,
        heads_per_group: 1,
        ..NO_MASK
    };
    let total = if packed { 64 } else { 0 };
    blockflash_attention_fwd_params { total_q: total, total_kv: total, block_mask, ..dense }
}

/// What both kernels without tensor maps say: the portable one, and the one for small grids.
fn fits(packed: bool, lists: Option<&BlockLists>) -> [Fit<i128>; 2] {
    let stream = Device::cpu().stream().unwrap();
    let shape: &[usize] = if packed { &[64, 1, 8] } else { &[1, 64, 1, 8] };
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let (q, offsets) = (zeros(DType::F16, shape), zeros(DType::I32, &[2]));
    let mut o = zeros(DType::F16, shape);
    let operands = AttentionFwdOperands {
        q: q.view(),
        k: q.view(),
        v: q.view(),
        o: o.view_mut(),
        lse: None,
        sink: None,
        cu_seqlens: packed.then(|| [offsets.view(); 2]),
        block_mask: lists,
    };
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(64));
    let min_blocks = 2;
    let portable = AttentionFwd {
        types,
        head_dims,
        block_q: 64,
        block_kv: 64,
        warps: 4,
        split: 1,
        stages: 1,
        min_blocks,
    };
    let small = AttentionFwdSmall { types, head_dims, warpgroups: 2, stages: 3, min_blocks };
    let plan = plan(packed);
    [Launch::fit(&portable, &plan, &operands), Launch::fit(&small, &plan, &operands)]
}

#[test]
fn small_grids_refuse_what_their_kernels_do_not_read() {
    let arrays = BlockListArrays {
        groups: &[1, 1],
        rows: 1,
        cols: 1,
        row_ptr: &[0, 1],
        col_idx: &[0],
        row_order: &[0],
        cu_rows: None,
    };
    let lists = BlockLists::new(&arrays, &Device::cpu().stream().unwrap()).unwrap();
    assert_eq!(fits(false, None), [Ok(1), Ok(1)]);
    let [portable, small] = fits(true, None);
    assert_eq!(portable, Ok(1));
    assert!(small.unwrap_err().contains("packed sequences"));
    let [portable, small] = fits(false, Some(&lists));
    assert_eq!(portable, Ok(1));
    assert!(small.unwrap_err().contains("block masks"));
}

/// Of 16 columns each tensor shows its own head dimension, or the other one, with equal strides: a
/// kernel would read or write beyond the rows of one that it takes for a wider one.
#[test]
fn each_tensor_has_its_own_head_dimension() {
    let stream = Device::cpu().stream().unwrap();
    let wide = || Tensor::zeros(&stream, DType::F16, &[1, 64, 1, 16]).unwrap();
    let (read, mut written) = (wide(), wide());
    let min_blocks = 2;
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims { qk: 64, v: 64 });
    let small = AttentionFwdSmall { types, head_dims, warpgroups: 2, stages: 3, min_blocks };
    for [qk, v] in [[16, 8], [8, 16]] {
        let plan = blockflash_attention_fwd_params {
            q_stride_seq: 16,
            k_stride_seq: 16,
            v_stride_seq: 16,
            o_stride_seq: 16,
            head_dim_qk: qk as i32,
            head_dim_v: v as i32,
            ..plan(false)
        };
        let mut fit = |columns: [usize; 4]| {
            let [q, k, values] = [0, 1, 2].map(|i| read.view().slice(3, 0..columns[i]).unwrap());
            let operands = AttentionFwdOperands {
                q,
                k,
                v: values,
                o: written.view_mut().slice(3, 0..columns[3]).unwrap(),
                lse: None,
                sink: None,
                cu_seqlens: None,
                block_mask: None,
            };
            Launch::fit(&small, &plan, &operands)
        };
        let right = [qk, qk, v, v];
        assert_eq!(fit(right), Ok(1));
        for (i, name) in ["q", "k", "v", "o"].into_iter().enumerate() {
            let mut columns = right;
            columns[i] = qk + v - columns[i];
            let error = fit(columns).unwrap_err();
            assert!(error.starts_with(&format!("{name} is f16 ")), "{error}");
        }
    }
}

#[test]
fn head_dimensions_have_limits_of_their_own() {
    let head_dims = HeadDims { qk: 192, v: 128 };
    let of = |[qk, v]: [i64; 2]| super::super::attention_sizes::fit_head_dims([qk, v], head_dims);
    for good in [[192, 128], [8, 8], [64, 128], [192, 8]] {
        assert_eq!(of(good), Ok(()), "{good:?}");
    }
    for (bad, name) in [
        ([200, 128], "head_dim_qk is 200, expected a multiple of 8 up to 192"),
        ([128, 136], "head_dim_v is 136, expected a multiple of 8 up to 128"),
        ([0, 128], "head_dim_qk is 0,"),
        ([128, -8], "head_dim_v is -8,"),
        ([12, 8], "head_dim_qk is 12,"),
    ] {
        let error = of(bad).unwrap_err();
        assert!(error.starts_with(name), "{error}");
    }
}
