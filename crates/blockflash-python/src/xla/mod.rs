//! Targets of XLA's foreign function interface, which `blockflash.jax` calls.
//!
//! A call names its operands in the attribute `operands`, and its options are the attributes and
//! operands of the tables of `blockflash-foreign`. What a target does not know is an error.

mod attention;
mod backward;
mod decode;
mod named;
mod parts;

use crate::error::{Failure, Kind};
use blockflash_foreign::xla::{Call, Code, Refusal, Target, handlers};
use pyo3::prelude::*;

/// A target: `(name, platform, address of its handler)`.
type Row = (&'static str, &'static str, usize);

/// All targets. Each computes on the platform of its row: `cpu` or `CUDA`.
#[pyfunction]
pub(crate) fn xla_targets() -> Vec<Row> {
    fn of<T: Target>(name: &'static str) -> [Row; 2] {
        handlers::<T>().map(|(platform, address)| (name, platform, address))
    }
    [
        of::<Attention>("blockflash_attention"),
        of::<Backward>("blockflash_attention_backward"),
        of::<Decode>("blockflash_attention_decode"),
    ]
    .concat()
}

/// `(o, lse)` of attention.
struct Attention;
/// The gradients of q, k and v, and of the options that have one.
struct Backward;
/// `(o, lse)` of attention over a cache, and the cache if new keys and values are appended.
struct Decode;

impl Target for Attention {
    fn run(call: Call<'_>) -> Result<(), Refusal> {
        Ok(attention::run(call)?)
    }
}

impl Target for Backward {
    fn run(call: Call<'_>) -> Result<(), Refusal> {
        Ok(backward::run(call)?)
    }
}

impl Target for Decode {
    fn run(call: Call<'_>) -> Result<(), Refusal> {
        Ok(decode::run(call)?)
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let code = match failure.kind {
            Kind::Value | Kind::Misaligned => Code::InvalidArgument,
            Kind::Unsupported => Code::Unimplemented,
            Kind::Device => Code::Internal,
            Kind::Memory => Code::ResourceExhausted,
        };
        Self { code, text: failure.text }
    }
}

impl From<Refusal> for Failure {
    fn from(Refusal { code, text }: Refusal) -> Self {
        let kind = match code {
            Code::InvalidArgument => Kind::Value,
            Code::Unimplemented => Kind::Unsupported,
            Code::ResourceExhausted => Kind::Memory,
            Code::FailedPrecondition | Code::Internal => Kind::Device,
        };
        Self { kind, text }
    }
}
