//! Where the elements of a logical tensor are stored: dimension order and padding, with something
//! in every gap.

mod dense;
mod placed;

pub use dense::Dense;
pub use placed::{Placed, Placement};
