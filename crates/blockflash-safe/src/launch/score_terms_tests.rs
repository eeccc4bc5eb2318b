use super::super::attention_fixtures::PLAIN_SCORES;
use super::super::checked::zeros;
use super::super::{
    AttentionBwdOperands, AttentionBwdPlan, AttentionFwdOperands, AttentionFwdPlan,
    AttentionScalars, Launch, attention_bwd_workspace,
};
use super::*;
use crate::{BlockListArrays, Device, Tensor, ViewMut};
use blockflash_sys::manifest::{self, AttentionBwd, AttentionBwdStep as Step, AttentionFwd};
use blockflash_sys::params::{
    blockflash_attention_bwd_bias_params, blockflash_attention_fwd_terms_params,
};

const SCALARS: AttentionScalars =
    AttentionScalars { scores: PLAIN_SCORES, longest: [70, 100], blocks: [64; 2] };
/// Of batch 2 and 2 heads.
const FULL: [usize; 4] = [2, 2, 70, 100];

fn tensor(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

/// The first tile of the table that has terms, or has none.
fn forward(terms: bool) -> AttentionFwd {
    let mut tiles = manifest::kernels().iter().filter_map(AttentionFwd::of);
    tiles.find(|tile| tile.terms == terms && tile.types.q == DType::F16).unwrap()
}

fn backward(step: Step, terms: bool) -> AttentionBwd {
    let mut tiles = manifest::kernels().iter().filter_map(AttentionBwd::of);
    let fits = |tile: &AttentionBwd| {
        (tile.step, tile.terms, tile.types.q, tile.block_q) == (step, terms, DType::F16, 64)
    };
    tiles.find(fits).unwrap()
}

/// Two block rows of one column each, with bits for the first one; the transpose has the same.
fn lists(tiles: Option<usize>) -> BlockLists {
    let stream = Device::cpu().stream().unwrap();
    let arrays = BlockListArrays {
        groups: &[1, 1],
        rows: 2,
        cols: 2,
        row_ptr: &[0, 1, 2],
        col_idx: &[0, 1],
        row_order: &[0, 1],
        cu_rows: None,
    };
    let lists = BlockLists::new(&arrays, &stream).unwrap();
    match tiles {
        None => lists,
        Some(tiles) => {
            let first = if tiles > 0 { 0 } else { -1 };
            lists.with_bits(1, &[first, -1], &vec![0; 128 * tiles], &stream).unwrap()
        }
    }
}

fn fit_forward(
    tile: &AttentionFwd,
    terms: ScoreTerms<'_>,
    block_mask: Option<&BlockLists>,
) -> Fit<(i128, blockflash_attention_fwd_terms_params)> {
    let [q, k] = [[2, 70, 2, 8], [2, 100, 1, 8]].map(|shape| tensor(DType::F16, &shape));
    let mut o = tensor(DType::F16, &[2, 70, 2, 8]);
    let operands = AttentionFwdOperands {
        q: q.view(),
        k: k.view(),
        v: k.view(),
        o: o.view_mut(),
        lse: None,
        sink: None,
        cu_seqlens: None,
        block_mask,
        terms,
        scales: [None; 3],
    };
    let plan = AttentionFwdPlan { scalars: SCALARS, heads_per_section: 1 };
    let mut params = zeros::<AttentionFwd>();
    Ok((tile.fit(&plan, &operands, &mut params)?, params))
}

#[test]
fn strides_are_those_of_the_tensors() {
    let tile = forward(true);
    let (bias, slopes) = (tensor(DType::BF16, &[2, 1, 100, 70]), tensor(DType::F32, &[2, 2]));
    let bias = bias.view().permute(&[0, 1, 3, 2]).unwrap();
    let terms = ScoreTerms { bias: Some(bias), alibi: Some(slopes.view()) };
    let (_, params) = fit_forward(&tile, terms, None).unwrap();
    let t = &params.terms;
    let strides = [
        t.bias_stride_batch,
        t.bias_stride_head,
        t.bias_stride_q,
        t.bias_stride_kv,
        t.bias_type.into(),
    ];
    assert_eq!(strides, [7000, 0, 1, 70, DType::BF16 as i64]);
    assert_eq!([t.alibi_stride_batch, t.alibi_stride_head], [2, 1]);
    assert_eq!(t.bit_tiles, 0);
    let heads = tensor(DType::F32, &[2]);
    let terms = ScoreTerms { bias: None, alibi: Some(heads.view()) };
    let (_, params) = fit_forward(&tile, terms, None).unwrap();
    assert_eq!([params.terms.alibi_stride_batch, params.terms.alibi_stride_head], [0, 1]);
}

#[test]
fn misfits_are_named() {
    let tile = forward(true);
    let with_bias = |dtype, shape: &[usize]| {
        let bias = tensor(dtype, shape);
        let terms = ScoreTerms { bias: Some(bias.view()), alibi: None };
        fit_forward(&tile, terms, None).map(drop).unwrap_err()
    };
    assert!(with_bias(DType::I32, &FULL).starts_with("bias is i32, expected one of"));
    assert!(with_bias(DType::F16, &[2, 2, 70]).contains("3 dimensions, expected 4"));
    for dim in 0..4 {
        for wrong in [FULL[dim] - 1, FULL[dim] + 1, 0] {
            let mut shape = FULL;
            shape[dim] = wrong;
            if wrong != 1 {
                assert!(with_bias(DType::F16, &shape).contains("or 1 in places"), "{shape:?}");
            }
        }
    }
    for shape in [&[3][..], &[1, 2], &[2, 3], &[2, 2, 1]] {
        let slopes = tensor(DType::F32, shape);
        let terms = ScoreTerms { bias: None, alibi: Some(slopes.view()) };
        let error = fit_forward(&tile, terms, None).map(drop).unwrap_err();
        assert!(error.starts_with("alibi is f32"), "{error}");
    }
}

#[test]
fn kernels_without_terms_refuse_them() {
    let (bias, slopes) = (tensor(DType::F16, &FULL), tensor(DType::F32, &[2]));
    let terms = ScoreTerms { bias: Some(bias.view()), alibi: None };
    let error = fit_forward(&forward(false), terms, None).map(drop).unwrap_err();
    assert!(error.starts_with("bias is given, expected none"), "{error}");
    let terms = ScoreTerms { bias: None, alibi: Some(slopes.view()) };
    let error = fit_forward(&forward(false), terms, None).map(drop).unwrap_err();
    assert!(error.starts_with("alibi is given, expected none"), "{error}");
}

#[test]
fn bits_of_lists() {
    let of = |tile: &AttentionFwd, lists: &BlockLists| {
        fit_forward(tile, ScoreTerms::default(), Some(lists))
    };
    let tile = forward(true);
    let (_, params) = of(&tile, &lists(Some(3))).unwrap();
    assert_eq!(params.terms.bit_tiles, 3);
    let (_, params) = of(&tile, &lists(Some(0))).unwrap();
    assert_eq!(params.terms.bit_tiles, 0, "without tiles all blocks are full");
    let stream = Device::cpu().stream().unwrap();
    let wide = lists(None).with_bits(2, &[0, -1], &[0; 256], &stream).unwrap();
    let error = of(&tile, &wide).map(drop).unwrap_err();
    assert!(error.contains("have 2 tiles of 64 × 64 bits, expected those of 64 × 64"), "{error}");
    let narrow = AttentionFwd { block_q: 64, ..forward(false) };
    let error = of(&narrow, &lists(Some(1))).map(drop).unwrap_err();
    assert!(error.starts_with("block_bits is given, expected none"), "{error}");
    assert!(of(&narrow, &lists(None)).is_ok());
}

fn fit_backward(
    tile: &AttentionBwd,
    dbias: Option<ViewMut<'_>>,
    masks: Option<[&BlockLists; 2]>,
) -> Fit<(i128, blockflash_attention_bwd_bias_params)> {
    let [q, k] = [[2, 70, 2, 8], [2, 100, 1, 8]].map(|shape| tensor(DType::F16, &shape));
    let mut gradients =
        [[2, 70, 2, 8], [2, 100, 1, 8], [2, 100, 1, 8]].map(|shape| tensor(DType::F16, &shape));
    let [dq, dk, dv] = &mut gradients;
    let lse = tensor(DType::F32, &[2, 2, 70]);
    let mut workspace = tensor(DType::U8, &[attention_bwd_workspace(4 * 128, None, 0).unwrap()]);
    let operands = AttentionBwdOperands {
        q: q.view(),
        k: k.view(),
        v: k.view(),
        o: q.view(),
        lse: lse.view(),
        d_o: q.view(),
        dq: dq.view_mut(),
        dk: dk.view_mut(),
        dv: dv.view_mut(),
        sink: None,
        d_sink: None,
        workspace: Some(workspace.view_mut()),
        cu_seqlens: None,
        block_mask: masks,
        terms: ScoreTerms::default(),
        dbias,
    };
    let plan = AttentionBwdPlan {
        scalars: SCALARS,
        sums_head_dim: None,
        heads_per_section: 1,
        parts: None,
    };
    let mut params = zeros::<AttentionBwd>();
    Ok((tile.fit(&plan, &operands, &mut params)?, params))
}

#[test]
fn gradients_of_the_bias() {
    let tile = backward(Step::Bias, true);
    let of = |dtype, shape: &[usize]| {
        let mut dbias = tensor(dtype, shape);
        fit_backward(&tile, Some(dbias.view_mut()), None)
    };
    let tiles = [70_usize.div_ceil(64), 100_usize.div_ceil(tile.block_kv as usize)];
    let (blocks, p) = of(DType::F32, &FULL).unwrap();
    assert_eq!(blocks, (4 * tiles[0] * tiles[1]) as i128);
    assert_eq!([p.batch, p.heads, p.rows, p.cols], [2, 2, 70, 100]);
    let strides =
        [p.d_bias_stride_batch, p.d_bias_stride_head, p.d_bias_stride_q, p.d_bias_stride_kv];
    assert_eq!(strides, [14000, 7000, 100, 1]);
    let (blocks, p) = of(DType::F16, &[1, 2, 1, 100]).unwrap();
    assert_eq!((blocks, p.d_bias_type), ((2 * tiles[1]) as i128, DType::F16 as i32));
    assert_eq!([p.batch, p.heads, p.rows, p.cols], [1, 2, 1, 100]);
    assert!(of(DType::U8, &FULL).map(drop).unwrap_err().starts_with("dbias is u8"));
    assert!(of(DType::F32, &[2, 2, 71, 100]).map(drop).unwrap_err().starts_with("dbias has the"));
    let error = fit_backward(&tile, None, None).map(drop).unwrap_err();
    assert!(error.starts_with("dbias is not given"), "{error}");
}

#[test]
fn a_mask_and_its_transpose_have_bits() {
    let tile = backward(Step::Queries, true);
    let of = |tiles: [Option<usize>; 2]| {
        let [mask, transposed] = [lists(tiles[0]), lists(tiles[1])];
        fit_backward(&tile, None, Some([&mask, &transposed]))
            .map(|(_, p)| [p.base.terms.bit_tiles, p.base.bit_tiles_t])
    };
    assert_eq!(of([Some(3), Some(2)]), Ok([3, 2]));
    assert_eq!(of([None, None]), Ok([0, 0]));
    for tiles in [[Some(1), None], [None, Some(1)]] {
        let error = of(tiles).unwrap_err();
        assert!(error.contains("expected both or none"), "{error}");
    }
    let (mask, without) = (lists(Some(1)), backward(Step::Queries, false));
    let error = fit_backward(&without, None, Some([&mask, &mask])).map(drop).unwrap_err();
    assert!(error.starts_with("block_bits is given, expected none"), "{error}");
}

/// The driver copies as many bytes of an argument as a kernel takes.
#[test]
fn kernels_without_terms_take_the_first_member() {
    let sizes = |tile: &AttentionFwd| tile.param_bytes();
    assert!(sizes(&forward(false)) < sizes(&forward(true)));
    let sizes = [
        backward(Step::Queries, false).param_bytes(),
        backward(Step::Queries, true).param_bytes(),
        backward(Step::Bias, true).param_bytes(),
        size_of::<blockflash_attention_bwd_bias_params>(),
    ];
    assert!(sizes[0] < sizes[1] && sizes[1] < sizes[2] && sizes[2] == sizes[3], "{sizes:?}");
}
