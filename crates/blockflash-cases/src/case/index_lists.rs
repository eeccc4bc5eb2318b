//! Lists of blocks of keys that are drawn.

use super::index::{IndexShape, Listing};
use crate::random;
use rayon::prelude::*;

/// Queries that have scores in common.
const NEIGHBOURS: usize = 64;

/// Lists i32 `[groups, batch · seqlen_q, entries]`: of each query the block that it is in and
/// others before it, ascending, then -1.
pub(super) fn draw(shape: &IndexShape, seed: u64) -> Vec<i32> {
    let &IndexShape { batch, seqlen_q, groups, entries, .. } = shape;
    let mut lists = vec![-1; groups * batch * seqlen_q * entries];
    // The lists of neighbours in one sequence.
    let runs = lists.par_chunks_mut(seqlen_q * entries).enumerate();
    let runs = runs.flat_map(|(sequence, lists)| {
        let run = lists.par_chunks_mut(NEIGHBOURS * entries).enumerate();
        run.map(move |(at, lists)| (sequence, at * NEIGHBOURS, lists))
    });
    runs.for_each(|(sequence, first, lists)| {
        // Streams of numbers that no other run has: `of` of each query and one of the run.
        let of = |query: usize| ((sequence * (seqlen_q + 1) + query) * 2) as u64 + 3;
        let shared = random::words(shared_columns(shape, first), seed ^ (of(first) + 1));
        for (query, list) in (first..).zip(lists.chunks_mut(entries)) {
            let own = shape.position(query) / shape.granularity;
            let count = shape.listed(query) - 1;
            let others = match shape.lists {
                Listing::Uniform => random::choose(count, own, seed, of(query)),
                Listing::Near => near(&shared[..own], count, seed ^ of(query)),
            };
            let listed = others.into_iter().chain([own]);
            list.iter_mut().zip(listed).for_each(|(entry, block)| *entry = block as i32);
        }
    });
    lists
}

/// Blocks for which the neighbours from a query on have scores in common.
fn shared_columns(shape: &IndexShape, first: usize) -> usize {
    let last = (first + NEIGHBOURS).min(shape.seqlen_q) - 1;
    match shape.lists {
        Listing::Uniform => 0,
        Listing::Near => shape.position(last) / shape.granularity,
    }
}

/// The `count` positions with the largest of the shared scores and a fifth of others, ascending.
fn near(shared: &[i32], count: usize, seed: u64) -> Vec<usize> {
    if count == 0 {
        return Vec::new();
    }
    let scores = shared.iter().zip(random::words(shared.len(), seed));
    let scores = scores.map(|(&shared, own)| 5 * i64::from(shared) + i64::from(own));
    let mut order: Vec<_> = scores.zip(0usize..).collect();
    if count < order.len() {
        order.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
        order.truncate(count);
    }
    let mut positions: Vec<_> = order.into_iter().map(|(_, at)| at).collect();
    positions.sort_unstable();
    positions
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_sys::{DType, HeadDims};
    use std::collections::HashSet;

    fn shape(lists: Listing) -> IndexShape {
        IndexShape {
            batch: 2,
            seqlen_q: 150,
            seqlen_kv: 1000,
            num_heads_q: 4,
            num_heads_kv: 2,
            groups: 2,
            head_dims: HeadDims::all(64),
            page_size: None,
            granularity: 16,
            entries: 8,
            lists,
            latent: false,
            dtype: DType::F16,
        }
    }

    #[test]
    fn lists_ascend_to_the_block_of_their_query() {
        for lists in [Listing::Uniform, Listing::Near] {
            let shape = shape(lists);
            let drawn = draw(&shape, 5);
            assert_eq!(drawn, draw(&shape, 5));
            assert_ne!(drawn, draw(&shape, 6));
            for (at, list) in drawn.chunks(8).enumerate() {
                assert!(list.windows(2).all(|pair| pair[0] < pair[1]), "{list:?}");
                assert_eq!(list[7] as usize, shape.position(at % 150) / 16);
            }
        }
    }

    #[test]
    fn the_first_queries_of_a_prompt_list_all_blocks() {
        let shape = IndexShape { seqlen_q: 1000, ..shape(Listing::Near) };
        let drawn = draw(&shape, 1);
        assert_eq!(drawn[..8], [0, -1, -1, -1, -1, -1, -1, -1]);
        assert_eq!(drawn[8 * 40..][..8], [0, 1, 2, -1, -1, -1, -1, -1]);
    }

    #[test]
    fn neighbours_list_mostly_the_same_blocks() {
        let common = |lists| {
            let drawn = draw(&shape(lists), 3);
            let of = |query: usize| drawn[query * 8..][..8].iter().collect::<HashSet<_>>();
            (0..60).map(|query| of(query).intersection(&of(query + 1)).count()).sum::<usize>()
        };
        assert!(common(Listing::Near) > 5 * 60 && common(Listing::Uniform) < 3 * 60);
    }
}
