//! Gradients of attention: the data of a case beyond its forward pass, the oracle, and the harness
//! that runs a case on a device and judges every gradient. A case is an
//! [`AttentionCase`](crate::attention::AttentionCase).

mod data;
mod kernels;
mod oracle;
mod run;

pub use data::BackwardData;
pub(crate) use kernels::dims_of_tile;
pub use kernels::{
    BackwardGroup, BackwardGroups, backward_groups, cases_of, repeated_gradients, run_or_refuse,
    same_gradients,
};
pub use oracle::BackwardReference;
pub use run::{BackwardInputs, BackwardOutputs, finite, run_and_check, run_case};
