//! New values in a matrix on a GPU: where the pattern, the index and a captured graph stay.

use blockflash_ops::{BsrMatmul, BsrMatrix, DType, Device, Error, Tensor};
use blockflash_tests::gpu::gpu;
use half::bf16;

/// Blocks (0, 1), (1, 0) and (1, 1) of 64 × 64 that are filled with these numbers, in a matrix of
/// these sizes.
fn matrix([rows, cols]: [usize; 2], values: [f32; 3]) -> BsrMatrix {
    let blocks = [(0, 1), (1, 0), (1, 1)];
    let inside = |block: usize, at: usize| {
        let (row, col) = blocks[block];
        row * 64 + at / 64 < rows && col * 64 + at % 64 < cols
    };
    let element = |at: usize| if inside(at / 4096, at % 4096) { values[at / 4096] } else { 0.0 };
    let elements: Vec<f32> = (0..3 * 4096).map(element).collect();
    BsrMatrix::from_blocks(rows, cols, 64, DType::BF16, &blocks, &elements).unwrap()
}

#[test]
fn a_graph_computes_with_new_values() {
    let Some(gpu) = gpu("bsr_values_gpu::a_graph_computes_with_new_values") else { return };
    let stream = &gpu.stream;
    let mut a = matrix([128, 128], [1.0, 1.0, 1.0]).to(stream).unwrap();
    let b = Tensor::from_slice(stream, &[bf16::ONE; 128 * 8], &[128, 8]).unwrap();
    let mut c = Tensor::zeros(stream, DType::F32, &[128, 8]).unwrap();
    let mut launch = |a: &BsrMatrix| BsrMatmul::new(a, b.view()).matmul_into(c.view_mut(), stream);
    launch(&a).unwrap();
    let graph = stream.capture(|_| launch(&a)).unwrap();
    let replayed = || {
        graph.launch(stream).unwrap();
        let c = c.to_vec::<f32>(stream).unwrap();
        [c[0], c[127 * 8 + 7]]
    };
    assert_eq!(replayed(), [64.0, 128.0]);
    a.set_values(matrix([128, 128], [2.0, 3.0, 4.0]).values(), stream).unwrap();
    assert_eq!(replayed(), [128.0, 448.0]);
    let on_gpu = matrix([128, 128], [-1.0, 0.5, 0.5]).to(stream).unwrap();
    a.set_values(on_gpu.values(), stream).unwrap();
    assert_eq!(replayed(), [-64.0, 64.0]);
    assert_eq!(a.values_mut().unwrap().device_ptr(), a.values().view().device_ptr());
}

#[test]
fn what_nobody_could_check_is_refused() {
    let Some(gpu) = gpu("bsr_values_gpu::what_nobody_could_check_is_refused") else { return };
    let stream = &gpu.stream;
    let source = matrix([100, 128], [1.0, 2.0, 3.0]);
    let mut a = source.to(stream).unwrap();
    let on_gpu = source.values().copy_to(stream).unwrap();
    assert!(matches!(
        a.set_values(&on_gpu, stream),
        Err(Error::UncheckedPadding { rows: 100, .. })
    ));
    assert!(matches!(a.values_mut(), Err(Error::UncheckedPadding { cols: 128, .. })));
    a.set_values(source.values(), stream).unwrap();
    let full = matrix([128, 128], [1.0; 3]);
    assert!(matches!(
        a.set_values(full.values(), stream),
        Err(Error::NonzeroPadding { block: 1, row: 36, .. })
    ));
    let cpu = Device::cpu().stream().unwrap();
    assert!(matches!(
        a.set_values(source.values(), &cpu),
        Err(Error::DeviceMismatch { what: "matrix", .. })
    ));
    let mut on_cpu = matrix([128, 128], [1.0; 3]);
    assert!(matches!(
        on_cpu.set_values(&on_gpu, &cpu),
        Err(Error::DeviceMismatch { what: "values", .. })
    ));
}
