use blockflash_ops::{DType, HeadDims};
use blockflash_tests::attention::Choice;
use blockflash_tests::attention_latent::{latent_cases, run_latent_case};
use blockflash_tests::host::all_pass;

/// The cases that every kernel on a GPU computes, and other widths.
#[test]
fn latent_rows() {
    for (dtype, step) in [(DType::BF16, 5), (DType::F32, 7)] {
        for dims in [HeadDims { qk: 576, v: 512 }, HeadDims { qk: 72, v: 24 }] {
            let cases: Vec<_> = latent_cases(dtype, dims).into_iter().step_by(step).collect();
            all_pass(&cases, |case, stream| run_latent_case(case, Choice::Selected, stream));
        }
    }
}
