use blockflash_ops::{DType, HeadDims};
use blockflash_tests::attention::Choice;
use blockflash_tests::attention_latent::{latent_cases, run_latent_case};
use blockflash_tests::host::all_pass;

/// The cases that every kernel on a GPU computes, and other widths.
#[test]
fn latent_rows() {
    let mla = HeadDims { qk: 576, v: 512 };
    for (dtype, step) in [(DType::BF16, 5), (DType::F32, 7)] {
        for (dims, codes) in [(mla, false), (mla, true), (HeadDims { qk: 72, v: 24 }, false)] {
            let cases = latent_cases((dtype, dims, codes));
            let cases: Vec<_> = cases.into_iter().step_by(step).collect();
            all_pass(&cases, |case, stream| run_latent_case(case, Choice::Selected, stream));
        }
    }
}
