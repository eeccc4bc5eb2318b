use super::super::AttentionDecodeWorkspace;
use super::super::estimate::pace;
use super::*;
use crate::Error;
use crate::attention::{Align, Mask};
use crate::fixtures;
use crate::kv_cache::{CacheSizes, TableSizes};
use blockflash_sys::DType;

#[test]
fn no_length_has_more_splits_than_there_is_room_for() {
    let mut division = of_rows(8, &problem(8192, [32, 8], 1));
    for (splits, chunk_min) in [(1, 256), (4, 256), (16, 128), (64, 256), (128, 128)] {
        (division.splits, division.chunk_min) = (splits, chunk_min);
        let mut most = 0;
        for keys in (0..600_000).step_by(16).chain((600_000..4_000_000).step_by(4096)) {
            most = most.max(division.of_sequence(keys)[1]);
            let room = most_splits(keys, splits, [chunk_min, LONGEST_SPLIT]);
            assert!(most <= room && room <= MOST_SPLITS, "{keys} keys: {most} of {room}");
        }
        assert_eq!(most, MOST_SPLITS);
    }
    (division.splits, division.chunk_min) = (16, 256);
    let splits = [1024, 8192, 32_768, 131_072].map(|keys| division.of_sequence(keys)[1]);
    assert_eq!(splits, [4, 16, 16, 32]);
}

fn gpu() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..fixtures::gpu(9, 0) }
}

fn tile(rows: usize) -> Tile {
    Tile {
        rows,
        blocks: 2,
        heads_and_splits: 128,
        fewest_keys: 256,
        runs: &[1],
        counts_lengths: rows == 64,
        stores_runs: rows < 64,
        pace: pace(rows),
        fills: false,
        cluster: 16,
        columns: 128,
    }
}

fn problem(capacity: usize, heads: [usize; 2], seqlen_q: usize) -> AttentionDecodeProblem {
    let cache = CacheSizes::contiguous(DType::BF16, [64, capacity], heads[1], 128);
    let problem = AttentionDecodeProblem::of(cache, seqlen_q, heads[0]);
    AttentionDecodeProblem { batch_invariant: true, ..problem }
}

fn of_rows(rows: usize, problem: &AttentionDecodeProblem) -> Division {
    divided(&tile(rows), &gpu(), problem, problem.attention.seqlen_q).unwrap()
}

#[test]
fn room_for_every_item() {
    let plan = of_rows(8, &problem(131_072, [32, 8], 1));
    assert_eq!((plan.splits, plan.most_splits, plan.partial_rows), (16, 32, 4));
    assert_eq!(plan.items, 64 * 8 * 32);
    let [sums, words] = plan.room(&problem(131_072, [32, 8], 1)).unwrap();
    assert_eq!((sums, words), (64 * 8 * 32 * 4 * 130, 64 * 8 * 32));
    let bytes = AttentionDecodeWorkspace::bytes_for(sums, words).unwrap();
    assert!((35_000_000..36_000_000).contains(&bytes), "{bytes}");
    // Row tiles; and no room where a sequence is one split.
    let long = problem(100, [32, 8], 16);
    let plan = of_rows(32, &long);
    assert_eq!((plan.items, plan.partial_rows, plan.most_splits), (64 * 2 * 8, 32, 1));
    assert_eq!(plan.room(&long), Some([0, 0]));
}

/// Sequences whose lengths the host knows.
fn known(batch: usize, keys: usize, heads: [usize; 2]) -> AttentionDecodeProblem {
    let mut cache = CacheSizes::contiguous(DType::BF16, [batch, keys], heads[1], 128);
    cache.seqused_kv = false;
    let problem = AttentionDecodeProblem::of(cache, 1, heads[0]);
    AttentionDecodeProblem { batch_invariant: true, ..problem }
}

#[test]
fn few_splits_are_combined_in_clusters() {
    let clusters = |batch, keys, heads: [usize; 2], fewest_keys| {
        let problem = known(batch, keys, heads);
        let tile = Tile { fewest_keys, ..tile(8) };
        divided(&tile, &gpu(), &problem, 1).unwrap().in_clusters(&tile, &problem, 132)
    };
    assert_eq!(clusters(1, 1024, [8, 1], 128), Some([1, 8]));
    assert_eq!(clusters(8, 1000, [8, 1], 128), Some([8, 8]));
    assert_eq!(clusters(1, 700, [8, 1], 128), Some([1, 8]));
    assert_eq!(clusters(1, 8192, [8, 1], 256), Some([2, 16]));
    assert_eq!(clusters(1, 32_768, [8, 1], 256), Some([8, 16]));
    // Long splits, more than the GPU holds, more than its half in single groups, one split.
    assert_eq!(clusters(1, 131_072, [8, 1], 256), None);
    assert_eq!(clusters(2, 32_768, [8, 1], 256), None);
    assert_eq!(clusters(1, 1024, [32, 32], 256), None);
    assert_eq!(clusters(1, 100, [8, 1], 128), None);
    // Some keys are hidden from the queries, or only the device knows how many there are.
    let all = known(1, 1024, [8, 1]);
    let mut window = all;
    window.attention.scores.mask =
        Mask::Window { left: Some(700), right: Some(0), align: Align::BottomRight };
    let mut unknown = all;
    unknown.cache.seqused_kv = true;
    for problem in [window, unknown] {
        assert_eq!(of_rows(8, &problem).in_clusters(&tile(8), &problem, 132), None);
    }
}

#[test]
fn packed_queries_and_listed_pages() {
    let mut packed = problem(8192, [32, 8], 512);
    packed.attention.packed = Some(crate::attention::PackedRows { total_q: 575, total_kv: 0 });
    assert_eq!(of_rows(32, &packed).items, (72 + 64) * 8 * 16);
    let mut listed = problem(131_072, [32, 8], 1);
    listed.cache.table = Some(TableSizes { max_pages: 1024, stride: 1024 });
    listed.cache.page_size = 128;
    listed.pages = Some(super::super::PageListSizes { capacity: 8 });
    assert_eq!(of_rows(8, &listed).most_splits, 4);
}

#[test]
fn rows_that_16_byte_accesses_cannot_reach_are_refused() {
    let mut odd = problem(100, [32, 8], 1);
    odd.cache.v.seq += 4;
    let error = divided(&tile(8), &gpu(), &odd, 1).unwrap_err();
    assert!(matches!(error, Error::Misaligned { what: "cache.v", .. }), "{error}");
}

#[test]
fn what_32_bits_cannot_count_is_refused() {
    let error = divided(&tile(8), &gpu(), &problem(1 << 30, [1 << 20, 1 << 20], 1), 1).unwrap_err();
    assert!(matches!(error, Error::TooLarge { what: "items", .. }), "{error}");
}

#[test]
fn runs_are_as_long_as_waves_are_full() {
    let several = Tile { heads_and_splits: 256, runs: &[8, 4, 1], cluster: 1, ..tile(64) };
    let of = |batch, capacity, seqused_kv| {
        let cache = CacheSizes::contiguous(DType::BF16, [batch, capacity], 8, 128);
        let mut problem = AttentionDecodeProblem::of(CacheSizes { seqused_kv, ..cache }, 16, 32);
        problem.batch_invariant = true;
        let division = divided(&several, &gpu(), &problem, 16).unwrap();
        [division.run, division.items]
    };
    assert_eq!(of(1, 4096, false), [1, 128]);
    assert_eq!(of(1, 8192, false), [1, 256]);
    assert_eq!(of(4, 8192, false), [4, 256]);
    assert_eq!(of(8, 8192, false), [8, 256]);
    assert_eq!(of(64, 8192, false), [8, 2048]);
    assert_eq!(of(64, 8192, true), [8, 2048]);
    assert_eq!(of(1, 1_048_576, false), [8, 256]);
}

/// The rule of `decode/runs.cuh` for even splits: the chunks that it chooses from.
fn even_chunks(lengths: &[usize], row_tiles: usize, division: &Division) -> Vec<usize> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let total: f32 = lengths.iter().map(|&keys| keys as f32).sum();
    let share = total * row_tiles as f32 / division.even_ctas as f32;
    let chunk = |part: f32| {
        let keys = (share * part).ceil() as usize;
        keys.min(longest).max(division.chunk_min).next_multiple_of(64)
    };
    [2.0, 1.5, 1.25, 1.125, 1.0, 0.7, 0.5, 0.34].map(chunk).to_vec()
}

/// Where lengths are on the device, every choice of it fits into the workspace, which grows with
/// the batch.
#[test]
fn even_splits_fit_into_the_workspace() {
    let (mut state, capacity) = (1u64, 40_000);
    let mut random = |most: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % most
    };
    for (heads, queries) in [([32, 8], 4), ([71, 1], 1), ([48, 1], 9)] {
        let mut room = [0, 0];
        for batch in [1, 2, 5, 31, 64, 200] {
            let cache = CacheSizes::contiguous(DType::BF16, [batch, capacity], heads[1], 128);
            let problem = AttentionDecodeProblem::of(cache, queries, heads[0]);
            let division = divided(&tile(64), &gpu(), &problem, queries).unwrap();
            assert_eq!((division.even_ctas, division.run, division.chunk_min), (264, 1, 256));
            let row_tiles = (queries * heads[0] / heads[1]).div_ceil(64) * heads[1];
            for round in 0..40 {
                let most = [capacity, 100, 4096, random(capacity) + 1][round % 4];
                let equal = round % 3 == 0;
                let lengths: Vec<_> =
                    (0..batch).map(|_| if equal { most } else { random(most + 1) }).collect();
                for chunk in even_chunks(&lengths, row_tiles, &division) {
                    let splits = |&keys: &usize| {
                        keys.div_ceil(chunk.max(keys.div_ceil(256).next_multiple_of(64))).max(1)
                    };
                    let items = lengths.iter().map(splits).sum::<usize>() * row_tiles;
                    assert!(items <= division.items, "{items} of {}: {chunk}", division.items);
                    let most = lengths.iter().map(splits).max().unwrap_or(1);
                    assert!(most <= division.most_splits);
                }
            }
            let needed = division.room(&problem).unwrap();
            assert!(needed[0] >= room[0] && needed[1] >= room[1], "{batch}");
            room = needed;
        }
    }
    // Bits that depend on no other sequence, unequal numbers of queries, few keys, another kernel.
    let cache = CacheSizes::contiguous(DType::BF16, [4, capacity], 8, 128);
    let problem = AttentionDecodeProblem::of(cache, 1, 32);
    assert_eq!(divided(&tile(8), &gpu(), &problem, 1).unwrap().even_ctas, 0);
    let mut packed = problem;
    packed.attention.packed = Some(crate::attention::PackedRows { total_q: 4, total_kv: 0 });
    let short = CacheSizes::contiguous(DType::BF16, [4, 2000], 8, 128);
    let short = AttentionDecodeProblem::of(short, 1, 32);
    for problem in [AttentionDecodeProblem { batch_invariant: true, ..problem }, packed, short] {
        assert_eq!(divided(&tile(64), &gpu(), &problem, 1).unwrap().even_ctas, 0);
    }
}
