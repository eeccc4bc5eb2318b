use super::*;
use crate::case::{BsrShape, Pattern};
use crate::io::TensorFile;
use crate::peers::{Command, Selection};
use approx::assert_abs_diff_eq;
use blockflash_ops::{DType, Device};
use std::cell::RefCell;
use std::path::Path;

const CASE: Case = Case::BsrMatmul(BsrShape {
    m: 32,
    n: 8,
    k: 32,
    block_size: 16,
    density: 0.5,
    pattern: Pattern::Uniform,
    dtype: DType::F16,
});

fn run(rounds: usize) -> Run {
    let suite = Suite { rounds, window_ms: 1.0, gap_ms: 0.0, ..Suite::of(vec![CASE]) };
    let device = Device::cpu();
    let machine = Machine::of(&device, Path::new("."));
    Run::new(suite, machine, device.stream().unwrap(), 1, Kernels::Selected).unwrap()
}

/// Competitors `fast` (right), `wrong` (not verified), `late` (fails in its third window). The
/// window of number n of `fast` takes 10 n µs.
fn peers() -> Peers {
    let script = r#"n=0
while read -r line; do case "$line" in
  *hello*) echo '{"ok":true,"references":["fast"],'\
'"peers":{"bsr_matmul":["fast","wrong","late"],"attention_fwd":["fast"],"attention_bwd":["fast"]},'\
'"absent":{}}';;
  *prepare*wrong*) echo '{"ok":true,"verified":false,"rel_err":0.5}';;
  *prepare*attention*) echo '{"ok":true,"verified":true,"rel_err":0.001}';;
  *prepare*) case "$line" in *col_idx*npy*)
    echo '{"ok":true,"verified":true,"rel_err":0.001,"settings":"x=1"}';; esac;;
  *window*late*) n=$((n+1)); if [ $n -ge 3 ]; then echo '{"error":"late"}'; else
    echo '{"ok":true,"us":1.0,"us_min":1.0,"us_max":1.0,"replays":1,"launches":1}'; fi;;
  *window*) n2=$((n2+1)); us=$((n2 * 10)).0
    echo '{"ok":true,"us":'$us',"us_min":1.0,"us_max":1.0,"replays":1,"launches":7}';;
  *) echo '{"ok":true}';;
esac; done"#;
    let arguments = vec!["-c".into(), script.into()];
    let command = Command { program: "sh".into(), arguments, verbose: false };
    Peers::start(command, Selection::Auto, 0)
}

fn measure(run: &Run, case: &Case) -> Vec<Record> {
    run.measure(case, Cache::Warm, &mut peers(), |_| ())
}

fn names(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.implementation.as_str()).collect()
}

/// Contestants that had a window in this round, such as `round 1 of 4`.
fn order<'s>(steps: &'s [String], round: &str) -> Vec<&'s str> {
    steps.iter().filter_map(|step| step.strip_suffix(round)?.strip_suffix(": ")).collect()
}

#[test]
fn ours_and_competitors_have_windows_in_counterbalanced_order() {
    let (run, steps) = (run(3), RefCell::new(Vec::new()));
    let step = |step: &str| steps.borrow_mut().push(step.to_owned());
    let records = run.measure(&CASE, Cache::Warm, &mut peers(), step);
    assert_eq!(names(&records), ["blockflash", "fast", "wrong", "late"]);
    let [ours, fast, wrong, late] = &records[..] else { panic!("{records:?}") };
    assert!(ours.verified && ours.us.unwrap() > 0.0 && ours.error.is_none(), "{ours:?}");
    // Three contestants have four places, and balance takes as many rounds.
    assert_eq!((ours.rounds, ours.op.as_str(), ours.cache.as_str()), (4, "bsr_matmul", "warm"));
    let protocol = |at| Some(Protocol { order: "williams".to_owned(), contestant: at, places: 4 });
    let protocols: Vec<_> = records.iter().map(|record| record.protocol.clone()).collect();
    assert_eq!(protocols, [protocol(0), protocol(1), None, protocol(2)]);
    let tflops = ours.flops / ours.us.unwrap() / 1e6;
    assert_abs_diff_eq!(ours.tflops.unwrap(), tflops, epsilon = 1e-12);

    // Windows of 10 (warm-up), 20, 30, 40 and 50 µs.
    assert_eq!((fast.us, fast.us_min, fast.us_max), (Some(35.0), Some(20.0), Some(50.0)));
    let settings = (fast.settings.as_deref(), fast.launches, fast.reference);
    assert_eq!((settings, &fast.run), ((Some("x=1"), Some(7), true), &ours.run));
    assert_eq!((wrong.us, wrong.verified), (None, false));
    assert!(wrong.error.as_deref().unwrap().contains("5.0e-1"));
    assert_eq!((late.us, late.error.as_deref()), (None, Some("late")));

    let steps = steps.into_inner();
    let order = |round: usize| order(&steps, &format!("round {round} of 4"));
    // The place of number 3 is empty. The last order comes first, to warm up.
    assert_eq!(order(0), ["blockflash", "late", "fast"]);
    assert_eq!(order(1), ["blockflash", "fast", "late"]);
    assert_eq!(order(2), ["late", "fast", "blockflash"]);
    assert_eq!((order(3), order(4)), (vec!["fast", "blockflash"], vec!["blockflash", "fast"]));
}

#[test]
fn a_swap_check_prepares_once_and_reverses_the_order() {
    let steps = RefCell::new(Vec::new());
    let step = |step: &str| steps.borrow_mut().push(step.to_owned());
    let (swaps, records) = run(2).swap_check(&CASE, Cache::Warm, &mut peers(), step);
    // Windows of 10 (warm-up), 20 and 30 µs, then of 40 (warm-up), 50 and 60 µs.
    let of = |name: &str| -> Vec<_> {
        records.iter().filter(|record| record.implementation == name).collect()
    };
    let (ours, fast) = (of(OURS), of("fast"));
    assert_eq!([fast[0].us_min, fast[1].us_min], [Some(20.0), Some(50.0)]);
    let ratios = [0, 1].map(|at| fast[at].us.unwrap() / ours[at].us.unwrap());
    assert_eq!(swaps, [Swap { name: "fast".into(), ratios }]);
    let order_of = |record: &Record| record.protocol.clone().unwrap().order;
    assert_eq!([order_of(fast[0]), order_of(fast[1])], ["fixed", "reversed"]);
    let steps = steps.into_inner();
    // The third window of `late` fails.
    let second = order(&steps, "round 1 of 2");
    assert_eq!(second, ["blockflash", "fast", "late", "fast", "blockflash"]);
    assert_eq!(steps.iter().filter(|step| step.contains("inputs and check")).count(), 4);
    let moved = |ratios| Swap { name: String::new(), ratios }.moved();
    assert_abs_diff_eq!(moved([0.955, 1.067]), 0.117, epsilon = 1e-3);
    assert_abs_diff_eq!(moved([1.0, 0.99]), 0.01, epsilon = 1e-12);
}

/// Only competitors of packed sequences, of which the script has none, are asked for them.
#[test]
fn competitors_of_dense_batches_are_not_asked_for_packed_sequences() {
    let case: Case = "varlen9+4_h2_d16_causal_bf16".parse().unwrap();
    let records = measure(&run(1), &case);
    let [ours] = &records[..] else { panic!("{records:?}") };
    assert!(ours.verified && ours.us.is_some() && ours.error.is_none(), "{ours:?}");
    assert_eq!((ours.op.as_str(), ours.case.parse()), ("attention_fwd", Ok(case.clone())));
    assert_eq!(ours.flops, case.work().flops);

    let case: Case = "bwd_varlen9+4_h2_d16_causal_bf16".parse().unwrap();
    let records = measure(&run(1), &case);
    let [ours, fast] = &records[..] else { panic!("{records:?}") };
    assert!(ours.verified && ours.us.is_some() && ours.error.is_none(), "{ours:?}");
    assert_eq!((ours.flops, fast.flops), (case.work().flops, case.work().flops));
    // The script would have verified and timed it.
    assert_eq!((fast.us, fast.verified, names(&records)[1]), (None, false, "fast"));
    assert_eq!(fast.error.as_deref(), Some("dense batches only"));
}

#[test]
fn a_case_without_competitors_is_ours_only_and_its_record_survives_the_file() {
    let mut run = run(1);
    run.suite.alone = vec![CASE];
    let records = measure(&run, &CASE);
    assert_eq!((names(&records), records[0].us.is_some()), (vec!["blockflash"], true));
    let line = serde_json::to_string(&records[0]).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&line).unwrap(), records[0]);
    assert!(line.contains("\"impl\":\"blockflash\"") && line.contains("\"schema\":1"));
    assert!(line.contains(r#""protocol":{"turns":"williams","contestant":0,"places":1}"#));
    let scratch = run.scratch.clone();
    assert!(scratch.is_dir());
    drop(run);
    assert!(!scratch.exists());
}

#[test]
fn lists_of_blocks_are_measured_and_competitors_get_those_of_every_query_head() {
    let case: Case = "b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_bf16".parse().unwrap();
    let run = run(1);
    let records = measure(&run, &case);
    assert_eq!(records.len(), 1, "the script has no competitor of this operation");
    assert!(records[0].verified && records[0].us.is_some(), "{:?}", records[0]);
    assert_eq!((records[0].op.as_str(), records[0].flops), ("block_sparse_fwd", case.work().flops));
    let sparse = case.attention().unwrap().block_sparse().unwrap();
    let request = case.peer_case(1, &run.scratch).unwrap();
    let request = serde_json::to_value(request).unwrap();
    assert_eq!((&request["op"], &request["mask_heads"]), (&"block_sparse_fwd".into(), &2.into()));
    let mut offsets = TensorFile::open(request["row_ptr"].as_str().unwrap()).unwrap();
    let offsets = offsets.load("", DType::I32).unwrap();
    assert_eq!(offsets.as_i32(), Some(&sparse.pattern_of_query_heads(1).0[..]));
}
