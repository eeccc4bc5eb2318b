use std::fmt;

/// How attention is divided among ranks.
///
/// Consecutive ranks form groups of `heads` ranks. The ranks of a group exchange rows for heads:
/// each has some heads of all rows of the group (all-to-all, known as Ulysses). There are `keys`
/// groups, and the keys and values of a group visit the queries of every other one (ring
/// attention). `heads` divides the heads of keys, and `heads · keys` is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Ranks of a group, among which heads are divided.
    pub heads: usize,
    /// Groups, among which keys are divided.
    pub keys: usize,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Scheme { heads, keys: 1 } => write!(f, "heads over {heads}"),
            Scheme { heads: 1, keys } => write!(f, "keys over {keys}"),
            Scheme { heads, keys } => write!(f, "heads over {heads}, keys over {keys}"),
        }
    }
}

impl Scheme {
    /// All schemes for this many ranks and heads of keys, the one with the most heads first. Never
    /// empty with a rank: keys can always be divided.
    pub fn all(world: usize, num_heads_kv: usize) -> Vec<Scheme> {
        let fits = |heads: &usize| [world, num_heads_kv].iter().all(|n| n.is_multiple_of(*heads));
        let scheme = |heads| Scheme { heads, keys: world / heads };
        // A divisor of the heads is at most their number, however many ranks there are.
        (1..=world.min(num_heads_kv.max(1))).rev().filter(fits).map(scheme).collect()
    }
}
