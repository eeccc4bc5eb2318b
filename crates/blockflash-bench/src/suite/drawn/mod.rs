//! Suites that are drawn and not chosen: heads and sizes of published models, at random lengths,
//! batches and caches. A seed draws the same shapes on every machine and with every toolchain: the
//! draw takes integers only, from a generator that is written here.

mod dice;
mod models;
mod shapes;
#[cfg(test)]
mod tests;

use super::Suite;
use crate::case::{Case, DecodeShape, Fill, Shape};
use crate::error::{Error, Result};
use crate::timing::Cache;
use dice::Dice;
pub use models::{Model, Models};

/// The name by which `blockflash bench` draws suites, and the start of their names.
pub const DRAWN: &str = "drawn";
/// Shapes that are refused for each one that is taken before limits count as too narrow.
const MOST_REFUSED: usize = 20_000;

/// What is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Operation {
    /// Attention of one to 64 queries of each sequence to a cache.
    Decode,
    /// Attention of dense batches.
    Forward,
    /// The gradients of attention of dense batches.
    Backward,
    /// Attention under a block mask.
    BlockSparse,
    /// Block-sparse matrices, of the sizes of an MLP's weights, times dense ones.
    Bsr,
    /// Attention of packed sequences.
    Packed,
}

impl Operation {
    /// All of them, in the order in which they are measured.
    pub const ALL: [Self; 6] =
        [Self::Decode, Self::Forward, Self::Backward, Self::BlockSparse, Self::Bsr, Self::Packed];

    /// As the names of suites have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::BlockSparse => "block_sparse",
            Self::Bsr => "bsr",
            Self::Packed => "packed",
        }
    }
}

/// The largest shapes that are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// MiB of all inputs and outputs together, of a cache with all that it has room for.
    pub mib: u32,
    /// 10⁹ useful floating-point operations of a launch.
    pub gflop: u32,
}

impl Default for Limits {
    /// About 15 ms of an H100, and half a minute of its host for inputs and the check.
    fn default() -> Self {
        Self { mib: 2048, gflop: 8000 }
    }
}

impl Limits {
    fn allow(self, case: &Case) -> bool {
        let bytes = match case {
            Case::AttentionDecode(shape) => {
                DecodeShape { fill: Fill::Full, window: None, ..*shape }.work().bytes
            }
            case => case.work().bytes,
        };
        bytes <= f64::from(self.mib) * f64::from(1 << 20)
            && case.work().flops <= f64::from(self.gflop) * 1e9
    }
}

impl Suite {
    /// Draws this many cases of an operation, all of them different; those of fewer are the first
    /// of those of more.
    ///
    /// # Errors
    /// [`Error::Option`] if the limits leave too few shapes.
    pub fn drawn(operation: Operation, seed: u64, cases: usize, limits: Limits) -> Result<Self> {
        let models = Models::published().map_err(Error::Option)?;
        let mut dice = Dice::new(seed, operation as u64);
        let (mut drawn, mut refused) = (Vec::<Case>::new(), 0);
        while drawn.len() < cases {
            let mut case = Some(shapes::draw(operation, &models, &mut dice));
            while let Some(large) = case.take_if(|case| !limits.allow(case)) {
                case = shapes::smaller(large, &mut dice);
            }
            match case.filter(|case| case.check().is_ok() && !drawn.contains(case)) {
                Some(case) => {
                    drawn.push(case);
                    refused = 0;
                }
                None if refused < MOST_REFUSED => refused += 1,
                None => {
                    let (name, found) = (operation.name(), drawn.len());
                    let Limits { mib, gflop } = limits;
                    return Err(Error::Option(format!(
                        "of {name}, {found} of {cases} shapes were found within {mib} MiB and \
                         {gflop} GFLOP; allow more"
                    )));
                }
            }
        }
        let Limits { mib, gflop } = limits;
        let suite = Self {
            name: format!("{DRAWN}_{}_{seed}", operation.name()),
            description: format!(
                "{cases} shapes of published models, drawn with seed {seed}, of at most {mib} MiB \
                 and {gflop} GFLOP"
            ),
            ..Self::of(drawn)
        };
        Ok(match operation {
            // As the suite of chosen shapes is measured.
            Operation::Decode => {
                let cache = vec![Cache::Rotated];
                Self { rounds: 4, window_ms: 40.0, gap_ms: 30.0, cache, ..suite }
            }
            _ => suite,
        })
    }
}
