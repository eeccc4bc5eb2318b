//! Records of measurements that a program loads: they decide about kernels, and nothing in them can
//! make selection take a kernel that does not accept the problem. One test of what is loaded, since
//! it counts for the whole process.

use blockflash_ops::attention::{self, AttentionProblem};
use blockflash_ops::bsr_matmul::{self, BsrProblem};
use blockflash_ops::tuning::{self, Likeness, Measured, Tuning};
use blockflash_ops::{ComputeCapability, CudaProperties, DType, Error};
use blockflash_sys::manifest;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use std::io::Write;
use tempfile::NamedTempFile;

fn l4() -> CudaProperties {
    CudaProperties {
        ordinal: 0,
        name: "NVIDIA L4".into(),
        compute_capability: ComputeCapability::new(8, 9),
        multiprocessors: 58,
        smem_per_block: 99 * 1024,
        smem_per_multiprocessor: 100 * 1024,
        l2_bytes: 48 << 20,
        memory_bytes: 24 << 30,
        driver_version: 13000,
        clock_khz: 2_040_000,
        memory_clock_khz: 6_251_000,
        memory_bus_bits: 192,
    }
}

fn file(text: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text).unwrap();
    file
}

fn line(problem: Likeness, image: &str, us: f64) -> String {
    let (image, gpu) = (image.to_owned(), l4());
    let multiprocessors = gpu.multiprocessors;
    let tuning = Measured { image, multiprocessors, selected: false, problem };
    let tuning = serde_json::to_string(&tuning).unwrap();
    format!("{{\"gpu\":\"{}\",\"us\":{us},\"verified\":true,\"tuning\":{tuning}}}\n", gpu.name)
}

#[test]
fn a_loaded_record_decides_until_it_is_unloaded() {
    let (gpu, problem) = (l4(), AttentionProblem::dense(DType::F16, [4, 4096, 4096], [16; 2], 64));
    let chosen = || attention::select(&problem, &gpu).unwrap();
    let estimated = chosen();
    assert_eq!(estimated.attention_tile().unwrap().block_q, 128);
    let narrow = "blockflash_attention_fwd_sm80_f16_d64_q64_kv64_w4_s1.sm_89.cubin";
    let likeness = Likeness::of_attention(&problem).unwrap();
    let lines =
        [line(likeness, narrow, 2.0), line(likeness, &estimated.image_name(), 3.0)].concat();
    let record = file(lines.as_bytes());
    assert_eq!(tuning::loaded(), None);

    let tuning = tuning::load(record.path()).unwrap();
    assert_eq!((tuning.path(), tuning.gpus().len()), (record.path(), 1));
    assert_eq!(tuning::loaded(), Some(tuning));
    assert_eq!(chosen().image_name(), narrow);
    attention::plan(chosen(), &problem, &gpu).unwrap();
    // An error changes nothing.
    assert!(matches!(tuning::load("missing.jsonl"), Err(Error::Tuning { .. })));
    assert_eq!(chosen().image_name(), narrow);
    tuning::unload();
    assert_eq!((chosen(), tuning::loaded()), (estimated, None));
}

proptest! {
    #![proptest_config(blockflash_tests::property::config(200))]

    /// Bytes of any kind are a record or an error.
    #[test]
    fn noise_is_no_record(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Tuning::read(file(&noise).path()).is_err());
    }

    /// A record with a character changed is a record or an error that names the line.
    #[test]
    fn a_damaged_record_is_read_or_refused(at in any::<Index>(), byte in 32..127u8) {
        let problem = BsrProblem::new(DType::BF16, [4096, 512, 4096], 64, 400);
        let likeness = Likeness::of_bsr_matmul(&problem);
        let image = bsr_matmul::select(&problem, &l4()).unwrap().image_name();
        let mut text = line(likeness, &image, 1.5).into_bytes();
        let at = at.index(text.len() - 1);
        text[at] = byte;
        match Tuning::read(file(&text).path()) {
            Ok(tuning) => prop_assert!(tuning.gpus().len() <= 1),
            Err(Error::Tuning { problem, .. }) => prop_assert!(problem.contains("line")),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// Sizes, images and times of any kind are read, or refused with the line.
    #[test]
    fn any_measurement_is_read_or_refused(
        sizes in prop::collection::vec(any::<usize>(), 3),
        blocks in any::<usize>(),
        us in any::<f64>(),
        kernel in select(manifest::kernels().iter().collect::<Vec<_>>()),
    ) {
        let [m, n, k] = [sizes[0], sizes[1], sizes[2]];
        let problem = BsrProblem { m, n, k, nnz_blocks: blocks, ..BsrProblem::new(
            DType::BF16, [64; 3], 64, 1,
        ) };
        let text = line(Likeness::of_bsr_matmul(&problem), &kernel.image_name(), us);
        match Tuning::read(file(text.as_bytes()).path()) {
            Ok(tuning) => prop_assert_eq!(tuning.gpus()[0].cases(), 1),
            Err(Error::Tuning { problem, .. }) => prop_assert!(problem.starts_with("line 1")),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
