use super::super::attention_fixtures::scalars;
use super::super::checked::zeros;
use super::*;
use crate::{BlockListArrays, BlockLists, Device, ScoreTerms, Tensor};
use blockflash_sys::{DType, manifest};

const CODES: DType = DType::E4M3;

fn tensor(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

/// The tile of a head dimension that writes bf16.
fn tile(head_dim: usize) -> AttentionFwdE4m3 {
    let tiles = manifest::kernels().iter().filter_map(AttentionFwdE4m3::of);
    let fits = |tile: &AttentionFwdE4m3| {
        (tile.types.o, tile.head_dims.max(), tile.block_q()) == (DType::BF16, head_dim, 64)
    };
    tiles.into_iter().find(fits).unwrap()
}

/// Of 2 sequences of 6 heads of q and 3 of k.
struct Tensors {
    q: Tensor,
    k: Tensor,
    o: Tensor,
    offsets: Option<Tensor>,
}

impl Tensors {
    fn dense(codes: DType, o: DType, head_dim: usize) -> Self {
        let of_q = [2, 70, 6, head_dim];
        Self {
            q: tensor(codes, &of_q),
            k: tensor(codes, &[2, 90, 3, head_dim]),
            o: tensor(o, &of_q),
            offsets: None,
        }
    }

    fn packed() -> Self {
        Self {
            q: tensor(CODES, &[100, 6, 64]),
            k: tensor(CODES, &[150, 3, 64]),
            o: tensor(DType::BF16, &[100, 6, 64]),
            offsets: Some(tensor(DType::I32, &[3])),
        }
    }

    fn operands<'a>(&'a mut self, scales: [Option<&'a Tensor>; 3]) -> AttentionFwdOperands<'a> {
        let (q, k) = (self.q.view(), self.k.view());
        AttentionFwdOperands {
            q,
            k,
            v: k,
            o: self.o.view_mut(),
            lse: None,
            sink: None,
            cu_seqlens: self.offsets.as_ref().map(|offsets| [offsets.view(); 2]),
            block_mask: None,
            terms: ScoreTerms::default(),
            scales: scales.map(|scale| scale.map(Tensor::view)),
        }
    }
}

fn fit(
    tile: &AttentionFwdE4m3,
    operands: &AttentionFwdOperands<'_>,
) -> Fit<(i128, blockflash_attention_fwd_e4m3_params)> {
    let plan = AttentionFwdPlan { scalars: scalars([70, 90], [64; 2]), heads_per_section: 2 };
    let mut params = zeros::<AttentionFwdE4m3>();
    Ok((tile.fit(&plan, operands, &mut params)?, params))
}

/// The strides of scales of q, of k and of v, and heads of q that share one.
fn scale_strides(scales: [Option<&[usize]>; 3]) -> Fit<([[i64; 2]; 3], i32)> {
    let scales = scales.map(|shape| shape.map(|shape| tensor(DType::F32, shape)));
    let mut tensors = Tensors::dense(CODES, DType::BF16, 64);
    let [q, k, v] = &scales;
    let (_, params) = fit(&tile(64), &tensors.operands([q.as_ref(), k.as_ref(), v.as_ref()]))?;
    let p = params.scales;
    let strides = [
        [p.q_stride_batch, p.q_stride_head],
        [p.k_stride_batch, p.k_stride_head],
        [p.v_stride_batch, p.v_stride_head],
    ];
    Ok((strides, p.q_heads_per_scale))
}

#[test]
fn scales_have_strides_of_sequences_and_heads() {
    const NONE: [i64; 2] = [0; 2];
    for (shapes, expected) in [
        ([None, None, None], ([NONE; 3], 1)),
        ([Some(&[1][..]), Some(&[1]), Some(&[1])], ([NONE; 3], 1)),
        ([Some(&[2, 6]), Some(&[2, 3]), Some(&[2, 3])], ([[6, 1], [3, 1], [3, 1]], 1)),
        ([Some(&[2, 3]), None, Some(&[1, 3])], ([[3, 1], NONE, [0, 1]], 2)),
        ([Some(&[1, 3]), Some(&[2, 1]), Some(&[1, 1])], ([[0, 1], [1, 0], NONE], 2)),
        ([Some(&[2, 1]), Some(&[1, 3]), None], ([[1, 0], [0, 1], NONE], 1)),
    ] {
        assert_eq!(scale_strides(shapes), Ok(expected), "{shapes:?}");
    }
    for (at, shape, error) in [
        (0, &[2, 4][..], "q_scale is f32 [2, 4], expected f32 [1] or [2 or 1, 6 or 1]"),
        (1, &[2, 6], "k_scale is f32 [2, 6], expected f32 [1] or [2 or 1, 3 or 1]"),
        (2, &[3, 3], "v_scale is f32 [3, 3]"),
        (2, &[3], "v_scale is f32 [3]"),
        (0, &[2, 6, 1], "q_scale is f32 [2, 6, 1]"),
    ] {
        let mut scales = [None; 3];
        scales[at] = Some(shape);
        let found = scale_strides(scales).unwrap_err();
        assert!(found.starts_with(error), "{found}");
    }
    let (whole, mut tensors) = (tensor(DType::I32, &[1]), Tensors::packed());
    let found = fit(&tile(64), &tensors.operands([None, Some(&whole), None])).unwrap_err();
    assert!(found.starts_with("k_scale is i32 [1]"), "{found}");
}

#[test]
fn sizes_and_strides_are_those_of_the_tensors() {
    let mut tensors = Tensors::dense(CODES, DType::BF16, 48);
    let (tiles, params) = fit(&tile(64), &tensors.operands([None; 3])).unwrap();
    let p = params.fwd.base;
    assert_eq!((tiles, p.batch, p.num_heads_q, p.num_heads_kv), (2 * 2 * 6, 2, 6, 3));
    assert_eq!([p.seqlen_q, p.seqlen_kv, p.head_dim_qk, p.head_dim_v], [70, 90, 48, 48]);
    assert_eq!([p.q_stride_batch, p.q_stride_seq, p.q_stride_head], [70 * 6 * 48, 6 * 48, 48]);
    assert_eq!([p.o_stride_batch, p.o_stride_seq, p.o_stride_head], [70 * 6 * 48, 6 * 48, 48]);
    assert_eq!(params.fwd.heads_per_section, 2);
    let scale = tensor(DType::F32, &[2, 3]);
    let mut tensors = Tensors::packed();
    let (tiles, params) = fit(&tile(64), &tensors.operands([Some(&scale); 3])).unwrap();
    let p = params.fwd.base;
    assert_eq!((tiles, p.batch, p.total_q, p.total_kv), (2 * 2 * 6, 2, 100, 150));
    assert_eq!([p.q_stride_batch, p.o_stride_batch], [0; 2]);
    assert_eq!((params.scales.q_stride_batch, params.scales.q_heads_per_scale), (3, 2));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refusal = |tile: &AttentionFwdE4m3, operands: &AttentionFwdOperands<'_>, what: &str| {
        let found = fit(tile, operands).unwrap_err();
        assert!(found.contains(what), "{found}");
    };
    let codes = tile(64);
    for (head_dim, what) in [
        (72, "head_dim_qk is 72, expected a multiple of 16 up to 64"),
        (40, "head_dim_qk is 40,"),
        (80, "head_dim_qk is 80,"),
    ] {
        let mut tensors = Tensors::dense(CODES, DType::BF16, head_dim);
        refusal(&codes, &tensors.operands([None; 3]), what);
    }
    for (of_q, o, what) in [
        (CODES, DType::F16, "o is f16"),
        (DType::E5M2, DType::BF16, "q is e5m2"),
        (DType::I8, DType::BF16, "q is i8"),
        (DType::BF16, DType::BF16, "q is bf16"),
    ] {
        let mut tensors = Tensors::dense(of_q, o, 64);
        refusal(&codes, &tensors.operands([None; 3]), what);
    }
    // Outputs at 4 elements.
    let mut wide = tensor(DType::BF16, &[2, 70, 6, 68]);
    let mut tensors = Tensors::dense(CODES, DType::BF16, 64);
    let operands = AttentionFwdOperands {
        o: wide.view_mut().slice(3, 0..64).unwrap(),
        ..tensors.operands([None; 3])
    };
    refusal(&codes, &operands, "multiples of 16 bytes and of 8 elements");
    let bias = tensor(DType::BF16, &[1, 1, 70, 90]);
    let terms = ScoreTerms { bias: Some(bias.view()), alibi: None };
    let operands = AttentionFwdOperands { terms, ..tensors.operands([None; 3]) };
    refusal(&codes, &operands, "bias");
    let arrays = BlockListArrays {
        groups: &[1, 1],
        rows: 2,
        cols: 2,
        row_ptr: &[0, 1, 2],
        col_idx: &[0, 1],
        row_order: &[0, 1],
        cu_rows: None,
    };
    let lists = BlockLists::new(&arrays, &Device::cpu().stream().unwrap()).unwrap();
    let operands = AttentionFwdOperands { block_mask: Some(&lists), ..tensors.operands([None; 3]) };
    assert_eq!(fit(&codes, &operands).unwrap().0, 2 * 2 * 6);
    // A kernel of another type reads no scales.
    let portable = manifest::kernels()
        .iter()
        .find_map(|kernel| match kernel.variant {
            manifest::Variant::AttentionFwd(tile) => Some(tile),
            _ => None,
        })
        .unwrap();
    let o = portable.types.o;
    let (mut tensors, scale) = (Tensors::dense(o, o, 64), tensor(DType::F32, &[1]));
    let plan = AttentionFwdPlan { scalars: scalars([0; 2], [0; 2]), heads_per_section: 0 };
    let mut params = zeros::<manifest::AttentionFwd>();
    let found = portable
        .fit(&plan, &tensors.operands([None, None, Some(&scale)]), &mut params)
        .unwrap_err();
    assert!(found.starts_with("scales is given"), "{found}");
}
