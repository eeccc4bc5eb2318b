//! Attention over all keys from attention over parts of them.

use super::attention_sizes::{row_sizes, row_strides};
use super::checked::{Launch, Operands};
use super::fit::{Fit, all_strides, ceil_div, narrow, optional, pointer, require, rows_aligned};
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
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

/// The code of a floating-point type in an argument.
pub(super) fn dtype_code(name: &str, dtype: DType) -> Fit<i32> {
    match dtype {
        DType::F16 => Ok(BLOCKFLASH_DTYPE_F16),
        DType::BF16 => Ok(BLOCKFLASH_DTYPE_BF16),
        DType::F32 => Ok(BLOCKFLASH_DTYPE_F32),
        other => Err(format!("{name} is {other}, expected f16, bf16 or f32")),
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernel that merges attention.
// 2. As for attention forward; no address follows from the contents of a tensor.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionMerge {
    type Operands<'a> = AttentionMergeOperands<'a>;
    type Plan = ();
    type Params = blockflash_attention_merge_params;
    const FAMILY: &'static str = "merging attention";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::AttentionMerge(AttentionMergeTile { columns }) => Some(Self { columns }),
            _ => None,
        }
    }

    fn fit(
        &self,
        (): &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let AttentionMergeOperands { parts, parts_lse, o, lse } = operands;
        let (o, lse) = (o.as_view(), lse.as_ref().map(ViewMut::as_view));
        let sizes = row_sizes("parts", parts, false)?;
        let [count, rows, heads, head_dim] = sizes;
        require(
            sizes.iter().all(|&size| size > 0),
            format_args!("parts, rows, heads and head_dim are {sizes:?}: a size is not positive"),
        )?;
        require(
            head_dim % 8 == 0,
            format_args!("head_dim is {head_dim}, expected a multiple of 8"),
        )?;
        let of_parts = row_strides("parts", parts, parts.dtype(), false, sizes)?;
        let [_, o_row, o_head] = row_strides("o", &o, o.dtype(), true, [1, rows, heads, head_dim])?;
        rows_aligned("o", &o, 4, [o_row, o_head])?;
        let of_logs = match parts_lse {
            Some(logs) => all_strides("parts_lse", logs, DType::F32, [count, heads, rows])?,
            None => [0; 3],
        };
        let of_lse = match &lse {
            Some(lse) => all_strides("lse", lse, DType::F32, [heads, rows])?,
            None => [0; 2],
        };
        let threads = i128::from(rows) * i128::from(heads) * ceil_div(head_dim, self.columns);
        let blocks = (threads + i128::from(THREADS) - 1) / i128::from(THREADS);
        require(
            blocks <= i32::MAX.into(),
            format_args!("{blocks} blocks, the limit is {}", i32::MAX),
        )?;
        *params = blockflash_attention_merge_params {
            parts: pointer(parts),
            parts_lse: optional(parts_lse.as_ref()).cast(),
            o: pointer(&o).cast_mut(),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            parts_stride_part: of_parts[0],
            parts_stride_row: of_parts[1],
            parts_stride_head: of_parts[2],
            parts_lse_stride_part: of_logs[0],
            parts_lse_stride_head: of_logs[1],
            parts_lse_stride_row: of_logs[2],
            o_stride_row: o_row,
            o_stride_head: o_head,
            lse_stride_head: of_lse[0],
            lse_stride_row: of_lse[1],
            count: narrow("parts", count)?,
            rows: narrow("rows", rows)?,
            num_heads_q: narrow("num_heads_q", heads)?,
            head_dim_v: narrow("head_dim_v", head_dim)?,
            parts_dtype: dtype_code("parts", parts.dtype())?,
            o_dtype: dtype_code("o", o.dtype())?,
        };
        Ok(blocks)
    }
}
