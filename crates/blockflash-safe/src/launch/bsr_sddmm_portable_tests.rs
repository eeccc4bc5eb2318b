use super::*;
use crate::launch::LaunchConfig;
use crate::launch::bsr_matmul_fixtures::pattern;
use crate::launch::checked::fitted;
use crate::manifest::BsrSddmm;
use crate::{DType, Device, Target, Tensor, ViewMut};
use blockflash_sys::params::blockflash_tensor_map;
use std::ptr::{null, null_mut};

/// 150 × 136 in blocks of 32, of which eleven are stored; 200 deep.
const M: usize = 150;
const N: usize = 136;
const K: usize = 200;
const BLOCKS: usize = 11;

fn row() -> Kernel {
    let (dtype, block_size, columns, block_k) = (DType::F16, 32, 128, 64);
    let tile = BsrSddmm {
        dtype,
        block_size,
        columns,
        block_k,
        warps_m: 1,
        warps_n: 4,
        stages: 2,
        min_blocks: 4,
    };
    Kernel { variant: Variant::BsrSddmm(tile), target: Target::Sm80 }
}

fn config(blocks: u32) -> LaunchConfig {
    LaunchConfig {
        grid: [blocks, 1, 1],
        block: 128,
        smem_bytes: row().smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: false,
    }
}

fn params() -> blockflash_bsr_sddmm_params {
    let nothing = blockflash_tensor_map { opaque: [0; 16] };
    blockflash_bsr_sddmm_params {
        a: nothing,
        b: nothing,
        row_ptr: null(),
        col_idx: null(),
        values: null_mut(),
        tile_counter: null_mut(),
        m: M as i32,
        n: N as i32,
        k: K as i32,
        nnz_blocks: BLOCKS as i32,
        values_dtype: DType::F32 as i32,
        alpha: 0.5,
        beta: 2.0,
    }
}

fn matrix(lines: &Tensor, major: Major, [rows, cols]: [usize; 2]) -> View<'_> {
    let view =
        if major == Major::Row { lines.view() } else { lines.view().permute(&[1, 0]).unwrap() };
    view.slice(0, 0..rows).and_then(|view| view.slice(1, 0..cols)).unwrap()
}

/// What `fit` says about A and B with lines this many elements apart.
fn fit_of(
    majors: [Major; 2],
    [lda, ldb]: [usize; 2],
    change: impl FnOnce(&mut blockflash_bsr_sddmm_params),
    config: &LaunchConfig,
) -> Fit<blockflash_bsr_sddmm_portable_params> {
    let stream = &Device::cpu().stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape).unwrap();
    let pattern = &pattern(&[5, 0, 1, 2, 3], false);
    let mut values = tensor(DType::F32, &[BLOCKS, 32, 32]);
    let [a, b] = [lda, ldb].map(|ld| tensor(DType::F16, &[256, ld]));
    let operands = BsrSddmmOperands {
        pattern,
        a: matrix(&a, majors[0], [M, K]),
        b: matrix(&b, majors[1], [K, N]),
        values: values.view_mut(),
    };
    let mut params = params();
    change(&mut params);
    fitted::<BsrSddmm>(&row(), config, &params, &operands)
}

#[test]
fn every_layout_fits() {
    // Two tiles of four blocks at least, and one more for each of five block rows.
    for [a, b] in Major::ALL.into_iter().flat_map(|a| Major::ALL.map(|b| [a, b])) {
        let p = fit_of([a, b], [208, 203], |_| (), &config(7)).unwrap();
        assert_eq!((p.lda, p.ldb, p.a_vectorized, p.b_vectorized), (208, 203, 1, 0));
        let column = |major| i32::from(major == Major::Column);
        assert_eq!((p.a_column_major, p.b_column_major), (column(a), column(b)));
        assert_eq!((p.m, p.n, p.k, p.alpha, p.beta), (150, 136, 200, 0.5, 2.0));
        assert_eq!((p.values_dtype, p.values_vectorized), (DType::F32 as i32, 1));
    }
}

#[test]
fn values_start_anywhere() {
    let mut data = vec![0f32; 2 * 32 * 32 + 8];
    let start = data.as_ptr().align_offset(16);
    let stream = &Device::cpu().stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape).unwrap();
    let pattern = &pattern(&[2], false);
    let (a, b) = (tensor(DType::F16, &[32, 8]), tensor(DType::F16, &[8, 64]));
    let params = blockflash_bsr_sddmm_params { m: 32, n: 64, k: 8, nnz_blocks: 2, ..params() };
    for (offset, vectorized) in [(0, 1), (1, 0), (2, 0), (4, 1)] {
        let values =
            ViewMut::from_slice(&mut data[start + offset..][..2 * 32 * 32], &[2, 32, 32]).unwrap();
        let operands = BsrSddmmOperands { pattern, a: a.view(), b: b.view(), values };
        let p = fitted::<BsrSddmm>(&row(), &config(1), &params, &operands).unwrap();
        assert_eq!(p.values_vectorized, vectorized, "{offset}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let refused = |change: &dyn Fn(&mut blockflash_bsr_sddmm_params), reason: &str| {
        let found = fit_of([Major::Row; 2], [208, 208], change, &config(7)).unwrap_err();
        assert!(found.contains(reason), "{found}");
    };
    refused(&|p| p.k += 1, "a is f16");
    refused(&|p| p.n += 1, "b is f16");
    refused(&|p| p.m += 32, "row_ptr is i32");
    refused(&|p| p.nnz_blocks -= 1, "col_idx is i32");
    refused(&|p| p.nnz_blocks = 0, "not positive");
    refused(&|p| p.values_dtype = 0, "values_dtype");
    refused(&|p| p.m = i32::MAX, "the limit is");
    let early = LaunchConfig { programmatic_dependent_launch: true, ..config(7) };
    for (config, reason) in
        [(config(6), "a grid of 6x1x1"), (config(8), "a grid of 8x1x1"), (early, "wait")]
    {
        let found = fit_of([Major::Row; 2], [208, 208], |_| (), &config).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
}

#[test]
fn single_lines_lie_either_way() {
    let stream = &Device::cpu().stream().unwrap();
    let line = Tensor::empty(stream, DType::F16, &[1, 30]).unwrap();
    let lines = |view: &View<'_>, shape| {
        let lines = Lines::of(view);
        fits_dense("a", view, DType::F16, shape, lines.major).unwrap();
        lines
    };
    // Nothing comes behind a single line: its distance to the next does not matter.
    let row = lines(&line.view(), [1, 30]);
    assert_eq!((row.major, row.vectorized), (Major::Row, true));
    let column = lines(&line.view().permute(&[1, 0]).unwrap(), [30, 1]);
    assert_eq!((column.major, column.vectorized), (Major::Column, true));
    let none = fits_dense("a", &line.view(), DType::F16, [1, 29], row.major).unwrap_err();
    assert!(none.contains("a is f16"), "{none}");
}
