use super::super::sample::record;
use super::*;
use crate::record::OURS;

/// `before` is a run of commit 0123456789ab, `now` a later one of another commit: case, ours,
/// rival.
fn history(before: &[(&str, Option<f64>, f64)], now: &[(&str, Option<f64>, f64)]) -> Vec<Record> {
    let run = |cases: &[(&str, Option<f64>, f64)], run: &str, commit: &str, date: &str| {
        let of = |&(case, ours, rival): &(&str, Option<f64>, f64)| {
            [record(case, OURS, ours), record(case, "x", Some(rival))]
        };
        let late = |record: Record| Record {
            run: run.into(),
            commit: commit.into(),
            date: format!("{date}T08:00:00Z"),
            ..record
        };
        cases.iter().flat_map(of).map(late).collect::<Vec<_>>()
    };
    let before = run(before, "r1", "0123456789ab", "2026-11-20");
    [before, run(now, "r2", "cafe00000000-dirty", "2026-11-21")].concat()
}

#[test]
fn slower_beyond_the_spread_is_a_regression() {
    let records = history(
        &[("a", Some(10.0), 10.0), ("b", Some(10.0), 10.0), ("c", Some(10.0), 10.0)],
        &[("a", Some(10.5), 10.0), ("b", Some(10.08), 10.0), ("c", Some(8.0), 10.0)],
    );
    let result = against(&records, "0123").unwrap();
    assert_eq!(result.regressions, 1);
    let text = &result.text;
    assert!(
        text.starts_with("### `s` on G: cafe00000000-dirty (2026-11-21) against 0123456789ab"),
        "{text}"
    );
    assert!(
        text.contains("| a | 10.0 | 10.5 | +5.0 % | 1.00 → 0.95 (-4.8 %) | **slower** |"),
        "{text}"
    );
    assert!(text.contains("| b | 10.0 | 10.1 | +0.8 % | 1.00 → 0.99 (-0.8 %) |  |"), "{text}");
    assert!(
        text.contains("| c | 10.0 | 8.00 | -20.0 % | 1.00 → 1.25 (+25.0 %) | faster |"),
        "{text}"
    );
    assert!(text.contains("3 cases: 1 slower, 1 faster, 1 within spread and 2 %"), "{text}");
    // A full hash is a commit as well.
    assert_eq!(against(&records, "0123456789abcdef0123").unwrap(), result);
}

#[test]
fn overlapping_windows_are_no_regression() {
    let mut records = history(&[("a", Some(10.0), 10.0)], &[("a", Some(10.5), 10.0)]);
    records[0].us_max = Some(10.6);
    assert_eq!(against(&records, "0123").unwrap().regressions, 0);
}

#[test]
fn a_slower_machine_shows_in_the_ratio() {
    let records = history(&[("a", Some(10.0), 10.0)], &[("a", Some(11.0), 11.0)]);
    let result = against(&records, "0123").unwrap();
    assert_eq!(result.regressions, 1);
    assert!(
        result.text.contains("1.00 → 1.00 (+0.0 %) | **slower**, as is the rival |"),
        "{}",
        result.text
    );
    assert!(result.text.contains("perhaps the machine was"), "{}", result.text);
}

#[test]
fn only_rivals_of_both_runs_count() {
    let mut records = history(&[("a", Some(10.0), 10.0)], &[("a", Some(10.0), 10.0)]);
    let newcomer = Record { us: Some(1.0), implementation: "new".into(), ..records[3].clone() };
    records.push(newcomer);
    let text = against(&records, "0123").unwrap().text;
    assert!(text.contains("1.00 → 1.00"), "{text}");
}

#[test]
fn a_result_that_is_gone_is_a_regression_and_other_cases_are_counted() {
    let records = history(
        &[("a", Some(10.0), 10.0), ("gone", Some(1.0), 1.0), ("never", None, 1.0)],
        &[("a", None, 10.0), ("new", Some(1.0), 1.0), ("never", None, 1.0)],
    );
    let result = against(&records, "0123").unwrap();
    assert_eq!(result.regressions, 1);
    assert!(result.text.contains("| a | 10.0 | — | — | — | **lost** |"), "{}", result.text);
    assert!(
        result.text.contains("1 case only in the newer run; 1 case only in the older run"),
        "{}",
        result.text
    );
}

#[test]
fn cold_is_not_compared_with_warm() {
    let mut records = history(&[("a", Some(10.0), 10.0)], &[("a", Some(20.0), 10.0)]);
    records
        .iter_mut()
        .filter(|record| record.run == "r2")
        .for_each(|record| record.cache = "cold".into());
    assert_eq!(against(&records, "0123").unwrap().regressions, 0);
}

#[test]
fn unknown_commits_are_answered_with_those_that_there_are() {
    let records = history(&[("a", Some(1.0), 1.0)], &[("a", Some(1.0), 1.0)]);
    let error = against(&records, "beef").unwrap_err().to_string();
    let present = "cafe00000000-dirty (2026-11-21), 0123456789ab (2026-11-20)";
    assert_eq!(error, format!("no earlier run has commit beef; there are {present}"));
    // The newest run is not its own past.
    assert!(against(&records, "cafe").is_err());
    assert_eq!(against(&records, "").unwrap_err(), AgainstError::Short(String::new()));
}
