use super::super::attention_fixtures::PLAIN_SCORES;
use super::super::checked::zeros;
use super::*;
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::{DType, ElementTypes, HeadDims};

/// Of sequences of up to 64 queries and keys.
const PLAN: AttentionFwdPlan = AttentionFwdPlan {
    scalars: AttentionScalars { scores: PLAIN_SCORES, longest: [64; 2], blocks: [64; 2] },
    heads_per_section: 1,
};

/// Tiles of a launch, and its argument.
fn fit_of<L: Launch<Plan = AttentionFwdPlan>>(
    tile: &L,
    operands: &L::Operands<'_>,
) -> Fit<(i128, L::Params)> {
    let mut params = zeros::<L>();
    Ok((tile.fit(&PLAN, operands, &mut params)?, params))
}

fn tiles<L: Launch<Plan = AttentionFwdPlan>>(tile: &L, operands: &L::Operands<'_>) -> Fit<i128> {
    fit_of(tile, operands).map(|(tiles, _)| tiles)
}

fn portable() -> AttentionFwd {
    AttentionFwd {
        types: ElementTypes::all(DType::F16),
        head_dims: HeadDims::all(64),
        block_q: 64,
        block_kv: 64,
        warps: 4,
        split: 1,
        stages: 1,
        min_blocks: 2,
        terms: false,
    }
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
        terms: ScoreTerms::default(),
        scales: [None; 3],
    };
    let portable = portable();
    let AttentionFwd { types, head_dims, min_blocks, .. } = portable;
    let small = AttentionFwdSmall { types, head_dims, warpgroups: 2, stages: 3, min_blocks };
    [tiles(&portable, &operands), tiles(&small, &operands)]
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
/// kernel would read or write beyond the rows of one that it takes for a wider one. Those of q and
/// v are the measure of the others.
#[test]
fn each_tensor_has_its_own_head_dimension() {
    let stream = Device::cpu().stream().unwrap();
    let wide = || Tensor::zeros(&stream, DType::F16, &[1, 64, 1, 16]).unwrap();
    let (read, mut written) = (wide(), wide());
    let min_blocks = 2;
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims { qk: 64, v: 64 });
    let small = AttentionFwdSmall { types, head_dims, warpgroups: 2, stages: 3, min_blocks };
    for [qk, v] in [[16, 8], [8, 16]] {
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
                terms: ScoreTerms::default(),
                scales: [None; 3],
            };
            fit_of(&small, &operands)
        };
        let right = [qk, qk, v, v];
        let (tiles, p) = fit(right).unwrap();
        assert_eq!((tiles, p.head_dim_qk as usize, p.head_dim_v as usize), (1, qk, v));
        for (i, name) in ["k", "k", "o", "o"].into_iter().enumerate() {
            let mut columns = right;
            columns[i] = qk + v - columns[i];
            let error = fit(columns).unwrap_err();
            assert!(error.starts_with(&format!("{name} is f16 ")), "{error}");
        }
    }
}

/// Some rows of some heads of two batch entries.
fn part(tensor: &Tensor, rows: usize, heads: usize) -> View<'_> {
    let view = tensor.view().slice(0, 1..3).unwrap().slice(1, 0..rows).unwrap();
    view.slice(2, 0..heads).unwrap()
}

/// Every number of the argument is that of a tensor, whatever its layout.
#[test]
fn sizes_and_strides_are_those_of_the_tensors() {
    let stream = Device::cpu().stream().unwrap();
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let [q, k, v] = [[3, 70, 7, 24], [3, 90, 3, 24], [3, 90, 5, 16]].map(|x| zeros(DType::F16, &x));
    // Heads before rows.
    let mut o = zeros(DType::F16, &[2, 6, 60, 16]);
    let mut o_packed = zeros(DType::F16, &[60, 6, 24]);
    let mut lse = zeros(DType::F32, &[2, 6, 61]);
    let sink = zeros(DType::F32, &[6]);
    let operands = AttentionFwdOperands {
        q: part(&q, 60, 6),
        k: part(&k, 80, 3),
        v: part(&v, 80, 3),
        o: o.view_mut().permute(&[0, 2, 1, 3]).unwrap(),
        lse: Some(lse.view_mut().slice(2, 0..60).unwrap()),
        sink: Some(sink.view()),
        cu_seqlens: None,
        block_mask: None,
        terms: ScoreTerms::default(),
        scales: [None; 3],
    };
    let (types, head_dims, min_blocks) =
        (ElementTypes::all(DType::F16), HeadDims { qk: 64, v: 64 }, 2);
    let small = AttentionFwdSmall { types, head_dims, warpgroups: 2, stages: 3, min_blocks };
    let (_, p) = fit_of(&small, &operands).unwrap();
    assert_eq!([p.batch, p.num_heads_q, p.num_heads_kv], [2, 6, 3]);
    assert_eq!([p.seqlen_q, p.seqlen_kv, p.head_dim_qk, p.head_dim_v], [60, 80, 24, 16]);
    assert_eq!([p.total_q, p.total_kv], [0; 2], "not packed");
    let of_q = [p.q_stride_batch, p.q_stride_seq, p.q_stride_head];
    let of_k = [p.k_stride_batch, p.k_stride_seq, p.k_stride_head];
    let of_v = [p.v_stride_batch, p.v_stride_seq, p.v_stride_head];
    let of_o = [p.o_stride_batch, p.o_stride_seq, p.o_stride_head];
    assert_eq!([of_q, of_k], [[70 * 7 * 24, 7 * 24, 24], [90 * 3 * 24, 3 * 24, 24]]);
    assert_eq!([of_v, of_o], [[90 * 5 * 16, 5 * 16, 16], [6 * 60 * 16, 16, 60 * 16]]);
    assert_eq!([p.lse_stride_batch, p.lse_stride_head], [6 * 61, 61]);
    // The same memory as packed sequences has no stride of a batch.
    let [rows_q, rows_kv] = [operands.q, operands.k].map(|x| x.slice(0, 0..1).unwrap());
    let offsets = zeros(DType::I32, &[4]);
    let [q, k] = [rows_q, rows_kv].map(|x| x.flatten(0..2).unwrap());
    let operands = AttentionFwdOperands {
        q,
        k,
        v: k,
        o: o_packed.view_mut(),
        lse: None,
        sink: None,
        cu_seqlens: Some([offsets.view(); 2]),
        block_mask: None,
        terms: ScoreTerms::default(),
        scales: [None; 3],
    };
    let (tiles, p) = fit_of(&portable(), &operands).unwrap();
    let p = p.base;
    assert_eq!((tiles, [p.batch, p.seqlen_q, p.seqlen_kv]), (3 * 6, [3, 64, 64]));
    assert_eq!([p.total_q, p.total_kv], [60, 80]);
    assert_eq!([p.q_stride_batch, p.k_stride_batch, p.o_stride_batch], [0; 3]);
    assert_eq!([p.q_stride_seq, p.q_stride_head], [7 * 24, 24]);
}

#[test]
fn head_dimensions_have_limits_of_their_own() {
    let head_dims = HeadDims { qk: 192, v: 128 };
    let of = |[qk, v]: [i64; 2]| {
        super::super::attention_sizes::fit_head_dims(
            [qk, v],
            head_dims,
            ElementTypes::all(DType::F16),
        )
    };
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
