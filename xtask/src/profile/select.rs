//! Which kernels are profiled, and on what.

use anyhow::{Result, bail};
use blockflash_sys::manifest::{
    self, AttentionFwd, AttentionFwdHopper, BsrMatmul, BsrMatmulHopper, BsrSddmm, BsrSddmmHopper,
    Variant,
};
use blockflash_sys::{ComputeCapability, Row};

/// The rows that a GPU runs and whose symbol contains a text; of several for the same symbol the
/// preferred one. A text that is a whole symbol selects no longer one.
pub fn rows(pattern: &str, gpu: ComputeCapability) -> Result<Vec<&'static Row>> {
    let mut found: Vec<&'static Row> = Vec::new();
    for row in manifest::rows().iter().filter(|row| row.target.runs_on(gpu) && case(row).is_some())
    {
        if row.symbol().contains(pattern)
            && !found.iter().any(|other| other.symbol() == row.symbol())
        {
            found.push(row);
        }
    }
    if found.iter().any(|row| row.symbol() == pattern) {
        found.retain(|row| row.symbol() == pattern);
    }
    if found.is_empty() {
        let mut known: Vec<String> = manifest::rows().iter().map(Row::symbol).collect();
        known.dedup();
        match known.iter().find(|symbol| symbol.contains(pattern)) {
            Some(symbol) => {
                bail!("{symbol} is no kernel that {gpu} runs, or one that computes nothing")
            }
            None => bail!("no kernel has {pattern:?} in its name; `blockflash info` lists them"),
        }
    }
    Ok(found)
}

/// The one row that a text selects; `None` when no symbol contains it.
pub fn row(pattern: &str, gpu: ComputeCapability) -> Result<Option<&'static Row>> {
    if !manifest::rows().iter().any(|row| row.symbol().contains(pattern)) {
        return Ok(None);
    }
    match rows(pattern, gpu)?.as_slice() {
        [row] => Ok(Some(row)),
        [first, second, ..] => {
            bail!(
                "{pattern:?} is part of several kernels' names, {} and {} among them",
                first.symbol(),
                second.symbol()
            )
        }
        [] => Ok(None),
    }
}

/// What a row is profiled on unless `--shape` says otherwise: large enough for many waves of
/// blocks. `None` for a row that belongs to no operation.
pub fn case(row: &Row) -> Option<String> {
    match row.variant {
        Variant::AttentionFwd(AttentionFwd { head_dim, dtype, .. })
        | Variant::AttentionFwdHopper(AttentionFwdHopper { head_dim, dtype, .. }) => {
            let heads = 2048 / head_dim.max(1);
            Some(format!("b4_s4096_h{heads}_d{head_dim}_full_{dtype}"))
        }
        // No case has Aᵀ, or B by columns.
        Variant::BsrMatmulHopper(tile) if tile.a_transposed || tile.b_column_major => None,
        Variant::BsrMatmul(BsrMatmul { block_size, dtype, .. })
        | Variant::BsrMatmulAny(BsrMatmul { block_size, dtype, .. })
        | Variant::BsrMatmulHopper(BsrMatmulHopper { block_size, dtype, .. }) => {
            Some(format!("m8192_n1024_k8192_b{block_size}_d0.1_uniform_{dtype}"))
        }
        // The gradient of weights.
        Variant::BsrSddmm(BsrSddmm { block_size, dtype, .. }) => {
            Some(format!("sddmm_m8192_n8192_k4096_b{block_size}_d0.1_uniform_column_row_{dtype}"))
        }
        Variant::BsrSddmmHopper(BsrSddmmHopper { block_size, dtype, a, b, .. }) => {
            let (a, b) = (a.name(), b.name());
            Some(format!("sddmm_m8192_n8192_k4096_b{block_size}_d0.1_uniform_{a}_{b}_{dtype}"))
        }
        // The first three belong to no case of `blockflash bench`, the last is measured by it as a
        // ceiling.
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: ComputeCapability = ComputeCapability::new(9, 0);

    #[test]
    fn symbols_are_selected_once_and_preferred_code_first() {
        let rows = rows("attention_fwd_sm80_f16_d96", HOPPER).unwrap();
        assert_eq!(rows.len(), 1);
        assert!(!rows[0].target.is_ptx());
        let whole = rows[0].symbol();
        assert_eq!(row(&whole, HOPPER).unwrap(), Some(rows[0]));
        assert_eq!(case(rows[0]).unwrap(), "b4_s4096_h21_d96_full_f16");
        let hopper = super::rows("attention_fwd_sm90a_bf16_d192", HOPPER).unwrap();
        assert_eq!(case(hopper[0]).unwrap(), "b4_s4096_h10_d192_full_bf16");
        let bsr = super::rows("bsr_matmul_sm80_bf16_b128", HOPPER).unwrap();
        assert!(bsr.len() > 1);
        assert_eq!(case(bsr[0]).unwrap(), "m8192_n1024_k8192_b128_d0.1_uniform_bf16");
        let sampled = super::rows("bsr_sddmm_sm90a_bf16_b64_column_row", HOPPER).unwrap();
        assert_eq!(
            case(sampled[0]).unwrap(),
            "sddmm_m8192_n8192_k4096_b64_d0.1_uniform_column_row_bf16"
        );
    }

    #[test]
    fn what_selects_nothing_is_told() {
        let message = |pattern, gpu| rows(pattern, gpu).unwrap_err().to_string();
        assert!(message("d65", HOPPER).contains("`blockflash info` lists them"));
        assert!(message("_d64_", ComputeCapability::new(7, 5)).contains("sm_75"));
        assert_eq!(row("main", HOPPER).unwrap(), None);
        assert!(row("_d64_", HOPPER).unwrap_err().to_string().contains("several"));
    }
}
