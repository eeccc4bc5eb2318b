//! Larger blocks on the GPU, bit for bit those of the host.

use blockflash_ops::{BsrMatmul, BsrMatrix, BsrReblock, DType, Device, Error, Stream, Tensor};
use blockflash_sys::Row;
use blockflash_sys::manifest::Variant;
use blockflash_tests::bsr::{BsrCase, BsrData, Pattern};
use blockflash_tests::gpu::{Gpu, Report, gpu, say, wait};
use blockflash_tests::host::{download, poisoned};

const PATTERNS: [Pattern; 6] = [
    Pattern::Random(0.3),
    Pattern::Full,
    Pattern::EmptyRows(0.5),
    Pattern::OneLongRow,
    Pattern::Banded,
    Pattern::Random(0.05),
];

/// The kernels that run on this GPU.
fn rows(gpu: &Gpu) -> Vec<&'static Row> {
    gpu.rows().filter(|row| matches!(row.variant, Variant::BsrReblock(_))).collect()
}

/// Says that there is none: it is not among the rows while it is on trial, unless `BLOCKFLASH_IMAGES` is set.
fn skipped(test: &str) {
    say(&format!("SKIPPED (no row makes blocks larger): bsr_reblock_gpu::{test}"));
}

fn text(error: impl Into<Error>) -> String {
    error.into().to_string()
}

/// A matrix on a device and on the host, of these values.
fn matrices(case: &BsrCase, data: &BsrData, stream: &Stream) -> Result<[BsrMatrix; 2], String> {
    let host = Device::cpu().stream().map_err(text)?;
    Ok([data.matrix(case, stream)?, data.matrix(case, &host)?])
}

/// Fails unless the larger blocks are those that the host makes.
fn judge(reblock: &BsrReblock, host: &BsrMatrix, stream: &Stream, what: &str) -> Result<(), String> {
    wait(stream, &|| what.to_string())?;
    let expected = host.with_block_size(reblock.matrix().block_size()).map_err(text)?;
    let cpu = Device::cpu().stream().map_err(text)?;
    for (name, found, expected) in [
        ("values", reblock.matrix().values(), expected.values()),
        ("row_ptr", reblock.matrix().row_ptr(), expected.row_ptr()),
        ("col_idx", reblock.matrix().col_idx(), expected.col_idx()),
    ] {
        let (found, expected) = (download(stream, found)?, download(&cpu, expected)?);
        if found != expected {
            let at = found.iter().zip(&expected).position(|(a, b)| a != b);
            return Err(format!("{what}: {name} differ at {at:?}, {} and {}", found.len(), expected.len()));
        }
    }
    Ok(())
}

/// Blocks of a size in blocks of another: made, updated, and updated by a graph; with a row, or on the CPU.
fn run(row: Option<&Row>, case: &BsrCase, large: usize, stream: &Stream) -> Result<usize, String> {
    let what = format!("blocks of {large} from {case:?}");
    let refused = |error: Error| format!("{what}: {error}");
    let update = |reblock: &mut BsrReblock, from: &BsrMatrix, stream: &Stream| match row {
        Some(row) => reblock.update_with(row, from, stream),
        None => reblock.update(from, stream),
    };
    let mut data = BsrData::generate(case);
    let [mut small, host] = matrices(case, &data, stream)?;
    let mut reblock = BsrReblock::new(&small, large, stream).map_err(refused)?;
    judge(&reblock, &host, stream, &what)?;

    // Other numbers in the same blocks; what lies beyond the matrix stays zero.
    let mut negated = |scale: f32| -> Result<[BsrMatrix; 2], String> {
        data.values.iter_mut().for_each(|x| *x *= scale);
        matrices(case, &data, stream)
    };
    let [other, host] = negated(-2.0)?;
    update(&mut reblock, &other, stream).map_err(refused)?;
    judge(&reblock, &host, stream, &what)?;

    if row.is_none() {
        return Ok(2);
    }
    let graph = stream.capture(|stream| update(&mut reblock, &small, stream)).map_err(refused)?;
    for scale in [0.5, -0.25] {
        let [_, host] = negated(scale)?;
        small.set_values(host.values(), stream).map_err(refused)?;
        graph.launch(stream).map_err(text)?;
        judge(&reblock, &host, stream, &what)?;
    }
    Ok(4)
}

fn cases() -> impl Iterator<Item = (BsrCase, usize)> {
    let sizes = [
        (16, 16),
        (16, 32),
        (16, 64),
        (16, 128),
        (32, 64),
        (32, 128),
        (64, 128),
        (8, 64),
        (24, 72),
        (16, 1024),
    ];
    sizes.into_iter().enumerate().flat_map(|(at, (size, large))| {
        let whole = [2 * large, 8, 3 * large];
        let hanging = [2 * large + size + 3, 8, large + 2 * size - 1];
        let below = [size - 1, 8, 2 * size + 1];
        let shapes = [whole, hanging, below].into_iter().enumerate();
        shapes.flat_map(move |(turn, mnk)| {
            [DType::F16, DType::BF16, DType::F32].into_iter().map(move |dtype| {
                let pattern = PATTERNS[(3 * at + turn) % PATTERNS.len()];
                (BsrCase { seed: at as u64, ..BsrCase::simple(dtype, size, mnk, pattern) }, large)
            })
        })
    })
}

#[test]
fn larger_blocks_are_those_of_the_host() {
    let Some(gpu) = gpu("bsr_reblock_gpu::larger_blocks_are_those_of_the_host") else { return };
    let rows = rows(&gpu);
    if rows.is_empty() {
        return skipped("larger_blocks_are_those_of_the_host");
    }
    let mut report = Report::default();
    let empty = BsrCase::simple(DType::F16, 16, [100, 8, 100], Pattern::Empty);
    for (case, large) in cases().chain([(empty, 64)]) {
        for row in &rows {
            report.run(row, || run(Some(row), &case, large, &gpu.stream));
        }
    }
    report.finish(&gpu, "bsr_reblock_gpu");
}

#[test]
fn larger_blocks_on_the_cpu() {
    let stream = Device::cpu().stream().unwrap();
    for (case, large) in cases() {
        assert_eq!(run(None, &case, large, &stream).unwrap_or_else(|error| panic!("{error}")), 2);
    }
}

/// The purpose: new values of small blocks, then a product of large ones, in one graph.
#[test]
fn a_graph_multiplies_new_values_in_larger_blocks() {
    let test = "a_graph_multiplies_new_values_in_larger_blocks";
    let Some(gpu) = gpu(&format!("bsr_reblock_gpu::{test}")) else { return };
    if rows(&gpu).is_empty() {
        return skipped(test);
    }
    let stream = &gpu.stream;
    let case = BsrCase::simple(DType::F16, 16, [300, 64, 280], Pattern::Random(0.5));
    let mut data = BsrData::generate(&case);
    let [mut small, _] = matrices(&case, &data, stream).unwrap();
    let mut large = BsrReblock::new(&small, 128, stream).unwrap();
    let ones = vec![half::f16::ONE; 280 * 64];
    let b = Tensor::from_slice(stream, &ones, &[280, 64]).unwrap();
    let mut c = poisoned(stream, DType::F32, &[300, 64]).unwrap();
    let graph = stream
        .capture(|stream| {
            large.update(&small, stream)?;
            BsrMatmul::new(large.matrix(), b.view()).matmul_into(c.view_mut(), stream)
        })
        .unwrap();
    for scale in [1.0, -2.0] {
        // Small numbers of few bits: every order of the sums gives the same.
        data.values.iter_mut().for_each(|x| *x = (*x * scale).round().clamp(-4.0, 4.0));
        let [_, host] = matrices(&case, &data, stream).unwrap();
        small.set_values(host.values(), stream).unwrap();
        graph.launch(stream).unwrap();
        wait(stream, &|| test.to_string()).unwrap();
        let dense = host.to_dense().unwrap();
        let sums: Vec<f32> = dense.chunks(280).map(|row| row.iter().sum()).collect();
        for (row, found) in c.to_vec::<f32>(stream).unwrap().chunks(64).enumerate() {
            assert!(
                found.iter().all(|&x| x == sums[row]),
                "row {row} is {:?}, not {}",
                &found[..4],
                sums[row]
            );
        }
    }
}

#[test]
fn what_the_gpu_cannot_copy_is_refused() {
    let Some(gpu) = gpu("bsr_reblock_gpu::what_the_gpu_cannot_copy_is_refused") else { return };
    let stream = &gpu.stream;
    let odd = BsrMatrix::from_coo(64, 64, 4, DType::F16, &[(0, 0, 1.0)]).unwrap().to(stream).unwrap();
    let error = BsrReblock::new(&odd, 64, stream).unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "bsr_reblock", .. }), "{error}");
    let on_cpu = BsrMatrix::from_coo(64, 64, 16, DType::F16, &[(0, 0, 1.0)]).unwrap();
    let error = BsrReblock::new(&on_cpu, 64, stream).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch { what: "a", .. }), "{error}");
    if rows(&gpu).is_empty() {
        return skipped("what_the_gpu_cannot_copy_is_refused");
    }
    let mut large = BsrReblock::new(&on_cpu.to(stream).unwrap(), 64, stream).unwrap();
    let error = large.update(&on_cpu, stream).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch { what: "from", .. }), "{error}");
}
