//! `blockflash tune` and `--tuning` as a user meets them, mostly without a GPU.

mod common;

use blockflash_bench::record::{Record, SCHEMA};
use blockflash_ops::Device;
use blockflash_ops::attention::{self, AttentionProblem};
use blockflash_ops::tuning::{Likeness, Measured, Tuning};
use common::{Folder, blockflash, has_gpu, json, refused};

/// A record of a GPU that no machine has.
fn record(folder: &Folder) -> String {
    let problem = AttentionProblem::dense(blockflash_ops::DType::BF16, [1; 3], [1; 2], 64);
    let tuning = Measured {
        image: "blockflash_attention_fwd_sm80_bf16_d64_q64_kv64_w4_s1.sm_89.cubin".into(),
        multiprocessors: 3,
        selected: true,
        problem: Likeness::of_attention(&problem).unwrap(),
    };
    let good = Record {
        schema: SCHEMA,
        gpu: "NVIDIA Made-up".into(),
        us: Some(2.0),
        verified: true,
        tuning: Some(tuning),
        ..Record::default()
    };
    let mut unknown = good.clone();
    unknown.tuning.iter_mut().for_each(|tuning| tuning.image = "of_tomorrow.cubin".into());
    let lines = [good, unknown].map(|record| serde_json::to_string(&record).unwrap());
    let path = folder.path("tuned.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

#[test]
fn tune_needs_a_gpu_and_says_so() {
    let line = refused(&["tune", "--device", "cpu"]);
    assert!(line.contains("tune measures the kernels of a GPU, and none is used"), "{line}");
    assert!(line.contains("--device says cpu"), "{line}");
    if Device::best().is_cpu() {
        let line = refused(&["tune", "--case", "b1_s512_h8_d64_full_bf16"]);
        assert!(line.contains("and none is used: "), "{line}");
    }
    assert!(refused(&["tune", "--case", "nonsense"]).contains("not a case"));
    let both = ["tune", "smoke", "--case", "b1_s512_h8_d64_full_bf16"];
    assert!(refused(&both).contains("cannot be used with"));
}

#[test]
fn info_says_what_a_record_decides_about() {
    let folder = Folder::new("info");
    let path = record(&folder);
    let text = |args: &[&str]| String::from_utf8(blockflash(args).stdout).unwrap();
    assert!(text(&["info", "--device", "cpu"]).contains("no record is loaded"));
    let with = text(&["info", "--device", "cpu", "--tuning", &path]);
    assert!(with.contains("no case of this device, but of NVIDIA Made-up (3 SMs)"), "{with}");
    assert!(with.contains("1 lines of unknown kernels do not count"), "{with}");
    let output = blockflash(&["info", "--device", "cpu", "--tuning", &path, "--json"]);
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&info["tuning"]["cases"], info["tuning"]["path"].as_str()),
        (&0.into(), Some(&*path))
    );
    assert!(
        refused(&["info", "--tuning", &folder.path("missing.jsonl")]).contains("missing.jsonl")
    );
    std::fs::write(&path, "noise").unwrap();
    assert!(refused(&["info", "--tuning", &path]).contains("tuned.jsonl: line 1: "));
}

/// An option acts or is an error.
#[test]
fn a_record_that_would_do_nothing_is_refused() {
    let folder = Folder::new("refused");
    let path = record(&folder);
    let random = ["attention", "--random", "1x64x2x64", "--tuning", &path];
    for command in [
        &random[..],
        &["bsr-matmul", "--random", "64x64x64", "--tuning", &path],
        &["bench", "smoke", "--tuning", &path],
        &["launch", "--case", "b1_s512_h8_d64_full_bf16", "--tuning", &path],
    ] {
        let on_cpu = refused(&[command, &["--device", "cpu"]].concat());
        assert!(on_cpu.contains("--tuning is about kernels of GPUs"), "{on_cpu}");
        if !Device::best().is_cpu() {
            assert!(refused(command).contains("has no case of"));
        }
    }
    let kernel = [&random[..], &["--kernel", "sm80"]].concat();
    assert!(refused(&kernel).contains("cannot be used with"));
    assert_eq!(json(&random[..3])["kernel"], serde_json::Value::Null);
}

/// The whole way on a GPU: measure, read, run by it.
#[test]
fn what_is_measured_is_read() {
    if !has_gpu("what_is_measured_is_read") {
        return;
    }
    let folder = Folder::new("gpu");
    let out = folder.path("tuned.jsonl");
    let case = "b1_s512_h8_d64_full_bf16";
    let quick = ["--rounds", "1", "--window-ms", "5", "--gap-ms", "1", "--out", &out];
    let output = blockflash(&[&["tune", "--case", case], &quick[..]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains(case), "{text}");
    let tuning = Tuning::read(&out).unwrap();
    let device = Device::best();
    let gpu = device.cuda_properties().unwrap();
    assert_eq!((tuning.gpu(gpu).unwrap().cases(), tuning.failed()), (1, 0));
    let problem = AttentionProblem::dense(blockflash_ops::DType::BF16, [1, 512, 512], [8; 2], 64);
    let images = std::fs::read_to_string(&out).unwrap();
    let selected = attention::select(&problem, gpu).unwrap().image_name();
    assert!(images.lines().any(|line| line.contains(&selected)), "{selected}");
    let launched = blockflash(&["launch", "--case", case, "--tuning", &out]);
    assert!(launched.status.success());
}
