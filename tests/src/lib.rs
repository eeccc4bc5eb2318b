//! What the test suites of blockflash share. There is one of each:
//!
//! - cases ([`attention::AttentionCase`], [`attention_decode::DecodeCase`], [`bsr::BsrCase`],
//!   [`sddmm::SddmmCase`]): a problem as plain data, from which everything follows;
//! - generators of cases (proptest strategies) and of N(0,1) numbers, never scaled down;
//! - references: the rows of a case, computed by the oracle (`blockflash-oracle`), and the
//!   [tolerance] rule, which compares a result with them;
//! - the harness: operands of `blockflash-cases` for products, poisoned outputs, NaN in every gap,
//!   a watchdog on every launch, a loud skip without a GPU.
//!
//! The suites are the files in `tests/`; what needs no GPU is one program, `tests/cpu`. The
//! environment decides:
//!
//! | variable | meaning |
//! |---|---|
//! | `BLOCKFLASH_REQUIRE_GPU=1` | a test that finds no usable GPU fails instead of being skipped |
//! | `BLOCKFLASH_GPU_RECORD=file` | one JSON line is appended for each image that passed a suite |
//! | `BLOCKFLASH_SEED=number` or `random` | other random cases than usual |
//! | `BLOCKFLASH_CASES=n` | n times as many random cases |
//! | `BLOCKFLASH_FUZZ_CASES=n` or `a..b` | these cases of garbage instead of the usual ones |

pub mod attention;
pub mod attention_bwd;
pub mod attention_decode;
pub mod attention_index;
pub mod attention_index_bwd;
pub mod attention_latent;
pub mod block_masks;
pub mod bsr;
pub mod dist;
pub mod garbage;
pub mod gpu;
pub mod host;
pub mod index_choice;
pub mod number;
pub mod page_choice;
pub mod property;
pub mod score_terms;
pub mod sddmm;
pub mod token_case;
mod token_outputs;

pub use blockflash_cases::placement;
pub use blockflash_oracle::tolerance;

/// The example of the repository's README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
