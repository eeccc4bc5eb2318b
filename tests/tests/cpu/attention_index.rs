use blockflash_ops::{DType, HeadDims};
use blockflash_tests::attention::Choice;
use blockflash_tests::attention_index::{IndexCase, IndexForm, run_index_case};
use blockflash_tests::host::all_pass;

/// Random cases of all layouts, granularities and groups of heads.
#[test]
fn against_the_definition() {
    let granularities = [1, 4, 7, 16, 64, 128];
    for (dtype, qk, v, latent) in [
        (DType::F32, 24, 24, false),
        (DType::BF16, 64, 64, false),
        (DType::F16, 72, 40, false),
        (DType::BF16, 128, 128, false),
        (DType::F32, 5, 3, false),
        (DType::BF16, 576, 512, true),
        (DType::F16, 72, 24, true),
    ] {
        let form = IndexForm { dtype, head_dims: HeadDims { qk, v }, latent };
        let cases: Vec<_> =
            (0..60).map(|seed| IndexCase::random(seed, form, &granularities)).collect();
        all_pass(&cases, |case, stream| run_index_case(case, Choice::Selected, stream));
    }
}
