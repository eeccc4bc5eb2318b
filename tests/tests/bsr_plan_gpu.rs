//! Patterns that are planned on a GPU: array by array what the host plans.

use blockflash_ops::{BsrMatmul, BsrMatrix, BsrTranspose, DType, Device, Error, Stream, Tensor};
use blockflash_sys::Row;
use blockflash_sys::manifest::Variant;
use blockflash_tests::bsr::{BsrCase, BsrData, BsrReference, Indices, Kind, Pattern, check_output};
use blockflash_tests::gpu::{Gpu, Report, gpu, say, wait};
use blockflash_tests::host::{poisoned, upload};
use blockflash_tests::number::{encode, rng};
use rand::Rng;

/// The matrix of these indices, with this kernel or as the library plans it.
fn build(indices: &Indices, row: Option<&Row>, stream: &Stream) -> Result<Result<BsrMatrix, Error>, String> {
    let (sizes, arrays) = (indices.sizes(), indices.upload(stream)?);
    if let Some(row) = row {
        return Ok(BsrMatrix::from_tensors_with(row, sizes, arrays, stream));
    }
    let ([rows, cols, block_size], [row_ptr, col_idx, values]) = (sizes, arrays);
    Ok(BsrMatrix::from_tensors(rows, cols, block_size, row_ptr, col_idx, values, stream))
}

fn text(error: impl Into<Error>) -> String {
    error.into().to_string()
}

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// The kernels that run on this GPU.
fn rows(gpu: &Gpu) -> Vec<&'static Row> {
    gpu.rows().filter(|row| matches!(row.variant, Variant::BsrPlan(_))).collect()
}

/// Fails unless the plan is that of the host. Returns how many parts were compared.
fn same_plan(indices: &Indices, row: Option<&Row>, stream: &Stream) -> Result<usize, String> {
    let story = |error: String| {
        let Indices { block_size, rows, cols, col_idx, .. } = indices;
        format!("{rows} x {cols} blocks of {block_size}, {} stored: {error}", col_idx.len())
    };
    let matrix = build(indices, row, stream)?.map_err(|error| story(text(error)))?;
    wait(stream, &|| story("hangs".into()))?;
    matrix.check_plan(stream).map_err(|error| story(text(error)))?;
    // An index of the host's matrix is that of this one, too: the hashes are equal.
    let host = build(indices, None, &cpu())?.map_err(text)?;
    let index = BsrTranspose::new(&host, &cpu()).and_then(|index| index.to(stream)).map_err(text)?;
    let b = Tensor::zeros(stream, DType::F16, &[host.rows(), 8]).map_err(text)?;
    let product = BsrMatmul::transposed(&matrix, &index, b.view());
    let mut c = Tensor::empty(stream, DType::F16, &[host.cols(), 8]).map_err(text)?;
    product.problem(&c.view_mut()).map_err(|error| story(text(error)))?;
    Ok(1)
}

/// Patterns of every kind, in sizes around those of groups, words and chunks of words.
fn patterns() -> Vec<Indices> {
    let kinds = [
        Kind::Random(0.1),
        Kind::Random(0.5),
        Kind::Random(0.0),
        Kind::Random(1.0),
        Kind::Uniform(5),
        Kind::PowerLaw,
        Kind::Clustered,
        Kind::EmptyRows(0.3),
        Kind::Pairs,
    ];
    let sizes =
        [[1, 1], [1, 300], [15, 31], [16, 32], [17, 33], [64, 64], [129, 257], [200, 520], [333, 1000]];
    let mut patterns = Vec::new();
    for block_size in [16, 32, 64, 128] {
        for (at, size) in sizes.into_iter().enumerate() {
            for (turn, kind) in kinds.into_iter().enumerate() {
                // Larger ones are planned by the host for a while, too.
                if at < 7 || (at + turn) % 3 == 0 {
                    patterns.push(Indices::new(block_size, size, kind, (at * 100 + turn) as u64));
                }
            }
        }
    }
    // More candidates than threads, and as many columns as there may be.
    patterns.push(Indices::new(16, [1100, 600], Kind::Random(0.02), 1));
    patterns.push(Indices::new(32, [2100, 150], Kind::Clustered, 2));
    patterns.push(Indices::new(64, [1500, 200], Kind::Random(0.05), 3));
    patterns.push(Indices::new(16, [40, 4096], Kind::Random(0.01), 4));
    patterns.push(Indices::new(128, [4096, 40], Kind::PowerLaw, 5));
    // Other block sizes are ordered by length.
    patterns.push(Indices::new(7, [50, 60], Kind::Random(0.3), 6));
    patterns.push(Indices::new(1, [300, 200], Kind::PowerLaw, 7));
    // Values are there, too, though they do not matter.
    patterns.retain(|indices| indices.col_idx.len() * indices.block_size.pow(2) <= 1 << 26);
    patterns
}

#[test]
fn plans_are_those_of_the_host() {
    let Some(gpu) = gpu("bsr_plan_gpu::plans_are_those_of_the_host") else { return };
    let stream = &gpu.stream;
    // Whether there is a kernel or not.
    for indices in patterns().iter().step_by(7) {
        same_plan(indices, None, stream).unwrap_or_else(|error| panic!("{error}"));
    }
    names_what_is_wrong(None, stream).unwrap_or_else(|error| panic!("{error}"));
    products_are_right(None, stream).unwrap_or_else(|error| panic!("{error}"));
    let rows = rows(&gpu);
    if rows.is_empty() {
        // They are not among the rows while they are on trial, unless `BLOCKFLASH_IMAGES` is set.
        return say("SKIPPED (no row plans patterns): bsr_plan_gpu::plans_are_those_of_the_host");
    }
    let mut report = Report::default();
    let patterns = patterns();
    for row in rows {
        for indices in &patterns {
            report.run(row, || same_plan(indices, Some(row), stream));
        }
        report.run(row, || names_what_is_wrong(Some(row), stream));
        report.run(row, || products_are_right(Some(row), stream));
    }
    report.finish(&gpu, "bsr_plan_gpu");
}

#[test]
fn plans_on_the_cpu() {
    let stream = cpu();
    for indices in patterns().iter().filter(|indices| indices.rows * indices.cols < 50_000) {
        same_plan(indices, None, &stream).unwrap_or_else(|error| panic!("{error}"));
    }
    names_what_is_wrong(None, &stream).unwrap_or_else(|error| panic!("{error}"));
    products_are_right(None, &stream).unwrap_or_else(|error| panic!("{error}"));
}

/// Whatever the indices are, the error is that of the host, and the device goes on.
fn names_what_is_wrong(row: Option<&Row>, stream: &Stream) -> Result<usize, String> {
    let mut random = rng(11);
    let mut compared = 0;
    for turn in 0..120 {
        let block_size = [16, 32, 64, 128][turn % 4];
        let mut indices = Indices::new(block_size, [50, 70], Kind::Random(0.2), turn as u64);
        let garbage = [-1, i32::MIN, i32::MAX, 70, 0, 1 << 20, -1 << 20];
        for _ in 0..1 + turn / 30 {
            let value = garbage[random.random_range(0..garbage.len())];
            let (last, blocks) = (indices.row_ptr.len() - 1, indices.col_idx.len());
            match turn / 4 % 5 {
                0 => indices.row_ptr[random.random_range(0..=last)] = value,
                1 => indices.col_idx[random.random_range(0..blocks)] = value,
                2 => indices.row_ptr[[0, last][turn % 2]] += 1,
                3 => indices.col_idx.swap(blocks / 2, blocks / 2 + 1),
                _ => {
                    let at = random.random_range(0..blocks - 1);
                    indices.col_idx[at + 1] = indices.col_idx[at];
                }
            }
        }
        if turn >= 110 {
            indices.row_ptr.iter_mut().chain(&mut indices.col_idx).for_each(|x| *x = random.random());
        }
        let said = |result: Result<BsrMatrix, Error>| result.err().map(text);
        let found = said(build(&indices, row, stream)?);
        let expected = said(build(&indices, None, &cpu())?);
        if found != expected {
            return Err(format!("corruption {turn}: {found:?}, expected {expected:?}"));
        }
        compared += usize::from(expected.is_some());
    }
    if compared > 90 { Ok(compared) } else { Err(format!("only {compared} of the patterns are wrong")) }
}

/// Products of matrices that were planned there, by whatever kernel is selected for them, against the oracle.
fn products_are_right(row: Option<&Row>, stream: &Stream) -> Result<usize, String> {
    let mut compared = 0;
    for block_size in [16, 32, 64, 128] {
        for pattern in [Pattern::Random(0.3), Pattern::EmptyRows(0.5), Pattern::OneLongRow, Pattern::Banded] {
            let case = BsrCase::simple(DType::F16, block_size, [6 * block_size, 72, 5 * block_size], pattern);
            let data = BsrData::generate(&case);
            let [m, n, k] = case.mnk;
            let indices = [&data.row_ptr, &data.col_idx];
            let [row_ptr, col_idx] =
                indices.map(|numbers| Tensor::from_slice(stream, numbers, &[numbers.len()]));
            let bits = |values: &[f32]| values.iter().map(|&x| encode(DType::F16, x)).collect::<Vec<u32>>();
            let shape = [data.col_idx.len(), block_size, block_size];
            let values = upload(stream, DType::F16, &bits(&data.values), &shape)?;
            let (row_ptr, col_idx) = (row_ptr.map_err(text)?, col_idx.map_err(text)?);
            let a = match row {
                Some(row) => {
                    let arrays = [row_ptr, col_idx, values];
                    BsrMatrix::from_tensors_with(row, [m, k, block_size], arrays, stream)
                }
                None => BsrMatrix::from_tensors(m, k, block_size, row_ptr, col_idx, values, stream),
            };
            let a = a.map_err(text)?;
            let b = upload(stream, DType::F16, &bits(&data.b), &[k, n])?;
            let mut c = poisoned(stream, DType::F16, &[m, n])?;
            BsrMatmul::new(&a, b.view()).matmul_into(c.view_mut(), stream).map_err(text)?;
            wait(stream, &|| format!("{case:?}"))?;
            let reference = BsrReference::compute(&case, &data, 2e8);
            compared += check_output(&c, &case, &data, &reference, stream)?;
        }
    }
    Ok(compared)
}

#[test]
fn what_cannot_be_planned_on_a_gpu_is_refused() {
    let test = "what_cannot_be_planned_on_a_gpu_is_refused";
    let Some(gpu) = gpu(&format!("bsr_plan_gpu::{test}")) else { return };
    let stream = &gpu.stream;
    let indices = Indices::new(16, [20, 30], Kind::Random(0.2), 1);
    let build = |[rows, cols]: [usize; 2], arrays: [Tensor; 3], stream: &Stream| {
        let [row_ptr, col_idx, values] = arrays;
        BsrMatrix::from_tensors(rows, cols, 16, row_ptr, col_idx, values, stream)
    };
    // Nothing would look at values beyond the matrix.
    for sizes in [[20 * 16 - 1, 30 * 16], [20 * 16, 30 * 16 - 15]] {
        let error = build(sizes, indices.upload(stream).unwrap(), stream).unwrap_err();
        assert!(matches!(error, Error::UncheckedPadding { .. }), "{error}");
    }
    let sizes = [20 * 16, 30 * 16];
    for (at, what) in ["row_ptr", "col_idx", "values"].into_iter().enumerate() {
        let mut arrays = indices.upload(stream).unwrap();
        arrays[at] = arrays[at].copy_to(&cpu()).unwrap();
        let error = build(sizes, arrays, stream).unwrap_err();
        assert!(matches!(error, Error::DeviceMismatch { what: found, .. } if found == what), "{error}");
    }
    // What comes back has to be waited for.
    let arrays = indices.upload(stream).unwrap();
    let mut refused = None;
    let captured = stream.capture(|stream| {
        refused = build(sizes, arrays, stream).err();
        Ok::<(), Error>(())
    });
    drop(captured);
    let refused = refused.expect("no planning in a graph").to_string();
    assert!(refused.contains("while a graph is being captured"), "{refused}");
}
