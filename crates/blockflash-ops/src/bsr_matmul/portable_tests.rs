use super::super::{accepts, select};
use super::*;
use crate::rates::tests::{a10, a100, h200, l4, l40s, rtx_4090};
use blockflash_sys::DType;
use blockflash_sys::manifest::{self, Variant};

/// A square matrix with block rows of one length.
fn problem(size: usize, n: usize, block_size: usize, density: f64) -> BsrProblem {
    let rows = size / block_size;
    let of_row = ((rows as f64 * density).ceil() as usize).max(1);
    let even = BsrProblem::new(DType::F16, [size, n, size], block_size, of_row * rows);
    BsrProblem { longest_row: Some(of_row), ..even }
}

fn block_n(problem: &BsrProblem, gpu: &CudaProperties) -> u32 {
    select(problem, gpu).unwrap().bsr_matmul_tile().unwrap().block_n
}

/// Estimates for the kernels of the selected target.
fn estimates(problem: &BsrProblem, gpu: &CudaProperties) -> Vec<(u32, f64)> {
    let target = select(problem, gpu).unwrap().target;
    let kernels = manifest::kernels().iter().filter(|kernel| kernel.target == target);
    let accepted = kernels.filter(|kernel| accepts(kernel, problem, gpu).is_ok());
    accepted
        .filter_map(|kernel| match &kernel.variant {
            Variant::BsrMatmul(tile) => {
                Some((tile.block_n, portable_time(tile, kernel, problem, gpu)))
            }
            _ => None,
        })
        .collect()
}

/// What is estimated: narrow tiles where wide ones would leave SMs idle or compute columns that
/// nobody asked for. Two of the widest do not fit into 99 KB.
#[test]
fn wide_tiles_where_they_fill_the_gpu() {
    let small = [128, 256, 128, 128];
    let narrow = [64; 4];
    for (gpu, wide, of_128) in [
        (a100(), [256, 256, 256, 128], narrow),
        (l4(), small, [128, 64, 64, 64]),
        (l40s(), small, narrow),
        (rtx_4090(), small, [128, 128, 64, 64]),
    ] {
        for (i, block) in [16, 32, 64, 128].into_iter().enumerate() {
            let wide = wide[i];
            let chosen = |size, n| block_n(&problem(size, n, block, 0.2), &gpu);
            assert_eq!(chosen(8192, 8192), wide, "{} {block}", gpu.name);
            assert_eq!(chosen(4096, 4096), wide, "{} {block}", gpu.name);
            assert_eq!(chosen(1024, 64), 64, "{} {block}", gpu.name);
            assert_eq!(chosen(1024, 128), of_128[i], "{} {block}", gpu.name);
        }
    }
    // 64 block rows of 142 SMs' worth.
    assert_eq!(block_n(&problem(8192, 128, 128, 0.1), &l40s()), 64);
    assert_eq!(block_n(&problem(8192, 128, 128, 0.1), &a100()), 128);
}

/// On Hopper the tile with the least columns beyond n is taken, and of these the widest.
#[test]
fn hopper_keeps_the_order_that_was_measured() {
    let portable = |n: usize| {
        // Without aligned rows of B there is no tensor map.
        let odd = problem(1024, n, 64, 0.2);
        let kernel = select(&BsrProblem { b_vectorized: false, ..odd }, &h200()).unwrap();
        assert!(matches!(kernel.variant, Variant::BsrMatmul(_)), "{}", kernel.symbol());
        kernel.bsr_matmul_tile().unwrap().block_n
    };
    assert_eq!([64, 128, 129, 256].map(portable), [64, 128, 64, 256]);
}

/// A matrix with little in it is a matter of reading B and writing C, at 300 GB/s.
#[test]
fn device_memory_bounds() {
    let gpu = l4();
    let sparse = problem(8192, 8192, 64, 0.01);
    let bytes = 2.0 * 8192.0 * 8192.0 * 2.01;
    for (block_n, clocks) in estimates(&sparse, &gpu) {
        let clocks = if block_n <= NARROW { clocks / DOUBT } else { clocks };
        let seconds = clocks / GpuRates::of(&gpu).clock;
        assert!((seconds / (bytes / 300e9) - 1.0).abs() < 0.02, "{block_n}: {seconds}");
    }
    assert_eq!(block_n(&sparse, &gpu), 256);
    // 6 MB of L2 hold no panel of B, so that device memory delivers it again and again.
    let dense = problem(8192, 8192, 64, 0.5);
    let rates = GpuRates::of(&a10());
    let read = 0.5 * 8192.0 * 8192.0 / 64.0 * 8192.0 * 2.0 * 64.0 / 64.0;
    assert!(memory_bytes(&dense, &rates) > 0.5 * read);
    assert!(memory_bytes(&dense, &GpuRates::of(&l40s())) < 4.1e8);
}

#[test]
fn estimates_are_numbers() {
    for gpu in [a100(), a10(), l4(), rtx_4090()] {
        for (size, n) in [(128, 0), (0, 8), (128, 1), (1 << 20, 1 << 20)] {
            for (block, tiles) in [(16, 3), (128, 2)] {
                let empty = BsrProblem::new(DType::BF16, [size, n, size], block, 0);
                for problem in [empty, BsrProblem { longest_row: Some(usize::MAX), ..empty }] {
                    let all = estimates(&problem, &gpu);
                    assert_eq!(all.len(), tiles);
                    assert!(all.iter().all(|(_, time)| time.is_finite() && *time >= 0.0));
                }
            }
        }
    }
}
