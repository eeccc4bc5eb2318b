//! Reading a case's id.

use super::{
    AttentionShape, BlockMaskShape, BlockSparseShape, BsrShape, Case, Lengths, MaskKind, MaskStep,
    Pattern, SddmmShape, VarlenShape,
};
use blockflash_sys::{DType, Major};
use std::str::FromStr;

impl FromStr for Case {
    type Err = String;

    /// Reads what [`Display`](std::fmt::Display) writes.
    fn from_str(id: &str) -> Result<Self, String> {
        // A pattern's name may hold the separator.
        let join = |id: String, name: String| id.replace(&name, &name.replace('_', "-"));
        let joined = Pattern::ALL.iter().map(ToString::to_string).fold(id.to_owned(), join);
        let parts: Vec<&str> = joined.split('_').collect();
        let case = match id.as_bytes().first() {
            Some(b'm') if parts[0] == "mask" => block_mask(&parts[1..]),
            Some(b'm') => bsr(&parts),
            Some(b's') => sddmm(&parts),
            Some(b'v') => varlen(&parts),
            _ => attention(&parts),
        };
        // Whatever was read differently from how it was written is not an id.
        case.filter(|case| case.to_string() == id).ok_or_else(|| {
            format!(
                "{id:?} is no case: expected for example b4_s4096_h32_d64_causal_bf16, \
                 b1_q1_kv8192_h32kv8_d128_full_f16, varlen4096+512x2_h16_d128_causal_bf16 or m8192_n1024_k8192_b64_d0.1_uniform_f16"
            )
        })
    }
}

fn number<T: FromStr>(part: &str, prefix: &str) -> Option<T> {
    part.strip_prefix(prefix)?.parse().ok()
}

fn pair(part: &str, prefix: &str) -> Option<[usize; 2]> {
    let (first, second) = part.strip_prefix(prefix)?.split_once("kv")?;
    Some([first.parse().ok()?, second.parse().ok()?])
}

/// `h32` or `h32kv8`.
fn heads(part: &str) -> Option<[usize; 2]> {
    pair(part, "h").or_else(|| Some([number(part, "h")?; 2])).filter(|heads| heads[1] > 0)
}

fn dtype(part: &str) -> Option<DType> {
    [DType::F16, DType::BF16, DType::F32].into_iter().find(|dtype| dtype.name() == part)
}

fn mask(part: &str) -> Option<MaskKind> {
    [MaskKind::Full, MaskKind::Causal].into_iter().find(|mask| mask.to_string() == part)
}

fn pattern(part: &str) -> Option<Pattern> {
    Pattern::named(&part.replace('-', "_"))
}

fn attention(parts: &[&str]) -> Option<Case> {
    let (batch, rest) = parts.split_first()?;
    let batch = number(batch, "b")?;
    let ([seqlen_q, seqlen_kv], rest) = match rest {
        [s, rest @ ..] if s.starts_with('s') => ([number(s, "s")?; 2], rest),
        [q, kv, rest @ ..] => ([number(q, "q")?, number(kv, "kv")?], rest),
        _ => return None,
    };
    let (head_counts, rest) = rest.split_first()?;
    let (head_counts, mask_heads) = match head_counts.split_once('m') {
        Some((heads, of_mask)) => (heads, Some(of_mask.parse().ok()?)),
        None => (*head_counts, None),
    };
    let [num_heads_q, num_heads_kv] = heads(head_counts)?;
    match *rest {
        [d, mask_name, dtype_name] if mask_heads.is_none() => {
            Some(Case::AttentionFwd(AttentionShape {
                batch,
                seqlen_q,
                seqlen_kv,
                num_heads_q,
                num_heads_kv,
                head_dim: number(d, "d")?,
                mask: mask(mask_name)?,
                dtype: dtype(dtype_name)?,
            }))
        }
        [d, blocks, density, pattern_name, mask_name, dtype_name] => {
            let [block_q, block_kv] = pair(blocks, "q")?;
            let shape = BlockSparseShape {
                batch,
                seqlen_q,
                seqlen_kv,
                num_heads_q,
                num_heads_kv,
                mask_heads: mask_heads.unwrap_or(num_heads_q),
                head_dim: number(d, "d")?,
                block_q,
                block_kv,
                density: number(density, "d")?,
                pattern: pattern(pattern_name)?,
                mask: mask(mask_name)?,
                dtype: dtype(dtype_name)?,
            };
            shape.check().ok().map(|()| Case::BlockSparseFwd(shape))
        }
        _ => None,
    }
}

fn varlen(parts: &[&str]) -> Option<Case> {
    let &[lengths, head_counts, d, mask_name, dtype_name] = parts else { return None };
    let [num_heads_q, num_heads_kv] = heads(head_counts)?;
    Some(Case::VarlenFwd(VarlenShape {
        lengths: Lengths::parse(lengths.strip_prefix("varlen")?).ok()?,
        num_heads_q,
        num_heads_kv,
        head_dim: number(d, "d")?,
        mask: mask(mask_name)?,
        dtype: dtype(dtype_name)?,
    }))
}

fn block_mask(parts: &[&str]) -> Option<Case> {
    let (&[seqlen, heads, block], step) = parts.split_first_chunk()?;
    let step = match *step {
        ["scores", d, dtype_name] => {
            MaskStep::Scores { head_dim: number(d, "d")?, dtype: dtype(dtype_name)? }
        }
        [top_k] => MaskStep::Choose { top_k: number(top_k, "top")? },
        _ => return None,
    };
    let shape = BlockMaskShape {
        seqlen: number(seqlen, "s")?,
        num_heads: number(heads, "h")?,
        block: number(block, "b")?,
        step,
    };
    shape.check().ok().map(|()| Case::BlockMaskBuild(shape))
}

fn bsr(parts: &[&str]) -> Option<Case> {
    let &[m, n, k, block, density, pattern_name, dtype_name] = parts else { return None };
    let block_size = number(block, "b")?;
    (block_size > 0).then_some(())?;
    Some(Case::BsrMatmul(BsrShape {
        m: number(m, "m")?,
        n: number(n, "n")?,
        k: number(k, "k")?,
        block_size,
        density: number(density, "d")?,
        pattern: pattern(pattern_name)?,
        dtype: dtype(dtype_name)?,
    }))
}

fn sddmm(parts: &[&str]) -> Option<Case> {
    let &["sddmm", m, n, k, block, density, pattern_name, a, b, dtype_name] = parts else {
        return None;
    };
    let major = |part: &str| Major::ALL.into_iter().find(|major| major.name() == part);
    let shape = SddmmShape {
        m: number(m, "m")?,
        n: number(n, "n")?,
        k: number(k, "k")?,
        block_size: number(block, "b")?,
        density: number(density, "d")?,
        pattern: pattern(pattern_name)?,
        a_major: major(a)?,
        b_major: major(b)?,
        dtype: dtype(dtype_name)?,
    };
    shape.check().ok().map(|()| Case::BsrSddmm(shape))
}
