use crate::attention::{CuSeqlens, MAX_SEQLEN, Strides, check_maximum};
use crate::check::{Operand, to_i32};
use crate::{Error, Result};
use blockflash_safe::{Stream, View};
use std::ops::Range;

/// Where the new tokens of each sequence are in packed tensors: sequence `i` has the rows
/// `cu_seqlens[i]..cu_seqlens[i + 1]`, also none. What [`CuSeqlens`] says about valid and invalid
/// offsets holds here.
#[derive(Clone, Copy, Debug)]
pub struct PackedTokens<'a> {
    /// i32 `[batch + 1]`: offsets of the tokens.
    pub cu_seqlens: View<'a>,
    /// Upper bound on the tokens of a sequence; not 0 if there are sequences and rows.
    pub max_seqlen: usize,
}

impl PackedTokens<'_> {
    fn as_cu_seqlens(&self) -> CuSeqlens<'_> {
        let (q, max_seqlen_q) = (self.cu_seqlens, self.max_seqlen);
        CuSeqlens { q, kv: q, max_seqlen_q, max_seqlen_kv: max_seqlen_q }
    }
}

/// Sizes of a tensor of tokens, `[batch, tokens, heads, head_dim]` or packed
/// `[total, heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) batch: usize,
    /// Tokens of a sequence; at most this many when packed.
    pub(crate) tokens: usize,
    /// Rows of the packed tensor.
    pub(crate) packed: Option<usize>,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) strides: Strides,
}

/// The sizes of a tensor of tokens, checked.
pub(crate) fn token_sizes(
    operand: &Operand<'_>,
    packed: Option<&PackedTokens<'_>>,
) -> Result<Rows> {
    let rows = match (packed, operand.shape, operand.strides) {
        (None, &[batch, tokens, heads, head_dim], &[of_batch, seq, head, _]) => {
            let strides = Strides { batch: of_batch, seq, head };
            Rows { batch, tokens, packed: None, heads, head_dim, strides }
        }
        (None, ..) => return Err(operand.wrong_shape("[batch, seqlen, num_heads, head_dim]")),
        (Some(packed), &[total, heads, head_dim], &[seq, head, _]) => {
            // Offsets into the packed rows are 32-bit.
            to_i32("packed rows", total)?;
            let (batch, tokens) = (packed.as_cu_seqlens().batch()?, packed.max_seqlen);
            check_maximum("max_seqlen", [batch, tokens], total)?;
            let strides = Strides { batch: 0, seq, head };
            Rows { batch, tokens, packed: Some(total), heads, head_dim, strides }
        }
        (Some(_), ..) => {
            return Err(operand.wrong_shape("[total, num_heads, head_dim] (variable length)"));
        }
    };
    operand.last_dim_contiguous()?;
    to_i32("batch", rows.batch)?;
    to_i32("num_heads", rows.heads)?;
    if rows.tokens > MAX_SEQLEN {
        return Err(Error::TooLarge { what: "seqlen_q", value: rows.tokens, limit: MAX_SEQLEN });
    }
    Ok(rows)
}

/// The rows of each sequence. Packed offsets are copied to the host and verified.
pub(crate) fn token_ranges(
    packed: Option<&PackedTokens<'_>>,
    [batch, tokens]: [usize; 2],
    total: Option<usize>,
    stream: &Stream,
) -> Result<Vec<Range<usize>>> {
    let (Some(packed), Some(total)) = (packed, total) else {
        return Ok((0..batch).map(|_| 0..tokens).collect());
    };
    let (offsets, _) = packed.as_cu_seqlens().read(stream, total, total, None)?;
    Ok(offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}
