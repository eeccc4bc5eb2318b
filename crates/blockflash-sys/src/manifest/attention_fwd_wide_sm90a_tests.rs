use super::*;
use crate::manifest::{self, Variant};

#[test]
fn wide_kernels() {
    let kernels: Vec<_> = manifest::kernels()
        .iter()
        .filter_map(|kernel| match kernel.variant {
            Variant::AttentionFwdWide(tile) => Some((kernel, tile)),
            _ => None,
        })
        .collect();
    let symbols: Vec<_> = kernels.iter().map(|(kernel, _)| kernel.symbol()).collect();
    assert_eq!(
        symbols,
        ["f16", "bf16"]
            .map(|dtype| format!("blockflash_attention_fwd_wide_sm90a_{dtype}_d512_q64_kv64"))
    );
    for (kernel, tile) in kernels {
        assert_eq!((kernel.target, kernel.threads()), (Target::Sm90a, 384));
        // Three tiles of 64 KiB, three of probabilities, and 2 KiB.
        assert_eq!(kernel.smem_bytes(), (3 * 64 + 3 * 8 + 2) * 1024);
        assert!(kernel.smem_bytes() <= kernel.target.smem_limit());
        assert!(kernel.waits_for_predecessor() && !kernel.family().is_persistent());
        let of_all = kernel.attention_tile().unwrap();
        assert_eq!(of_all, tile.tile());
        assert_eq!([of_all.queries(), of_all.block_kv], [64, 64]);
        assert!(!of_all.takes_block_masks() && !of_all.dense_only && !of_all.terms);
        assert!([false, true].map(|asked| of_all.lse.suits(asked)) == [true; 2]);
    }
}
