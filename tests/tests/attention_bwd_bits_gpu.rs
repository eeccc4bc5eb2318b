//! Gradients under partial blocks and with ALiBi, on the kernels of Hopper: longer sequences,
//! packed ones, and the same bits every time.
#![forbid(unsafe_code)]

use blockflash_ops::DType;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionBwdTile, Variant};
use blockflash_tests::attention::{
    AlibiCase, AttentionCase, BlockCase, BlockPattern, Blocks, Choice, Lengths, MaskHeads, Terms,
    visible_keys,
};
use blockflash_tests::attention_bwd::{
    BackwardData, BackwardReference, repeated_gradients, run_and_check, run_case,
};
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::host::cpu;
use std::collections::BTreeMap;

type Groups = BTreeMap<(DType, usize), Vec<(&'static Kernel, AttentionBwdTile)>>;

/// The kernels of Hopper with score terms.
fn groups(gpu: &Gpu) -> Groups {
    let mut groups = Groups::new();
    for kernel in gpu.kernels() {
        let hopper = matches!(kernel.variant, Variant::AttentionBwdHopper(tile) if tile.terms);
        if let Some(tile) = kernel.attention_bwd_tile().filter(|_| hopper) {
            groups.entry((tile.types.q, tile.head_dims.qk)).or_default().push((kernel, tile));
        }
    }
    groups
}

fn blocks(size: usize, heads: MaskHeads) -> Option<BlockCase> {
    let (per_entry, pattern) = (heads != MaskHeads::One, BlockPattern::Random(0.7));
    Some(BlockCase { block_q: size, block_kv: size, per_entry, heads, pattern })
}

/// Partial blocks of all sizes with every other option, dense and packed, and slopes without
/// blocks.
fn cases(dtype: DType, head_dim: usize) -> Vec<AttentionCase> {
    let simple = AttentionCase::simple(dtype, (4, 2), head_dim, (700, 900));
    let window = Mask::Window { left: Some(300), right: Some(50), align: Align::BottomRight };
    let packed = || {
        let lengths = vec![(300, 500), (0, 40), (260, 130), (64, 64), (1, 1)];
        Lengths::Packed { lengths, slack: (3, 5) }
    };
    let scores = |mask| Scores { mask, sink: Some(()), ..Scores::default() };
    let alibi = |of| Terms { alibi: Some(of), ..Terms::default() };
    let partial = |terms: Terms| Terms { partial: true, ..terms };
    let mut cases = Vec::new();
    for size in [64, 128] {
        for (at, heads) in
            [MaskHeads::One, MaskHeads::KeyValue, MaskHeads::Query].into_iter().enumerate()
        {
            let block_mask = blocks(size, heads);
            let mask = [Mask::causal(), Mask::Full, window][at];
            let terms = partial(Terms::default());
            let of = AttentionCase { block_mask, terms, seed: at as u64, ..simple.clone() };
            cases.push(AttentionCase { scores: scores(mask), ..of.clone() });
            let softcap = (at == 1).then_some(20.0);
            cases.push(AttentionCase {
                terms: partial(alibi([AlibiCase::PerHead, AlibiCase::PerEntry][at % 2])),
                scores: Scores { softcap, ..scores(Mask::Full) },
                lengths: Lengths::Dense { batch: 2, seqlen_q: 520, seqlen_kv: 650 },
                ..of.clone()
            });
            let terms = if at == 2 { partial(alibi(AlibiCase::PerHead)) } else { of.terms.clone() };
            let (scores, lengths) = (scores(mask), packed());
            cases.push(AttentionCase { scores, lengths, terms, ..of });
        }
    }
    for (mask, softcap) in [(Mask::causal(), None), (window, None), (Mask::Full, Some(15.0))] {
        let scores = Scores { softcap, ..scores(mask) };
        let of = AttentionCase { scores, terms: alibi(AlibiCase::PerHead), ..simple.clone() };
        cases.push(AttentionCase { heads_q: 14, heads_kv: 2, ..of.clone() });
        cases.push(AttentionCase { heads_q: 4, heads_kv: 4, ..of.clone() });
        cases.push(AttentionCase { lengths: packed(), ..of });
    }
    cases
}

/// Whether a kernel has to refuse a case.
fn is_refused(case: &AttentionCase, tile: &AttentionBwdTile) -> bool {
    let divides = |tile: u32, block: usize| block.is_multiple_of(tile as usize);
    case.block_mask.is_some_and(|mask| {
        !divides(tile.block_q, mask.block_q) || !divides(tile.block_kv, mask.block_kv)
    })
}

/// The mask of the library has the bits that the oracle is told.
#[test]
fn masks_are_those_of_the_cases() {
    for case in cases(DType::BF16, 64) {
        let Some(mask) = case.block_mask(&cpu()).unwrap() else { continue };
        let (block, blocks) = (case.block_mask.unwrap(), Blocks::of(&case));
        for (entry, sequence) in case.sequences().iter().enumerate() {
            for query in (0..sequence.q_len).step_by(13) {
                for head in 0..case.heads_q {
                    let of_mask = match block.heads {
                        MaskHeads::One => 0,
                        MaskHeads::KeyValue => head / (case.heads_q / case.heads_kv),
                        MaskHeads::Query => head,
                    };
                    let entry_of_mask = if mask.batch() == 1 { 0 } else { entry };
                    let sees =
                        |&key: &usize| mask.is_visible(entry_of_mask, of_mask, query, key).unwrap();
                    let seen: Vec<usize> =
                        visible_keys(&case, sequence, query).filter(sees).collect();
                    let told = case.attended_keys(blocks.as_ref(), [entry, query, head], sequence);
                    assert_eq!(seen, told.collect::<Vec<_>>(), "{case:?} {entry} {query} {head}");
                }
            }
        }
    }
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_bwd_bits_gpu::every_kernel") else { return };
    let check = |((dtype, head_dim), kernels): (_, Vec<_>), gpu: &Gpu, report: &mut Report| {
        for case in cases(dtype, head_dim) {
            let data = BackwardData::generate(&case);
            let reference = BackwardReference::compute(&case, &data);
            report.run_each(gpu, &kernels, |kernel, tile, stream| {
                let run = run_and_check(&case, &data, &reference, Choice::This(kernel), stream);
                match (is_refused(&case, tile), run) {
                    (false, run) => run,
                    (true, Err(error)) if error.contains("divide") => Ok(0),
                    (true, run) => Err(format!("not refused: {run:?} {case:?}")),
                }
            });
        }
    };
    gpu.check_groups("attention_bwd_bits_gpu", &Report::default(), groups(&gpu), check);
}

/// The selected kernels, for head dimensions between those of the tiles.
#[test]
fn selected_schemes() {
    let Some(gpu) = gpu("attention_bwd_bits_gpu::selected_schemes") else { return };
    for (dtype, head_dim) in [(DType::F16, 40), (DType::BF16, 96), (DType::BF16, 128)] {
        for case in cases(dtype, head_dim) {
            run_case(&case, Choice::Selected, &gpu.stream).unwrap();
        }
    }
}

#[test]
fn the_same_bits() {
    let Some(gpu) = gpu("attention_bwd_bits_gpu::the_same_bits") else { return };
    let simple = AttentionCase::simple(DType::BF16, (8, 4), 128, (1500, 1700));
    for (size, head_dim) in [(128, 128), (128, 64), (64, 128)] {
        for mask in [Mask::Full, Mask::causal()] {
            let case = AttentionCase {
                block_mask: blocks(size, MaskHeads::Query),
                terms: Terms { bias: None, alibi: Some(AlibiCase::PerHead), partial: true },
                scores: mask.into(),
                head_dim,
                ..simple.clone()
            };
            repeated_gradients(&case, Choice::Selected, 500, &gpu.stream).unwrap();
        }
    }
}
