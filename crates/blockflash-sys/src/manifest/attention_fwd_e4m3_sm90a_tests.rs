use super::*;
use crate::{Expect, manifest, manifest::Variant};

#[test]
fn kernels_of_codes() {
    let kernels: Vec<_> = manifest::kernels()
        .iter()
        .filter_map(|kernel| match kernel.variant {
            Variant::AttentionFwdE4m3(tile) => Some((kernel, tile)),
            _ => None,
        })
        .collect();
    assert_eq!(kernels.len(), 2 * TILES.len());
    for (kernel, tile) in &kernels {
        assert_eq!((kernel.target, kernel.source()), (Target::Sm90a, "attention_fwd_e4m3_sm90a"));
        assert_eq!(kernel.threads(), 128 * (tile.warpgroups + 1));
        assert_eq!(kernel.attention_tile(), Some(tile.tile()));
        assert!(tile.cost_ns.iter().all(|cost| (100..5000).contains(cost)));
        // CTAs that share an SM have 228 KB together, and 1 KB each is reserved.
        let together = tile.blocks_per_multiprocessor * (kernel.smem_bytes() + 1024);
        assert!(together <= 228 * 1024, "{}: {together}", kernel.symbol());
        assert!(kernel.smem_bytes() <= kernel.target.smem_limit());
        assert!([false, true].map(|asked| tile.tile().lse.suits(asked)) == [true; 2]);
        assert!(tile.tile().takes_block_masks());
        for opcode in ["QGMMA", "UTMALDG", "LDSM", "STSM"] {
            assert!(kernel.expects().contains(&Expect::Contains(opcode)));
        }
        assert_eq!(tile.box_columns() as usize, tile.head_dims.max().min(128));
        let case = kernel.family().profile_case();
        assert_eq!(case.is_some(), tile.types.o == DType::BF16, "{case:?}");
    }
    let (kernel, _) = kernels[0];
    assert_eq!(kernel.symbol(), "blockflash_attention_fwd_e4m3_sm90a_f16_d64_q192_kv128_s3");
    let macros = kernel.macros();
    for (name, value) in [
        ("VARIANT_TYPE_Q", "5"),
        ("VARIANT_TYPE_O", "0"),
        ("VARIANT_HEAD_DIM_QK", "64"),
        ("VARIANT_WARPGROUPS", "3"),
        ("VARIANT_LOADED_STAGES", "2"),
        ("VARIANT_TURNED_STAGES", "3"),
        ("VARIANT_Q_IN_REGISTERS", "0"),
        ("VARIANT_SMEM_BYTES", "92160"),
        ("VARIANT_MIN_BLOCKS", "1"),
    ] {
        assert!(macros.contains(&(name, value.to_owned())), "{name}: {macros:?}");
    }
}

/// Every type of output, head dimension and block of 64 or 128 has a tile.
#[test]
fn tiles_for_block_masks() {
    for (o, head_dim, block) in [DType::F16, DType::BF16]
        .into_iter()
        .flat_map(|o| [64, 128, 256].map(|d| (o, d)))
        .flat_map(|(o, d)| [64, 128].map(|block| (o, d, block)))
    {
        let divides = |tile: AttentionFwdE4m3| {
            tile.types.o == o
                && tile.head_dims == HeadDims::all(head_dim)
                && [tile.block_q(), tile.block_kv].iter().all(|size| block % size == 0)
        };
        assert!(tiles(Target::Sm90a).any(divides), "{o} {head_dim} {block}");
    }
    assert_eq!(tiles(Target::Sm90).count(), 0);
}
