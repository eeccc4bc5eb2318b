use super::*;
use crate::{Expect, manifest, manifest::Variant};

#[test]
fn hopper_kernels() {
    let kernels: Vec<_> = manifest::kernels()
        .iter()
        .filter_map(|kernel| match kernel.variant {
            Variant::AttentionFwdHopper(tile) => Some((kernel, tile)),
            _ => None,
        })
        .collect();
    assert_eq!(kernels.len(), 64 + 8 + 14 + 8);
    for (kernel, tile) in &kernels {
        assert_eq!((kernel.target, kernel.source()), (Target::Sm90a, "attention_fwd_sm90a"));
        assert_eq!(kernel.threads(), 128 * (tile.warpgroups + 1));
        assert!(
            kernel.smem_bytes() <= kernel.target.smem_limit(),
            "{}: {}",
            kernel.symbol(),
            kernel.smem_bytes()
        );
        assert!(tile.cost_ns.iter().all(|cost| (500..5000).contains(cost)));
        assert_eq!(kernel.attention_tile(), Some(tile.tile()));
        assert!([1, tile.warpgroups].contains(&tile.heads));
        assert!([1, tile.warpgroups / tile.heads].contains(&tile.block_rows));
        assert_eq!(kernel.symbol().contains("_h2"), tile.heads == 2);
        assert_eq!(kernel.symbol().contains("_r2"), tile.block_rows == 2);
        assert_eq!(tile.tile().queries() * tile.heads, 64 * tile.warpgroups);
        assert_eq!(kernel.symbol().ends_with("_terms"), tile.terms && !tile.bits_only);
        assert_eq!(kernel.symbol().ends_with("_bits"), tile.bits_only);
        if tile.bits_only {
            assert!(tile.tile().lse == Lse::Never && tile.tile().terms);
            assert!(tile.tile().takes_block_masks());
        } else if tile.terms {
            assert!([false, true].map(|asked| tile.tile().lse.suits(asked)) == [true; 2]);
            assert!(tile.lse && tile.tile().terms);
            assert_eq!(tile.tile().takes_block_masks(), tile.block_q() != 192);
        } else {
            assert_eq!(kernel.symbol().ends_with("_lse"), tile.lse);
            assert!(tile.tile().lse.suits(tile.lse) && !tile.tile().lse.suits(!tile.lse));
        }
        let twin = AttentionFwdHopper { lse: !tile.lse, terms: false, bits_only: false, ..*tile };
        assert!(
            kernels.iter().any(|(_, other)| *other == twin),
            "with and without the log-sum-exp"
        );
        assert!(kernel.expects().contains(&Expect::Contains("UTMALDG")));
    }
    let (kernel, _) = kernels[0];
    assert_eq!(kernel.symbol(), "blockflash_attention_fwd_sm90a_f16_d64_q192_kv128_s2");
    assert_eq!(kernel.smem_bytes(), 174_080);
    for (kernel, tile) in &kernels {
        // CTAs that share an SM have 228 KB together, and 1 KB each is reserved.
        let together = tile.blocks_per_multiprocessor * (kernel.smem_bytes() + 1024);
        assert!(together <= 228 * 1024, "{}: {together}", kernel.symbol());
    }
    let bytes_of = |head_dims, block_kv, block_q, heads_and_rows| {
        let same = |tile: &AttentionFwdHopper| {
            (tile.head_dims, tile.block_kv, tile.block_q(), [tile.heads, tile.block_rows])
                == (head_dims, block_kv, block_q, heads_and_rows)
        };
        kernels.iter().find(|(_, tile)| same(tile)).unwrap().0.smem_bytes()
    };
    let bytes =
        |head_dim, block_kv, block_q| bytes_of(HeadDims::all(head_dim), block_kv, block_q, [1, 1]);
    assert_eq!(bytes(96, 128, 128), 198_656);
    assert_eq!(bytes(128, 128, 128), 231_424);
    assert_eq!(bytes(128, 64, 64), 100_352);
    assert_eq!(bytes(192, 64, 128), 223_232);
    assert_eq!(bytes_of(HeadDims::all(128), 64, 64, [1, 2]), 223_744);
    // Both stages of V share the ones, or the output has a place.
    assert_eq!([128, 64].map(|block_kv| bytes_of(MLA, block_kv, 128, [1, 1])), [231_424; 2]);
    // Boxes of the bias: for each warpgroup one more than a step takes.
    let with_terms = kernels.iter().filter(|(kernel, tile)| {
        tile.terms
            && !tile.bits_only
            && kernel.symbol().starts_with("blockflash_attention_fwd_sm90a_f16_")
    });
    assert_eq!(
        with_terms.map(|(kernel, _)| kernel.smem_bytes()).collect::<Vec<_>>(),
        [206_848, 165_888, 67_584, 231_424, 108_544, 231_424, 182_272]
    );
    let macros = kernel.macros();
    for (name, value) in
        [("VARIANT_WARPGROUPS", "3"), ("VARIANT_Q_IN_REGISTERS", "0"), ("VARIANT_MIN_BLOCKS", "1")]
    {
        assert!(macros.contains(&(name, value.to_owned())), "{name}");
    }
}
