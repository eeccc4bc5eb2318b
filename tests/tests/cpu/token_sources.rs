//! Masks that buffers build from sources of token pairs on the CPU, held against the definition of
//! each pair. GPUs are held against the CPU (`block_bits_gpu`).

use blockflash_ops::Align;
use blockflash_ops::Mask;
use blockflash_tests::property::config;
use blockflash_tests::token_case::{Kind, TokenCase, token_cases};
use proptest::prelude::*;

/// A mask shows the pairs of the definition, in no more blocks than that takes.
fn assert_builds(case: &TokenCase, seed: usize) {
    let data = case.data(seed);
    let mask = case.on_host(&data, true);
    let pairs = mask.to_token_mask().unwrap();
    let ([batch, heads], [queries, keys]) = (case.groups, case.lengths);
    let geometry = case.geometry();
    let [mut blocks, mut partial] = [0; 2];
    for (group, row, col) in (0..batch * heads).flat_map(|group| {
        (0..geometry.rows())
            .flat_map(move |row| (0..geometry.cols()).map(move |col| (group, row, col)))
    }) {
        let visits = |query| {
            let seen = case.mask.visible(query, queries, keys);
            seen.start < geometry.keys(col).end && geometry.keys(col).start < seen.end
        };
        let (mut all, mut any) = (true, false);
        let visited = geometry.queries(row).any(visits);
        for query in geometry.queries(row) {
            for key in geometry.keys(col) {
                let shown = case.shows(&data, [group / heads, group % heads, query, key]);
                let found = pairs[(group * queries + query) * keys + key];
                assert_eq!(found, shown && visited, "{case:?}: group {group}, {query}, {key}");
                all &= shown;
                any |= shown;
            }
        }
        blocks += usize::from(any && visited);
        partial += usize::from(any && visited && !all);
    }
    assert_eq!([mask.nnz(), mask.partial_blocks().unwrap()], [blocks, partial], "{case:?}");
}

#[test]
fn every_source() {
    let small = |case: &&TokenCase| case.lengths.iter().product::<usize>() < 200_000;
    for case in token_cases().iter().filter(small) {
        assert_builds(case, 1);
    }
}

fn align() -> impl Strategy<Value = Align> {
    prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)]
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Bool),
        (0..4usize).prop_map(Kind::Ranges),
        Just(Kind::Documents),
        (0..9usize).prop_map(Kind::Tree),
        (1..100usize, align()).prop_map(|(stride, align)| Kind::Strided(stride, align)),
    ]
}

fn within() -> impl Strategy<Value = Mask> {
    let side = || prop_oneof![Just(None), (0..150usize).prop_map(Some)];
    (side(), side(), align()).prop_map(|(left, right, align)| Mask::Window { left, right, align })
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn sources(
        kind in kind(),
        within in within(),
        mask in prop_oneof![Just(Mask::Full), Just(Mask::causal())],
        [q, more] in [1..250usize, 0..150usize],
        [block_q, block_kv] in [1..4usize, 1..4usize],
        groups in [1..3usize, 1..3usize],
        scale in 1..120usize,
        seed in 0..1000usize,
    ) {
        let (lengths, blocks) = ([q, q + more], [64 * block_q, 64 * block_kv]);
        let lengths =
            if seed % 2 == 0 || matches!(kind, Kind::Tree(_)) { lengths } else { [q + more, q] };
        assert_builds(&TokenCase { lengths, blocks, groups, scale, kind, within, mask }, seed);
    }
}
