use super::family::Family;
use crate::Target;

/// `index_union_sm80`: the union of the lists of neighbouring queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexUnion {
    /// Words of members of blocks in shared memory, and of bits of entries.
    pub words: u32,
}

/// It serves the kernels of Hopper alone, but is no faster with its instructions.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = IndexUnion> {
    (target == Target::Sm90).then_some(IndexUnion { words: 2048 }).into_iter()
}

impl IndexUnion {
    /// The most entries of all lists of a tile.
    pub const fn most_entries(&self) -> u32 {
        32 * self.words
    }
}

impl Family for IndexUnion {
    fn source(&self) -> &'static str {
        "index_union_sm80"
    }

    fn name(&self) -> String {
        format!("w{}", self.words)
    }

    fn warps(&self) -> u32 {
        4
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_UNION_WORDS", self.words);
        define("VARIANT_MIN_BLOCKS", 8);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["ATOMS", "SHFL", "VOTE"]
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest::{Variant, kernels};

    #[test]
    fn lists_of_64_queries_fit() {
        let of = |kernel: &crate::Kernel| match kernel.variant {
            Variant::IndexUnion(union) => Some(union),
            _ => None,
        };
        let unions: Vec<_> = kernels().iter().filter_map(of).collect();
        assert_eq!(unions.len(), 1);
        assert!(unions[0].most_entries() >= 2 * 64 * 512);
    }
}
