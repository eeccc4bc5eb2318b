use super::super::{Attention, AttentionProblem, accepts, as_asked, plan, select};
use super::*;
use crate::BlockGeometry;
use crate::fixtures::{gpu, gpus};
use crate::selection::select_among;
use blockflash_safe::View;
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::{DType, Kernel, Target};
use half::f16;

fn mask([seqlen_q, seqlen_kv]: [usize; 2], batch: usize, heads: usize) -> BlockMask {
    let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, 64, 128).unwrap();
    let blocks = vec![true; batch * heads * geometry.rows() * geometry.cols()];
    BlockMask::from_bool(geometry, batch, heads, &blocks).unwrap()
}

/// Batch 2, 100 queries, 200 keys, 4 and 2 heads.
fn of(mask: &BlockMask) -> Result<AttentionProblem> {
    let (q, k) = (vec![f16::ONE; 2 * 100 * 4 * 8], vec![f16::ONE; 2 * 200 * 2 * 8]);
    let q = View::from_slice(&q, &[2, 100, 4, 8]).unwrap();
    let k = View::from_slice(&k, &[2, 200, 2, 8]).unwrap();
    Attention { block_mask: Some(mask), ..Attention::new(q, k, k) }.problem()
}

#[test]
fn masks_that_fit() {
    for (batch, heads) in [1, 2].into_iter().flat_map(|batch| [1, 2, 4].map(|heads| (batch, heads)))
    {
        let sizes = of(&mask([100, 200], batch, heads)).unwrap().block_mask.unwrap();
        let [batch, heads] = [batch, heads].map(|count| count as u32);
        assert_eq!(
            sizes,
            BlockMaskSizes {
                block_q: 64,
                block_kv: 128,
                batch,
                heads,
                packed_rows: None,
                bits: false
            }
        );
        let followed = [0, 1, 2, 3].map(|head| sizes.head(head, 4));
        assert_eq!(followed, [0, 1, 2, 3].map(|head| head * heads as usize / 4));
    }
}

#[test]
fn masks_that_do_not_fit() {
    for (seqlens, batch, heads) in [
        ([101, 200], 1, 1),
        ([100, 199], 1, 1),
        ([200, 100], 1, 1),
        ([100, 200], 3, 1),
        ([100, 200], 1, 3),
        ([100, 200], 1, 8),
    ] {
        match of(&mask(seqlens, batch, heads)) {
            Err(Error::Shape { what: "block_mask", found, .. }) => {
                assert_eq!(found, [batch, heads, seqlens[0], seqlens[1]]);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        of(&mask([100, 200], 3, 1)).unwrap_err().to_string(),
        "block_mask has shape [3, 1, 100, 200], expected [1 or 2, 1 or 2 or 4, 100, 200] in \
         queries and keys"
    );
}

/// Batch 2, 300 queries, 500 keys, 8 and 2 heads.
fn sparse(head_dim: usize, block_q: u32, block_kv: u32) -> AttentionProblem {
    let dense = AttentionProblem::dense(DType::F16, [2, 300, 500], [8, 2], head_dim);
    let sizes =
        BlockMaskSizes { block_q, block_kv, batch: 1, heads: 1, packed_rows: None, bits: false };
    AttentionProblem { block_mask: Some(sizes), ..dense }
}

fn attention_kernels() -> impl Iterator<Item = (&'static Kernel, AttentionTile)> {
    let kernels = manifest::kernels().iter();
    let tiles = kernels.filter_map(|kernel| Some((kernel, kernel.attention_tile()?)));
    // Those with score terms do not take full blocks alone.
    tiles.filter(|(_, tile)| tile.block_masks && !tile.terms)
}

#[test]
fn every_gpu_runs_every_block_size() {
    let blocks = (1..=16).flat_map(|q| (1..=16).map(move |kv| [64 * q, 64 * kv]));
    for (gpu, [block_q, block_kv]) in
        gpus().iter().flat_map(|gpu| blocks.clone().map(move |b| (gpu, b)))
    {
        for head_dim in [8, 64, 72, 96, 104, 128, 136, 192, 200, 256, 264, 512] {
            let problem = sparse(head_dim, block_q, block_kv);
            let kernels = manifest::kernels();
            let kernel = select_among(kernels, &problem, gpu).unwrap();
            let chosen = kernel.attention_tile().unwrap();
            assert!(block_q % chosen.block_q == 0 && block_kv % chosen.block_kv == 0);
            plan(kernel, &problem, gpu).unwrap();
            // Of what fits on the preferred target nothing is narrower, and of that width nothing
            // has larger tiles.
            let fitting = kernels.iter().filter(|other| other.target == kernel.target);
            for other in fitting.filter(|other| accepts(other, &problem, gpu).is_ok()) {
                let tile = other.attention_tile().unwrap();
                assert!(tile.head_dims.qk >= chosen.head_dims.qk);
                let size = |tile: AttentionTile| (tile.block_q, tile.block_kv);
                assert!(tile.head_dims.qk > chosen.head_dims.qk || size(tile) <= size(chosen));
            }
        }
    }
}

#[test]
fn partial_blocks_need_kernels_that_read_their_bits() {
    let full = mask([100, 200], 1, 1);
    assert!(!of(&full).unwrap().block_mask.unwrap().bits);
    let partial = full.with_bits(&[-1; 4], &[]).unwrap();
    assert!(of(&partial).unwrap().block_mask.unwrap().bits);
    let problem = sparse(64, 64, 64);
    let sizes = BlockMaskSizes { bits: true, ..problem.block_mask.unwrap() };
    let partial = AttentionProblem { block_mask: Some(sizes), ..problem };
    for gpu in gpus() {
        let reads_bits = |problem| select(problem, &gpu).unwrap().attention_tile().unwrap().terms;
        assert!(!reads_bits(&problem) && reads_bits(&partial), "{}", gpu.name);
        let plain = select(&problem, &gpu).unwrap();
        let error = accepts(plain, &partial, &gpu).unwrap_err().to_string();
        assert!(error.contains("a block mask with partial blocks is given"), "{error}");
    }
}

#[test]
fn tiles_divide_the_blocks() {
    let h200 = gpu(9, 0);
    let tile = |kernels, head_dim, block_q, block_kv| {
        let kernel = select_among(kernels, &sparse(head_dim, block_q, block_kv), &h200).unwrap();
        let tile = kernel.attention_tile().unwrap();
        (kernel.target, [tile.head_dims.qk as u32, tile.block_q, tile.block_kv])
    };
    let portable: Vec<Kernel> = manifest::kernels()
        .iter()
        .filter(|kernel| kernel.target != Target::Sm90a)
        .cloned()
        .collect();
    let portable = |head_dim, block_q, block_kv| tile(&portable, head_dim, block_q, block_kv).1;
    assert_eq!(portable(64, 128, 128), [64, 128, 64]);
    assert_eq!(portable(64, 64, 128), [64, 64, 64]);
    assert_eq!(portable(64, 192, 64), [64, 64, 64]);
    assert_eq!(portable(128, 256, 192), [128, 128, 64]);
    assert_eq!(portable(128, 64, 64), [128, 64, 64]);
    // No tile of 96 has 64 queries: the next wider one that does.
    assert_eq!(portable(96, 128, 64), [96, 128, 64]);
    assert_eq!(portable(96, 64, 64), [128, 64, 64]);
    assert_eq!(portable(256, 64, 64), [256, 64, 64]);
    assert_eq!(portable(264, 64, 192), [512, 32, 32]);
    // Hopper's own kernels come first, wider ones included.
    let (target, [_, block_q, block_kv]) = tile(manifest::kernels(), 64, 128, 128);
    assert_eq!((target, block_q, block_kv), (Target::Sm90a, 128, 128));
    assert_eq!(tile(manifest::kernels(), 64, 192, 128), (Target::Sm90a, [64, 192, 128]));
    assert_eq!(tile(manifest::kernels(), 64, 64, 128), (Target::Sm90a, [64, 64, 128]));
}

#[test]
fn a_kernel_says_that_its_tiles_do_not_divide() {
    for (kernel, tile) in attention_kernels().filter(|(_, tile)| tile.types.q == DType::F16) {
        let gpu =
            gpus().into_iter().find(|gpu| kernel.target.runs_on(gpu.compute_capability)).unwrap();
        let (head_dim, [q, kv]) = (tile.head_dims.min(), [tile.block_q, tile.block_kv]);
        accepts(kernel, &as_asked(sparse(head_dim, 2 * q, 3 * kv), &tile), &gpu).unwrap();
        for (block_q, block_kv) in [(q / 2, kv), (q, kv / 2), (3 * q / 2, kv), (0, kv), (q, 0)] {
            let problem = as_asked(sparse(head_dim, block_q, block_kv), &tile);
            let error = accepts(kernel, &problem, &gpu).unwrap_err().to_string();
            let expected = format!(
                "tiles of {q} × {kv} do not divide the blocks of the mask, {block_q} × {block_kv}"
            );
            assert!(error.contains(&expected), "{error}");
            let error = plan(kernel, &problem, &gpu).unwrap_err().to_string();
            assert!(error.contains(&expected), "{error}");
        }
    }
    let error = select(&sparse(64, 16, 64), &gpu(8, 0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "attention is not supported on sm_80: head_dim 64: no kernel has tiles that divide blocks \
         of 16 × 64"
    );
}

#[test]
fn plans_say_how_the_mask_is_read() {
    let h200 = gpu(9, 0);
    for (kernel, tile) in attention_kernels().filter(|(_, tile)| tile.head_dims.qk >= 64) {
        let [block_q, block_kv] = [2 * tile.block_q, 2 * tile.block_kv];
        let planned = |batch, heads| {
            let sizes =
                BlockMaskSizes { block_q, block_kv, batch, heads, packed_rows: None, bits: false };
            let types = tile.types;
            let problem = AttentionProblem { types, block_mask: Some(sizes), ..sparse(64, 0, 0) };
            plan(kernel, &as_asked(problem, &tile), &h200)
        };
        for (batch, heads) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            let plan = planned(batch, heads).unwrap();
            assert_eq!(plan.plan.scalars.blocks, [block_q, block_kv].map(|size| size as i32));
            // Two tiles per row, for 8 heads of 2 entries.
            let tiles = 2 * 300u32.div_ceil(block_q) * (8 / tile.heads) * 2;
            let blocks = match kernel.variant {
                Variant::AttentionFwdHopper(tile) => {
                    tiles.min(108 * tile.blocks_per_multiprocessor)
                }
                _ => tiles,
            };
            assert_eq!(plan.config.grid, [blocks, 1, 1]);
        }
        if tile.heads == 1 {
            assert!(planned(1, 8).is_ok() && planned(2, 8).is_ok());
        } else {
            assert!(planned(1, 8).unwrap_err().to_string().contains("share a tile"));
        }
        // Tiles take unequal time: as under a window.
        if let Variant::AttentionFwdHopper(_) = kernel.variant {
            assert_eq!(planned(1, 1).unwrap().plan.heads_per_section, 16);
        }
    }
}
