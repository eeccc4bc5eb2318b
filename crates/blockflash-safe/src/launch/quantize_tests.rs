use super::*;
use crate::launch::{LaunchConfig, checked};
use crate::{Device, Tensor};
use blockflash_sys::manifest;

/// 2 sequences of 300 tokens and 3 heads of 32 elements.
struct Tensors {
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    mean: Tensor,
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

impl Tensors {
    fn new() -> Self {
        Self {
            x: zeros(DType::F16, &[2, 300, 3, 32]),
            codes: zeros(DType::I8, &[2, 300, 3, 32]),
            scale: zeros(DType::F32, &[2, 3]),
            mean: zeros(DType::F32, &[2, 3, 32]),
        }
    }

    fn operands(&mut self) -> QuantizeOperands<'_> {
        QuantizeOperands {
            x: self.x.view(),
            cu_seqlens: None,
            codes: self.codes.view_mut(),
            scale: QuantizeScales::Head(self.scale.view_mut()),
            mean: Some(self.mean.view_mut()),
        }
    }
}

const PLAN: QuantizePlan = QuantizePlan {
    step: BLOCKFLASH_QUANTIZE_CODES,
    longest: 0,
    tokens: 84,
    rotates: false,
    descends: false,
};

/// 42 tokens of 3 heads at once, as 2 lanes have a row, so 4 CTAs have 84 tokens of a sequence.
const BLOCKS: u32 = 2 * 4;

fn fit(
    operands: &QuantizeOperands<'_>,
    plan: &QuantizePlan,
    blocks: u32,
) -> Fit<blockflash_quantize_params> {
    let found = |row: &&Kernel| matches!(row.variant, Variant::Quantize(_));
    let row = manifest::kernels().iter().find(found).unwrap();
    checked::fitted::<Quantize>(row, &LaunchConfig::of(row, blocks, false), plan, operands)
}

#[test]
fn launches_that_fit() {
    let mut tensors = Tensors::new();
    let p = fit(&tensors.operands(), &PLAN, BLOCKS).unwrap();
    assert_eq!([p.x_stride_batch, p.x_stride_seq, p.x_stride_head], [28800, 96, 32]);
    assert_eq!([p.codes_stride_batch, p.codes_stride_seq, p.codes_stride_head], [28800, 96, 32]);
    assert_eq!([p.scale_stride_batch, p.scale_stride_seq, p.scale_stride_head], [3, 0, 1]);
    assert_eq!([p.mean_stride_batch, p.mean_stride_head], [96, 32]);
    assert_eq!([p.batch, p.num_heads, p.head_dim, p.seqlen, p.total], [2, 3, 32, 300, 0]);
    assert_eq!([p.scale_of, p.x_dtype, p.codes_dtype], [2, 0, DType::I8 as i32]);
    assert_eq!((p.tokens, p.rotation), (84, 0.0));
    // Three chunks of each sequence; classes of 16 tokens leave room for 8 heads.
    let sums = QuantizePlan { step: BLOCKFLASH_QUANTIZE_SUMS, ..PLAN };
    fit(&tensors.operands(), &sums, 6).unwrap();
    let means = QuantizePlan { step: BLOCKFLASH_QUANTIZE_MEANS, ..PLAN };
    fit(&tensors.operands(), &means, 6).unwrap();
    fit(&QuantizeOperands { mean: None, ..tensors.operands() }, &means, 1).unwrap();
    let rotated = QuantizePlan { rotates: true, ..PLAN };
    let p = fit(&tensors.operands(), &rotated, BLOCKS).unwrap();
    assert_eq!(p.rotation, (1.0 / 32f64.sqrt()) as f32);
}

#[test]
fn packed_launches_have_room_for_the_rests_of_sequences() {
    let (x, mut codes) = (zeros(DType::F32, &[600, 3, 32]), zeros(DType::E4M3, &[600, 3, 32]));
    let (offsets, mut scale) = (zeros(DType::I32, &[6]), zeros(DType::F32, &[600, 3]));
    let mut operands = QuantizeOperands {
        x: x.view(),
        cu_seqlens: Some(offsets.view()),
        codes: codes.view_mut(),
        scale: QuantizeScales::Token(Some(scale.view_mut())),
        mean: None,
    };
    let plan = QuantizePlan { longest: 400, ..PLAN };
    let p = fit(&operands, &plan, 600 / 84 + 5).unwrap();
    assert_eq!([p.scale_stride_batch, p.scale_stride_seq, p.scale_stride_head], [0, 3, 1]);
    assert_eq!([p.batch, p.seqlen, p.total, p.x_stride_batch as i32], [5, 400, 600, 0]);
    operands.scale = QuantizeScales::Token(None);
    assert!(fit(&operands, &plan, 600 / 84 + 5).unwrap().scale.is_null());
    assert!(fit(&operands, &plan, 600 / 84 + 6).is_err());
}

#[test]
fn given_scales_may_be_shared() {
    let mut tensors = Tensors::new();
    for (shape, expected) in
        [(&[1][..], [0, 0, 0]), (&[1, 3], [0, 0, 1]), (&[2, 1], [1, 0, 0]), (&[2, 3], [3, 0, 1])]
    {
        let scale = zeros(DType::F32, shape);
        let scale = QuantizeScales::Given(scale.view());
        let p = fit(&QuantizeOperands { scale, ..tensors.operands() }, &PLAN, BLOCKS).unwrap();
        let found = [p.scale_stride_batch, p.scale_stride_seq, p.scale_stride_head];
        assert_eq!(found, expected, "{shape:?}");
    }
}

#[test]
fn launches_that_do_not_fit() {
    type Spoil = fn(&mut Tensors);
    let cases: [(&str, Spoil); 8] = [
        ("codes is f16", |t| t.codes = zeros(DType::F16, &[2, 300, 3, 32])),
        ("codes is i8 [2, 299, 3, 32]", |t| t.codes = zeros(DType::I8, &[2, 299, 3, 32])),
        ("x is i32", |t| t.x = zeros(DType::I32, &[2, 300, 3, 32])),
        ("x has 3 dimensions", |t| t.x = zeros(DType::F16, &[300, 3, 32])),
        ("head_dim is 12", |t| t.x = zeros(DType::F16, &[2, 300, 3, 12])),
        ("head_dim is 264", |t| t.x = zeros(DType::F16, &[2, 300, 3, 264])),
        ("scale is f32 [3, 2]", |t| t.scale = zeros(DType::F32, &[3, 2])),
        ("mean is f32 [2, 3, 31]", |t| t.mean = zeros(DType::F32, &[2, 3, 31])),
    ];
    let refused = |found: Fit<blockflash_quantize_params>, expected: &str| {
        let error = found.unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    for (expected, change) in cases {
        let mut tensors = Tensors::new();
        change(&mut tensors);
        refused(fit(&tensors.operands(), &PLAN, BLOCKS), expected);
    }
    let mut tensors = Tensors::new();
    let plans = [
        ("step is 4", QuantizePlan { step: 4, ..PLAN }),
        ("a CTA has 0 tokens", QuantizePlan { tokens: 0, ..PLAN }),
        ("a CTA has 65537 tokens", QuantizePlan { tokens: 65537, ..PLAN }),
        ("expected 4..=4 in x", QuantizePlan { tokens: 200, ..PLAN }),
    ];
    for (expected, plan) in plans {
        refused(fit(&tensors.operands(), &plan, BLOCKS), expected);
    }
    let of_step = |step| QuantizePlan { step, ..PLAN };
    let none =
        QuantizeOperands { mean: None, scale: QuantizeScales::Token(None), ..tensors.operands() };
    let expected = "step SUMS is given, expected none: no mean is subtracted";
    refused(fit(&none, &of_step(BLOCKFLASH_QUANTIZE_SUMS), 1), expected);
    let expected = "step MEANS is given, expected none";
    refused(fit(&none, &of_step(BLOCKFLASH_QUANTIZE_MEANS), 1), expected);
    let expected = "step GREATEST is given, expected none";
    refused(fit(&none, &of_step(BLOCKFLASH_QUANTIZE_GREATEST), 1), expected);
    let (x, mut codes) = (zeros(DType::F16, &[1, 2, 1, 24]), zeros(DType::I8, &[1, 2, 1, 24]));
    let rotated = QuantizePlan { rotates: true, ..PLAN };
    let odd = QuantizeOperands {
        x: x.view(),
        cu_seqlens: None,
        codes: codes.view_mut(),
        scale: QuantizeScales::Token(None),
        mean: None,
    };
    refused(fit(&odd, &rotated, 1), "head_dim is 24, expected a power of 2");
    // Rows of codes that no piece of 8 bytes meets.
    let mut wide = zeros(DType::I8, &[1, 2, 1, 28]);
    let narrow = wide.view_mut().slice(3, 0..24).unwrap();
    let apart = QuantizeOperands { codes: narrow, ..odd };
    refused(fit(&apart, &PLAN, 1), "codes has strides [56, 28, 28], expected multiples of 8");
}

/// Sequences, heads or tokens may be none.
#[test]
fn empty_launches() {
    for shape in [[0, 5, 3, 32], [2, 0, 3, 32], [2, 5, 0, 32]] {
        let (x, mut codes) = (zeros(DType::F16, &shape), zeros(DType::I8, &shape));
        let mut scale = zeros(DType::F32, &[1]);
        let operands = QuantizeOperands {
            x: x.view(),
            cu_seqlens: None,
            codes: codes.view_mut(),
            scale: QuantizeScales::Tensor(scale.view_mut()),
            mean: None,
        };
        let blocks = if shape[1] == 0 { 2 } else { 1 };
        fit(&operands, &PLAN, blocks).unwrap();
        fit(&operands, &QuantizePlan { step: BLOCKFLASH_QUANTIZE_MEANS, ..PLAN }, 1).unwrap();
    }
}
