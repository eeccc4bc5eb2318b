use super::*;
use crate::launch::LaunchConfig;
use crate::launch::bsr_matmul_fixtures::{self as fixtures, TILE};
use crate::launch::checked::fitted;
use crate::{
    BsrIndexArrays, BsrIndices, BsrPartsMemory, BsrStageArrays, DType, Device, Tensor, View,
    ViewMut,
};
use blockflash_sys::params::BLOCKFLASH_BSR_SPLITS;

const PAIRS: BsrMatmulHopper = BsrMatmulHopper { block_rows: 2, stages: 4, ..TILE };
/// 150 × 200 in blocks of 64, of which five are stored, times 200 × 136, whose rows are 144 apart.
const M: usize = 150;
const N: usize = 136;
const K: usize = 200;
const LDB: usize = 144;
const LDB_COLUMNS: usize = 208;
const BLOCKS: usize = 5;
/// Of the block rows.
const LENGTHS: [i32; 3] = [3, 2, 0];

fn params() -> blockflash_bsr_matmul_params {
    fixtures::params([M, N, K], LDB)
}

fn row(tile: BsrMatmulHopper) -> Kernel {
    Kernel { variant: Variant::BsrMatmulHopper(tile), target: crate::Target::Sm90a }
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

/// What `fit` says about these operands with changed parameters and launch. B and C are as tile and
/// parameters say.
fn fit_of(
    tile: BsrMatmulHopper,
    change: impl FnOnce(&mut blockflash_bsr_matmul_params),
    config: &LaunchConfig,
) -> Fit {
    let stream = &Device::cpu().stream().unwrap();
    let tensor = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape).unwrap();
    let indices = fixtures::pattern(&LENGTHS, tile.a_transposed);
    let values = tensor(DType::F16, &[BLOCKS, 64, 64]);
    let mut params = params();
    change(&mut params);
    let (b, mut c) = (tensor(DType::F16, &[K, LDB]), tensor(DType::F32, &[M, N]));
    let (mut b, mut c): (View<'_>, ViewMut<'_>) = (b.view().slice(1, 0..N).unwrap(), c.view_mut());
    let (columns_of_b, mut columns_of_c) =
        (tensor(DType::F16, &[N, LDB_COLUMNS]), tensor(DType::F32, &[N, M]));
    if tile.b_column_major {
        b = columns_of_b.view().slice(1, 0..K).unwrap().permute(&[1, 0]).unwrap();
    }
    if params.c_column_major != 0 {
        c = columns_of_c.view_mut().permute(&[1, 0]).unwrap();
    }
    let operands = BsrMatmulOperands {
        indices: &indices,
        values: values.view(),
        parts: None,
        b,
        c,
        bias: None,
    };
    fitted::<BsrMatmulHopper>(&row(tile), config, &params, &operands).map(drop)
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
    refused(&|p| p.k = 128, "of k");
    refused(&|p| p.ldc += 8, "c is f32");
    refused(&|p| p.c_dtype = 0, "c_dtype");
    let cluster = LaunchConfig { cluster: Some([1, 1, 1]), ..config(TILE, 3) };
    assert!(
        fit_of(TILE, |_| (), &cluster)
            .unwrap_err()
            .contains("clusters of Some([1, 1, 1]), expected None")
    );
}

#[test]
fn clusters_are_whole() {
    // Three block rows and one tile of columns: each pair has a block of threads without any.
    let pair = BsrMatmulHopper { cluster: 2, ..TILE };
    let launch =
        |cluster, blocks| fit_of(pair, |_| (), &LaunchConfig { cluster, ..config(pair, blocks) });
    for blocks in [2, 4, 6] {
        launch(Some([2, 1, 1]), blocks).unwrap();
    }
    for (cluster, blocks, reason) in [
        (Some([2, 1, 1]), 8, "a grid of 8x1x1"),
        (Some([2, 1, 1]), 3, "do not divide into clusters"),
        (Some([4, 1, 1]), 4, "expected Some(["),
        (None, 4, "expected Some(["),
    ] {
        let found = launch(cluster, blocks).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
}

#[test]
fn some_may_idle_where_two_share_a_multiprocessor() {
    let half = BsrMatmulHopper { blocks_per_multiprocessor: 2, ..TILE };
    let launch = |tile, blocks| fit_of(tile, |_| (), &config(tile, blocks));
    for blocks in [1, 3, 132, 264] {
        launch(half, blocks).unwrap();
    }
    assert!(launch(TILE, 132).unwrap_err().contains("a grid of 132x1x1"));
    assert!(launch(half, 0).unwrap_err().contains("a grid of 0x1x1"));
    assert!(launch(half, 1 << 30).unwrap_err().contains("the limit is 2147483647"));
}

#[test]
fn parts_have_room_and_places() {
    let stream = Device::cpu().stream().unwrap();
    let memory = |sums: usize, words: usize| {
        let tensor = Tensor::empty(&stream, DType::I32, &[sums + words]).unwrap();
        BsrPartsMemory::from_tensor(tensor, words).unwrap()
    };
    let small = Tensor::empty(&stream, DType::U8, &[7]).unwrap();
    assert!(BsrPartsMemory::from_tensor(small, 2).is_err(), "a word and three bytes");
    let rooms: Vec<BsrPartsMemory> = (0..8).map(|room| memory(room * 64 * 256, room * 8)).collect();
    let too_few_words = memory(3 * 64 * 256, 3 * 8 - 1);
    let (values, mut c) = (
        Tensor::empty(&stream, DType::F16, &[BLOCKS, 64, 64]).unwrap(),
        Tensor::empty(&stream, DType::F32, &[M, N]).unwrap(),
    );
    let indices = fixtures::pattern(&LENGTHS, false);
    let longer = fixtures::pattern(&[3, 4, 0], false);
    // With memory for this many parts.
    let of = |begin: &[i32], room: usize| {
        let mut all = [0; BLOCKFLASH_BSR_SPLITS as usize];
        all[..begin.len()].copy_from_slice(begin);
        BsrParts { steps: 2, begin: all, memory: &rooms[room] }
    };
    // Three block rows and one tile of columns.
    let mut split_in =
        |indices: &BsrIndices, tile: &BsrMatmulHopper, parts: Option<BsrParts<'_>>| {
            let (values, b) = (values.view(), values.view());
            let c = c.view_mut();
            split(tile, &params(), &BsrMatmulOperands { indices, values, parts, b, c, bias: None })
        };
    assert_eq!(split_in(&indices, &TILE, None), Ok(0));
    // The second block row is cut in two, too.
    assert_eq!(split_in(&longer, &TILE, Some(of(&[2], 2))), Ok(2));
    let error = split_in(&longer, &TILE, Some(of(&[1], 1))).unwrap_err();
    assert!(error.contains("blocks has more than"), "{error}");
    let mut split_of =
        |tile: &BsrMatmulHopper, parts: BsrParts<'_>| split_in(&indices, tile, Some(parts));
    let error = split_of(&TILE, of(&[], 0)).unwrap_err();
    assert!(error.contains("blocks has more than"), "{error}");
    assert_eq!(split_of(&TILE, BsrParts { steps: 3, ..of(&[], 0) }), Ok(0));
    assert_eq!(split_of(&TILE, of(&[4, 1], 4)), Ok(4));
    assert_eq!(split_of(&TILE, of(&[3], 3)), Ok(3));
    assert_eq!(split_of(&TILE, of(&[3], 7)), Ok(3), "more room than is needed");
    let pair = BsrMatmulHopper { cluster: 2, ..TILE };
    assert_eq!(split_of(&pair, of(&[3], 6)), Ok(6));
    let mut refused = |tile: &BsrMatmulHopper, parts: BsrParts<'_>, reason: &str| {
        let found = split_of(tile, parts).unwrap_err();
        assert!(found.contains(reason), "{found}");
    };
    refused(&pair, of(&[3], 5), "sums,");
    refused(&TILE, of(&[5, 2], 4), "sums,");
    refused(&TILE, BsrParts { memory: &too_few_words, ..of(&[3], 3) }, "words,");
    refused(&TILE, of(&[4], 4), "tiles have a part, there are");
    refused(&TILE, of(&[1, 2], 1), "expected numbers that descend to 0");
    refused(&TILE, of(&[2, -1], 2), "expected numbers that descend to 0");
    refused(&TILE, of(&[7; 8], 7), "expected numbers that descend to 0");
    refused(
        &TILE,
        BsrParts { steps: 0, ..of(&[3], 3) },
        "steps of a part are 0, expected at least 1",
    );
    refused(&PAIRS, of(&[1], 1), "whole tiles");
}

#[test]
fn columns_fit_where_the_tile_or_the_kernel_takes_them() {
    let columns = |p: &mut blockflash_bsr_matmul_params| (p.ldc, p.c_column_major) = (M as i64, 1);
    let transposed = BsrMatmulHopper { a_transposed: true, b_column_major: true, ..TILE };
    let of_b = |p: &mut blockflash_bsr_matmul_params| p.ldb = LDB_COLUMNS as i64;
    fit_of(TILE, columns, &config(TILE, 3)).unwrap();
    fit_of(transposed, of_b, &config(transposed, 3)).unwrap();
    fit_of(transposed, |p| (of_b(p), columns(p)).0, &config(transposed, 3)).unwrap();
    let refused = |tile, change: &dyn Fn(&mut blockflash_bsr_matmul_params), reason: &str| {
        let found = fit_of(tile, change, &config(tile, 3)).unwrap_err();
        assert!(found.contains(reason), "{found}");
    };
    refused(TILE, &|p| p.c_column_major = 1, "c is f32");
    refused(transposed, &|_| (), "b is f16");
    let columns = blockflash_bsr_matmul_params { c_column_major: 1, ..params() };
    assert!(writes(true, &columns).unwrap_err().contains("c_column_major is 1, expected 0"));
    writes(false, &columns).unwrap();
}

#[test]
fn what_tensor_copies_can_store() {
    let plain = blockflash_bsr_matmul_params { c_dtype: DType::F16 as i32, ..params() };
    assert!(copies_c(&TILE, &plain, true));
    let refused = [
        blockflash_bsr_matmul_params { c_dtype: DType::F32 as i32, ..plain },
        blockflash_bsr_matmul_params { beta: 0.5, ..plain },
        blockflash_bsr_matmul_params { c_column_major: 1, ..plain },
        blockflash_bsr_matmul_params { n: 131, ..plain },
        blockflash_bsr_matmul_params { ldc: 140, ..plain },
        blockflash_bsr_matmul_params { ldc: 0, ..plain },
        blockflash_bsr_matmul_params { ldc: 1 << 39, ..plain },
    ];
    for p in &refused {
        assert!(!copies_c(&TILE, p, true));
    }
    assert!(!copies_c(&TILE, &plain, false));
    let activated = blockflash_bsr_matmul_params { activation: 1, ..plain };
    assert!(copies_c(&TILE, &activated, true));
    let gathers = BsrMatmulHopper { block_size: 32, block_rows: 8, block_n: 128, ..TILE };
    assert!(!copies_c(&gathers, &plain, true), "its pages have no room");
    assert!(copies_c(&BsrMatmulHopper { filled: true, ..gathers }, &plain, true));
}

#[test]
fn small_blocks_need_a_plan() {
    let gathers =
        BsrMatmulHopper { block_size: 32, block_rows: 8, block_n: 128, stages: 4, ..TILE };
    let stream = &Device::cpu().stream().unwrap();
    // 150 × 200 in blocks of 32, one block in the last row and column: one group with one stage.
    let mut stage = [0; 64];
    (stage[2 * 4 + 1], stage[2 * 16], stage[2 * 24], stage[2 * 24 + 1]) = (1, 6, 1, 1);
    let stages = BsrStageArrays { block_size: 32, stages: &stage, group_stages: &[0, 1] };
    let fit_with = |stages| {
        let arrays = BsrIndexArrays {
            block_cols: 7,
            row_ptr: &[0, 0, 0, 0, 0, 1],
            col_idx: &[6],
            row_order: &[4, 3, 2, 1, 0],
            block_idx: None,
            stages,
        };
        let indices = &BsrIndices::new(&arrays, stream).unwrap();
        let tensor = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape).unwrap();
        let (values, b) = (tensor(DType::F16, &[1, 32, 32]), tensor(DType::F16, &[K, LDB]));
        let mut c = tensor(DType::F32, &[M, N]);
        let (values, b, c) = (values.view(), b.view().slice(1, 0..N).unwrap(), c.view_mut());
        let operands = BsrMatmulOperands { indices, values, parts: None, b, c, bias: None };
        let row = row(gathers);
        let (block, smem_bytes) = (row.threads(), row.smem_bytes());
        let config = LaunchConfig { block, smem_bytes, ..config(TILE, 1) };
        fitted::<BsrMatmulHopper>(&row, &config, &params(), &operands)
    };
    fit_with(Some(stages)).unwrap();
    assert!(fit_with(None).unwrap_err().contains("the stages of the pattern"));
}
