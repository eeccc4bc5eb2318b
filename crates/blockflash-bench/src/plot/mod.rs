//! Plots. From records: speed over lengths and densities, the ratio to the best rival, and
//! rooflines. Also block masks, cost and gain of sparsity, training curves,
//! and timelines.

mod bandwidth;
mod curves;
mod density;
mod drawing;
mod error;
mod figure;
mod lengths;
mod mask;
mod ratio;
mod render;
mod roofline;
mod series;
mod speedup;
mod style;
mod suites;
mod timeline;
mod tradeoff;

pub use curves::Curves;
pub use drawing::Drawing;
pub use error::{MAX_SHOWN, PlotError};
pub use mask::MaskPicture;
pub use speedup::{Speedup, SpeedupLine, SpeedupPanel};
pub use suites::{Plot, plots};
pub use timeline::{Lane, Timeline};
pub use tradeoff::{Tradeoff, TradeoffPoint};
