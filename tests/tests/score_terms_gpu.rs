//! Every kernel with score terms that the GPU can run against the oracle.

use blockflash_ops::DType;
use blockflash_sys::Kernel;
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::score_terms::{TermCase, TermData, run_backward, run_forward, term_cases};
use std::collections::BTreeMap;

/// Kernels of both passes, by element type and head dimension.
type Groups = BTreeMap<(DType, usize), Vec<(&'static Kernel, bool)>>;

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("score_terms_gpu::every_kernel") else { return };
    let mut groups = Groups::new();
    for kernel in gpu.kernels() {
        let forward = kernel.attention_tile().filter(|tile| tile.terms);
        let backward = kernel.attention_bwd_tile().filter(|tile| tile.terms);
        let key = match (forward, backward) {
            (Some(tile), _) => (tile.types.q, tile.head_dims.qk),
            (_, Some(tile)) => (tile.types.q, tile.head_dims.qk),
            _ => continue,
        };
        groups.entry(key).or_default().push((kernel, forward.is_some()));
    }
    let check = |((dtype, head_dim), kernels): (_, Vec<_>), gpu: &Gpu, report: &mut Report| {
        let cases = term_cases(dtype, head_dim);
        report.run_cases(
            gpu,
            &cases,
            &kernels,
            TermData::generate,
            |case, data, (kernel, forward), stream| match forward {
                true => run_forward(case, data, Some(kernel), stream),
                false if is_refused(kernel, case) => Ok(0),
                false => run_backward(case, data, Some(kernel), stream),
            },
        );
    };
    gpu.check_groups("score_terms_gpu", &Report::default(), groups, check);
}

/// Whether the step of a kernel is not asked for, or a kernel of Hopper is given a bias or blocks
/// that its tiles do not divide.
fn is_refused(kernel: &Kernel, case: &TermCase) -> bool {
    use blockflash_sys::manifest::AttentionBwdStep::Bias;
    let Some(tile) = kernel.attention_bwd_tile() else { return false };
    let tiles = [tile.block_q, tile.block_kv].map(|tile| tile as usize);
    let divides = |block: usize| tiles.iter().all(|&tile| block.is_multiple_of(tile));
    match case.bias {
        Some(_) => !tile.takes_bias(),
        None => tile.step == Bias || !case.block.is_none_or(divides),
    }
}

/// The selected kernels, for head dimensions between those of the tiles.
#[test]
fn selected_kernels() {
    let Some(gpu) = gpu("score_terms_gpu::selected_kernels") else { return };
    for (dtype, head_dim) in [(DType::F16, 40), (DType::BF16, 96), (DType::F16, 200)] {
        for case in term_cases(dtype, head_dim) {
            let data = TermData::generate(&case);
            run_forward(&case, &data, None, &gpu.stream).unwrap();
            run_backward(&case, &data, None, &gpu.stream).unwrap();
        }
    }
}
