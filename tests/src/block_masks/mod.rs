//! Block masks that are built on a device: cases, their data, and what the constructors for the CPU
//! make of it.

mod case;
mod run;

pub use case::{MaskCase, MaskData, MaskSource, mask_cases};
pub use run::{Arrays, MaskInputs, build_and_check, compare_transposed, cut, prepare};
