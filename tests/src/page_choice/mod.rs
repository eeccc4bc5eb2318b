//! Summaries of the pages of a cache, and the choice of pages by them.

mod case;
mod garbage;
mod reference;
mod run;

pub use case::PageCase;
pub use garbage::pages_survive_garbage;
pub use run::{page_replays, run_pages};

use crate::attention::Choice;
use blockflash_sys::Kernel;

/// The kernels of both steps.
#[derive(Clone, Copy)]
pub struct PageKernels {
    /// Summarises.
    pub summaries: Choice,
    /// Chooses.
    pub choice: Choice,
}

impl PageKernels {
    /// The ones that the library selects.
    pub const SELECTED: Self = Self { summaries: Choice::Selected, choice: Choice::Selected };

    /// This kernel for the step that it computes.
    pub fn with(kernel: &'static Kernel) -> Self {
        let this = Choice::This(kernel);
        match kernel.symbol().contains("page_choice") {
            true => Self { choice: this, ..Self::SELECTED },
            false => Self { summaries: this, ..Self::SELECTED },
        }
    }
}
