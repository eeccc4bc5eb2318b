use super::super::fixtures::{geometries, random_partial, token_masks};
use super::*;

/// The property tests of `tests/tests/cpu/token_masks.rs` hold all constructors against booleans.
#[test]
fn pairs_come_back() {
    for geometry in geometries() {
        let (mask, pairs) = random_partial(geometry, 2, 3, 3);
        let again = BlockMask::from_token_mask(geometry, 2, 3, &pairs).unwrap();
        assert_eq!(again.to_token_mask().unwrap(), pairs);
        // What shows nothing is not visited, and what shows everything has no bits.
        let least = mask.intersection(&BlockMask::full(geometry).unwrap()).unwrap();
        assert_eq!(again.to_bool().unwrap(), least.to_bool().unwrap());
        assert_eq!(again.bits().is_some(), least.bits().is_some());
        for tokens in token_masks() {
            let mask = BlockMask::from_masks(geometry, &[tokens]).unwrap();
            let expected = tokens.visited_pairs(geometry.seqlen_q(), geometry.seqlen_kv());
            assert_eq!(mask.visited_pairs(Mask::Full).unwrap(), expected, "{tokens:?}");
            assert_eq!(mask.visited_pairs(tokens).unwrap(), expected, "{tokens:?}");
            assert_eq!(mask.complement(tokens).unwrap().nnz(), 0, "{tokens:?}");
        }
    }
}

#[test]
fn a_causal_mask_shares_the_bits_of_its_diagonal() {
    let geometry = BlockGeometry::new(1024, 1024, 128, 128).unwrap();
    let mask = BlockMask::from_masks(geometry, &[Mask::causal()]).unwrap();
    let [block_bits, words] = mask.bits().unwrap();
    let first = block_bits.view().as_slice::<i32>().unwrap().to_vec();
    assert_eq!(first.iter().filter(|&&first| first == 0).count(), 8);
    assert_eq!((first.len(), words.shape()), (36, &[4, 128][..]));
}

#[test]
fn what_does_not_fit_is_an_error() {
    let geometry = BlockGeometry::new(100, 200, 64, 64).unwrap();
    let said = |mask: Result<BlockMask>| mask.unwrap_err().to_string();
    assert!(said(BlockMask::from_masks(geometry, &[])).contains("heads is 0"));
    let shape = said(BlockMask::from_token_mask(geometry, 1, 2, &[true; 20_000]));
    assert_eq!(shape, "pairs has shape [20000], expected the values of [1, 2, 100, 200]");
}
