use super::*;
use crate::launch::LaunchConfig;
use crate::launch::bsr_matmul_fixtures as fixtures;
use crate::launch::checked::fitted;
use crate::{DType, Device, Tensor, View};
use blockflash_sys::manifest;
use blockflash_sys::params::blockflash_bsr_matmul_params;
use std::ptr::null;

/// 40 × 50 in blocks of 16, of which seven are stored, times 50 × 136.
const M: usize = 40;
const N: usize = 136;
const K: usize = 50;
const BLOCKS: usize = 7;

/// Of A as it is, or transposed, and B and C by rows or columns, without gaps.
fn params([a, b, c]: [bool; 3]) -> blockflash_bsr_matmul_any_params {
    blockflash_bsr_matmul_any_params {
        base: blockflash_bsr_matmul_params {
            ldc: if c { M } else { N } as i64,
            b_vectorized: 0,
            c_vectorized: 0,
            c_column_major: c.into(),
            ..fixtures::params([M, N, K], if b { K } else { N })
        },
        block_idx: null(),
        a_transposed: a.into(),
        b_column_major: b.into(),
    }
}

/// Fits tensors on the CPU, which are so (`fit` looks at sizes and strides only), with these
/// parameters.
fn fit_with_layouts(
    [a, b, c]: [bool; 3],
    params: &blockflash_bsr_matmul_any_params,
    change: impl Fn(&mut LaunchConfig),
) -> Fit {
    let zeros = |dtype, shape: &[usize]| {
        Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
    };
    let indices = fixtures::pattern(&[2, 1, 4], a);
    let values = zeros(DType::F16, &[BLOCKS, 16, 16]);
    let b_tensor = zeros(DType::F16, &if b { [N, K] } else { [K, N] });
    let mut c_tensor = zeros(DType::F32, &if c { [N, M] } else { [M, N] });
    let operands = BsrMatmulOperands {
        indices: &indices,
        values: values.view(),
        parts: None,
        b: if b { b_tensor.view().permute(&[1, 0]).unwrap() } else { b_tensor.view() },
        c: if c { c_tensor.view_mut().permute(&[1, 0]).unwrap() } else { c_tensor.view_mut() },
        bias: None,
    };
    let tile_of = |row: &'static Kernel| match &row.variant {
        Variant::BsrMatmulAny(tile) if (tile.0.dtype, tile.0.block_size) == (DType::F16, 16) => {
            Some((row, tile))
        }
        _ => None,
    };
    let (row, tile) = manifest::kernels().iter().find_map(tile_of).ok_or("no row")?;
    let mut config = LaunchConfig::of(row, 3 * (N as u32).div_ceil(tile.0.block_n), false);
    change(&mut config);
    fitted::<BsrMatmulAny>(row, &config, params, &operands).map(drop)
}

const LAYOUTS: [[bool; 3]; 8] = [
    [false, false, false],
    [false, false, true],
    [false, true, false],
    [false, true, true],
    [true, false, false],
    [true, false, true],
    [true, true, false],
    [true, true, true],
];

#[test]
fn operands_lie_as_the_parameters_say() {
    for says in LAYOUTS {
        for layout in LAYOUTS {
            let found = fit_with_layouts(layout, &params(says), |_| ());
            assert_eq!(found.is_ok(), says == layout, "{says:?} {layout:?}: {found:?}");
        }
    }
}

#[test]
fn what_does_not_fit() {
    let layout = [true, true, true];
    let refused = |params: &blockflash_bsr_matmul_any_params, expected: &str| {
        let error = fit_with_layouts(layout, params, |_| ()).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    let good = params(layout);
    refused(
        &blockflash_bsr_matmul_any_params { a_transposed: 0, ..good },
        "it is for kernels that transpose a",
    );
    let with = |base| blockflash_bsr_matmul_any_params { base, ..good };
    refused(&with(blockflash_bsr_matmul_params { ldb: K as i64 + 8, ..good.base }), "b is f16");
    refused(&with(blockflash_bsr_matmul_params { ldc: M as i64 - 1, ..good.base }), "c is f32");
    refused(&with(blockflash_bsr_matmul_params { m: 0, ..good.base }), "not positive");
    let refused = |change: fn(&mut LaunchConfig), expected: &str| {
        let error = fit_with_layouts(layout, &good, change).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    refused(|config| config.grid[0] += 1, "a grid of 7x1x1 blocks");
    refused(
        |config| config.programmatic_dependent_launch = true,
        "does not wait for its predecessor",
    );
    refused(|config| config.smem_bytes += 16, "shared memory");
}

/// Kernels copy blocks 16 bytes at a time.
#[test]
fn values_start_at_multiples_of_16_bytes() {
    let zeros = |dtype, shape: &[usize]| {
        Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
    };
    let tile_of = |row: &'static Kernel| match &row.variant {
        Variant::BsrMatmulAny(tile) if tile.0.block_size == 16 => Some(tile.0.tile()),
        _ => None,
    };
    let tile = BsrMatmulTile {
        dtype: DType::F16,
        ..manifest::kernels().iter().find_map(tile_of).unwrap()
    };
    let indices = fixtures::pattern(&[2, 1, 4], false);
    let (b, mut c) = (zeros(DType::F16, &[K, N]), zeros(DType::F32, &[M, N]));
    let data = vec![half::f16::ZERO; BLOCKS * 256 + 16];
    let first = data.as_ptr().align_offset(16);
    for (start, fits) in [(0, true), (8, true), (1, false), (4, false)] {
        let values = &data[first + start..][..BLOCKS * 256];
        let operands = BsrMatmulOperands {
            indices: &indices,
            values: View::from_slice(values, &[BLOCKS, 16, 16]).unwrap(),
            parts: None,
            b: b.view(),
            c: c.view_mut(),
            bias: None,
        };
        let params = fixtures::params([M, N, K], N);
        let found = operands.fit(&tile, &params, &mut { params });
        assert_eq!(found.is_ok(), fits, "{start}: {found:?}");
    }
}
