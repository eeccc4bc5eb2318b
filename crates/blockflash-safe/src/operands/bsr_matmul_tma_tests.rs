use super::*;
use crate::{DType, Device, Tensor, ViewMut};
use std::ptr::null;

const TILE: BsrMatmulHopper =
    BsrMatmulHopper { dtype: DType::F16, block_size: 64, block_rows: 1, block_n: 256, stages: 5 };
const PAIRS: BsrMatmulHopper = BsrMatmulHopper { block_rows: 2, stages: 4, ..TILE };
/// 150 × 200 in blocks of 64, of which five are stored, times 200 × 136, whose rows are 144 apart.
const M: usize = 150;
const N: usize = 136;
const K: usize = 200;
const LDB: usize = 144;
const BLOCKS: usize = 5;

fn params() -> blockflash_bsr_matmul_params {
    blockflash_bsr_matmul_params {
        row_ptr: null(),
        col_idx: null(),
        values: null(),
        row_order: null(),
        b: null(),
        c: null_mut(),
        bias: null(),
        ldb: LDB as i64,
        ldc: N as i64,
        m: M as i64,
        n: N as i64,
        k: K as i64,
        c_dtype: DType::F32 as i32,
        bias_per_row: 0,
        activation: 0,
        b_vectorized: 1,
        c_vectorized: 1,
        alpha: 1.0,
        beta: 0.0,
    }
}

fn row(tile: BsrMatmulHopper) -> Row {
    Row { variant: Variant::BsrMatmulHopper(tile), target: crate::Target::Sm90a }
}

fn config(tile: BsrMatmulHopper, blocks: u32) -> LaunchConfig {
    LaunchConfig {
        grid: [blocks, 1, 1],
        block: 384,
        smem_bytes: row(tile).smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: true,
    }
}

/// What `fit` says about these operands with changed parameters and launch.
fn fit_of(
    tile: BsrMatmulHopper,
    change: impl FnOnce(&mut blockflash_bsr_matmul_params),
    config: &LaunchConfig,
) -> Fit {
    let stream = &Device::cpu().stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape).unwrap();
    let [row_ptr, col_idx, row_order] = [4, BLOCKS, 3].map(|entries| tensor(DType::I32, &[entries]));
    let values = tensor(DType::F16, &[BLOCKS, 64, 64]);
    let (b, mut c) = (tensor(DType::F16, &[K, LDB]), tensor(DType::F32, &[M, N]));
    let c: ViewMut<'_> = c.view_mut();
    let operands = BsrMatmulOperands {
        row_ptr: row_ptr.view(),
        col_idx: col_idx.view(),
        values: values.view(),
        row_order: Some(row_order.view()),
        b: b.view().slice(1, 0..N).unwrap(),
        c,
        bias: None,
    };
    let mut params = params();
    change(&mut params);
    fit(&row(tile), &tile, config, &params, &operands)
}

#[test]
fn what_fits_and_what_does_not() {
    // Three block rows, or a pair and a half, and one tile of columns.
    for (tile, most) in [(TILE, 3), (PAIRS, 2)] {
        for blocks in 1..=most {
            fit_of(tile, |_| (), &config(tile, blocks)).unwrap();
        }
        let found = fit_of(tile, |_| (), &config(tile, most + 1)).unwrap_err();
        assert!(found.contains(&format!("a grid of {}x1x1 blocks", most + 1)), "{found}");
    }
    let refused = |change: &dyn Fn(&mut blockflash_bsr_matmul_params), reason: &str| {
        let found = fit_of(TILE, change, &config(TILE, 3)).unwrap_err();
        assert!(found.contains(reason), "{found}");
    };
    refused(&|p| p.ldb = 152, "b is f16");
    refused(&|p| p.k += 1, "b is f16");
    refused(&|p| p.n += 1, "b is f16");
    refused(&|p| p.m += 64, "row_ptr is i32");
    refused(&|p| p.ldc += 8, "c is f32");
    refused(&|p| p.c_dtype = 0, "c_dtype");
    let cluster = LaunchConfig { cluster: Some([1, 1, 1]), ..config(TILE, 3) };
    assert!(fit_of(TILE, |_| (), &cluster).unwrap_err().contains("no clusters"));
}

#[test]
fn maps_describe_blocks_panels_and_edges() {
    let [a, b, b_edge] = maps(&TILE, &params(), BLOCKS as u64);
    assert_eq!(
        a,
        Map { shape: [64, 64, 5], strides_bytes: [128, 64 * 128], box_shape: [64, 64, 1] },
        "a block"
    );
    // 136 columns: two whole panels, the rest by the map of the edges.
    assert_eq!(b, Map { shape: [64, 200, 2], strides_bytes: [288, 128], box_shape: [64, 64, 4] });
    assert_eq!(b_edge, Map { shape: [136, 200, 1], strides_bytes: [288, 288], box_shape: [64, 64, 1] });
    let stream = &Device::cpu().stream().unwrap();
    let view = Tensor::empty(stream, DType::F16, &[1]).unwrap();
    for map in [&a, &b, &b_edge] {
        map.spec(&view.view()).check().unwrap();
    }
}

#[test]
fn small_blocks_are_copied_as_they_lie() {
    let gathers = BsrMatmulHopper { block_size: 32, block_rows: 8, block_n: 128, ..TILE };
    let [a, b, b_edge] = maps(&gathers, &params(), BLOCKS as u64);
    assert!(a.shape.contains(&0));
    // The rows of B that one block column meets.
    assert_eq!((b.box_shape, b_edge.box_shape), ([64, 32, 2], [64, 32, 1]));
}

#[test]
fn tensors_without_elements_have_no_map() {
    let stream = &Device::cpu().stream().unwrap();
    let nothing = Tensor::empty(stream, DType::F16, &[0]).unwrap();
    let narrow = blockflash_bsr_matmul_params { n: 63, k: 0, ..params() };
    for map in maps(&TILE, &narrow, 0) {
        assert_eq!(map.encode(&nothing.view()).unwrap().opaque, [0; 16]);
    }
    let [_, b, b_edge] = maps(&TILE, &blockflash_bsr_matmul_params { n: 63, ..params() }, 1);
    assert!(b.shape.contains(&0) && !b_edge.shape.contains(&0));
}
