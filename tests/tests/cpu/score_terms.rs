use blockflash_ops::DType;
use blockflash_tests::host::all_pass;
use blockflash_tests::score_terms::{TermCase, TermData, run_backward, run_forward, term_cases};

#[test]
fn agrees_with_the_oracle() {
    let cases: Vec<TermCase> = [(DType::F16, 16), (DType::BF16, 24)]
        .into_iter()
        .flat_map(|(t, d)| term_cases(t, d))
        .collect();
    all_pass(&cases, |case, stream| {
        let data = TermData::generate(case);
        Ok(run_forward(case, &data, None, stream)? + run_backward(case, &data, None, stream)?)
    });
}
