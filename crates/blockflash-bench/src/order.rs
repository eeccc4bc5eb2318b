//! Counterbalanced order of the contestants in each round. A contestant inherits the clock and the
//! temperature of its predecessor: at the power limit this moved ratios by up to 6 % when all
//! rounds had the same order.
//!
//! The orders are due to E. J. Williams ("Experimental designs balanced for the estimation of
//! residual effects of treatments", Australian Journal of Scientific Research A 2, 1949): 0, 1,
//! n−1, 2, n−2, … and the sequences that follow from it by adding 1, 2, … modulo n, for an even n.
//! In n rounds each contestant has each place once, and follows each other contestant directly
//! once. Each order is followed by its reverse, which is also one of the orders. With an odd number
//! of contestants one place of each round stays empty.

use std::time::Duration;

/// Kind of order over the rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Williams' orders, balanced over the rounds.
    #[default]
    Balanced,
    /// The same order in all rounds.
    Fixed,
    /// The same order in all rounds, reversed.
    Reversed,
}

impl Order {
    /// Name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Balanced => "williams",
            Self::Fixed => "fixed",
            Self::Reversed => "reversed",
        }
    }

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
    pub fn of_round(self, contestants: usize, round: usize) -> Vec<usize> {
        let places = self.places(contestants);
        let round = round % places.max(1);
        let place = |at: usize| match self {
            Self::Balanced if at % 2 == 1 => (at.div_ceil(2) + round / 2) % places,
            Self::Balanced => (places - at / 2 + round / 2) % places,
            _ => at,
        };
        let mut order: Vec<_> = (0..places).map(place).collect();
        if self == Self::Reversed || self == Self::Balanced && round % 2 == 1 {
            order.reverse();
        }
        order
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

#[cfg(test)]
mod tests {
    use super::Order::{Balanced, Fixed, Reversed};
    use super::*;

    #[test]
    fn orders_are_those_of_the_records() {
        let orders =
            |contestants| Vec::from_iter((0..4).map(|round| Balanced.of_round(contestants, round)));
        assert_eq!(orders(2), [[0, 1], [1, 0], [0, 1], [1, 0]]);
        assert_eq!(orders(4), [[0, 1, 3, 2], [2, 3, 1, 0], [1, 2, 0, 3], [3, 0, 2, 1]]);
        assert_eq!(orders(3), orders(4));
        assert_eq!(orders(1), [[0]; 4]);
        assert!(orders(0).iter().all(Vec::is_empty));
        assert_eq!((Fixed.of_round(3, 1), Reversed.of_round(3, 1)), (vec![0, 1, 2], vec![2, 1, 0]));
    }

    /// The balance holds across round borders, and the warm-up round has the order before the
    /// first.
    #[test]
    fn each_follows_each_other_one_and_has_each_place_equally_often() {
        for contestants in 2..=12 {
            let (places, rounds) = (Balanced.places(contestants), Balanced.rounds(contestants, 5));
            assert!(rounds >= 5 && rounds < 5 + places);
            let (mut place, mut behind) =
                (vec![vec![0; places]; places], vec![vec![0; places]; places]);
            let (mut last, mut before) = (usize::MAX, vec![(usize::MAX, usize::MAX); places]);
            for round in 0..=rounds {
                let order = Balanced.of_round(contestants, round);
                for (at, &who) in order.iter().enumerate() {
                    assert_ne!(before[who], (at, last), "{contestants}: {who} in round {round}");
                    (before[who], last) = ((at, last), who);
                }
                if round < rounds {
                    order.iter().enumerate().for_each(|(at, &who)| place[who][at] += 1);
                    order.windows(2).for_each(|pair| behind[pair[0]][pair[1]] += 1);
                }
            }
            let times = rounds / places;
            assert_eq!(place, vec![vec![times; places]; places], "{contestants}");
            for (who, of_who) in behind.iter().enumerate() {
                let expected = |other| if who == other { 0 } else { times };
                assert_eq!(*of_who, (0..places).map(expected).collect::<Vec<_>>(), "{contestants}");
            }
        }
    }

    #[test]
    fn rounds_are_as_many_as_balance_takes() {
        let rounds = [(1, 5), (2, 5), (6, 5), (7, 5), (7, 9), (0, 5)];
        assert_eq!(rounds.map(|(who, least)| Balanced.rounds(who, least)), [5, 6, 6, 8, 16, 5]);
        assert_eq!(Fixed.rounds(4, 5), 5);
        let [window, gap] = [60, 100].map(Duration::from_millis);
        // Eight rounds and the warm-up round, eight places each.
        assert_eq!(Balanced.time(7, 5, window, gap), Duration::from_millis(72 * 160));
        assert_eq!(Balanced.time(1, 5, window, gap), Duration::from_millis(6 * 160));
    }
}
