//! How many random cases, and which.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// Configuration of a property: the same cases in every run, unless `BLOCKFLASH_SEED` is set to a
/// number or to `random`. `BLOCKFLASH_CASES` multiplies the number of cases.
pub fn config(cases: u32) -> Config {
    let seed = match std::env::var("BLOCKFLASH_SEED") {
        Ok(text) if text == "random" => RngSeed::Random,
        Ok(text) => RngSeed::Fixed(text.parse().expect("BLOCKFLASH_SEED is a number or `random`")),
        Err(_) => RngSeed::Fixed(0x0B10_CF1A_5400),
    };
    let factor = std::env::var("BLOCKFLASH_CASES")
        .map_or(1, |text| text.parse::<u32>().expect("BLOCKFLASH_CASES is a number"));
    // The failing case is printed completely, so nothing needs to be written into the source tree.
    Config {
        cases: cases * factor,
        rng_seed: seed,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    }
}

/// Runs a property over random cases and shrinks a failing one.
pub fn check<S: Strategy>(
    cases: u32,
    strategy: S,
    property: impl Fn(S::Value) -> Result<(), String>,
) where
    S::Value: std::fmt::Debug,
{
    let result = TestRunner::new(config(cases))
        .run(&strategy, |case| property(case).map_err(TestCaseError::fail));
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Random cases as a list.
pub fn samples<S: Strategy>(cases: u32, strategy: S) -> Vec<S::Value> {
    let config = config(cases);
    let count = config.cases;
    let mut runner = TestRunner::new(config);
    (0..count)
        .map(|_| strategy.new_tree(&mut runner).expect("a strategy without rejections").current())
        .collect()
}
