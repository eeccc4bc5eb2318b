//! The order in which contestants take their windows. A contestant inherits the clock and the
//! temperature of its predecessor: at the power limit this moved ratios by up to 6 % when all
//! rounds had the same order.
//!
//! The orders are due to E. J. Williams ("Experimental designs balanced for the estimation of
//! residual effects of treatments", Australian Journal of Scientific Research A 2, 1949): 0, 1,
//! n−1, 2, n−2, … and the sequences that follow from it by adding 1, 2, … modulo n, for an even n.
//! In n rounds each contestant takes each place once, and follows each other contestant directly
//! once. Each order is followed by its reverse, which is also one of the orders. With an odd number
//! of contestants one place of each round stays empty.

use std::fmt;
use std::time::Duration;

/// Kind of order over the rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turns {
    /// Williams' orders, balanced over the rounds.
    #[default]
    Balanced,
    /// The same order in all rounds.
    Fixed,
    /// The same order in all rounds, reversed.
    Reversed,
}

impl Turns {
    /// Number of places in a round: at least one for each contestant.
    pub fn places(self, contestants: usize) -> usize {
        match self {
            Self::Balanced if contestants > 1 => contestants.next_multiple_of(2),
            _ => contestants,
        }
    }

    /// Number of rounds: as many as asked for, or the few more that balance needs.
    pub fn rounds(self, contestants: usize, at_least: usize) -> usize {
        match self {
            Self::Balanced => at_least.next_multiple_of(self.places(contestants).max(1)),
            _ => at_least,
        }
    }

    /// The contestants of a round in order. Indices beyond the last contestant stand for empty
    /// places.
    pub fn order(self, contestants: usize, round: usize) -> Vec<usize> {
        let places = self.places(contestants);
        match self {
            Self::Balanced => williams(places, round % places.max(1)),
            Self::Fixed => (0..places).collect(),
            Self::Reversed => (0..places).rev().collect(),
        }
    }

    /// Time that the windows of a case take, including the warm-up round and the gaps.
    pub fn time(
        self,
        contestants: usize,
        at_least: usize,
        window: Duration,
        gap: Duration,
    ) -> Duration {
        let windows = (1 + self.rounds(contestants, at_least)) * self.places(contestants);
        (window + gap) * u32::try_from(windows).unwrap_or(u32::MAX)
    }
}

impl fmt::Display for Turns {
    /// The name in records.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Balanced => "williams",
            Self::Fixed => "fixed",
            Self::Reversed => "reversed",
        })
    }
}

/// The order of a round with the given number of places, which is one or even.
fn williams(places: usize, round: usize) -> Vec<usize> {
    let zigzag = (0..places).map(|at| if at % 2 == 1 { at.div_ceil(2) } else { places - at / 2 });
    let mut order: Vec<_> = zigzag.map(|place| (place + round / 2) % places).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_those_of_the_records() {
        let orders = |contestants| {
            Vec::from_iter((0..4).map(|round| Turns::Balanced.order(contestants, round)))
        };
        assert_eq!(orders(2), [[0, 1], [1, 0], [0, 1], [1, 0]]);
        assert_eq!(orders(4), [[0, 1, 3, 2], [2, 3, 1, 0], [1, 2, 0, 3], [3, 0, 2, 1]]);
        assert_eq!(orders(3), orders(4));
        assert_eq!(orders(1), [[0]; 4]);
        assert!(orders(0).iter().all(Vec::is_empty));
        assert_eq!(Turns::Fixed.order(3, 1), [0, 1, 2]);
        assert_eq!(Turns::Reversed.order(3, 1), [2, 1, 0]);
    }

    #[test]
    fn each_follows_each_other_one_and_has_each_place_equally_often() {
        for contestants in 2..=12 {
            let places = Turns::Balanced.places(contestants);
            let rounds = Turns::Balanced.rounds(contestants, 5);
            assert!(rounds >= 5 && rounds < 5 + places);
            let (mut place, mut behind) =
                (vec![vec![0; places]; places], vec![vec![0; places]; places]);
            for round in 0..rounds {
                let order = Turns::Balanced.order(contestants, round);
                order.iter().enumerate().for_each(|(at, &who)| place[who][at] += 1);
                order.windows(2).for_each(|pair| behind[pair[0]][pair[1]] += 1);
            }
            let times = rounds / places;
            assert!(
                place.iter().flatten().all(|&count| count == times),
                "{contestants}: {place:?}"
            );
            for (who, other) in
                (0..places).flat_map(|who| (0..places).map(move |other| (who, other)))
            {
                let expected = if who == other { 0 } else { times };
                assert_eq!(behind[who][other], expected, "{contestants}: {other} behind {who}");
            }
        }
    }

    /// The balance holds across round borders, and the warm-up round has the order before the
    /// first.
    #[test]
    fn nobody_keeps_place_and_predecessor_in_two_rounds() {
        for contestants in 2..=12 {
            let places = Turns::Balanced.places(contestants);
            let mut last = usize::MAX;
            let mut before = vec![(usize::MAX, usize::MAX); places];
            for round in 0..=places {
                for (at, who) in Turns::Balanced.order(contestants, round).into_iter().enumerate() {
                    assert_ne!(before[who], (at, last), "{contestants}: {who} in round {round}");
                    (before[who], last) = ((at, last), who);
                }
            }
        }
    }

    #[test]
    fn rounds_are_as_many_as_balance_takes() {
        let rounds = |contestants, at_least| Turns::Balanced.rounds(contestants, at_least);
        assert_eq!(
            [rounds(1, 5), rounds(2, 5), rounds(6, 5), rounds(7, 5), rounds(7, 9)],
            [5, 6, 6, 8, 16]
        );
        assert_eq!((rounds(0, 5), Turns::Fixed.rounds(4, 5)), (5, 5));
        let [window, gap] = [60, 100].map(Duration::from_millis);
        // Eight rounds and the warm-up round, eight places each.
        assert_eq!(Turns::Balanced.time(7, 5, window, gap), Duration::from_millis(72 * 160));
        assert_eq!(Turns::Balanced.time(1, 5, window, gap), Duration::from_millis(6 * 160));
    }
}
