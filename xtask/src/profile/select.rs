//! Selection of the kernels to profile and their cases.

use anyhow::{Result, bail};
use blockflash_sys::{ComputeCapability, Kernel, manifest};

/// Kernels that a GPU runs and whose symbol contains a text, each with its default case, which
/// `--shape` overrides. If several kernels share a symbol, the preferred one is taken. A text that
/// equals a whole symbol does not select longer symbols.
pub fn kernels(pattern: &str, gpu: ComputeCapability) -> Result<Vec<(&'static Kernel, String)>> {
    let mut found: Vec<(&'static Kernel, String)> = Vec::new();
    for kernel in manifest::kernels().iter().filter(|kernel| kernel.target.runs_on(gpu)) {
        let (symbol, Some(case)) = (kernel.symbol(), case(kernel)) else { continue };
        if symbol.contains(pattern) && !found.iter().any(|(other, _)| other.symbol() == symbol) {
            found.push((kernel, case));
        }
    }
    if found.iter().any(|(kernel, _)| kernel.symbol() == pattern) {
        found.retain(|(kernel, _)| kernel.symbol() == pattern);
    }
    if found.is_empty() {
        match manifest::kernels().iter().map(Kernel::symbol).find(|symbol| symbol.contains(pattern))
        {
            Some(symbol) => {
                bail!("{symbol} is a kernel that {gpu} does not run, or that belongs to no case")
            }
            None => bail!("no kernel has {pattern:?} in its name; `blockflash info` lists them"),
        }
    }
    Ok(found)
}

/// The default case of a kernel; `None` if no case launches the kernel.
fn case(kernel: &Kernel) -> Option<String> {
    kernel.family().profile_case()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: ComputeCapability = ComputeCapability::new(9, 0);

    #[test]
    fn symbols_are_selected_once_and_preferred_code_first() {
        let selected = |pattern| kernels(pattern, HOPPER).unwrap();
        let kernels = selected("attention_fwd_sm80_f16_d96");
        assert_eq!(kernels.len(), 1);
        assert!(!kernels[0].0.target.is_ptx());
        assert_eq!(super::kernels(&kernels[0].0.symbol(), HOPPER).unwrap(), kernels);
        assert!(selected("bsr_matmul_sm80_bf16_b128").len() > 1);
        for (pattern, case) in [
            ("attention_fwd_sm80_f16_d96", "b4_s4096_h21_d96_full_f16"),
            ("attention_fwd_sm90a_bf16_d192_", "b4_s4096_h10_d192_full_bf16"),
            ("attention_bwd_kv_sm90a_bf16_d128", "bwd_b4_s4096_h16_d128_full_bf16"),
            (
                "attention_decode_sm80_bf16_d64_n8",
                "decode_b64_q1_kv8192_h64kv8_d64_contiguous_full_bf16",
            ),
            ("bsr_matmul_sm80_bf16_b128", "m8192_n1024_k8192_b128_d0.1_uniform_bf16"),
            (
                "bsr_sddmm_sm90a_bf16_b64_column_row",
                "sddmm_m8192_n8192_k4096_b64_d0.1_uniform_column_row_bf16",
            ),
        ] {
            assert_eq!(selected(pattern)[0].1, case);
        }
    }

    #[test]
    fn what_selects_nothing_is_told() {
        let message = |pattern, gpu| kernels(pattern, gpu).unwrap_err().to_string();
        assert!(message("d65", HOPPER).contains("`blockflash info` lists them"));
        assert!(message("_d64_", ComputeCapability::new(7, 5)).contains("sm_75"));
    }
}
