use super::super::fixtures::{geometries, random_partial, token_masks};
use super::*;
use crate::Align;

/// Masks of two batch entries and three heads and the pairs that they show.
fn masks() -> impl Iterator<Item = (BlockMask, Vec<bool>)> {
    geometries().into_iter().map(|geometry| random_partial(geometry, 2, 3, 5))
}

/// What transposition does to pairs of `rows` × `cols`.
fn transposed(pairs: &[bool], [rows, cols]: [usize; 2]) -> Vec<bool> {
    let groups = pairs.chunks((rows * cols).max(1));
    groups.flat_map(|of| (0..rows * cols).map(|at| of[at % rows * cols + at / rows])).collect()
}

#[test]
fn pairs_are_visible_where_their_bits_are() {
    for (mask, pairs) in masks() {
        let [seqlen_q, seqlen_kv] = [mask.seqlen_q(), mask.seqlen_kv()];
        assert_eq!(mask.to_token_mask().unwrap(), pairs);
        for (at, &visible) in pairs.iter().enumerate().step_by(11) {
            let (group, pair) = (at / (seqlen_q * seqlen_kv), at % (seqlen_q * seqlen_kv));
            let (query, key) = (pair / seqlen_kv, pair % seqlen_kv);
            assert_eq!(mask.is_visible(group / 3, group % 3, query, key).unwrap(), visible);
        }
        for tokens in token_masks() {
            let shown = |&(at, &visible): &(usize, &bool)| {
                let pair = at % (seqlen_q * seqlen_kv);
                let keys = tokens.visible(pair / seqlen_kv, seqlen_q, seqlen_kv);
                visible && keys.contains(&(pair % seqlen_kv))
            };
            let count = pairs.iter().enumerate().filter(shown).count();
            assert_eq!(mask.visited_pairs(tokens).unwrap(), count as u64, "{tokens:?}");
            let of_row = |([batch, head, row], _): ([usize; 3], Range<usize>)| {
                let pairs = mask.row_pairs(batch, head, row, tokens).unwrap();
                assert!(mask.row(batch, head, row).unwrap().eq(pairs.map(|(col, _)| col)));
                let pairs = mask.row_pairs(batch, head, row, tokens).unwrap();
                pairs.map(|(_, pairs)| pairs).sum::<u64>()
            };
            assert_eq!(mask.spans().unwrap().map(of_row).sum::<u64>(), count as u64);
        }
    }
    let geometry = BlockGeometry::new(64, 192, 64, 64).unwrap();
    let full = BlockMask::full(geometry).unwrap();
    assert_eq!(full.partial_blocks().unwrap(), 0);
    let some = full.with_bits(&[0, -1, 0], &BitTile::NONE.words()).unwrap();
    assert_eq!(some.partial_blocks().unwrap(), 2);
    let (mask, _) = random_partial(BlockGeometry::new(100, 200, 64, 64).unwrap(), 2, 3, 1);
    for ([batch, head, query, key], said) in [
        ([2, 0, 0, 0], "batch is 2"),
        ([0, 3, 0, 0], "head is 3"),
        ([0, 0, 100, 0], "query is 100, but there are 100"),
        ([0, 0, 0, 200], "key is 200, but there are 200"),
    ] {
        let error = mask.is_visible(batch, head, query, key).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn transposes_and_copies_have_the_bits() {
    let stream = Device::cpu().stream().unwrap();
    for (mask, pairs) in masks() {
        let lengths = [mask.seqlen_q(), mask.seqlen_kv()];
        let turned = mask.transpose().unwrap();
        assert_eq!(turned.to_token_mask().unwrap(), transposed(&pairs, lengths));
        let bits = |mask: &BlockMask| mask.bits().map(|bits| bits.map(|a| a.shape().to_vec()));
        let mask = mask.with_transpose().unwrap().to(&stream).unwrap();
        assert_eq!(mask.to_token_mask().unwrap(), pairs);
        // Kernels read the same first tiles, beside the transposed lists, in as many words.
        let (Some([_, words]), Some([first, words_t])) = (mask.bits(), mask.transposed_bits())
        else {
            assert_eq!(mask.nnz(), 0);
            continue;
        };
        assert_eq!(words.shape(), words_t.shape());
        assert_eq!(bits(&mask), bits(&turned));
        let words: Vec<u32> =
            words_t.to_vec::<i32>(&stream).unwrap().iter().map(|&word| word as u32).collect();
        let full = turned.with_bits(&first.to_vec::<i32>(&stream).unwrap(), &words).unwrap();
        assert_eq!(full.to_token_mask().unwrap(), transposed(&pairs, lengths));
        // New bits renew the transpose.
        let none = mask.with_bits(&vec![-1; full.nnz()], &[]).unwrap();
        let [first, words] = none.transposed_bits().unwrap();
        assert!(first.to_vec::<i32>(&stream).unwrap().iter().all(|&first| first == -1));
        assert_eq!(words.shape(), [0, 128]);
    }
}

#[test]
fn packed_masks_have_the_bits_of_their_sequences() {
    let of = |lengths: [usize; 2], heads, seed| {
        let geometry = BlockGeometry::new(lengths[0], lengths[1], 128, 64).unwrap();
        random_partial(geometry, 1, heads, seed)
    };
    let sequences = [of([300, 200], 2, 1), of([0, 70], 1, 2), of([65, 129], 2, 3)];
    let packed = BlockMask::packed(&sequences.each_ref().map(|(mask, _)| mask)).unwrap();
    let mut count = 0;
    for (at, (mask, pairs)) in sequences.iter().enumerate() {
        let entry = packed.entry(at).unwrap();
        let pairs = if mask.heads() == 1 { pairs.repeat(2) } else { pairs.clone() };
        assert_eq!(entry.to_token_mask().unwrap(), pairs);
        count += pairs.iter().filter(|&&visible| visible).count();
        let [seqlen_q, seqlen_kv] = [mask.seqlen_q(), mask.seqlen_kv()];
        for (at_pair, &visible) in pairs.iter().enumerate().step_by(7) {
            let (head, pair) = (at_pair / (seqlen_q * seqlen_kv), at_pair % (seqlen_q * seqlen_kv));
            let [query, key] = [pair / seqlen_kv, pair % seqlen_kv];
            assert_eq!(packed.is_visible(at, head, query, key).unwrap(), visible);
        }
    }
    assert_eq!(packed.visited_pairs(Mask::Full).unwrap(), count as u64);
    let turned = packed.with_transpose().unwrap();
    assert_eq!(turned.transposed_bits().unwrap()[0].shape(), [turned.nnz()]);
}

#[test]
fn combinations_are_those_of_the_pairs() {
    for geometry in geometries() {
        let ((a, a_pairs), (b, b_pairs)) =
            (random_partial(geometry, 2, 1, 1), random_partial(geometry, 2, 3, 2));
        let (full, all) = (BlockMask::full(geometry).unwrap(), geometry.seqlen_q());
        let of_head = all * geometry.seqlen_kv();
        let combined = |both: fn(bool, bool) -> bool| -> Vec<bool> {
            let of_a = |at: usize| a_pairs[at / of_head / 3 * of_head + at % of_head];
            (0..b_pairs.len()).map(|at| both(of_a(at), b_pairs[at])).collect()
        };
        let pairs = |mask: Result<BlockMask>| mask.unwrap().to_token_mask().unwrap();
        assert_eq!(pairs(a.union(&b)), combined(|a, b| a || b));
        assert_eq!(pairs(a.intersection(&b)), combined(|a, b| a && b));
        assert_eq!(pairs(a.difference(&b)), combined(|a, b| a && !b));
        assert_eq!(pairs(b.difference(&a)), combined(|a, b| b && !a));
        assert_eq!(pairs(full.difference(&b)), combined(|_, b| !b));
        assert_eq!(pairs(b.intersection(&full)), b_pairs);
        assert_eq!(b.difference(&b).unwrap().nnz(), 0);
        // What a combination shows entirely is full, and equal bits are shared.
        let whole = b.union(&full.difference(&b).unwrap()).unwrap();
        assert!(whole.bits().is_none() && whole.density() == full.density());
        let causal = Mask::Causal { align: Align::TopLeft };
        let narrowed = b.intersect_mask(causal).unwrap();
        assert_eq!(
            narrowed.visited_pairs(causal).unwrap(),
            b.visited_pairs(causal).unwrap(),
            "{geometry:?}"
        );
        let factors = [geometry.block_q() / 64, geometry.block_kv() / 64];
        assert_eq!(pairs(b.expand(factors[0], factors[1])), b_pairs);
        assert_eq!(b.entry(1).unwrap().to_token_mask().unwrap(), b_pairs[b_pairs.len() / 2..]);
    }
}

#[test]
fn bits_that_fit_no_blocks_are_errors() {
    let geometry = BlockGeometry::new(128, 256, 64, 128).unwrap();
    let of = |block_bits: &[i32], words: usize| {
        let mask = BlockMask::full(geometry).unwrap();
        match mask.with_bits(block_bits, &vec![0; words]) {
            Err(Error::InvalidBlockMask(what)) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(of(&[-1, 0, -1], 256), "block_bits has 3 entries, expected 4");
    assert!(of(&[-1, 0, -1, 2], 256).contains("block_bits[3] is 2, not from -1 to 2 - 1"));
    assert!(of(&[-1, 0, 1, -1], 512).contains("block_bits[2] is 1, neither -1 nor a multiple"));
    assert!(of(&[-1, 0, -1, -1], 128).contains("128 words"));
}
