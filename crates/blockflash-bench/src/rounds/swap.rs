//! Checks whether the order of contestants influences their times.

use super::Run;
use crate::case::Case;
use crate::order::Order;
use crate::peers::Peers;
use crate::record::{OURS, Record};
use crate::timing::Cache;

/// A competitor's time over ours, with all rounds in one order and in the reverse order.
#[derive(Clone, Debug, PartialEq)]
pub struct Swap {
    /// Name of the competitor or reference.
    pub name: String,
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
            let ours = records.iter().filter(|record| record.implementation == OURS);
            ours.filter_map(|record| record.us).reduce(f64::min)
        };
        let (first, second) = (ours(forward), ours(reversed));
        let swap = |(forward, reversed): (&Record, &Record)| {
            let name = forward.implementation.clone();
            Some(Self { name, ratios: [forward.us? / first?, reversed.us? / second?] })
        };
        let others = forward.iter().zip(reversed).filter(|(one, _)| one.implementation != OURS);
        others.filter_map(swap).collect()
    }
}

impl Run {
    /// Measures a case with all rounds in one order, then in the reverse order; everything is
    /// prepared once. With only two contestants each follows the other in both orders, so at least
    /// two competitors have to run.
    pub fn swap_check(
        &self,
        case: &Case,
        cache: Cache,
        peers: &mut Peers,
        step: impl Fn(&str),
    ) -> (Vec<Swap>, Vec<Record>) {
        let both = self.measure_in([Order::Fixed, Order::Reversed], case, cache, peers, step);
        (Swap::of(&both), both.concat())
    }
}
