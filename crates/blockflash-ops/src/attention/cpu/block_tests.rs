use super::reference::{Case, assert_close, case, cpu};
use super::sequence::{MOST_ROWS, blocks, sequences, visited};
use crate::{Align, Attention, BlockGeometry, BlockMask, Mask};

fn geometry(case: &Case, block_q: usize, block_kv: usize) -> BlockGeometry {
    BlockGeometry::new(case.sizes[1], case.sizes[2], block_q, block_kv).unwrap()
}

fn run(case: &Case, mask: &BlockMask) -> (Vec<f32>, Vec<f32>) {
    let stream = cpu();
    let output = Attention { block_mask: Some(mask), ..case.attention() }.forward(&stream).unwrap();
    (output.o.to_vec(&stream).unwrap(), output.lse.to_vec(&stream).unwrap())
}

#[test]
fn blocks_of_queries_stay_in_their_row() {
    for (seqlen, row) in [(0, None), (300, None), (0, Some(64)), (300, Some(64)), (1000, Some(192))]
    {
        let mut end = 0;
        for queries in blocks(seqlen, row, MOST_ROWS) {
            assert!(queries.start == end && !queries.is_empty() && queries.len() <= MOST_ROWS);
            assert!(row.is_none_or(|row| queries.start / row == (queries.end - 1) / row));
            end = queries.end;
        }
        assert_eq!(end, seqlen);
    }
}

#[test]
fn only_visited_keys_are_taken() {
    let case = case([2, 200, 300], [4, 2], 8, Mask::Full);
    // Two rows for either batch entry and either head of keys.
    let rows = [
        [true, false, true, true, false],
        [false; 5],
        [true; 5],
        [false, false, false, false, true],
        [false, true, false, true, false],
        [true, true, false, false, false],
        [false; 5],
        [false, true, true, true, true],
    ];
    let mask = BlockMask::from_bool(geometry(&case, 128, 64), 2, 2, &rows.concat()).unwrap();
    let op = Attention { block_mask: Some(&mask), ..case.attention() };
    let problem = op.problem().unwrap();
    let sequences = sequences(&op, &problem, &cpu()).unwrap();
    let visited = |entry: usize, head: usize, queries: std::ops::Range<usize>| {
        let at = [sequences[entry].entry, head];
        let ranges = visited(Some(&mask), &problem, at, queries.start, 300).unwrap();
        ranges.ranges.into_iter().map(|keys| (keys.start, keys.end)).collect::<Vec<_>>()
    };
    for head in [0, 1] {
        assert_eq!(visited(0, head, 0..128), [(0, 64), (128, 256)]);
        assert_eq!(visited(0, head, 128..200), []);
        assert_eq!(visited(1, head, 0..128), [(64, 128), (192, 256)]);
        assert_eq!(visited(1, head, 128..200), [(0, 128)]);
    }
    for head in [2, 3] {
        assert_eq!(visited(0, head, 0..128), [(0, 300)]);
        assert_eq!(visited(0, head, 128..200), [(256, 300)]);
        assert_eq!(visited(1, head, 0..128), []);
        assert_eq!(visited(1, head, 128..200), [(64, 300)]);
    }
}

#[test]
fn every_block_is_no_block_mask() {
    let windows = [(Some(70), Some(3)), (None, Some(300)), (Some(0), None)].into_iter().flat_map(
        |(left, right)| {
            [Align::TopLeft, Align::BottomRight].map(|align| Mask::Window { left, right, align })
        },
    );
    for mask in [Mask::Full, Mask::causal(), Mask::Causal { align: Align::TopLeft }]
        .into_iter()
        .chain(windows)
    {
        for sizes in [[1, 1, 1], [2, 130, 3], [1, 3, 300], [1, 300, 700]] {
            let case = case(sizes, [2, 1], 8, mask);
            assert!(
                run(&case, &BlockMask::full(geometry(&case, 128, 64)).unwrap()) == case.run(),
                "{mask:?} {sizes:?}"
            );
            let visible =
                BlockMask::full(geometry(&case, 64, 128)).unwrap().intersect_mask(mask).unwrap();
            let ((o, lse), (o_reference, lse_reference)) = (run(&case, &visible), case.reference());
            assert_close(&o, &o_reference, 3e-6);
            assert_close(&lse, &lse_reference, 3e-6);
        }
    }
}

#[test]
fn one_block_is_attention_to_its_keys() {
    // Query head 1 of 2, keys 64..128 of 150, for the first 64 of 100 queries.
    let mut case = case([1, 100, 150], [2, 1], 8, Mask::Full);
    let geometry = geometry(&case, 64, 64);
    let mut blocks = vec![false; 2 * 2 * 3];
    blocks[6 + 1] = true;
    let (o, lse) = run(&case, &BlockMask::from_bool(geometry, 1, 2, &blocks).unwrap());
    case.sizes[2] = 64;
    (case.k, case.v) = (case.k[64 * 8..128 * 8].to_vec(), case.v[64 * 8..128 * 8].to_vec());
    let (o_alone, lse_alone) = case.reference();
    for (i, h) in (0..100).flat_map(|i| [(i, 0), (i, 1)]) {
        let o = &o[(i * 2 + h) * 8..][..8];
        if h == 1 && i < 64 {
            assert_close(o, &o_alone[(i * 2 + h) * 8..][..8], 3e-6);
            assert_close(&lse[100 + i..][..1], &lse_alone[100 + i..][..1], 3e-6);
        } else {
            assert!(o.iter().all(|&o| o == 0.0) && lse[h * 100 + i] == f32::NEG_INFINITY);
        }
    }
}

#[test]
fn what_is_not_visited_is_not_read() {
    let mut case = case([1, 200, 300], [1, 1], 8, Mask::Full);
    let geometry = geometry(&case, 128, 64);
    let blocks = [[true, false, true, true, false], [false, false, true, false, true]].concat();
    let mask = BlockMask::from_bool(geometry, 1, 1, &blocks).unwrap();
    let clean = run(&case, &mask);
    case.k[64 * 8..128 * 8].fill(f32::NAN);
    case.v[64 * 8..128 * 8].fill(f32::INFINITY);
    assert!(run(&case, &mask) == clean);
    // The first block is visited by the first row alone.
    case.k[0] = f32::NAN;
    case.v[9] = f32::NAN;
    let (o, lse) = run(&case, &mask);
    assert!(o[..128 * 8].iter().all(|o| o.is_nan()) && lse[..128].iter().all(|lse| lse.is_nan()));
    assert!(o[128 * 8..] == clean.0[128 * 8..] && lse[128..] == clean.1[128..]);
}
