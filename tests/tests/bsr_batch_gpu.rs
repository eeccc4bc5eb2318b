//! A batch of products as one product of a block diagonal, against the oracle and beside the
//! separate products.

use blockflash_ops::{BsrMatmul, BsrMatrix, DType, Device, Stream, Tensor};
use blockflash_tests::bsr::{BsrCase, BsrData, BsrReference, NanInB, Pattern, check_output};
use blockflash_tests::gpu::{gpu, wait};
use blockflash_tests::host::{poisoned, upload};
use blockflash_tests::number::encode;

const BATCH: usize = 4;

/// The entries of a batch: other patterns, and in the last one blocks that hang over the edge.
fn entries(dtype: DType, size: usize, n: usize) -> [BsrCase; BATCH] {
    let patterns =
        [Pattern::Random(0.3), Pattern::OneLongRow, Pattern::Empty, Pattern::Random(0.7)];
    std::array::from_fn(|at| {
        let (m, k) = if at + 1 < BATCH { (5 * size, 7 * size) } else { (4 * size + 3, 7 * size) };
        let nan_in_b = if at == 0 { NanInB::Unread } else { NanInB::Nowhere };
        BsrCase {
            seed: at as u64,
            nan_in_b,
            ..BsrCase::simple(dtype, size, [m, n, k], patterns[at])
        }
    })
}

/// The case and the data of the batch as one product, put together without the library.
fn joined(cases: &[BsrCase; BATCH], parts: &[BsrData; BATCH]) -> (BsrCase, BsrData) {
    let n = cases[0].mnk[1];
    let mut joined = BsrData {
        row_ptr: vec![0],
        col_idx: vec![],
        values: vec![],
        b: vec![],
        c: vec![],
        bias: vec![],
    };
    let (mut m, mut k, mut first_col) = (0, 0, 0);
    for (case, part) in cases.iter().zip(parts) {
        let blocks = joined.col_idx.len() as i32;
        joined.row_ptr.extend(part.row_ptr[1..].iter().map(|end| blocks + end));
        joined.col_idx.extend(part.col_idx.iter().map(|col| first_col + col));
        joined.values.extend(&part.values);
        joined.b.extend(&part.b);
        joined.c.extend(&part.c);
        first_col += case.blocks()[1] as i32;
        (m, k) = (m + case.mnk[0], k + case.mnk[2]);
    }
    let simple =
        BsrCase::simple(cases[0].dtype, cases[0].block_size, [m, n, k], Pattern::Random(0.0));
    (BsrCase { nan_in_b: NanInB::Unread, ..simple }, joined)
}

/// Computes the batch both ways and judges each; returns how many outputs were compared.
fn run(dtype: DType, size: usize, n: usize, stream: &Stream) -> Result<usize, String> {
    let text = |error: blockflash_ops::Error| error.to_string();
    let cases = entries(dtype, size, n);
    let parts = cases.each_ref().map(BsrData::generate);
    let (case, data) = joined(&cases, &parts);
    let reference = BsrReference::compute(&case, &data, 2e8);
    let [m, _, k] = case.mnk;

    let host = Device::cpu().stream().map_err(|error| error.to_string())?;
    let matrices: Vec<BsrMatrix> = cases
        .iter()
        .zip(&parts)
        .map(|(case, part)| part.matrix(case, &host))
        .collect::<Result<_, _>>()?;
    let a = BsrMatrix::block_diagonal(&matrices.iter().collect::<Vec<_>>()).map_err(text)?;
    let a = a.to(stream).map_err(text)?;
    let bits: Vec<u32> = data.b.iter().map(|&x| encode(dtype, x)).collect();
    let b = upload(stream, dtype, &bits, &[BATCH, k / BATCH, n])?;
    let mut c = poisoned(stream, dtype, &[m, n])?;
    let product = BsrMatmul::batched(&a, b.view()).map_err(text)?;
    product.matmul_into(c.view_mut(), stream).map_err(text)?;
    wait(stream, &|| format!("the batch of {cases:?}"))?;
    let compared = check_output(&c, &case, &data, &reference, stream)?;

    let mut c: Tensor = poisoned(stream, dtype, &[m, n])?;
    let mut first = 0;
    for (at, matrix) in matrices.iter().enumerate() {
        let (matrix, rows) = (matrix.to(stream).map_err(text)?, first..first + matrix.rows());
        let b = b
            .view()
            .slice(0, at..at + 1)
            .and_then(|b| b.flatten(0..2))
            .map_err(|error| error.to_string())?;
        let own = c.view_mut().slice(0, rows.clone()).map_err(|error| error.to_string())?;
        BsrMatmul::new(&matrix, b).matmul_into(own, stream).map_err(text)?;
        first = rows.end;
    }
    wait(stream, &|| format!("products one by one of {cases:?}"))?;
    Ok(compared + check_output(&c, &case, &data, &reference, stream)?)
}

fn run_all(dtypes: &[DType], stream: &Stream) {
    for &dtype in dtypes {
        for size in [16, 32, 64, 128] {
            for n in [8, 100, 264] {
                let compared = run(dtype, size, n, stream).unwrap_or_else(|error| {
                    panic!("{dtype}, blocks of {size}, {n} columns: {error}")
                });
                assert_eq!(compared, 2);
            }
        }
    }
}

#[test]
fn batches_are_their_products() {
    let Some(gpu) = gpu("bsr_batch_gpu::batches_are_their_products") else { return };
    run_all(&[DType::F16, DType::BF16], &gpu.stream);
}

/// The same where there is no GPU.
#[test]
fn batches_on_the_cpu() {
    run_all(&[DType::F16, DType::F32], &Device::cpu().stream().unwrap());
}
