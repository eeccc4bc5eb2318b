use blockflash_ops::{DType, HeadDims};
use blockflash_tests::attention::Choice;
use blockflash_tests::attention_index::{
    IndexCase, IndexForm, RowKind, lists_survive_garbage, run_index_case,
};
use blockflash_tests::host::all_pass;

/// Random cases of all layouts, granularities and groups of heads.
#[test]
fn against_the_definition() {
    let granularities = [1, 4, 7, 16, 64, 128];
    for (dtype, qk, v, rows) in [
        (DType::F32, 24, 24, RowKind::Plain),
        (DType::BF16, 64, 64, RowKind::Plain),
        (DType::F16, 72, 40, RowKind::Plain),
        (DType::BF16, 128, 128, RowKind::Plain),
        (DType::F32, 5, 3, RowKind::Plain),
        (DType::BF16, 576, 512, RowKind::Latent),
        (DType::F16, 72, 24, RowKind::Latent),
        (DType::BF16, 576, 512, RowKind::LatentCodes),
        (DType::BF16, 64, 48, RowKind::Codes),
    ] {
        let form = IndexForm { dtype, head_dims: HeadDims { qk, v }, rows };
        let cases: Vec<_> =
            (0..60).map(|seed| IndexCase::random(seed, form, &granularities)).collect();
        all_pass(&cases, |case, stream| run_index_case(case, Choice::Selected, stream));
    }
}

#[test]
fn garbage() {
    for rows in [RowKind::Plain, RowKind::Latent] {
        let form = IndexForm { dtype: DType::BF16, head_dims: HeadDims { qk: 72, v: 24 }, rows };
        let seeds: Vec<u64> = (0..60).collect();
        all_pass(&seeds, |&seed, stream| {
            lists_survive_garbage(seed, form, Choice::Selected, stream)
        });
    }
}
