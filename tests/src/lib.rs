//! What the test suites of blockflash share. There is one of each:
//!
//! - cases ([`attention::AttentionCase`], [`bsr::BsrCase`]): a problem as plain data, from which everything follows;
//! - generators of cases (proptest strategies) and of N(0,1) numbers, never scaled down;
//! - the oracle in f64 and the plain same-precision computation beside it;
//! - the [tolerance] rule, which compares a result with both;
//! - the harness: poisoned outputs, NaN in every gap, a watchdog on every launch, a loud skip without a GPU.
//!
//! The suites are the files in `tests/`.

pub mod attention;
pub mod bsr;
pub mod gpu;
pub mod host;
pub mod number;
pub mod placement;
pub mod property;
pub mod tolerance;
