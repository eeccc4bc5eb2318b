use super::*;

fn said(mask: Result<BlockMask>) -> String {
    mask.unwrap_err().to_string()
}

/// The property tests of `tests/tests/cpu/token_masks.rs` hold the patterns against booleans.
#[test]
fn what_does_not_fit_is_named() {
    let geometry = BlockGeometry::new(4, 6, 64, 64).unwrap();
    for (ids_q, ids_kv, expected) in [
        (&[0; 5][..], &[0; 6][..], "ids_q has shape [5], expected the values of [batch, 4]"),
        (&[], &[0; 6], "ids_q has shape [0], expected the values of [batch, 4]"),
        (&[0; 8], &[0; 6], "ids_kv has shape [6], expected the values of [2, 6]"),
    ] {
        assert_eq!(said(BlockMask::documents(geometry, ids_q, ids_kv)), expected);
    }
    for (parents, expected) in [
        ([-1, 0, 2, 0], "the parent of query 2 of batch 0 is 2, neither -1 nor an earlier query"),
        ([-2, 0, 0, 0], "the parent of query 0 of batch 0 is -2"),
    ] {
        assert!(said(BlockMask::tree(geometry, &parents)).contains(expected));
    }
    let few = BlockGeometry::new(4, 3, 64, 64).unwrap();
    assert!(said(BlockMask::tree(few, &[-1; 4])).contains("3 keys, fewer than the 4 queries"));
    let window = BlockMask::dilated_window(geometry, 0, None, None, Align::TopLeft);
    assert!(said(window).contains("dilation is 0"));
    assert!(said(BlockMask::prefix(geometry, &[], Mask::causal())).contains("batch is 0"));
    assert!(said(BlockMask::key_padding(geometry, &[])).contains("batch is 0"));

    let square = BlockGeometry::new(12, 12, 64, 64).unwrap();
    let of = |grid: &[usize], window: &[usize], dilation: &[usize]| {
        said(BlockMask::neighborhood(square, grid, window, dilation))
    };
    assert!(of(&[3, 5], &[3, 3], &[1, 1]).contains("a grid of [3, 5] tokens, but 12 queries"));
    assert!(of(&[3, 4], &[3], &[1, 1]).contains("2 dimensions, with 1 windows and 2 dilations"));
    assert!(of(&[3, 4], &[3, 3], &[1, 2]).contains("3 × 2 positions along dimension 1, not from"));
    assert!(of(&[3, 4], &[0, 3], &[1, 1]).contains("0 × 1 positions along dimension 0"));
    let grid = BlockMask::neighborhood(geometry, &[4], &[1], &[1]);
    assert!(said(grid).contains("4 queries and 6 keys"));
}
