//! The Hopper kernels with score terms against the oracle, where they have many key tiles: steps
//! without and with masks, boxes of a bias and bits of partial blocks in turns.

use blockflash_ops::DType;
use blockflash_ops::attention::{Align, Mask};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionTile, Variant};
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::score_terms::{BiasCase, SlopesOf, TermCase, TermData, run_forward};
use std::collections::BTreeMap;

/// Kernels by element type and head dimension.
type Groups = BTreeMap<(DType, usize), Vec<(&'static Kernel, AttentionTile)>>;

#[test]
fn many_key_tiles() {
    let Some(gpu) = gpu("score_terms_hopper_gpu::many_key_tiles") else { return };
    let mut groups = Groups::new();
    for kernel in gpu.kernels() {
        let Variant::AttentionFwdHopper(hopper) = kernel.variant else { continue };
        let tile = hopper.tile();
        if tile.terms {
            groups.entry((tile.types.q, tile.head_dims.qk)).or_default().push((kernel, tile));
        }
    }
    let check = |((dtype, head_dim), kernels): (_, Vec<_>), gpu: &Gpu, report: &mut Report| {
        let cases = cases(dtype, head_dim);
        report.run_cases(
            gpu,
            &cases,
            &kernels,
            TermData::generate,
            |case, data, (kernel, tile), stream| match takes(tile, case) {
                true => run_forward(case, data, Some(kernel), stream),
                false => Ok(0),
            },
        );
    };
    gpu.check_groups("score_terms_hopper_gpu", &Report::default(), groups, check);
}

/// Whether tiles divide the blocks of a case.
fn takes(tile: &AttentionTile, case: &TermCase) -> bool {
    let divides = |block: usize| {
        tile.takes_block_masks()
            && [tile.block_q, tile.block_kv].iter().all(|&side| block.is_multiple_of(side as usize))
    };
    case.block.is_none_or(divides)
}

fn cases(dtype: DType, head_dim: usize) -> Vec<TermCase> {
    let window = Mask::Window { left: Some(300), right: Some(40), align: Align::BottomRight };
    let top = Mask::Causal { align: Align::TopLeft };
    let masks = [Mask::Full, Mask::causal(), window, top];
    let lengths = [[330_usize, 777], [257, 1030], [130, 520], [513, 513]];
    let mut cases = Vec::new();
    for at in 0..16usize {
        let [batch, heads] = [0, 1].map(|bit| at >> bit & 1 == 1);
        let seqlens = lengths[at / 4];
        // Rows begin at multiples of 16 bytes.
        let gap = seqlens[1].next_multiple_of(8) - seqlens[1] + 8 * (at % 3);
        let broadcast = [batch, heads, false, false];
        cases.push(TermCase {
            batch: 3,
            bias: Some(BiasCase { dtype, broadcast, transposed: false, gap }),
            mask: masks[(at + at / 4) % 4],
            softcap: (at % 7 == 3).then_some(15.0),
            sink: at % 5 == 1,
            alibi: [None, None, Some(SlopesOf::Entries)][at % 3],
            block: [None, None, None, Some(64), Some(128)][at % 5],
            poisoned: at % 2 == 0,
            ..TermCase::simple(dtype, head_dim, seqlens, 100 * at as u64)
        });
    }
    for at in 0..8usize {
        cases.push(TermCase {
            block: Some([64, 128][at % 2]),
            mask: masks[at / 2],
            softcap: (at == 5).then_some(20.0),
            sink: at == 2,
            alibi: (at > 5).then_some(SlopesOf::Heads),
            poisoned: at % 3 == 0,
            heads: [[2, 2], [6, 2]][at % 2],
            ..TermCase::simple(dtype, head_dim - 8 * (at % 2), lengths[at % 4], 5000 + at as u64)
        });
    }
    for (at, mask) in masks.into_iter().enumerate() {
        cases.push(TermCase {
            alibi: Some([SlopesOf::Heads, SlopesOf::Entries][at % 2]),
            mask,
            sink: at == 3,
            ..TermCase::simple(dtype, head_dim, lengths[at], 6000 + at as u64)
        });
    }
    cases
}
