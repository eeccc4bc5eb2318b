//! Summaries of the pages of a cache, and the choice of pages by them.

mod case;
mod garbage;
mod reference;
mod run;

pub use case::PageCase;
pub use garbage::pages_survive_garbage;
pub use run::{PageKernels, page_replays, run_pages};
