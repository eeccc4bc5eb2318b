//! Products that follow each other without a pause, each of what the one before it has written.
//! Kernels look up their first tile while their predecessors in the stream are still running, and
//! wait for them before they touch anything else.

use blockflash_ops::{
    BsrMatmul, BsrMatrix, BsrPattern, BsrSddmm, BsrView, BsrWorkspace, DType, Operation, Stream,
    Tensor,
};
use blockflash_sys::Kernel;
use blockflash_tests::gpu::gpu;
use blockflash_tests::host::{download, upload};
use blockflash_tests::number::encode;

/// Products in a chain.
const STEPS: usize = 24;
/// Chains without a pause.
const REPEATS: usize = 20;
/// Block rows and columns of the matrices.
const BLOCKS: usize = 24;
/// Columns of the dense matrices.
const COLUMNS: usize = 136;

/// Numbers from -1 to 1.
fn noise(dtype: DType, shape: &[usize], seed: usize, stream: &Stream) -> Tensor {
    let number = |at: usize| ((at * 37 + at / 101 * 13 + seed) % 101) as f32 / 50.0 - 1.0;
    let bits: Vec<u32> = (0..shape.iter().product()).map(|at| encode(dtype, number(at))).collect();
    upload(stream, dtype, &bits, shape).unwrap()
}

/// A full row, empty ones, and others of a few blocks.
fn pattern(block_size: usize, seed: usize, stream: &Stream) -> BsrPattern {
    let is_stored = |&(row, col): &(usize, usize)| match row % 8 {
        0 => row == seed,
        5 => false,
        _ => (row * 7 + col * (3 + seed)).is_multiple_of(5),
    };
    let blocks: Vec<_> =
        (0..BLOCKS * BLOCKS).map(|at| (at / BLOCKS, at % BLOCKS)).filter(is_stored).collect();
    let size = BLOCKS * block_size;
    BsrPattern::from_blocks(size, size, block_size, &blocks).unwrap().to(stream).unwrap()
}

fn matrix(dtype: DType, block_size: usize, seed: usize, stream: &Stream) -> BsrMatrix {
    let pattern = pattern(block_size, seed, stream);
    let values = noise(dtype, &pattern.values_shape(), seed, stream);
    BsrMatrix::new(pattern, values).unwrap()
}

/// The same bits with a pause after each step and without.
fn same_bits(
    what: &str,
    stream: &Stream,
    mut chain: impl FnMut(&mut dyn FnMut()) -> Result<Vec<u32>, String>,
) {
    let expected = chain(&mut || stream.synchronize().unwrap()).unwrap();
    for repeat in 0..REPEATS {
        assert!(chain(&mut || ()).unwrap() == expected, "{what}, repeat {repeat}");
    }
}

#[test]
fn products_wait_for_what_they_read() {
    let Some(gpu) = gpu("bsr_chain_gpu::products_wait_for_what_they_read") else { return };
    let stream = &gpu.stream;
    let workspace = BsrWorkspace::new(stream).unwrap().with_parts(3).unwrap();
    let plain = |kernel: &&'static Kernel| {
        let tile = kernel.bsr_matmul_tile();
        tile.is_some_and(|tile| !tile.a_transposed && !tile.b_column_major)
    };
    for kernel in gpu.kernels().filter(plain) {
        let tile = kernel.bsr_matmul_tile().unwrap();
        let (dtype, size) = (tile.dtype, tile.block_size as usize);
        let factors = [0, 8].map(|seed| matrix(dtype, size, seed, stream));
        let shape = [BLOCKS * size, COLUMNS];
        let start = noise(dtype, &shape, 3, stream);
        let alpha = (15.0 / (BLOCKS * size) as f32).sqrt();
        for workspace in [None, Some(&workspace)] {
            same_bits(&kernel.image_name(), stream, |pause| {
                let error = |error: blockflash_ops::Error| error.to_string();
                let [mut from, mut to] = [(); 2].map(|()| start.copy_to(stream).unwrap());
                for step in 0..STEPS {
                    let a = &factors[step % 2];
                    let product = BsrMatmul { alpha, workspace, ..BsrMatmul::new(a, from.view()) };
                    product.run_with(kernel, to.view_mut(), stream).map_err(error)?;
                    pause();
                    std::mem::swap(&mut from, &mut to);
                }
                download(stream, &from)
            });
        }
    }
}

/// A sampled product writes the values, by which the next product multiplies.
#[test]
fn values_are_waited_for() {
    let Some(gpu) = gpu("bsr_chain_gpu::values_are_waited_for") else { return };
    let stream = &gpu.stream;
    for (dtype, size) in [DType::F16, DType::BF16]
        .into_iter()
        .flat_map(|dtype| [16, 32, 64, 128].map(|size| (dtype, size)))
    {
        let pattern = pattern(size, 0, stream);
        let rows = BLOCKS * size;
        let start = noise(dtype, &[rows, COLUMNS], 3, stream);
        let other = noise(dtype, &[COLUMNS, rows], 4, stream);
        let alpha = (15.0 / rows as f32).sqrt();
        same_bits(&format!("blocks of {size} of {dtype}"), stream, |pause| {
            let error = |error: blockflash_ops::Error| error.to_string();
            let mut x = start.copy_to(stream).unwrap();
            let mut values = Tensor::zeros(stream, dtype, &pattern.values_shape()).unwrap();
            for _ in 0..STEPS / 4 {
                let sampled = BsrSddmm {
                    alpha: 0.2,
                    beta: 0.0,
                    ..BsrSddmm::new(&pattern, x.view(), other.view())
                };
                sampled.sddmm_into(values.view_mut(), stream).map_err(error)?;
                pause();
                let a = BsrView::new(&pattern, values.view()).map_err(error)?;
                let mut next = Tensor::zeros(stream, dtype, &[rows, COLUMNS]).unwrap();
                let product = BsrMatmul { alpha, ..BsrMatmul::new(a, start.view()) };
                product.matmul_into(next.view_mut(), stream).map_err(error)?;
                pause();
                x = next;
            }
            download(stream, &x)
        });
    }
}
