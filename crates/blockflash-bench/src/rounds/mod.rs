//! One case, ours and the rivals in turns: every window is preceded by the same idle gap and has
//! the same length, so that clocks, power and temperature drift for all alike, and orders change so
//! that each runs behind each other one equally often.

mod ceilings;
mod contestant;
mod run;
mod swap;

pub use run::Run;
pub use swap::Swap;
