//! Gradients of attention by an index: cases, their numbers and lists, the reference, and the
//! harness that runs a case on a device and judges every gradient.

mod case;
mod data;
mod run;

pub use case::IndexBackwardCase;
pub use data::IndexBackwardData;
pub use run::{
    IndexBackwardChoice, gradients_of_lists_survive_garbage, replays_of_gradients_of_lists,
    run_index_backward, same_gradients_of_lists, with_workspace_of_many_passes,
};
