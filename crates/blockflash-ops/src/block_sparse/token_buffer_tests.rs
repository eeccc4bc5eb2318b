use super::*;
use crate::fixtures::gpus;
use crate::{BlockGeometry, Error, Mask, TokenSource};
use blockflash_safe::{Device, Tensor};
use blockflash_sys::DType;

fn stream() -> Stream {
    Device::cpu().stream().unwrap()
}

fn said<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

/// 200 queries and keys, chunks of 70 keys, in blocks of 64.
fn chunks(stream: &Stream) -> Tensor {
    let ends = (0..200).flat_map(|query| [query / 70 * 70, query / 70 * 70 + 70, 0, 0]);
    Tensor::from_slice(stream, &ends.collect::<Vec<i32>>(), &[1, 1, 200, 4]).unwrap()
}

fn buffer(blocks: usize, partial: usize, stream: &Stream) -> BlockMaskBuffer {
    let geometry = BlockGeometry::new(200, 200, 64, 64).unwrap();
    let buffer = BlockMaskBuffer::new(geometry, 1, 1, blocks, stream).unwrap();
    buffer.with_bits(partial, stream).unwrap().with_transpose(stream).unwrap()
}

#[test]
fn the_cpu_builds_what_its_constructors_make() {
    let stream = stream();
    let ranges = chunks(&stream);
    let mut buffer = buffer(16, 9, &stream);
    buffer.build_tokens(&TokenChoice::new(TokenSource::Ranges(ranges.view())), &stream).unwrap();
    buffer.check(&stream).unwrap();
    let sees = |query: usize, key: usize| query / 70 == key / 70;
    let pairs: Vec<bool> = (0..200 * 200).map(|at| sees(at / 200, at % 200)).collect();
    assert_eq!(buffer.mask().to_token_mask().unwrap(), pairs);
    assert!(buffer.mask().transposed_bits().is_some());

    let bytes: Vec<u8> = pairs.iter().map(|&pair| u8::from(pair) * 7).collect();
    let bytes = Tensor::from_slice(&stream, &bytes, &[1, 1, 200, 200]).unwrap();
    let source = TokenSource::Bool(bytes.view());
    let choice = TokenChoice { mask: Mask::causal(), ..TokenChoice::new(source) };
    buffer.build_tokens(&choice, &stream).unwrap();
    let found = buffer.to_host(&stream).unwrap();
    assert_eq!(found.row(0, 0, 1).unwrap().collect::<Vec<_>>(), [0, 1]);
    let expected: u64 = (0..200).map(|query| (query % 70) + 1).sum();
    assert_eq!(found.visited_pairs(Mask::causal()).unwrap(), expected);
}

#[test]
fn what_has_no_room_is_an_error_and_the_mask_stays() {
    let stream = stream();
    let ranges = chunks(&stream);
    let source = TokenChoice::new(TokenSource::Ranges(ranges.view()));
    for (blocks, partial, expected) in [
        (16, 3, "tiles of 64 × 64 bits are needed, but there is room for 3"),
        (5, 16, "blocks are visited, but the capacity is 5"),
    ] {
        let mut buffer = buffer(blocks, partial, &stream);
        let error = said(buffer.build_tokens(&source, &stream));
        assert!(error.contains(expected), "{error}");
        assert_eq!(buffer.mask().nnz(), 0);
    }
}

#[test]
fn sources_and_buffers_that_do_not_fit_are_named() {
    let stream = stream();
    let mut with_bits = buffer(16, 16, &stream);
    let geometry = BlockGeometry::new(200, 200, 64, 64).unwrap();
    let mut without = BlockMaskBuffer::new(geometry, 1, 1, 16, &stream).unwrap();
    let ranges = chunks(&stream);
    let source = TokenChoice::new(TokenSource::Ranges(ranges.view()));
    let error = said(without.build_tokens(&source, &stream));
    assert!(error.contains("no room for bits"), "{error}");
    let blocks = Tensor::zeros(&stream, DType::U8, &[1, 1, 4, 4]).unwrap();
    let choice = BlockChoice::new(BlockSource::Bool(blocks.view()));
    let error = said(with_bits.build(&choice, &stream));
    assert!(error.contains("`build_tokens` builds it"), "{error}");
    let long = BlockGeometry::new(1 << 30, 1 << 30, 64, 64).unwrap();
    let buffer = BlockMaskBuffer::new(long, 1, 1, 1, &stream).unwrap();
    let error = buffer.with_bits(1, &stream).unwrap_err();
    assert!(matches!(error, Error::TooLarge { what: "tiles of all blocks", .. }), "{error}");
}

#[test]
fn kernels_make_blocks_of_a_few_tiles() {
    let of = |block_q, block_kv| {
        let geometry = BlockGeometry::new(1000, 1000, block_q, block_kv).unwrap();
        BitSizes(Sizes::new(geometry, 1, 1).unwrap())
    };
    for gpu in gpus() {
        for [block_q, block_kv] in [[64, 64], [128, 128], [256, 256], [64, 1024]] {
            select(&of(block_q, block_kv), &gpu).unwrap();
        }
        let error = said(select(&of(320, 256), &gpu));
        assert!(error.contains("partial blocks of 320 × 256"), "{error}");
    }
}
