use super::*;
use crate::Error;
use crate::bsr_sddmm::plan;
use crate::fixtures::{gpu, gpus};
use crate::selection::select_among;
use blockflash_sys::{Target, manifest};

const LAYOUTS: [[Major; 2]; 4] = [
    [Major::Row, Major::Row],
    [Major::Row, Major::Column],
    [Major::Column, Major::Row],
    [Major::Column, Major::Column],
];

fn problem(block_size: usize) -> BsrSddmmProblem {
    BsrSddmmProblem::new(DType::BF16, [1000, 520, 264], block_size, 37, LAYOUTS[2])
}

fn reason(rows: &[Kernel], problem: &BsrSddmmProblem, gpu: &CudaProperties) -> String {
    match select_among(rows, problem, gpu) {
        Err(Error::Unsupported { op: "bsr_sddmm", what, .. }) => what,
        other => panic!("{other:?}"),
    }
}

fn hopper_rows() -> Vec<Kernel> {
    manifest::kernels().iter().filter(|row| row.target == Target::Sm90a).cloned().collect()
}

#[test]
fn there_is_one_row_for_each_layout() {
    for block_size in [64, 128] {
        for [a, b] in LAYOUTS {
            for dtype in [DType::F16, DType::BF16] {
                let problem = BsrSddmmProblem::new(dtype, [1000, 520, 264], block_size, 37, [a, b]);
                let row = select_among(manifest::kernels(), &problem, &gpu(9, 0)).unwrap();
                let tile = row.bsr_sddmm_tile().unwrap();
                let found = (tile.dtype, tile.block_size as usize, tile.majors);
                assert_eq!(found, (dtype, block_size, Some([a, b])));
                accepts(row, &problem, &gpu(9, 0)).unwrap();
                let rows = hopper_rows();
                let others = rows.iter().filter(|other| *other != row);
                assert!(
                    others.into_iter().all(|other| accepts(other, &problem, &gpu(9, 0)).is_err())
                );
            }
        }
    }
}

#[test]
fn one_portable_row_takes_every_layout() {
    let all = manifest::kernels();
    let is_portable = |problem: &BsrSddmmProblem, gpu: &CudaProperties| {
        let row = select_among(all, problem, gpu).unwrap();
        accepts(row, problem, gpu).unwrap();
        let tile = row.bsr_sddmm_tile().unwrap();
        assert_eq!((tile.dtype, tile.block_size as usize), (problem.dtype, problem.block_size));
        assert!(row.target.runs_on(gpu.compute_capability));
        tile.majors.is_none()
    };
    for (gpu, block_size) in gpus().iter().flat_map(|gpu| [16, 32, 64, 128].map(|size| (gpu, size)))
    {
        let hopper = gpu.compute_capability == blockflash_sys::ComputeCapability::new(9, 0);
        for majors in LAYOUTS {
            let p = BsrSddmmProblem::new(DType::F16, [1000, 520, 264], block_size, 37, majors);
            assert_eq!(is_portable(&p, gpu), !hopper || block_size < 64, "{gpu:?} {p:?}");
            // What tensor maps cannot describe, and values that start anywhere.
            let unaligned =
                BsrSddmmProblem { a: DenseLayout { aligned: false, ld: 1001, ..p.a }, ..p };
            let repeated = BsrSddmmProblem { b: DenseLayout { ld: 0, ..p.b }, ..p };
            let odd = BsrSddmmProblem { values_aligned: false, ..p };
            assert!([unaligned, repeated, odd].iter().all(|p| is_portable(p, gpu)));
        }
    }
    let none = BsrSddmmProblem { n: (1 << 31) - 1024, ..problem(16) };
    assert!(reason(all, &none, &gpu(8, 0)).contains("n is 2147482624"));
    assert_eq!(
        reason(all, &problem(16), &gpu(7, 5)),
        "kernels need compute capability 8.0 or newer"
    );
    assert_eq!(
        reason(all, &problem(48), &gpu(8, 9)),
        "block size 48: kernels take [16, 32, 64, 128]"
    );
}

#[test]
fn what_no_kernel_takes_is_named() {
    let (all, hopper) = (&hopper_rows()[..], gpu(9, 0));
    for gpu in gpus().iter().filter(|gpu| gpu.compute_capability != hopper.compute_capability) {
        assert_eq!(reason(all, &problem(64), gpu), "kernels need compute capability 9.0");
    }
    let wide = BsrSddmmProblem { dtype: DType::F32, ..problem(64) };
    assert_eq!(reason(all, &wide, &hopper), "kernels take f16 and bf16, but the matrices are f32");
    assert_eq!(reason(all, &problem(32), &hopper), "block size 32: kernels take [64, 128]");
    let p = problem(128);
    let unaligned = BsrSddmmProblem { a: DenseLayout { aligned: false, ld: 1001, ..p.a }, ..p };
    assert!(reason(all, &unaligned, &hopper).contains("a has no tensor map"));
    assert!(reason(all, &unaligned, &hopper).contains("1001 elements apart"));
    let repeated = BsrSddmmProblem { b: DenseLayout { ld: 0, ..p.b }, ..p };
    assert!(reason(all, &repeated, &hopper).contains("b has no tensor map"));
    // Nothing is read through the maps of matrices without elements.
    select_among(all, &BsrSddmmProblem { k: 0, ..unaligned }, &hopper).unwrap();
    let values = BsrSddmmProblem { values_aligned: false, ..p };
    assert!(reason(all, &values, &hopper).contains("values do not start"));
    let large = BsrSddmmProblem { k: (1 << 31) - 1024, ..p };
    assert!(reason(all, &large, &hopper).contains("k is 2147482624"));
    let small = CudaProperties { smem_per_block: 99 << 10, ..gpu(9, 0) };
    assert!(reason(all, &p, &small).contains("shared memory"));
}

#[test]
fn rows_say_what_they_do_not_take() {
    let row = select_among(manifest::kernels(), &problem(64), &gpu(9, 0)).unwrap();
    let refused = |problem: &BsrSddmmProblem, expected: &str| {
        let found = accepts(row, problem, &gpu(9, 0)).unwrap_err().to_string();
        assert!(found.contains(expected) && found.contains(&row.symbol()), "{found}");
    };
    refused(&problem(128), "the kernel takes blocks of 64, not 128");
    refused(
        &BsrSddmmProblem { dtype: DType::F16, ..problem(64) },
        "takes bf16, but the matrices are f16",
    );
    let [a, b] = [problem(64).b, problem(64).a];
    refused(&BsrSddmmProblem { a, ..problem(64) }, "the kernel takes a column-major a");
    refused(&BsrSddmmProblem { b, ..problem(64) }, "the kernel takes a row-major b");
    let other = manifest::kernels().iter().find(|row| row.bsr_sddmm_tile().is_none()).unwrap();
    assert!(
        accepts(other, &problem(64), &gpu(9, 0))
            .unwrap_err()
            .to_string()
            .contains("something else")
    );
}

#[test]
fn plans() {
    let hopper = gpu(9, 0);
    let row =
        |problem: &BsrSddmmProblem| select_among(manifest::kernels(), problem, &hopper).unwrap();
    let small = BsrSddmmProblem { alpha: 0.5, beta: 2.0, values_dtype: DType::F32, ..problem(64) };
    let planned = plan(row(&small), &small, &hopper).unwrap();
    let p = planned.params;
    assert_eq!((p.m, p.n, p.k, p.nnz_blocks), (1000, 520, 264, 37));
    assert_eq!((p.values_dtype, p.alpha, p.beta), (DType::F32 as i32, 0.5, 2.0));
    // Nine tiles of four blocks, and one more for each of 16 block rows.
    assert_eq!((planned.config.grid, planned.config.block), ([25, 1, 1], 384));
    assert!(planned.config.programmatic_dependent_launch);
    let many = BsrSddmmProblem { nnz_blocks: 2000, ..problem(128) };
    assert_eq!(plan(row(&many), &many, &hopper).unwrap().config.grid, [108, 1, 1]);

    let too_many =
        BsrSddmmProblem { m: (1 << 31) - 1025, nnz_blocks: (1 << 31) - 1, ..problem(64) };
    plan(row(&too_many), &too_many, &hopper).unwrap();
    let larger = BsrSddmmProblem { nnz_blocks: 1 << 31, ..too_many };
    let refused = plan(row(&larger), &larger, &hopper);
    assert!(matches!(refused, Err(Error::TooLarge { what: "nnz_blocks", .. })));
    assert!(matches!(plan(row(&small), &many, &hopper), Err(Error::Unsupported { .. })));
    let integers = BsrSddmmProblem { values_dtype: DType::I32, ..small };
    assert!(matches!(
        plan(row(&small), &integers, &hopper),
        Err(Error::DType { what: "values", .. })
    ));

    // A CTA for every possible tile: 37 / 8, and one more for each of 63 block rows.
    let blocks = problem(16);
    let planned = plan(row(&blocks), &blocks, &hopper).unwrap();
    assert_eq!((planned.config.grid, planned.config.block), ([4 + 63, 1, 1], 128));
    assert_eq!(planned.config.smem_bytes, row(&blocks).smem_bytes());
    assert!(!planned.config.programmatic_dependent_launch);
    let many = BsrSddmmProblem { m: 128 * 5, nnz_blocks: (1 << 31) - 1, ..problem(128) };
    let row = select_among(manifest::kernels(), &many, &gpu(8, 0)).unwrap();
    assert!(matches!(plan(row, &many, &gpu(8, 0)), Err(Error::TooLarge { .. })));
}
