use super::*;
use crate::attention::{self, AttentionProblem, Mask};
use crate::bsr_matmul::{self, BsrProblem};
use crate::rates::tests::{l4, rtx_4090};
use crate::selection::{self, Problem};
use crate::{Align, BlockMaskSizes, PackedRows};
use blockflash_sys::{DType, Major, manifest};
use serde_json::{Value, json};

/// A dense problem, and the images of its wide and its narrow tile on Ada.
fn dense(seqlen: usize) -> AttentionProblem {
    AttentionProblem::dense(DType::BF16, [4, seqlen, seqlen], [16, 16], 128)
}
const WIDE: &str = "blockflash_attention_fwd_sm80_bf16_d128_q128_kv32_w4_s1.sm_89.cubin";
const NARROW: &str = "blockflash_attention_fwd_sm80_bf16_d128_q64_kv64_w4_s1.sm_89.cubin";

/// A line as `blockflash tune` writes it, without the fields that nobody reads.
fn line(gpu: &CudaProperties, run: &str, problem: &impl Problem, image: &str, us: f64) -> Value {
    let tuning = Measured {
        image: image.into(),
        multiprocessors: gpu.multiprocessors,
        selected: false,
        problem: problem.likeness().unwrap(),
    };
    json!({
        "schema": 1, "gpu": gpu.name, "run": run, "us": us, "verified": true, "tuning": tuning,
    })
}

fn text(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn tuning(lines: &[Value]) -> Tuning {
    Tuning::parse(&text(lines)).unwrap()
}

/// The narrow tile was measured to be faster at 4096 tokens on an L4.
fn narrow_is_faster() -> Vec<Value> {
    [(WIDE, 120.0), (NARROW, 100.0)]
        .map(|(image, us)| line(&l4(), "a", &dense(4096), image, us))
        .into()
}

/// The image that is taken instead of the selected one, if any.
fn instead<P: Problem>(tuning: &Tuning, problem: &P, gpu: &CudaProperties) -> Option<String> {
    let selected = selection::select(problem, gpu).unwrap();
    let accepts = |kernel: &Kernel| selection::accepts(kernel, problem, gpu).is_ok();
    tuning.faster(selected, &problem.likeness()?, gpu, accepts).map(Kernel::image_name)
}

#[test]
fn a_measured_kernel_replaces_the_estimate() {
    let (tuning, gpu) = (tuning(&narrow_is_faster()), l4());
    assert_eq!(attention::select(&dense(4096), &gpu).unwrap().image_name(), WIDE);
    assert_eq!(instead(&tuning, &dense(4096), &gpu).as_deref(), Some(NARROW));
    // The kernels of the portable path compute lse as asked; a softcap is not compared.
    let other = AttentionProblem { softcap: Some(30.0), ..dense(4096).with_lse() };
    assert_eq!(instead(&tuning, &other, &gpu).as_deref(), Some(NARROW));
    assert_eq!(tuning.gpu(&gpu).unwrap().cases(), 1);
    // What was measured to be slower, or about as fast, changes nothing.
    for us in [119.0, 120.0, 200.0] {
        let mut lines = narrow_is_faster();
        lines[1]["us"] = json!(us);
        assert_eq!(instead(&self::tuning(&lines), &dense(4096), &gpu), None, "{us}");
    }
}

#[test]
fn another_gpu_is_left_alone() {
    let tuning = tuning(&narrow_is_faster());
    assert_eq!(instead(&tuning, &dense(4096), &rtx_4090()), None);
    assert_eq!(tuning.gpu(&rtx_4090()), None);
    // Products of one name may have different numbers of SMs.
    let fewer = CudaProperties { multiprocessors: 50, ..l4() };
    assert_eq!(instead(&tuning, &dense(4096), &fewer), None);
}

#[test]
fn problems_that_are_alike_are_near_in_every_size() {
    let (tuning, gpu) = (tuning(&narrow_is_faster()), l4());
    let decides = |problem: AttentionProblem| instead(&tuning, &problem, &gpu).is_some();
    for near in [2900, 4000, 5700] {
        assert!(decides(dense(near)), "{near}");
    }
    for far in [2890, 5800] {
        assert!(!decides(dense(far)), "{far}");
    }
    let with = |batch, heads: [usize; 2], head_dim| {
        AttentionProblem::dense(DType::BF16, [batch, 4096, 4096], heads, head_dim)
    };
    assert!(decides(with(1, [64, 64], 128)), "batch and heads count together");
    assert!(!decides(with(4, [32, 32], 128)) && !decides(with(4, [16, 8], 128)));
    assert!(!decides(with(4, [16, 16], 120)), "head_dim belongs to the class");
    assert!(!decides(AttentionProblem { dtype: DType::F16, ..dense(4096) }));
    assert!(!decides(AttentionProblem { mask: Mask::causal(), ..dense(4096) }));
    let [block_q, block_kv] = [128; 2];
    let sizes = BlockMaskSizes { block_q, block_kv, batch: 1, heads: 1, packed_rows: None };
    assert!(!decides(AttentionProblem { block_mask: Some(sizes), ..dense(4096) }));
}

#[test]
fn what_is_not_measured_has_no_likeness() {
    let window = Mask::Window { left: Some(5), right: None, align: Align::BottomRight };
    let top_left = Mask::Causal { align: Align::TopLeft };
    let packed = Some(PackedRows { total_q: 9, total_kv: 9 });
    for problem in [
        AttentionProblem { mask: window, ..dense(64) },
        AttentionProblem { packed, ..dense(64) },
        AttentionProblem { mask: top_left, seqlen_q: 8, ..dense(64) },
        AttentionProblem { num_heads_kv: 0, ..dense(64) },
    ] {
        assert_eq!(problem.likeness(), None, "{problem:?}");
    }
    let like = |mask| AttentionProblem { mask, ..dense(64) }.likeness();
    assert_eq!(like(top_left), like(Mask::causal()), "the same where lengths are equal");
    // A size of 0 is not near to anything.
    let (tuning, gpu) = (tuning(&narrow_is_faster()), l4());
    assert_eq!(instead(&tuning, &dense(0), &gpu), None);
    let empty = BsrProblem::new(DType::F16, [0, 0, 0], 64, 0);
    assert_eq!(instead(&tuning, &empty, &gpu), None);
}

#[test]
fn the_nearest_case_decides() {
    let mut lines = narrow_is_faster();
    // At 5000 tokens the wide tile was faster.
    for (image, us) in [(WIDE, 100.0), (NARROW, 130.0)] {
        lines.push(line(&l4(), "a", &dense(5000), image, us));
    }
    let (tuning, gpu) = (tuning(&lines), l4());
    assert_eq!(tuning.gpus()[0].cases(), 2);
    assert!(instead(&tuning, &dense(4400), &gpu).is_some());
    assert!(instead(&tuning, &dense(4600), &gpu).is_none());
}

/// Whatever a record says, a kernel that does not accept the problem is never taken, nor one
/// against a selected kernel that was not measured.
#[test]
fn rules_hold_whatever_a_record_says() {
    let gpu = l4();
    for kernel in manifest::kernels() {
        let image = kernel.image_name();
        let lines = [(WIDE, 120.0), (image.as_str(), 1.0)]
            .map(|(image, us)| line(&gpu, "a", &dense(4096), image, us));
        let taken = instead(&tuning(&lines), &dense(4096), &gpu);
        let accepts = attention::accepts(kernel, &dense(4096), &gpu).is_ok() && image != WIDE;
        assert_eq!(taken, accepts.then(|| image.clone()), "{image}");
    }
    let lines = [line(&gpu, "a", &dense(4096), NARROW, 1.0)];
    assert_eq!(instead(&tuning(&lines), &dense(4096), &gpu), None);
    // A kernel that is refused gives way to the next one.
    let other = "blockflash_attention_fwd_sm80_f16_d128_q64_kv64_w4_s1.sm_89.cubin";
    let mut lines = narrow_is_faster();
    lines.push(line(&gpu, "a", &dense(4096), other, 1.0));
    assert_eq!(instead(&tuning(&lines), &dense(4096), &gpu).as_deref(), Some(NARROW));
}

#[test]
fn a_later_run_replaces_a_case() {
    let (gpu, mut lines) = (l4(), narrow_is_faster());
    lines.push(line(&gpu, "b", &dense(4096), WIDE, 90.0));
    assert_eq!(instead(&tuning(&lines), &dense(4096), &gpu), None);
    lines.push(line(&gpu, "b", &dense(4096), NARROW, 80.0));
    assert_eq!(instead(&tuning(&lines), &dense(4096), &gpu).as_deref(), Some(NARROW));
}

#[test]
fn products_are_compared_by_size_density_and_skew() {
    let gpu = l4();
    let [wide, narrow] = ["b64_n128_k64_w2x2_s2", "b64_n64_k64_w2x2_s3"]
        .map(|tile| format!("blockflash_bsr_matmul_sm80_f16_{tile}.sm_89.cubin"));
    let with = |n, blocks, longest| BsrProblem {
        longest_row: Some(longest),
        ..BsrProblem::new(DType::F16, [8192, n, 8192], 64, blocks)
    };
    let measured = with(1024, 1638, 13);
    let lines =
        [(&wide, 50.0), (&narrow, 40.0)].map(|(image, us)| line(&gpu, "a", &measured, image, us));
    let tuning = tuning(&lines);
    assert_eq!(bsr_matmul::select(&measured, &gpu).unwrap().image_name(), wide);
    let decides = |problem: BsrProblem| instead(&tuning, &problem, &gpu).is_some();
    assert!(decides(measured) && decides(BsrProblem { beta: 1.0, ..measured }));
    assert!(decides(with(1200, 2000, 17)) && !decides(with(2048, 1638, 13)));
    assert!(!decides(with(1024, 6554, 52)), "four times as dense");
    assert!(!decides(with(1024, 1638, 128)), "one long row");
    assert!(!decides(BsrProblem { longest_row: None, nnz_blocks: 0, ..measured }));
    let transposed = measured.with_layouts(true, Major::Row, Major::Row);
    assert!(!decides(transposed));
}

#[test]
fn lines_of_others_are_left_out_and_counted() {
    let mut lines = narrow_is_faster();
    lines.push(line(&l4(), "a", &dense(4096), "blockflash_of_tomorrow.sm_89.cubin", 1.0));
    let mut wrong = line(&l4(), "a", &dense(4096), NARROW, 1.0);
    wrong["verified"] = json!(false);
    let mut failed = line(&l4(), "a", &dense(4096), NARROW, 1.0);
    failed["us"] = Value::Null;
    lines.extend([wrong, failed]);
    // A line of `blockflash bench`.
    lines.push(json!({"schema": 1, "gpu": "NVIDIA L4", "us": 1.0, "verified": true}));
    let tuning = tuning(&lines);
    assert_eq!((tuning.unknown_kernels(), tuning.failed()), (1, 2));
    assert_eq!(instead(&tuning, &dense(4096), &l4()).as_deref(), Some(NARROW));
}

#[test]
fn a_malformed_record_is_an_error() {
    let problem = |text: &str| Tuning::parse(text).unwrap_err();
    for text in ["", "\n\n", "{\"gpu\": \"NVIDIA L4\", \"us\": 1}"] {
        assert!(problem(text).contains("no line is a measurement"), "{text:?}");
    }
    let good = text(&narrow_is_faster());
    assert!(problem(&format!("{good}\n{{")).starts_with("line 4: "));
    assert!(problem(&format!("[1]\n{good}")).starts_with("line 1: "));
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut lines = narrow_is_faster();
        change(&mut lines[1]);
        problem(&text(&lines))
    };
    assert!(changed(&|line| line["us"] = json!(-1.0)).starts_with("line 2: -1 µs"));
    assert!(changed(&|line| line["us"] = json!(0)).contains("no time of a launch"));
    assert!(changed(&|line| line["gpu"] = Value::Null).contains("line 2"));
    let size = |name: &'static str, value: Value| {
        changed(&move |line| line["tuning"]["problem"][name] = value.clone())
    };
    assert!(size("seqlen_q", json!(0)).contains("not positive"));
    assert!(size("seqlen_q", json!(-5)).contains("line 2"));
    assert!(size("op", json!("sorting")).contains("unknown variant"));
    assert!(size("density", json!(1)).contains("unknown field"));
    assert!(
        good.replace("100.0", "1e999") != good
            && problem(&good.replace("100.0", "1e999")).contains("line 2")
    );
}

#[test]
fn files_that_cannot_be_read_change_nothing() {
    let refused = |path: &Path| match load(path).unwrap_err() {
        Error::Tuning { path: of, problem } => (of, problem),
        other => panic!("{other}"),
    };
    let folder = std::env::temp_dir().join(format!("blockflash-tuning-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (missing, noise) = (folder.join("missing.jsonl"), folder.join("noise.jsonl"));
    assert_eq!(refused(&missing).0, missing);
    std::fs::write(&noise, b"\xff\x00\n").unwrap();
    assert_eq!(refused(&noise).0, noise);
    std::fs::write(&noise, "noise").unwrap();
    let message = load(&noise).unwrap_err().to_string();
    assert!(message.contains("noise.jsonl: line 1: "), "{message}");
    assert_eq!(loaded(), None);
    std::fs::remove_dir_all(&folder).unwrap();
}
