use blockflash_ops::{DType, HeadDims};
use blockflash_tests::attention_index_bwd::{IndexBackwardCase, run_index_backward};
use blockflash_tests::host::all_pass;

/// Random cases of all granularities and groups of heads, dense and packed.
#[test]
fn gradients_against_the_definition() {
    let granularities = [1, 4, 7, 16, 64, 128];
    for (dtype, qk, v) in
        [(DType::F32, 24, 24), (DType::BF16, 64, 64), (DType::F16, 72, 40), (DType::F32, 5, 3)]
    {
        let cases: Vec<_> = (0..30)
            .map(|seed| {
                IndexBackwardCase::random(seed, (dtype, HeadDims { qk, v }), &granularities)
            })
            .collect();
        all_pass(&cases, |case, stream| run_index_backward(case, None, stream));
    }
}
