//! Attention over all keys from attention over parts of them.

use super::checked::{Launch, Operands};
use super::fit::{
    Fit, ceil_div, fits, optional, pointer, pointer_mut, require, rows_aligned, unknown,
};
use crate::view::Used;
use crate::{DType, Kernel, Result, View, ViewMut};
use blockflash_sys::manifest::{AttentionMerge as AttentionMergeTile, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_DTYPE_BF16, BLOCKFLASH_DTYPE_F16, BLOCKFLASH_DTYPE_F32,
    blockflash_attention_merge_params,
};

/// Tensors of merging attention.
#[derive(Debug)]
pub struct AttentionMergeOperands<'a> {
    /// `[count, rows, num_heads_q, head_dim]` in f16, bf16 or f32.
    pub parts: View<'a>,
    /// f32 `[count, num_heads_q, rows]`; `None` for a plain sum.
    pub parts_lse: Option<View<'a>>,
    /// `[rows, num_heads_q, head_dim]` in f16, bf16 or f32.
    pub o: ViewMut<'a>,
    /// f32 `[num_heads_q, rows]`.
    pub lse: Option<ViewMut<'a>>,
}

impl Operands for AttentionMergeOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let (parts, parts_lse) = (Some(self.parts.used()), self.parts_lse.as_ref().map(View::used));
        [parts, parts_lse, Some(self.o.used()), self.lse.as_ref().map(ViewMut::used)]
    }
}

/// The kernel that merges attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMerge {
    /// Columns of o per thread.
    columns: u32,
}

/// Threads per CTA.
const THREADS: u32 = 128;

/// The element type that a parameter of this name names.
pub(super) fn dtype_of(name: &str, code: i32) -> Fit<DType> {
    match code {
        BLOCKFLASH_DTYPE_F16 => Ok(DType::F16),
        BLOCKFLASH_DTYPE_BF16 => Ok(DType::BF16),
        BLOCKFLASH_DTYPE_F32 => Ok(DType::F32),
        _ => unknown(
            name,
            code,
            &[BLOCKFLASH_DTYPE_F16, BLOCKFLASH_DTYPE_BF16, BLOCKFLASH_DTYPE_F32],
        ),
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernel that merges attention.
// 2. As for attention forward; no address follows from the contents of a tensor.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionMerge {
    type Operands<'a> = AttentionMergeOperands<'a>;
    type Plan = blockflash_attention_merge_params;
    type Params = blockflash_attention_merge_params;
    const FAMILY: &'static str = "merging attention";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::AttentionMerge(AttentionMergeTile { columns }) => Some(Self { columns }),
            _ => None,
        }
    }

    fn fit(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let sizes = [p.count, p.rows, p.num_heads_q, p.head_dim_v].map(i64::from);
        let [count, rows, heads, head_dim] = sizes;
        require(
            sizes.iter().all(|&size| size > 0),
            format_args!("parts, rows, heads and head_dim are {sizes:?}: a size is not positive"),
        )?;
        require(
            head_dim % 8 == 0,
            format_args!("head_dim is {head_dim}, expected a multiple of 8"),
        )?;
        let parts = [
            (count, p.parts_stride_part),
            (rows, p.parts_stride_row),
            (heads, p.parts_stride_head),
            (head_dim, 1),
        ];
        fits("parts", &operands.parts, dtype_of("parts_dtype", p.parts_dtype)?, parts)?;
        let logs = [
            (count, p.parts_lse_stride_part),
            (heads, p.parts_lse_stride_head),
            (rows, p.parts_lse_stride_row),
        ];
        if let Some(parts_lse) = &operands.parts_lse {
            fits("parts_lse", parts_lse, DType::F32, logs)?;
        }
        let strides = [p.o_stride_row, p.o_stride_head];
        let o = [(rows, p.o_stride_row), (heads, p.o_stride_head), (head_dim, 1)];
        fits("o", &operands.o.as_view(), dtype_of("o_dtype", p.o_dtype)?, o)?;
        rows_aligned("o", &operands.o.as_view(), 4, strides)?;
        if let Some(lse) = &operands.lse {
            let logs = [(heads, p.lse_stride_head), (rows, p.lse_stride_row)];
            fits("lse", &lse.as_view(), DType::F32, logs)?;
        }
        let threads = i128::from(rows * heads) * ceil_div(head_dim, self.columns);
        let blocks = (threads + i128::from(THREADS) - 1) / i128::from(THREADS);
        require(
            blocks <= i32::MAX.into(),
            format_args!("{blocks} blocks, the limit is {}", i32::MAX),
        )?;
        Ok(blocks)
    }

    fn params(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let lse = operands.lse.as_ref().map(ViewMut::as_view);
        Ok(blockflash_attention_merge_params {
            parts: pointer(&operands.parts),
            parts_lse: optional(operands.parts_lse.as_ref()).cast(),
            o: pointer_mut(&operands.o),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            ..*p
        })
    }
}
