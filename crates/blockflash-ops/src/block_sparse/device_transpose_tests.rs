//! Plans, and buffers on the CPU; `tests/block_mask_transpose_gpu.rs` runs the kernels.

use super::super::fixtures::{geometries, random_blocks};
use super::super::{BlockChoice, BlockGeometry, BlockMaskBuffer, BlockSource};
use super::*;
use crate::{Error, Target, View};
use blockflash_sys::manifest;
use blockflash_sys::{BlockMaskKernel, manifest::Variant};

fn kernel() -> &'static Kernel {
    let transposes = |kernel: &&Kernel| {
        let variant =
            Variant::BlockMask(BlockMaskKernel::Transpose { slab_rows: 128, chunk_cols: 8192 });
        (kernel.variant, kernel.target) == (variant, Target::Sm90)
    };
    manifest::kernels().iter().find(transposes).unwrap()
}

fn sizes(rows: usize, cols: usize) -> TransposeSizes {
    let geometry = BlockGeometry::new(rows * 64, cols * 64, 64, 64).unwrap();
    TransposeSizes(Sizes::new(geometry, 2, 3).unwrap())
}

#[test]
fn both_steps_are_planned() {
    let [(gather, first), (list, second)] = plan(kernel(), &sizes(200, 9000), 77).unwrap().unwrap();
    let steps = [BLOCKFLASH_BLOCK_MASK_GATHER, BLOCKFLASH_BLOCK_MASK_LIST_T];
    assert_eq!([gather.step, list.step], steps);
    let numbers =
        |p: &blockflash_block_mask_transpose_params| [p.batch, p.heads, p.rows, p.cols, p.capacity];
    assert_eq!([&gather, &list].map(numbers), [[2, 3, 200, 9000, 77]; 2]);
    // Two slabs and two chunks for each of six heads, then 282 strips.
    assert_eq!([first.grid, second.grid], [[24, 1, 1], [6 * 282, 1, 1]]);
    assert_eq!([first.block, second.block], [512; 2]);
    assert!(plan(kernel(), &sizes(0, 10), 0).unwrap().is_none());
    assert!(plan(kernel(), &sizes(10, 0), 0).unwrap().is_none());
    let other = manifest::kernels().iter().find(|kernel| kernel.source() == "block_mask_sm80");
    let error = plan(other.unwrap(), &sizes(1, 1), 1).unwrap_err().to_string();
    assert!(error.contains("computes something else"), "{error}");
}

fn transposed(mask: &BlockMask) -> [Vec<i32>; 2] {
    let arrays = mask.transposed_indices().unwrap();
    arrays.map(|array| array.view().as_slice::<i32>().unwrap().to_vec())
}

/// A buffer on the CPU transposes each mask that it builds, and nothing unless it is asked to.
#[test]
fn builds_on_the_cpu_are_transposed() {
    let stream = Device::cpu().stream().unwrap();
    for geometry in geometries() {
        let shape = [2, 3, geometry.rows(), geometry.cols()];
        let room = shape.iter().product();
        let buffer = BlockMaskBuffer::new(geometry, 2, 3, room, &stream).unwrap();
        assert!(buffer.mask().transposed_indices().is_none());
        let mut buffer = buffer.with_transpose(&stream).unwrap();
        assert_eq!(transposed(buffer.mask())[0], vec![0; 6 * (geometry.cols() + 1)]);
        for seed in 0..3 {
            let blocks = random_blocks(geometry, 2, 3, seed);
            let bytes: Vec<u8> = blocks.iter().map(|&block| block.into()).collect();
            let source = BlockSource::Bool(View::from_slice(&bytes, &shape).unwrap());
            buffer.build(&BlockChoice::new(source), &stream).unwrap();
            let expected = BlockMask::from_bool(geometry, 2, 3, &blocks).unwrap();
            let expected = transposed(&expected.with_transpose().unwrap());
            assert_eq!(transposed(buffer.mask()), expected);
            assert_eq!(transposed(&buffer.to_host(&stream).unwrap()), expected);
        }
    }
}

#[test]
fn only_buffers_on_a_gpu_take_a_kernel() {
    let stream = Device::cpu().stream().unwrap();
    let geometry = BlockGeometry::new(100, 150, 64, 64).unwrap();
    let mut buffer = BlockMaskBuffer::new(geometry, 1, 1, 6, &stream).unwrap();
    let bytes = [1u8; 6];
    let choice =
        BlockChoice::new(BlockSource::Bool(View::from_slice(&bytes, &[1, 1, 2, 3]).unwrap()));
    let error = buffer.build_with(kernel(), &choice, &stream).unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "block_mask", .. }), "{error}");
}

#[test]
fn machine_code_before_ptx() {
    let found = |major, minor| select(&sizes(3, 4), &crate::fixtures::gpu(major, minor));
    let targets = [((8, 0), Target::Sm80), ((9, 0), Target::Sm90), ((10, 0), Target::Ptx80)];
    for ((major, minor), target) in targets {
        assert_eq!(found(major, minor).unwrap().target, target);
    }
    assert!(matches!(found(7, 5), Err(Error::Unsupported { op: "block_mask", .. })));
}
