use super::*;
use crate::launch::LaunchConfig;
use crate::launch::bsr_matmul_fixtures::pattern;
use crate::launch::checked::fitted;
use crate::manifest::Variant;
use crate::{Device, Tensor};
use std::ptr::{null, null_mut};

const TILE: BsrSddmmHopper = BsrSddmmHopper {
    dtype: DType::F16,
    block_size: 64,
    a: Major::Row,
    b: Major::Column,
    stages: 5,
};
/// 150 × 136 in blocks of 64, of which five are stored; 200 deep; lines of A and B are 208 apart,
/// or 160.
const M: usize = 150;
const N: usize = 136;
const K: usize = 200;
const BLOCKS: usize = 5;

fn params() -> blockflash_bsr_sddmm_params {
    blockflash_bsr_sddmm_params {
        a: blockflash_tensor_map { opaque: [0; 16] },
        b: blockflash_tensor_map { opaque: [0; 16] },
        row_ptr: null(),
        col_idx: null(),
        values: null_mut(),
        tile_counter: null_mut(),
        m: M as i32,
        n: N as i32,
        k: K as i32,
        nnz_blocks: BLOCKS as i32,
        values_dtype: DType::F32 as i32,
        alpha: 1.0,
        beta: 0.0,
    }
}

fn row(tile: BsrSddmmHopper) -> Kernel {
    Kernel { variant: Variant::BsrSddmmHopper(tile), target: crate::Target::Sm90a }
}

fn config(tile: BsrSddmmHopper, blocks: u32) -> LaunchConfig {
    LaunchConfig {
        grid: [blocks, 1, 1],
        block: 384,
        smem_bytes: row(tile).smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: true,
    }
}

/// Operands for a tile, to be looked at.
fn with_operands<T>(tile: BsrSddmmHopper, look: impl FnOnce(&BsrSddmmOperands<'_>) -> T) -> T {
    let stream = &Device::cpu().stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape).unwrap();
    let pattern = &pattern(&[3, 2, 0], false);
    let mut values = tensor(DType::F32, &[BLOCKS, 64, 64]);
    // Lines along K are 208 elements apart, the others 160.
    let (along_k, across) = (tensor(DType::F16, &[160, 208]), tensor(DType::F16, &[208, 160]));
    let matrix = |[rows, cols]: [usize; 2], major, k_major: Major| {
        let lines = if major == k_major { along_k.view() } else { across.view() };
        let view = if major == Major::Row { lines } else { lines.permute(&[1, 0]).unwrap() };
        view.slice(0, 0..rows).and_then(|view| view.slice(1, 0..cols)).unwrap()
    };
    look(&BsrSddmmOperands {
        pattern,
        a: matrix([M, K], tile.a, Major::Row),
        b: matrix([K, N], tile.b, Major::Column),
        values: values.view_mut(),
    })
}

/// What `fit` says about these operands with changed parameters and launch.
fn fit_of(
    tile: BsrSddmmHopper,
    change: impl FnOnce(&mut blockflash_bsr_sddmm_params),
    config: &LaunchConfig,
) -> Fit {
    let mut params = params();
    change(&mut params);
    with_operands(tile, |operands| {
        fitted::<BsrSddmmHopper>(&row(tile), config, &params, operands).map(drop)
    })
}

#[test]
fn what_fits_and_what_does_not() {
    // One tile of four blocks at least, and one more for each of three block rows.
    for [a, b] in Major::ALL.into_iter().flat_map(|a| Major::ALL.map(|b| [a, b])) {
        let tile = BsrSddmmHopper { a, b, ..TILE };
        for blocks in 1..=4 {
            fit_of(tile, |_| (), &config(tile, blocks)).unwrap();
        }
        let found = fit_of(tile, |_| (), &config(tile, 5)).unwrap_err();
        assert!(found.contains("a grid of 5x1x1 blocks"), "{found}");
        let other =
            BsrSddmmHopper { a: if a == Major::Row { Major::Column } else { Major::Row }, ..tile };
        let found = with_operands(tile, |operands| {
            fitted::<BsrSddmmHopper>(&row(other), &config(other, 4), &params(), operands)
        });
        assert!(found.unwrap_err().contains("a is f16"), "{a:?} is no other layout");
    }
    let refused = |change: &dyn Fn(&mut blockflash_bsr_sddmm_params), reason: &str| {
        let found = fit_of(TILE, change, &config(TILE, 3)).unwrap_err();
        assert!(found.contains(reason), "{found}");
    };
    refused(&|p| p.k += 1, "a is f16");
    refused(&|p| p.n += 1, "b is f16");
    refused(&|p| p.m += 64, "row_ptr is i32");
    refused(&|p| p.nnz_blocks -= 1, "col_idx is i32");
    refused(&|p| p.n = 128, "of n");
    refused(&|p| p.nnz_blocks = 0, "not positive");
    refused(&|p| p.values_dtype = 0, "values_dtype");
    refused(&|p| p.m = SIZE_LIMIT, "the limit is");
    let cluster = LaunchConfig { cluster: Some([1, 1, 1]), ..config(TILE, 3) };
    assert!(
        fit_of(TILE, |_| (), &cluster)
            .unwrap_err()
            .contains("clusters of Some([1, 1, 1]), expected None")
    );
}

#[test]
fn maps_describe_lines_along_k_and_panels_across() {
    let of = |a, b| {
        let tile = BsrSddmmHopper { a, b, block_size: 128, ..TILE };
        with_operands(tile, |operands| maps(&tile, operands))
    };
    let along = |lines: usize| Map {
        shape: [K as u64, lines as u64],
        stride_bytes: 416,
        box_shape: [64, 128],
    };
    let across = |length: usize| Map {
        shape: [length as u64, K as u64],
        stride_bytes: 320,
        box_shape: [64, 64],
    };
    assert_eq!(of(Major::Row, Major::Column), [along(M), along(N)]);
    assert_eq!(of(Major::Column, Major::Row), [across(M), across(N)]);
    assert_eq!(of(Major::Row, Major::Row), [along(M), across(N)]);
}

#[test]
fn a_single_line_has_a_valid_map_and_nothing_has_none() {
    let stream = &Device::cpu().stream().unwrap();
    let (line, nothing) = (
        Tensor::empty(stream, DType::F16, &[1, 30]).unwrap(),
        Tensor::empty(stream, DType::F16, &[30, 0]),
    );
    let (nothing, mut values) =
        (nothing.unwrap(), Tensor::empty(stream, DType::F32, &[0]).unwrap());
    with_operands(TILE, |operands| {
        let operands = BsrSddmmOperands {
            a: line.view(),
            b: nothing.view().permute(&[1, 0]).unwrap(),
            values: values.view_mut(),
            ..*operands
        };
        let [a, b] = maps(&TILE, &operands);
        assert_eq!((a.shape, a.stride_bytes), ([30, 1], 64));
        assert_eq!(b.encode(&operands.b).unwrap().opaque, [0; 16]);
    });
}
