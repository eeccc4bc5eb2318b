use super::*;
use crate::launch::bsr_matmul_fixtures::{self as fixtures, TILE};
use crate::{DType, Device, Tensor};

const SMALL: BsrMatmulHopper =
    BsrMatmulHopper { block_size: 32, block_rows: 8, block_n: 128, ..TILE };
const BLOCKS: u64 = 5;

/// 150 × 200 in blocks of 64 times 200 × 136, whose rows are 144 apart.
fn params() -> blockflash_bsr_matmul_params {
    fixtures::params([150, 136, 200], 144)
}

fn map(shape: [u64; 3], strides_bytes: [u64; 2], box_shape: [u32; 3]) -> Map {
    Map { shape, strides_bytes, box_shape, swizzle: Swizzle::B128 }
}

fn encodable(maps: &[&Map]) {
    let stream = &Device::cpu().stream().unwrap();
    let view = Tensor::empty(stream, DType::F16, &[1]).unwrap();
    for map in maps {
        map.spec(&view.view()).check().unwrap();
    }
}

#[test]
fn a_transposed_block_and_columns_of_b() {
    let tile =
        BsrMatmulHopper { block_size: 128, a_transposed: true, b_column_major: true, ..TILE };
    let params = blockflash_bsr_matmul_params { ldb: 208, n: 300, ..params() };
    let [a, b, b_edge] = maps(&tile, &params, BLOCKS);
    assert_eq!(
        a,
        map([128, 128, 5], [256, 128 * 256], [64, 64, 1]),
        "64 rows of a block, 64 of the depth"
    );
    assert_eq!(b, map([200, 300, 1], [416, 416], [64, 256, 1]));
    assert_eq!(
        b_edge,
        map([200, 300, 1], [416, 416], [64, 44, 1]),
        "the columns that the last tile has"
    );
    encodable(&[&a, &b, &b_edge]);
    let [_, _, b_edge] = maps(&tile, &blockflash_bsr_matmul_params { n: 512, ..params }, BLOCKS);
    assert!(b_edge.shape.contains(&0), "whole tiles have no edge");
}

#[test]
fn blocks_panels_and_edges() {
    let [a, b, b_edge] = maps(&TILE, &params(), BLOCKS);
    assert_eq!(a, map([64, 64, 5], [128, 64 * 128], [64, 64, 1]), "a block");
    // 136 columns: two whole panels, the rest by the map of the edges.
    assert_eq!(b, map([64, 200, 2], [288, 128], [64, 64, 4]));
    assert_eq!(b_edge, map([136, 200, 1], [288, 288], [64, 64, 1]));
    encodable(&[&a, &b, &b_edge]);
}

#[test]
fn each_block_of_a_cluster_copies_half_of_a() {
    let pair = BsrMatmulHopper { cluster: 2, ..TILE };
    let [[a, b, edge], [half, same, same_edge]] =
        [TILE, pair].map(|tile| maps(&tile, &params(), BLOCKS));
    assert_eq!((a.box_shape, half.box_shape), ([64, 64, 1], [64, 32, 1]));
    assert_eq!((b, edge), (same, same_edge));
    let transposed = BsrMatmulHopper { block_size: 128, a_transposed: true, ..pair };
    assert_eq!(maps(&transposed, &params(), BLOCKS)[0].box_shape, [64, 32, 1]);
}

#[test]
fn small_blocks_are_copied_as_they_lie() {
    let [a, b, b_edge] = maps(&SMALL, &params(), BLOCKS);
    assert!(a.shape.contains(&0));
    // The rows of B that one block column meets.
    assert_eq!((b.box_shape, b_edge.box_shape), ([64, 32, 2], [64, 32, 1]));
}

#[test]
fn filled_with_zeros_they_are_copied_one_by_one() {
    let [a, b, b_edge] = maps(&BsrMatmulHopper { filled: true, ..SMALL }, &params(), BLOCKS);
    assert_eq!(a, Map { swizzle: Swizzle::B64, ..map([32, 32, 5], [64, 32 * 64], [32, 32, 1]) });
    assert_eq!(b.box_shape, [64, 32, 2], "half of the columns of a pair");
    encodable(&[&a, &b, &b_edge]);
}

#[test]
fn tensors_without_elements_have_no_map() {
    let stream = &Device::cpu().stream().unwrap();
    let nothing = Tensor::empty(stream, DType::F16, &[0]).unwrap();
    let narrow = blockflash_bsr_matmul_params { n: 63, k: 0, ..params() };
    for map in maps(&TILE, &narrow, 0) {
        assert_eq!(map.encode(&nothing.view()).unwrap().opaque, [0; 16]);
    }
    let [_, b, b_edge] = maps(&TILE, &blockflash_bsr_matmul_params { n: 63, ..params() }, 1);
    assert!(b.shape.contains(&0) && !b_edge.shape.contains(&0));
}
