//! The CPU backend of the BSR product against the oracle.

use blockflash_cases::case::Operands;
use blockflash_ops::{BsrMatrix, DType, Major, View};
use blockflash_sys::Target;
use blockflash_sys::manifest::{self, Variant};
use blockflash_tests::bsr::{
    BsrCase, BsrData, Choice, Limits, Pattern, bsr_cases, column_cases, edge_cases, epilogue_cases,
    run_case, tiles,
};
use blockflash_tests::host::{all_pass, cpu, download};
use blockflash_tests::property;
use std::collections::BTreeSet;

fn run_all(cases: Vec<BsrCase>) {
    all_pass(&cases, |case, stream| run_case(case, Choice::Selected, stream));
}

#[test]
fn random_cases_in_half_precision() {
    let limits = Limits {
        dtypes: vec![DType::F16, DType::BF16],
        block_sizes: vec![16, 32, 64, 128],
        blocks: 4,
        columns: 260,
        any_layout: true,
    };
    let stream = cpu();
    property::check(150, bsr_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

#[test]
fn random_cases_that_only_the_cpu_takes() {
    let limits = Limits {
        dtypes: vec![DType::F32, DType::F32, DType::F16],
        block_sizes: vec![1, 2, 3, 5, 8, 24, 100],
        blocks: 7,
        columns: 130,
        any_layout: true,
    };
    let stream = cpu();
    property::check(150, bsr_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

#[test]
fn tile_edges() {
    for (dtype, block_size) in [(DType::F16, 16), (DType::BF16, 32), (DType::F16, 64)] {
        run_all(edge_cases(dtype, block_size, 128, 64));
        run_all(column_cases(dtype, block_size, 128));
    }
}

/// The suite of the GPU kernels relies on this: a case that is made for a kernel has A, B and C in
/// the layouts that the kernel takes.
#[test]
fn cases_lie_as_a_row_takes_them() {
    let stream = cpu();
    let mut columns_of_c = BTreeSet::new();
    // Tiles differ in sizes, too, but these do not matter here.
    let kernels = manifest::kernels()
        .iter()
        .flat_map(|kernel| tiles(kernel).into_iter().map(move |tile| (kernel, tile)));
    for (kernel, tile) in
        kernels.filter(|(_, tile)| (tile.dtype, tile.block_n) == (DType::F16, 128))
    {
        let hopper = match kernel.variant {
            Variant::BsrMatmulHopper(tile) => Some(tile),
            _ if kernel.takes_any_layout() && kernel.target == Target::Sm80 => None,
            _ => continue,
        };
        let size = tile.block_size as usize;
        let cases =
            [edge_cases(DType::F16, size, 128, 64), column_cases(DType::F16, size, 128)].concat();
        for case in cases.into_iter().map(|case| case.for_kernel(kernel, &tile)) {
            let data = BsrData::generate(&case);
            let problem = data.operands(&case, &stream).unwrap().problem(None).unwrap();
            assert_eq!(problem.a_transposed, tile.a_transposed);
            assert!(
                problem.c_major == Major::Row || !hopper.is_some_and(|tile| tile.gathers()),
                "{case:?}"
            );
            columns_of_c.extend(
                (problem.n > 1 && problem.c_major == Major::Column).then_some(kernel.symbol()),
            );
            // A single column, or none, is one of rows: kernels for columns take it only where A is
            // transposed. Without the gaps that those for Hopper need, a single row is one of
            // columns, too.
            let told = if hopper.is_some() {
                problem.n > 1 || !tile.b_column_major
            } else {
                problem.n > 1 && problem.k > 1
            };
            if told {
                assert_eq!(problem.b_major == Major::Column, tile.b_column_major, "{case:?}");
                let empty = problem.n == 0 || problem.k == 0;
                assert!(problem.b_vectorized || empty || hopper.is_none(), "{case:?}");
            }
        }
    }
    for size in [16, 32, 64, 128] {
        let any = format!("blockflash_bsr_matmul_any_sm80_f16_b{size}_");
        assert!(columns_of_c.iter().any(|symbol| symbol.starts_with(&any)), "{any}");
    }
}

#[test]
fn the_transpose_by_an_index_is_the_transposed_matrix_bit_by_bit() {
    let stream = cpu();
    for (size, pattern) in
        [(16, Pattern::Random(0.4)), (7, Pattern::EmptyRows(0.5)), (64, Pattern::Full)]
    {
        for n in [1, 33, 200] {
            let case = BsrCase::simple(DType::F16, size, [5 * size - 3, n, 4 * size + 1], pattern);
            let data = BsrData::generate(&case);
            let bits = |transposed| {
                let case = BsrCase { transposed, ..case.clone() };
                let mut operands = data.operands(&case, &stream).unwrap();
                operands.launch(None, &stream).unwrap();
                download(&stream, operands.c()).unwrap()
            };
            assert!(bits(true) == bits(false), "{case:?}");
        }
    }
}

#[test]
fn every_epilogue() {
    run_all(epilogue_cases(DType::F16, 16));
    run_all(epilogue_cases(DType::BF16, 32));
}

#[test]
fn repeats_are_equal_bit_by_bit() {
    let case = BsrCase::simple(DType::BF16, 32, [300, 130, 500], Pattern::Random(0.5));
    let (stream, data) = (cpu(), BsrData::generate(&case));
    let mut operands = data.operands(&case, &stream).unwrap();
    let mut run = || {
        operands.reset(None, &stream).unwrap();
        operands.launch(None, &stream).unwrap();
        download(&stream, operands.c()).unwrap()
    };
    let first = run();
    for repeat in 1..30 {
        assert!(run() == first, "repeat {repeat} differs");
    }
}

/// All constructors of one matrix give the same arrays.
#[test]
fn constructors_agree() {
    for (size, pattern) in
        [(16, Pattern::Random(0.4)), (7, Pattern::EmptyRows(0.5)), (32, Pattern::Full)]
    {
        let case = BsrCase::simple(DType::F16, size, [75, 1, 90], pattern);
        let data = BsrData::generate(&case);
        let parts = data.matrix(&case, &cpu()).unwrap();
        let dense = parts.to_dense().unwrap();
        let (rows, cols) = (parts.rows(), parts.cols());
        assert_eq!((rows, cols, dense.len()), (75, 90, 75 * 90));

        let from_dense = BsrMatrix::from_dense(
            View::from_slice(&dense, &[rows, cols]).unwrap(),
            size,
            DType::F16,
        );
        let triplets: Vec<(usize, usize, f32)> = (0..dense.len())
            .rev()
            .filter(|&at| dense[at] != 0.0)
            .map(|at| (at / cols, at % cols, dense[at]))
            .collect();
        let from_coo = BsrMatrix::from_coo(rows, cols, size, DType::F16, &triplets);
        let (mut row_ptr, mut col_idx, mut values) = (vec![0i32], Vec::new(), Vec::new());
        for row in 0..rows {
            for col in (0..cols).filter(|&col| dense[row * cols + col] != 0.0) {
                col_idx.push(col as i32);
                values.push(dense[row * cols + col]);
            }
            row_ptr.push(col_idx.len() as i32);
        }
        let from_csr =
            BsrMatrix::from_csr(rows, cols, size, DType::F16, &row_ptr, &col_idx, &values);
        let mut blocks: Vec<(usize, usize)> = Vec::new();
        for row in 0..parts.block_rows() {
            let range = data.row_ptr[row] as usize..data.row_ptr[row + 1] as usize;
            blocks.extend(data.col_idx[range].iter().map(|&col| (row, col as usize)));
        }
        // In reverse order, to be sorted.
        blocks.reverse();
        let reversed: Vec<f32> = data.values.chunks(size * size).rev().flatten().copied().collect();
        let from_blocks = BsrMatrix::from_blocks(rows, cols, size, DType::F16, &blocks, &reversed);

        let bits = |tensor: &blockflash_ops::Tensor| download(&cpu(), tensor).unwrap();
        for (name, other) in
            [("dense", from_dense), ("coo", from_coo), ("csr", from_csr), ("blocks", from_blocks)]
        {
            let other = other.unwrap_or_else(|error| panic!("from_{name}: {error}"));
            assert_eq!(bits(other.row_ptr()), bits(parts.row_ptr()), "row_ptr from_{name}");
            assert_eq!(bits(other.col_idx()), bits(parts.col_idx()), "col_idx from_{name}");
            assert_eq!(bits(other.values()), bits(parts.values()), "values from_{name}");
            assert_eq!(bits(other.row_order()), bits(parts.row_order()), "row_order from_{name}");
            assert_eq!(other.nnz_blocks(), parts.nnz_blocks());
            approx::assert_abs_diff_eq!(other.density(), parts.density(), epsilon = 1e-12);
        }
    }
}
