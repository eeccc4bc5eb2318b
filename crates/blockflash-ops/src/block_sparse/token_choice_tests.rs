use super::*;
use crate::{BlockGeometry, BlockMaskBuffer};
use blockflash_safe::{Stream, Tensor};

fn stream() -> Stream {
    Device::cpu().stream().unwrap()
}

fn buffer(lengths: [usize; 2], stream: &Stream) -> BlockMaskBuffer {
    let geometry = BlockGeometry::new(lengths[0], lengths[1], 64, 64).unwrap();
    BlockMaskBuffer::new(geometry, 1, 1, 99, stream).unwrap().with_bits(99, stream).unwrap()
}

fn said(lengths: [usize; 2], source: TokenSource<'_>) -> String {
    let stream = stream();
    let choice = TokenChoice::new(source);
    buffer(lengths, &stream).build_tokens(&choice, &stream).unwrap_err().to_string()
}

/// The property tests of `tests/tests/cpu/token_sources.rs` hold the sources against booleans.
#[test]
fn sources_that_do_not_fit_are_named() {
    let stream = stream();
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let pairs = zeros(DType::U8, &[1, 1, 4, 4]);
    let error = said([200, 200], TokenSource::Bool(pairs.view()));
    assert!(error.starts_with("pairs has shape [1, 1, 4, 4]"), "{error}");
    let odd = zeros(DType::I32, &[1, 1, 200, 3]);
    let error = said([200, 200], TokenSource::Ranges(odd.view()));
    assert!(error.starts_with("ranges has shape [1, 1, 200, 3]"), "{error}");
    let [ids, few] = [200, 100].map(|length| zeros(DType::I32, &[1, length]));
    let of = |ids_q: &Tensor, ids_kv: &Tensor| {
        said([200, 200], TokenSource::Documents { ids_q: ids_q.view(), ids_kv: ids_kv.view() })
    };
    assert!(of(&few, &ids).starts_with("ids_q has shape [1, 100]"));
    assert!(of(&ids, &few).starts_with("ids_kv has shape [1, 100]"));
    assert!(of(&zeros(DType::F32, &[1, 200]), &ids).starts_with("ids_q is f32"));
    let error = said([200, 100], TokenSource::Tree(ids.view()));
    assert!(error.contains("100 keys, fewer than the 200 queries"), "{error}");
    assert!(said([200, 300], TokenSource::Tree(few.view())).starts_with("parents has shape"));
    let strided = TokenSource::Strided { stride: 0, align: Align::TopLeft };
    assert!(said([200, 200], strided).contains("stride is 0"));
    let near = |lengths, grid: &[usize], window: &[usize], dilation: &[usize]| {
        said(lengths, TokenSource::Neighborhood { grid, window, dilation })
    };
    assert!(near([12, 12], &[3, 5], &[3, 3], &[1, 1]).contains("a grid of [3, 5] tokens"));
    assert!(near([12, 12], &[3, 4], &[3, 4], &[1, 2]).contains("along dimension 1, not from"));
    let five = near([32, 32], &[2; 5], &[1; 5], &[1; 5]);
    assert!(five.contains("a grid of 5 dimensions, the limit is 4"), "{five}");
}

#[test]
fn ctas_have_a_row_where_there_are_many_blocks() {
    let pairs = Tensor::zeros(&stream(), DType::U8, &[0]).unwrap();
    let bytes = TokenSource::Bool(pairs.view());
    let strided = TokenSource::Strided { stride: 1, align: Align::TopLeft };
    for (source, heads, block, expected) in
        [(bytes, 16, 64, 4), (bytes, 16, 128, 1), (strided, 1, 64, 32), (strided, 16, 64, 128)]
    {
        let geometry = BlockGeometry::new(1 << 14, 1 << 14, block, block).unwrap();
        let sizes = Sizes::new(geometry, 1, heads).unwrap();
        assert_eq!(TokenChoice::new(source).cols_of_cta(&sizes, 128), expected);
    }
}
