//! Rows of attention as codes of 8 bits.

use super::attention_merge::dtype_code;
use super::attention_sizes::{row_sizes, row_strides};
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, absent, all_strides, fits, narrow, optional, pointer, pointer_mut, require, rows_aligned,
    starts_at, steps, strides, unknown,
};
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{Quantize, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_QUANTIZE_CHUNK, BLOCKFLASH_QUANTIZE_CODES, BLOCKFLASH_QUANTIZE_GIVEN,
    BLOCKFLASH_QUANTIZE_GREATEST, BLOCKFLASH_QUANTIZE_HEAD, BLOCKFLASH_QUANTIZE_MEANS,
    BLOCKFLASH_QUANTIZE_SUMS, BLOCKFLASH_QUANTIZE_TENSOR, BLOCKFLASH_QUANTIZE_TOKEN,
    blockflash_quantize_params,
};

/// Tensors of a launch that quantises. With `cu_seqlens` the rows are packed.
#[derive(Debug)]
pub struct QuantizeOperands<'a> {
    /// f16, bf16 or f32 `[batch, seqlen, num_heads, head_dim]`, packed
    /// `[total, num_heads, head_dim]`.
    pub x: View<'a>,
    /// i32 `[batch + 1]`, with any values: the kernel clamps them.
    pub cu_seqlens: Option<View<'a>>,
    /// e4m3, e5m2 or i8, in the shape of x. Until the last step it holds what the kernel needs.
    pub codes: ViewMut<'a>,
    /// What rows are divided by.
    pub scale: QuantizeScales<'a>,
    /// f32 `[batch, num_heads, head_dim]`: what is subtracted.
    pub mean: Option<ViewMut<'a>>,
}

/// The scales of a launch that quantises, f32.
#[derive(Debug)]
pub enum QuantizeScales<'a> {
    /// `[1]` or `[batch or 1, num_heads or 1]`, with any values.
    Given(View<'a>),
    /// `[1]`.
    Tensor(ViewMut<'a>),
    /// `[batch, num_heads]`.
    Head(ViewMut<'a>),
    /// `[batch, seqlen, num_heads]`, packed `[total, num_heads]`. They may be left out.
    Token(Option<ViewMut<'a>>),
}

impl QuantizeScales<'_> {
    /// The code of the parameter, and the tensor.
    fn parts(&self) -> (i32, Option<View<'_>>) {
        match self {
            Self::Given(view) => (BLOCKFLASH_QUANTIZE_GIVEN, Some(*view)),
            Self::Tensor(view) => (BLOCKFLASH_QUANTIZE_TENSOR, Some(view.as_view())),
            Self::Head(view) => (BLOCKFLASH_QUANTIZE_HEAD, Some(view.as_view())),
            Self::Token(view) => (BLOCKFLASH_QUANTIZE_TOKEN, view.as_ref().map(ViewMut::as_view)),
        }
    }
}

impl Operands for QuantizeOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let scale = match &self.scale {
            QuantizeScales::Given(view) => Some(view.used()),
            QuantizeScales::Tensor(view) | QuantizeScales::Head(view) => Some(view.used()),
            QuantizeScales::Token(view) => view.as_ref().map(ViewMut::used),
        };
        let offsets = self.cu_seqlens.as_ref().map(View::used);
        let mean = self.mean.as_ref().map(ViewMut::used);
        [Some(self.x.used()), offsets, Some(self.codes.used()), scale, mean]
    }
}

/// What a launch that quantises knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct QuantizePlan {
    /// `BLOCKFLASH_QUANTIZE_SUMS`, `_MEANS`, `_GREATEST` or `_CODES`.
    pub step: i32,
    /// Tokens of the longest sequence in a packed batch; ignored otherwise.
    pub longest: i32,
    /// Tokens of a CTA where maxima are found and codes are written.
    pub tokens: i32,
    /// Whether rows are rotated.
    pub rotates: bool,
    /// Whether the last tiles come first.
    pub descends: bool,
}

/// Sizes of a launch that quantises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeSizes {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence that is not packed.
    pub seqlen: usize,
    /// Rows of packed tensors.
    pub packed: Option<usize>,
    /// Heads.
    pub num_heads: usize,
    /// Elements of a row.
    pub head_dim: usize,
    /// Whether means are subtracted.
    pub subtracts: bool,
    /// Whether all elements share a scale that is chosen.
    pub is_tensor: bool,
}

impl QuantizeSizes {
    /// Heads that a CTA has at once where it has all tokens, or maxima and codes: as many as fit,
    /// of which all CTAs have equally many.
    fn heads(&self) -> usize {
        let blocks = self.num_heads.div_ceil(Quantize::rows(self.head_dim)).max(1);
        self.num_heads.div_ceil(blocks).max(1)
    }

    /// Tokens that a CTA has at once where it finds maxima and writes codes.
    pub fn tokens_at_once(&self) -> usize {
        Quantize::rows(self.head_dim) / self.heads()
    }

    /// CTAs of a step, at least 1; saturating.
    pub fn blocks(&self, step: i32, tokens: usize) -> usize {
        let slots = |tokens: usize| match self.packed {
            Some(total) => (total / tokens.max(1)).saturating_add(self.batch),
            None => self.batch.saturating_mul(self.seqlen.div_ceil(tokens.max(1)).max(1)),
        };
        let groups = self.batch.saturating_mul(self.num_heads);
        let blocks = match step {
            BLOCKFLASH_QUANTIZE_SUMS => slots(BLOCKFLASH_QUANTIZE_CHUNK as usize)
                .saturating_mul(self.num_heads.div_ceil(Quantize::heads_of_sums(self.head_dim))),
            BLOCKFLASH_QUANTIZE_MEANS if self.subtracts => groups,
            BLOCKFLASH_QUANTIZE_MEANS if self.is_tensor => 1,
            BLOCKFLASH_QUANTIZE_MEANS => groups.div_ceil(256),
            _ => slots(tokens).saturating_mul(self.num_heads.div_ceil(self.heads())),
        };
        blocks.max(1)
    }
}

/// Strides of scales along sequences, tokens and heads.
fn fit_scale(
    scale: &View<'_>,
    of: i32,
    packed: bool,
    [batch, rows, heads]: [i64; 3],
) -> Fit<[i64; 3]> {
    const F32: DType = DType::F32;
    match (of, scale.shape()) {
        (BLOCKFLASH_QUANTIZE_GIVEN, &[first, second]) => {
            // Each extent may be 1 for a scale that all share.
            let is_one = [first == 1, second == 1];
            let sizes = [if is_one[0] { 1 } else { batch }, if is_one[1] { 1 } else { heads }];
            let [sequence, head] = all_strides("scale", scale, F32, sizes)?;
            let of = |dim: usize, stride| if is_one[dim] { 0 } else { stride };
            Ok([of(0, sequence), 0, of(1, head)])
        }
        (BLOCKFLASH_QUANTIZE_HEAD, _) => {
            let [sequence, head] = all_strides("scale", scale, F32, [batch, heads])?;
            Ok([sequence, 0, head])
        }
        (BLOCKFLASH_QUANTIZE_TOKEN, _) if packed => {
            let [row, head] = all_strides("scale", scale, F32, [rows, heads])?;
            Ok([0, row, head])
        }
        (BLOCKFLASH_QUANTIZE_TOKEN, _) => all_strides("scale", scale, F32, [batch, rows, heads]),
        _ => all_strides("scale", scale, F32, [1]).map(|_| [0; 3]),
    }
}

/// The most tokens that a CTA takes.
const MOST_TOKENS: i32 = 1 << 16;

// SAFETY:
// 1. This is the parameter struct of the kernel that quantises.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` wrote from the views, and from offsets of packed sequences, which one thread of a CTA
//    reads and clamps to these sizes. What waits in codes between two steps decides about no
//    address. The only loop that offsets decide about is a binary search, which halves an interval
//    each time.
// 3. Codes, the mean and scales that are chosen are `ViewMut`.
unsafe impl Launch for Quantize {
    type Operands<'a> = QuantizeOperands<'a>;
    type Plan = QuantizePlan;
    type Params = blockflash_quantize_params;
    const FAMILY: &'static str = "quantising";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::Quantize(kernel) = kernel.variant { Some(kernel) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let QuantizeOperands { x, cu_seqlens, scale, mean, .. } = operands;
        let (codes, mean) = (operands.codes.as_view(), mean.as_ref().map(ViewMut::as_view));
        let packed = cu_seqlens.is_some();
        let [entries, rows, heads, head_dim] = row_sizes("x", x, packed)?;
        let (mut batch, mut seqlen, mut total) = (entries, rows, 0);
        if let Some(offsets) = cu_seqlens {
            batch = offsets.shape().first().map_or(0, |&count| count as i64) - 1;
            fits("cu_seqlens", offsets, DType::I32, [(batch + 1, 1)])?;
            (seqlen, total) = (plan.longest.into(), rows);
        }
        require(
            batch >= 0 && seqlen >= 0,
            format_args!("batch is {batch} and seqlen is {seqlen}: a size is negative"),
        )?;
        let most = Self::MOST_HEAD_DIM as i64;
        require(
            head_dim > 0 && head_dim % 8 == 0 && head_dim <= most,
            format_args!("head_dim is {head_dim}, expected a multiple of 8 up to {most}"),
        )?;
        require(
            !plan.rotates || head_dim.count_ones() == 1,
            format_args!("head_dim is {head_dim}, expected a power of 2, since it is rotated"),
        )?;
        require(
            codes.dtype().is_code(),
            format_args!("codes is {}, expected one of e4m3, e5m2 and i8", codes.dtype()),
        )?;
        params.x_dtype = dtype_code("x", x.dtype())?;
        params.codes_dtype = codes.dtype() as i32;

        let sizes = [entries, rows, heads, head_dim];
        let of_x = row_strides("x", x, x.dtype(), packed, sizes)?;
        let of_codes = row_strides("codes", &codes, codes.dtype(), packed, sizes)?;
        let dims = |of: [i64; 3]| [0, 1, 2].map(|dim| (sizes[dim], of[dim]));
        if !x.layout().is_empty() {
            let multiple = 16 / x.dtype().size() as i64;
            rows_aligned("x", x, multiple, steps(&dims(of_x)))?;
            starts_at(8, "codes", &codes)?;
            require(
                steps(&dims(of_codes)).all(|stride| stride % 8 == 0),
                format_args!("codes has strides {of_codes:?}, expected multiples of 8"),
            )?;
        }
        if let Some(mean) = &mean {
            let of_mean = [batch, heads, head_dim];
            let strides = strides("mean", mean, DType::F32, of_mean)?;
            if !mean.layout().is_empty() {
                let dims = [(batch, strides[0]), (heads, strides[1])];
                rows_aligned("mean", mean, 4, steps(&dims))?;
            }
            [params.mean_stride_batch, params.mean_stride_head, _] = strides;
        }
        let (of, scale) = scale.parts();
        if let Some(scale) = &scale {
            let strides = fit_scale(scale, of, packed, [batch, rows, heads])?;
            [params.scale_stride_batch, params.scale_stride_seq, params.scale_stride_head] =
                strides;
        }

        let known = [
            BLOCKFLASH_QUANTIZE_SUMS,
            BLOCKFLASH_QUANTIZE_MEANS,
            BLOCKFLASH_QUANTIZE_GREATEST,
            BLOCKFLASH_QUANTIZE_CODES,
        ];
        if !known.contains(&plan.step) {
            return unknown("step", plan.step, &known);
        }
        let is_tensor = of == BLOCKFLASH_QUANTIZE_TENSOR;
        let shares = is_tensor || of == BLOCKFLASH_QUANTIZE_HEAD;
        let reason = "scales are chosen before codes only for a head or for all";
        absent("step GREATEST", plan.step == BLOCKFLASH_QUANTIZE_GREATEST && !shares, reason)?;
        let reason = "no mean is subtracted";
        absent("step SUMS", plan.step == BLOCKFLASH_QUANTIZE_SUMS && mean.is_none(), reason)?;
        let clears = plan.step == BLOCKFLASH_QUANTIZE_MEANS && !shares && mean.is_none();
        absent("step MEANS", clears, "neither is a mean subtracted, nor a scale shared")?;
        require(
            (1..=MOST_TOKENS).contains(&plan.tokens),
            format_args!("a CTA has {} tokens, expected 1 to {MOST_TOKENS}", plan.tokens),
        )?;
        let groups = i128::from(batch) * i128::from(heads);
        // The kernel counts them, and CTAs, in 32 bits.
        let limit = i128::from(i32::MAX) - 256;
        require(
            groups <= limit,
            format_args!("{groups} heads of sequences, the limit is {limit}"),
        )?;

        params.x = pointer(x);
        params.codes = pointer_mut(&operands.codes);
        params.scale = optional(scale.as_ref()).cast_mut().cast();
        params.mean = optional(mean.as_ref()).cast_mut().cast();
        params.cu_seqlens = optional(cu_seqlens.as_ref()).cast();
        [params.x_stride_batch, params.x_stride_seq, params.x_stride_head] = of_x;
        [params.codes_stride_batch, params.codes_stride_seq, params.codes_stride_head] = of_codes;
        params.batch = narrow("batch", batch)?;
        params.num_heads = narrow("num_heads", heads)?;
        params.head_dim = narrow("head_dim", head_dim)?;
        params.seqlen = narrow("seqlen", seqlen)?;
        params.total = narrow("total", total)?;
        params.tokens = plan.tokens;
        params.step = plan.step;
        params.scale_of = of;
        params.descending = plan.descends.into();
        params.rotation = if plan.rotates { (1.0 / (head_dim as f64).sqrt()) as f32 } else { 0.0 };
        let sizes = QuantizeSizes {
            batch: batch as usize,
            seqlen: seqlen as usize,
            packed: packed.then_some(total as usize),
            num_heads: heads as usize,
            head_dim: head_dim as usize,
            subtracts: mean.is_some(),
            is_tensor,
        };
        Ok(sizes.blocks(plan.step, plan.tokens as usize) as i128)
    }
}

#[cfg(test)]
#[path = "quantize_tests.rs"]
mod tests;
