//! Attention over a cache from the splits that kernels with many rows left in the workspace.

use super::attention_merge::dtype_code;
use super::attention_sizes::{lse_strides, row_sizes, row_strides};
use super::bsr_parts::BsrPartsMemory;
use super::checked::{Launch, Operands};
use super::fit::{Fit, ceil_div, narrow, optional, pointer, require, rows_aligned};
use crate::view::Used;
use crate::{DType, Kernel, ViewMut};
use blockflash_sys::manifest::{AttentionCombine, Variant};
use blockflash_sys::params::blockflash_attention_combine_params;

/// Tensors of combining splits.
#[derive(Debug)]
pub struct AttentionCombineOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim]` in f16 or bf16.
    pub o: ViewMut<'a>,
    /// f32 `[batch, num_heads_q, seqlen_q]`.
    pub lse: Option<ViewMut<'a>>,
    /// Outputs in f32 `[splits, batch, seqlen_q, num_heads_q, head_dim]`, and behind them their
    /// log-sum-exps, `[splits, num_heads_q, batch, seqlen_q]`.
    pub workspace: &'a BsrPartsMemory,
}

impl Operands for AttentionCombineOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let lse = self.lse.as_ref().map(ViewMut::used);
        [Some(self.o.used()), lse, Some(self.workspace.used())]
    }
}

/// Pointers to the outputs of splits and to their log-sum-exps.
///
/// # Errors
/// A workspace without room for them.
pub(super) fn fit_parts(
    memory: &BsrPartsMemory,
    splits: i32,
    [lines, head_dim]: [i128; 2],
) -> Fit<[*mut f32; 2]> {
    let most = AttentionCombine::MOST_SPLITS as i32;
    require(
        (1..=most).contains(&splits),
        format_args!("{splits} splits, expected from 1 to {most}"),
    )?;
    require(
        lines <= i32::MAX.into(),
        format_args!("{lines} rows of all heads, the limit is {}", i32::MAX),
    )?;
    let outputs = i128::from(splits) * lines * head_dim;
    let needed = outputs + i128::from(splits) * lines;
    require(
        needed <= memory.sums() as i128,
        format_args!("the workspace has {} sums, {needed} are needed", memory.sums()),
    )?;
    let parts = memory.sums_pointer();
    require(parts.addr().is_multiple_of(16), format_args!("the workspace is at {parts:?}"))?;
    Ok([parts, parts.wrapping_add(outputs as usize)])
}

/// Rows of all heads up to which each has a CTA, whose threads load all splits at once.
const FEW_LINES: usize = 1024;

/// Rows of a head that a CTA has.
fn lines_of_cta(all: usize, head_dim: usize) -> usize {
    let threads = head_dim.div_ceil(AttentionCombine::COLUMNS as usize).next_power_of_two();
    let most = (AttentionCombine::THREADS as usize / threads.max(1)).max(1);
    if all <= FEW_LINES { 1 } else { most.min(AttentionCombine::MOST_LINES as usize) }
}

// SAFETY:
// 1. This is the parameter struct of the kernel that combines splits.
// 2. All addresses follow from sizes and strides, which `fit` takes from the views, and from the
//    number of splits, for which the workspace has room. None follows from the contents of memory.
// 3. `o` and `lse` are `ViewMut`; the workspace is only read.
unsafe impl Launch for AttentionCombine {
    type Operands<'a> = AttentionCombineOperands<'a>;
    /// The splits.
    type Plan = i32;
    type Params = blockflash_attention_combine_params;
    const FAMILY: &'static str = "combining splits";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionCombine(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        splits: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (o, lse) =
            (operands.o.as_view(), operands.lse.as_ref().map(|lse: &ViewMut<'_>| lse.as_view()));
        let sizes = row_sizes("o", &o, false)?;
        let [batch, rows, heads, head_dim] = sizes;
        require(
            sizes.iter().all(|&size| size > 0),
            format_args!("batch, rows, heads and head_dim are {sizes:?}: a size is not positive"),
        )?;
        let widest = i64::from(Self::THREADS * Self::COLUMNS);
        require(
            head_dim % 8 == 0 && head_dim <= widest,
            format_args!("head_dim is {head_dim}, expected a multiple of 8 up to {widest}"),
        )?;
        require(
            [DType::F16, DType::BF16].contains(&o.dtype()),
            format_args!("o is {}, expected f16 or bf16", o.dtype()),
        )?;
        let of_o = row_strides("o", &o, o.dtype(), false, sizes)?;
        rows_aligned("o", &o, 8, of_o)?;
        let of_lse = match &lse {
            Some(lse) => lse_strides(lse, false, [batch, heads, rows])?,
            None => [0; 2],
        };
        let all = i128::from(batch) * i128::from(rows) * i128::from(heads);
        let [parts, parts_lse] = fit_parts(operands.workspace, *splits, [all, head_dim.into()])?;
        let lines = lines_of_cta(all as usize, head_dim as usize);
        *params = blockflash_attention_combine_params {
            parts,
            parts_lse,
            o: pointer(&o).cast_mut(),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            o_stride_batch: of_o[0],
            o_stride_seq: of_o[1],
            o_stride_head: of_o[2],
            lse_stride_batch: of_lse[0],
            lse_stride_head: of_lse[1],
            batch: narrow("batch", batch)?,
            seqlen_q: narrow("seqlen_q", rows)?,
            num_heads_q: narrow("num_heads_q", heads)?,
            lines: lines as i32,
            head_dim_v: narrow("head_dim_v", head_dim)?,
            splits: *splits,
            o_dtype: dtype_code("o", o.dtype())?,
        };
        Ok(ceil_div(all as i64, lines as u32))
    }
}

impl AttentionCombineOperands<'_> {
    /// CTAs of a launch for outputs of this shape.
    pub fn blocks([batch, rows, heads, head_dim]: [usize; 4]) -> Option<u32> {
        let all = batch.checked_mul(rows)?.checked_mul(heads)?;
        u32::try_from(all.div_ceil(lines_of_cta(all, head_dim))).ok()
    }
}
