//! Buffers on the CPU; `tests/block_mask_gpu.rs` compares those on a GPU with them.

use super::super::fixtures::{
    geometries, indices, random_blocks, random_mask, random_partial, token_masks,
};
use super::*;
use crate::Mask;
use crate::fixtures::values;
use blockflash_safe::{Device, View};

fn stream() -> Stream {
    Device::cpu().stream().unwrap()
}

fn problem<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

/// 2 × 3 blocks.
fn geometry() -> BlockGeometry {
    BlockGeometry::new(100, 150, 64, 64).unwrap()
}

/// One buffer, built of every source in turn, with and without blocks that are always visited.
#[test]
fn builds_are_those_of_the_constructors() {
    let stream = stream();
    for geometry in geometries() {
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let (batch, heads, k) = (2, 3, 2);
        let blocks = random_blocks(geometry, batch, heads, 1);
        let bytes: Vec<u8> = blocks.iter().map(|&block| u8::from(block) * 7).collect();
        let lists: Vec<i32> = (0..batch * heads * rows)
            .flat_map(|row| [row % (cols + 1), cols])
            .map(|col| if col < cols { col as i32 } else { -1 })
            .collect();
        let scores = values(batch * heads * rows * cols, 3);
        let mut buffer =
            BlockMaskBuffer::new(geometry, batch, heads, batch * heads * rows * cols, &stream)
                .unwrap();
        assert_eq!((buffer.mask().nnz(), buffer.mask().geometry()), (0, geometry));
        let shape = [batch, heads, rows, cols];
        for mask in token_masks() {
            let always = random_mask(geometry, 1, heads, 5);
            let host = [
                BlockMask::from_bool(geometry, batch, heads, &blocks),
                BlockMask::from_top_k(geometry, batch, heads, k, &lists),
                BlockMask::top_k_from_scores(geometry, batch, heads, &scores, k, mask),
            ];
            let sources = [
                BlockSource::Bool(View::from_slice(&bytes, &shape).unwrap()),
                BlockSource::TopK(View::from_slice(&lists, &[batch, heads, rows, k]).unwrap()),
                BlockSource::Scores { scores: View::from_slice(&scores, &shape).unwrap(), k },
            ];
            for (source, host) in sources.into_iter().zip(host) {
                let host = host.unwrap();
                buffer.build(&BlockChoice { mask, ..BlockChoice::new(source) }, &stream).unwrap();
                assert_eq!(indices(buffer.mask()), indices(&host.intersect_mask(mask).unwrap()));
                let choice = BlockChoice { always: Some(&always), mask, source };
                buffer.build(&choice, &stream).unwrap();
                let expected = host.union(&always).unwrap().intersect_mask(mask).unwrap();
                assert_eq!(indices(buffer.mask()), indices(&expected));
                assert_eq!(indices(&buffer.to_host(&stream).unwrap()), indices(&expected));
                buffer.check(&stream).unwrap();
            }
        }
    }
}

#[test]
fn what_is_wrong_is_an_error_and_the_mask_stays() {
    let stream = stream();
    let mut buffer = BlockMaskBuffer::new(geometry(), 1, 2, 5, &stream).unwrap();
    assert_eq!(buffer.capacity(), 5);
    let build = |buffer: &mut BlockMaskBuffer, blocks: [u8; 12]| {
        let view = View::from_slice(&blocks, &[1, 2, 2, 3]).unwrap();
        buffer.build(&BlockChoice::new(BlockSource::Bool(view)), &stream)
    };
    build(&mut buffer, [1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]).unwrap();
    assert_eq!(buffer.mask().nnz(), 5);
    assert_eq!(
        problem(build(&mut buffer, [1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1])),
        "invalid block mask: 6 blocks are visited, but the capacity is 5: it ends at batch 0, \
         head 1, row 1, position 2"
    );
    assert!(problem(build(&mut buffer, [1; 12])).ends_with(
        "12 blocks are visited, but the capacity is 5: it ends at batch 0, head 0, row 1, \
         position 2"
    ));
    let nan = [f32::NAN; 12];
    let scores = View::from_slice(&nan, &[1, 2, 2, 3]).unwrap();
    let choice = BlockChoice::new(BlockSource::Scores { scores, k: 1 });
    assert!(
        problem(buffer.build(&choice, &stream))
            .contains("score is NaN at batch 0, head 0, row 0, position 0")
    );
    let columns = View::from_slice(&[0, 1, 2, 2, 0, 1, 0, 1], &[1, 2, 2, 2]).unwrap();
    let choice = BlockChoice::new(BlockSource::TopK(columns));
    assert!(problem(buffer.build(&choice, &stream)).contains("column 2 comes twice"));
    assert_eq!(indices(buffer.mask()), (vec![0, 1, 3, 3, 4, 5], vec![0, 0, 1, 2, 0]));
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let stream = stream();
    let mut buffer = BlockMaskBuffer::new(geometry(), 1, 2, 12, &stream).unwrap();
    let mut refused = |source| buffer.build(&BlockChoice::new(source), &stream).unwrap_err();
    let bytes = View::from_slice(&[1u8; 12], &[1, 2, 2, 3]).unwrap();
    let numbers = View::from_slice(&[1f32; 12], &[1, 2, 2, 3]).unwrap();
    let columns = View::from_slice(&[0i32; 12], &[1, 2, 2, 3]).unwrap();
    assert!(matches!(refused(BlockSource::Bool(numbers)), Error::DType { what: "blocks", .. }));
    assert!(matches!(refused(BlockSource::TopK(bytes)), Error::DType { what: "columns", .. }));
    let scores = |scores| BlockSource::Scores { scores, k: 1 };
    assert!(matches!(refused(scores(columns)), Error::DType { what: "scores", .. }));
    let swapped = numbers.permute(&[1, 0, 2, 3]).unwrap();
    assert!(matches!(refused(scores(swapped)), Error::Shape { what: "scores", .. }));
    let three = View::from_slice(&[0i32; 12], &[2, 2, 3]).unwrap();
    assert!(matches!(refused(BlockSource::TopK(three)), Error::Shape { what: "columns", .. }));
    let gaps = View::from_slice_strided(&[0u8; 100], &[1, 2, 2, 3], &[50, 20, 5, 1]).unwrap();
    assert!(matches!(refused(BlockSource::Bool(gaps)), Error::Stride { what: "blocks", .. }));

    let mut with = |always: &BlockMask| {
        let choice =
            BlockChoice { always: Some(always), ..BlockChoice::new(BlockSource::Bool(bytes)) };
        buffer.build(&choice, &stream)
    };
    let other = BlockMask::full(BlockGeometry::new(100, 151, 64, 64).unwrap()).unwrap();
    assert!(problem(with(&other)).contains("`always` has the geometry"));
    let partial = random_partial(geometry(), 1, 1, 1).0;
    assert!(problem(with(&partial)).contains("`always` has partial blocks"));
    let many = random_mask(geometry(), 1, 3, 1);
    assert_eq!(problem(with(&many)), "invalid block mask: heads of `always` is 3, neither 1 nor 2");
    let many = random_mask(geometry(), 2, 1, 1);
    assert!(problem(with(&many)).contains("batch of `always` is 2, neither 1 nor 1"));
    with(&random_mask(geometry(), 1, 2, 1)).unwrap();

    let kernel = blockflash_sys::manifest::kernels().first().unwrap();
    let choice = BlockChoice { mask: Mask::causal(), ..BlockChoice::new(BlockSource::Bool(bytes)) };
    assert!(
        problem(buffer.build_with(kernel, &choice, &stream))
            .contains("block_mask is not supported on cpu")
    );
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    let new = |batch, capacity| BlockMaskBuffer::new(geometry(), batch, 1, capacity, &stream());
    assert!(matches!(new(0, 1), Err(Error::InvalidBlockMask(_))));
    assert!(matches!(new(1, 1 << 31), Err(Error::TooLarge { what: "capacity", .. })));
    assert_eq!(new(1, 0).unwrap().capacity(), 0);
}
