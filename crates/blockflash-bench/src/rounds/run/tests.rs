use super::*;
use crate::case::{BsrShape, Pattern};
use crate::peers::{Command, Selection};
use crate::rounds::Swap;
use approx::assert_abs_diff_eq;
use blockflash_ops::{DType, Device};
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
    let suite = Suite {
        name: "test".into(),
        description: String::new(),
        rounds,
        window_ms: 1.0,
        gap_ms: 0.0,
        energy: false,
        cache: vec![Cache::Warm],
        peers: "auto".into(),
        cases: vec![CASE],
        alone: Vec::new(),
    };
    let device = Device::cpu();
    let machine = Machine::of(&device, Path::new("."));
    Run::new(suite, machine, device.stream().unwrap(), 1, Kernels::Selected).unwrap()
}

/// Rivals `fast` (right), `wrong` (not verified), `late` (fails in its third window).
fn peers() -> Peers {
    let script = r#"n=0
while read -r line; do case "$line" in
  *hello*) echo '{"ok":true,"references":["fast"],'\
'"peers":{"bsr_matmul":["fast","wrong","late"],"attention_fwd":["fast"]},"absent":{}}';;
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
    let command = Command {
        program: "sh".into(),
        arguments: vec!["-c".into(), script.into()],
        verbose: false,
    };
    Peers::start(command, Selection::Auto, 0)
}

#[test]
fn ours_and_rivals_take_turns() {
    let run = run(3);
    let steps = std::cell::RefCell::new(Vec::new());
    let records = run
        .measure(&CASE, Cache::Warm, &mut peers(), |step| steps.borrow_mut().push(step.to_owned()));
    let names: Vec<_> = records.iter().map(|record| record.implementation.as_str()).collect();
    assert_eq!(names, ["blockflash", "fast", "wrong", "late"]);

    let ours = &records[0];
    assert!(ours.verified && ours.us.unwrap() > 0.0 && ours.error.is_none(), "{ours:?}");
    // Three contestants have four places, and balance takes as many rounds.
    assert_eq!((ours.rounds, ours.op.as_str(), ours.cache.as_str()), (4, "bsr_matmul", "warm"));
    let protocol = |record: &Record| {
        let Protocol { turns, contestant, places } = record.protocol.clone()?;
        Some((turns, contestant, places))
    };
    let expected =
        [Some(0), Some(1), None, Some(2)].map(|at| Some(("williams".to_owned(), at?, 4)));
    assert_eq!(records.iter().map(protocol).collect::<Vec<_>>(), expected);
    let tflops = ours.flops / ours.us.unwrap() / 1e6;
    assert_abs_diff_eq!(ours.tflops.unwrap(), tflops, epsilon = 1e-12);

    // Windows of 10 (warm-up), 20, 30, 40 and 50 µs.
    let fast = &records[1];
    assert_eq!((fast.us, fast.us_min, fast.us_max), (Some(35.0), Some(20.0), Some(50.0)));
    assert_eq!(
        (fast.settings.as_deref(), fast.launches, fast.reference),
        (Some("x=1"), Some(7), true)
    );
    assert_eq!(fast.run, ours.run);

    assert_eq!((records[2].us, records[2].verified), (None, false));
    assert!(records[2].error.as_deref().unwrap().contains("5.0e-1"));
    assert_eq!((records[3].us, records[3].error.as_deref()), (None, Some("late")));

    let steps = steps.borrow();
    let order = |round: usize| -> Vec<&str> {
        steps
            .iter()
            .filter_map(|step| step.strip_suffix(&format!(": round {round} of 4")))
            .collect()
    };
    // The place of number 3 is empty. The last order comes first, to warm up.
    assert_eq!(order(0), ["blockflash", "late", "fast"]);
    assert_eq!(order(1), ["blockflash", "fast", "late"]);
    assert_eq!(order(2), ["late", "fast", "blockflash"]);
    assert_eq!((order(3), order(4)), (vec!["fast", "blockflash"], vec!["blockflash", "fast"]));
}

#[test]
fn a_swap_check_prepares_once_and_turns_the_order_round() {
    let steps = std::cell::RefCell::new(Vec::new());
    let (swaps, records) = run(2).swap_check(&CASE, Cache::Warm, &mut peers(), |step| {
        steps.borrow_mut().push(step.to_owned())
    });
    // Windows of 10 (warm-up), 20 and 30 µs, then of 40 (warm-up), 50 and 60 µs.
    let ours: Vec<_> = records.iter().filter(|record| record.implementation == OURS).collect();
    let fast: Vec<_> = records.iter().filter(|record| record.implementation == "fast").collect();
    assert_eq!([fast[0].us_min, fast[1].us_min], [Some(20.0), Some(50.0)]);
    let ratios = [0, 1].map(|at| fast[at].us.unwrap() / ours[at].us.unwrap());
    assert_eq!(swaps, [Swap { rival: "fast".into(), ratios }]);
    let turns = |record: &Record| record.protocol.as_ref().map(|protocol| protocol.turns.clone());
    assert_eq!([turns(fast[0]), turns(fast[1])], [Some("fixed".into()), Some("reversed".into())]);
    let steps = steps.borrow();
    let second: Vec<_> =
        steps.iter().filter_map(|step| step.strip_suffix(": round 1 of 2")).collect();
    // The third window of `late` fails.
    assert_eq!(second, ["blockflash", "fast", "late", "fast", "blockflash"]);
    assert_eq!(steps.iter().filter(|step| step.contains("inputs and check")).count(), 4);
}

#[test]
fn what_moves_is_a_part_of_the_ratio() {
    let swap = |ratios| Swap { rival: String::new(), ratios };
    assert_abs_diff_eq!(swap([0.955, 1.067]).moved(), 0.117, epsilon = 1e-3);
    assert_abs_diff_eq!(swap([1.0, 0.99]).moved(), 0.01, epsilon = 1e-12);
}

#[test]
fn rivals_are_not_asked_for_packed_sequences() {
    let case: Case = "varlen9+4_h2_d16_causal_bf16".parse().unwrap();
    let records = run(1).measure(&case, Cache::Warm, &mut peers(), |_| ());
    assert_eq!(records.len(), 2);
    let (ours, rival) = (&records[0], &records[1]);
    assert!(ours.verified && ours.us.is_some() && ours.error.is_none(), "{ours:?}");
    assert_eq!((ours.op.as_str(), ours.case.parse()), ("attention_fwd", Ok(case.clone())));
    assert_eq!((ours.flops, rival.flops), (case.work().flops, case.work().flops));
    // The script would have verified and timed it.
    assert_eq!((rival.us, rival.verified), (None, false));
    assert_eq!(
        (rival.implementation.as_str(), rival.error.as_deref()),
        ("fast", Some("dense batches only"))
    );
}

#[test]
fn a_case_without_rivals_is_ours_only() {
    let mut run = run(1);
    run.suite.alone = vec![CASE];
    let records = run.measure(&CASE, Cache::Warm, &mut peers(), |_| ());
    let names: Vec<_> = records.iter().map(|record| record.implementation.as_str()).collect();
    assert_eq!((names, records[0].us.is_some()), (vec!["blockflash"], true));
}

#[test]
fn lists_of_blocks_are_measured_and_rivals_get_those_of_every_query_head() {
    let case: Case = "b1_s256_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_bf16".parse().unwrap();
    let run = run(1);
    let records = run.measure(&case, Cache::Warm, &mut peers(), |_| ());
    assert_eq!(records.len(), 1, "the script has no rival of this operation");
    assert!(records[0].verified && records[0].us.is_some(), "{:?}", records[0]);
    assert_eq!((records[0].op.as_str(), records[0].flops), ("block_sparse_fwd", case.work().flops));
    let Case::BlockSparseFwd(shape) = &case else { panic!("{case} is another operation") };
    let request = case.shape().peer_case(1, &run.scratch).unwrap();
    let request = serde_json::to_value(request).unwrap();
    assert_eq!((&request["op"], &request["mask_heads"]), (&"block_sparse_fwd".into(), &2.into()));
    let row_ptr = request["row_ptr"].as_str().unwrap();
    let offsets = crate::io::TensorFile::open(row_ptr).unwrap().load("", DType::I32).unwrap();
    assert_eq!(offsets.as_i32(), Some(&shape.pattern_of_query_heads(1).0[..]));
}

#[test]
fn a_record_survives_the_file() {
    let run = run(1);
    let none = || {
        Peers::start(
            Command { program: "x".into(), arguments: vec![], verbose: false },
            Selection::None,
            0,
        )
    };
    let records = run.measure(&CASE, Cache::Warm, &mut none(), |_| ());
    let line = serde_json::to_string(&records[0]).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&line).unwrap(), records[0]);
    assert!(line.contains("\"impl\":\"blockflash\"") && line.contains("\"schema\":1"));
    let scratch = run.scratch.clone();
    assert!(scratch.is_dir());
    drop(run);
    assert!(!scratch.exists());
}
