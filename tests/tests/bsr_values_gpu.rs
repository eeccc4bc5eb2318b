//! New values in a matrix on a GPU, where the pattern, the index and a captured graph stay, and
//! values and workspaces in memory of the caller.

use blockflash_ops::{
    BsrMatmul, BsrMatrix, BsrPattern, BsrSddmm, BsrTranspose, BsrView, BsrWorkspace, DType, Device,
    Error, Stream, Tensor, ViewMut,
};
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

/// For each block size: 6 × 5 blocks, of which every second one is stored.
fn pattern(block_size: usize) -> BsrPattern {
    let blocks: Vec<_> = (0..30).step_by(2).map(|at| (at / 5, at % 5)).collect();
    BsrPattern::from_blocks(6 * block_size, 5 * block_size, block_size, &blocks).unwrap()
}

fn noise(shape: &[usize], seed: usize, stream: &Stream) -> Tensor {
    let number = |at: usize| bf16::from_f32(((at * 37 + seed) % 101) as f32 / 50.0 - 1.0);
    let numbers: Vec<bf16> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_slice(stream, &numbers, shape).unwrap()
}

/// Every product computes the same bits from a part of the caller's buffer as from a matrix.
#[test]
fn values_of_the_caller_are_multiplied_where_they_are() {
    let name = "bsr_values_gpu::values_of_the_caller_are_multiplied_where_they_are";
    let Some(gpu) = gpu(name) else { return };
    let stream = &gpu.stream;
    for block_size in [16, 32, 64, 128] {
        let pattern = pattern(block_size).to(stream).unwrap();
        let index = BsrTranspose::new(&pattern, stream).unwrap();
        let [blocks, ..] = pattern.values_shape();
        let mut buffer = noise(&[blocks + 3, block_size, block_size], 1, stream);
        let own = buffer.view().slice(0, 3..blocks + 3).unwrap().to_tensor(stream).unwrap();
        let mut matrix = BsrMatrix::new(pattern, own).unwrap();
        let pattern = matrix.pattern().clone();
        let x = noise(&[72, pattern.cols()], 2, stream);
        let dy = noise(&[72, pattern.rows()], 3, stream);
        let bits = |tensor: Tensor| tensor.to_vec::<f32>(stream).unwrap();
        let products = |w: BsrView<'_>| {
            let y = BsrMatmul::linear(x.view(), w).unwrap();
            let dx = BsrMatmul::dense_sparse(dy.view(), w, &index).unwrap();
            [y, dx].map(|product| bits(product.matmul_transposed(DType::F32, stream).unwrap()))
        };
        let lent = buffer.view().slice(0, 3..blocks + 3).unwrap();
        assert_eq!(products(BsrView::new(&pattern, lent).unwrap()), products(matrix.view()));

        let a = dy.view().permute(&[1, 0]).unwrap();
        let step = BsrSddmm { alpha: -0.5, beta: 1.0, ..BsrSddmm::new(&pattern, a, x.view()) };
        let lent: ViewMut<'_> = buffer.view_mut().slice(0, 3..blocks + 3).unwrap();
        step.sddmm_into(lent, stream).unwrap();
        step.sddmm_into_matrix(&mut matrix, stream).unwrap();
        let lent = buffer.view().slice(0, 3..blocks + 3).unwrap().to_tensor(stream).unwrap();
        let [lent, own] = [&lent, matrix.values()].map(|of| of.to_vec::<bf16>(stream).unwrap());
        assert_eq!(lent, own, "blocks of {block_size}");
    }
}

#[test]
fn values_that_kernels_cannot_copy_are_refused() {
    let name = "bsr_values_gpu::values_that_kernels_cannot_copy_are_refused";
    let Some(gpu) = gpu(name) else { return };
    let stream = &gpu.stream;
    // Elements are the blocks, so that values may start at any of them.
    let host = pattern(1);
    let pattern = host.to(stream).unwrap();
    let [blocks, ..] = pattern.values_shape();
    let buffer = noise(&[blocks + 8, 1, 1], 1, stream);
    let from = |start: usize| buffer.view().slice(0, start..start + blocks).unwrap();
    BsrView::new(&pattern, from(8)).unwrap();
    for start in [1, 4, 7] {
        let error = BsrView::new(&pattern, from(start)).unwrap_err();
        assert!(matches!(error, Error::Misaligned { what: "values", .. }), "{error}");
    }
    // A pattern that is not where its values are.
    let b = noise(&[pattern.cols(), 8], 2, stream);
    let product = BsrMatmul::new(BsrView::new(&host, from(0)).unwrap(), b.view());
    let error = product.matmul(DType::F32, stream).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch { what: "the pattern of a", .. }), "{error}");
    let own = from(0).to_tensor(stream).unwrap();
    let error = BsrMatrix::new(host, own).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch { what: "values", .. }), "{error}");
}

/// A workspace in a tensor that another stream has just filled with garbage.
#[test]
fn a_workspace_may_be_lent() {
    let Some(gpu) = gpu("bsr_values_gpu::a_workspace_may_be_lent") else { return };
    let (stream, other) = (&gpu.stream, &gpu.device.stream().unwrap());
    let places: Vec<_> = (0..64).map(|col| (0, col)).collect();
    let pattern = BsrPattern::from_blocks(64, 64 * 64, 64, &places).unwrap().to(stream).unwrap();
    let values = noise(&pattern.values_shape(), 1, stream);
    let a = BsrMatrix::new(pattern, values).unwrap();
    let b = noise(&[64 * 64, 256], 2, stream);
    let product = |workspace: BsrWorkspace, stream: &Stream| {
        let workspace = workspace.with_parts(4).unwrap();
        let call = BsrMatmul { workspace: Some(&workspace), ..BsrMatmul::new(&a, b.view()) };
        let c = call.matmul(DType::F32, stream).unwrap();
        c.to_vec::<f32>(stream).unwrap()
    };
    let expected = product(BsrWorkspace::new(stream).unwrap(), stream);
    let mut memory = Tensor::empty(stream, DType::U8, &[BsrWorkspace::BYTES]).unwrap();
    memory.fill_bytes(other, 0x7F).unwrap();
    assert_eq!(product(BsrWorkspace::from_tensor(memory).unwrap(), stream), expected);

    // The launches of this graph would not take turns.
    let mut memory = Tensor::empty(stream, DType::U8, &[BsrWorkspace::BYTES]).unwrap();
    let graph = stream.capture(|stream| memory.fill_bytes(stream, 0x7F)).unwrap();
    let error = BsrWorkspace::from_tensor(memory).unwrap_err();
    assert!(matches!(error, Error::Safe(blockflash_safe::Error::InGraph { .. })), "{error}");
    drop(graph);
}
