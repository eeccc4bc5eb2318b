//! Checks whether the order of contestants influences their times.

use super::run::Run;
use crate::case::Case;
use crate::peers::Peers;
use crate::record::{OURS, Record};
use crate::report::fastest;
use crate::timing::Cache;
use crate::turns::Turns;

/// A rival's time over ours, with all rounds in one order and in the reverse order.
#[derive(Clone, Debug, PartialEq)]
pub struct Swap {
    /// Name of the rival or mark.
    pub rival: String,
    /// Ratios in the order of the record and in the reverse order.
    pub ratios: [f64; 2],
}

impl Swap {
    /// Relative change of the ratio: 0.01 is 1 %.
    pub fn moved(&self) -> f64 {
        let [forward, reversed] = self.ratios;
        (reversed / forward - 1.0).abs()
    }

    /// Swaps of the implementations that were measured both times.
    fn of([forward, reversed]: &[Vec<Record>; 2]) -> Vec<Self> {
        let ours = |records: &[Record]| {
            fastest(records.iter().filter(|record| record.implementation == OURS))?.us
        };
        let (Some(first), Some(second)) = (ours(forward), ours(reversed)) else {
            return Vec::new();
        };
        let pairs =
            forward.iter().zip(reversed).filter(|(record, _)| record.implementation != OURS);
        let swap = |(forward, reversed): (&Record, &Record)| {
            let rival = forward.implementation.clone();
            Some(Self { rival, ratios: [forward.us? / first, reversed.us? / second] })
        };
        pairs.filter_map(swap).collect()
    }
}

impl Run {
    /// Measures a case with all rounds in one order, then in the reverse order; everything is
    /// prepared once. With only two contestants each follows the other in both orders, so at least
    /// two rivals have to run.
    pub fn swap_check(
        &self,
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        step: impl Fn(&str),
    ) -> (Vec<Swap>, Vec<Record>) {
        let both = self.measure_in([Turns::Fixed, Turns::Reversed], case, cache, peers, step);
        (Swap::of(&both), both.concat())
    }
}
