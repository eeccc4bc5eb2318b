use super::super::sample::{ceiling, record, suite};
use super::*;

#[test]
fn only_the_newest_run_is_reported_and_what_it_hides_is_known() {
    let mut records = suite();
    let newer = Record {
        run: "r2".into(),
        commit: "other".into(),
        date: "2026-11-22T08:00:00Z".into(),
        ..record("c", OURS, Some(1.0))
    };
    records.insert(0, newer.clone());
    records.push(Record { gpu: "F".into(), ..record("d", OURS, Some(1.0)) });
    records.push(Record { run: "r0".into(), date: "2026-11-01T08:00:00Z".into(), ..newer });
    let runs = newest(&records);
    let cases: Vec<Vec<_>> =
        runs.iter().map(|run| run.records.iter().map(|r| r.case.as_str()).collect()).collect();
    assert_eq!(cases, [vec!["d"], vec!["c"]]);
    assert!(runs[0].fuller.is_none());
    let fuller = runs[1].fuller.as_ref().unwrap();
    assert_eq!((fuller.size, fuller.record.run.as_str()), (Size { cases: 2, rivals: 2 }, "r1"));
}

#[test]
fn runs_of_a_commit_complete_each_other() {
    let mut records = suite();
    let again = |case: &str| Record {
        run: "r2".into(),
        date: "2026-11-22T08:00:00Z".into(),
        ..record(case, OURS, Some(1.0))
    };
    records.extend([again("c"), again("b")]);
    let runs = newest(&records);
    let rows = runs[0].rows();
    let found: Vec<_> =
        rows.iter().map(|row| (row.any.case.as_str(), row.any.run.as_str())).collect();
    assert_eq!(found, [("a", "r1"), ("b", "r2"), ("c", "r2")]);
    assert!(runs.len() == 1 && rows[1].peers.is_empty());
}

#[test]
fn several_commits_are_named_in_short() {
    let of = |case: &str, commit: &str, same_as: Option<&str>| Record {
        commit: commit.into(),
        same_as: same_as.map(str::to_owned),
        ..record(case, OURS, Some(1.0))
    };
    let records = [
        of("a", "aaaaaaaaaaaa", Some("cccccccccccc-dirty")),
        of("b", "bbbbbbbbbbbb", Some("cccccccccccc-dirty")),
        of("c", "cccccccccccc-dirty", None),
    ];
    assert_eq!(newest(&records)[0].commits(), "aaaaaaa, bbbbbbb and cccccccccccc-dirty");
    assert_eq!(newest(&records[..1])[0].commits(), "aaaaaaaaaaaa");
}

#[test]
fn runs_of_the_same_images_complete_each_other() {
    let of = |case: &str, run: &str, commit: &str, same_as: Option<&str>| Record {
        run: run.into(),
        commit: commit.into(),
        same_as: same_as.map(str::to_owned),
        date: format!("2026-11-2{}T08:00:00Z", &run[1..]),
        ..record(case, OURS, Some(1.0))
    };
    let records = [
        of("a", "r1", "first", Some("second")),
        of("b", "r1", "first", None),
        of("c", "r1", "first", Some("second")),
        of("c", "r2", "second", None),
    ];
    let found = |records: &[Record]| {
        let runs = newest(records);
        let rows = runs[0].rows();
        let rows: Vec<_> =
            rows.iter().map(|row| format!("{} {}", row.any.case, row.any.run)).collect();
        (rows.join(", "), runs[0].commits())
    };
    assert_eq!(found(&records), ("a r1, c r2".into(), "first and second".into()));
    // A run of the later commit completes the newest one, too, wherever one of the first stands.
    let between =
        [records.to_vec(), vec![of("d", "r2", "second", None), of("e", "r3", "second", None)]]
            .concat();
    assert_eq!(found(&between), ("a r1, c r2, d r2, e r3".into(), "first and second".into()));
    let after = [&between[3..5], &records[..1], &between[5..]].concat();
    let late = |record: &Record| Record { date: "2026-11-22T09:00:00Z".into(), ..record.clone() };
    let after: Vec<_> =
        after.iter().map(|r| if r.run == "r1" { late(r) } else { r.clone() }).collect();
    assert_eq!(found(&after).0, "c r2, d r2, a r1, e r3");
}

#[test]
fn cold_and_warm_are_different_cases() {
    let cold = Record { cache: "cold".into(), ..record("a", OURS, Some(9.0)) };
    let records = [record("a", OURS, Some(2.0)), cold, record("a", "x", Some(3.0))];
    let rows = rows(&records.iter().collect::<Vec<_>>());
    let names: Vec<_> = rows.iter().map(Row::name).collect();
    assert_eq!(names, ["a", "a (cold)"]);
    assert_eq!((rows[0].ratio(), rows[1].ratio()), (Some(1.5), None));
    assert_eq!(groups(&rows).len(), 2);
}

#[test]
fn attention_over_blocks_is_held_against_dense_attention_of_its_shape() {
    let dense =
        |case: &str, us| Record { op: "attention_fwd".into(), ..record(case, OURS, Some(us)) };
    let sparse =
        |case: &str| Record { op: "block_sparse_fwd".into(), ..record(case, OURS, Some(2.5)) };
    let records = [
        sparse("b1_s256_h4kv2m2_d64_q64kv64_d0.5_uniform_causal_bf16"),
        sparse("b1_s256_h4kv2_d64_q64kv64_d0.5_uniform_full_bf16"),
        Record {
            cache: "cold".into(),
            ..sparse("b1_s256_h4kv2_d64_q64kv64_d0.5_uniform_causal_bf16")
        },
        dense("b1_s256_h4kv2_d64_causal_bf16", 2.0),
        dense("b1_s256_h4_d64_full_bf16", 1.0),
    ];
    let rows = rows(&records.iter().collect::<Vec<_>>());
    let parts: Vec<_> = rows.iter().map(|row| row.part_of_dense(row.best()?)).collect();
    assert_eq!(parts, [Some(0.8), None, None, None, None]);
}

#[test]
fn ceilings_belong_to_their_run() {
    let mut records = suite();
    records.push(ceiling("mma_f16", 2.0, "FLOP/s"));
    records.push(ceiling("wgmma_f16", 3.0, "FLOP/s"));
    records.push(Record { run: "other".into(), ..ceiling("exp2", 4.0, "exp/s") });
    let runs = newest(&records);
    assert_eq!(runs.len(), 1);
    assert_eq!((runs[0].rates.matmul(DType::F16), runs[0].rates.rate("exp2")), (Some(3.0), None));
    assert_eq!(runs[0].rates.l2(), None);
}

#[test]
fn means() {
    assert_eq!(geometric_mean(&[]), None);
    let mean = geometric_mean(&[0.5, 2.0, 8.0]).unwrap();
    approx::assert_abs_diff_eq!(mean, 2.0, epsilon = 1e-12);
    assert_eq!(range([2.0, 1.0, 3.0].into_iter()), Some((1.0, 3.0)));
}
