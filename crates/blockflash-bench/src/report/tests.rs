use super::*;
use crate::record::{OURS, Record, read};
use std::path::{Path, PathBuf};

fn record(case: &str, implementation: &str, us: Option<f64>) -> Record {
    Record {
        suite: "s".into(),
        op: "bsr_matmul".into(),
        case: case.into(),
        implementation: implementation.into(),
        us,
        us_min: us.map(|us| us * 0.995),
        us_max: us.map(|us| us * 1.005),
        tflops: us.map(|us| 100.0 / us),
        flops: 1e8,
        verified: us.is_some(),
        error: us.is_none().then(|| "it failed".to_owned()),
        run: "r1".into(),
        rounds: 3,
        gpu: "G".into(),
        commit: "abcdef012345".into(),
        cache: "warm".into(),
        date: "2026-11-21T08:00:00Z".into(),
        ..Record::default()
    }
}

/// Two cases with two competitors and a reference; the second case has no result of ours.
fn suite() -> Vec<Record> {
    let dense = Record { reference: true, ..record("a", "dense", Some(0.1)) };
    vec![
        record("a", OURS, Some(2.0)),
        record("a", "x", Some(3.0)),
        record("a", "y", Some(4.0)),
        dense,
        record("b", OURS, None),
        record("b", "x", Some(5.0)),
    ]
}

fn table(records: &[Record]) -> Cells {
    cells(&records.iter().collect::<Vec<_>>())
}

/// The folders of committed records.
fn committed() -> Vec<PathBuf> {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/results");
    ["nvidia-h100-80gb-hbm3", "nvidia-h200"].map(|gpu| results.join(gpu)).to_vec()
}

#[test]
fn the_committed_pages_and_charts_are_those_of_the_committed_records() {
    for folder in committed() {
        let mut files: Vec<PathBuf> =
            folder.read_dir().unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        let files = files.iter().filter(|file| file.extension().is_some_and(|e| e == "jsonl"));
        let mut records = Vec::new();
        files.for_each(|file| records.extend(read(file).unwrap().records));
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        let plots = plots(&records).unwrap();
        for plot in &plots {
            assert!(text(&plot.file) == plot.svg, "{}: draw it again", plot.file);
        }
        let image =
            |Plot { file: path, suite, alt, cover, .. }: Plot| Image { suite, alt, path, cover };
        let images: Vec<_> = plots.into_iter().map(image).collect();
        let page = text("README.md");
        let again = insert(&page, &markdown(&records, Detail::Cases, &images)).unwrap();
        assert!(again == page, "{}/README.md: write it again", folder.display());
    }
}

#[test]
fn a_line_compares_with_the_best_competitor_and_not_with_a_reference() {
    let cells = table(&suite());
    let header = ["case", "µs", "blockflash", "x", "y", "dense", "× best competitor", "verified"];
    assert_eq!(cells.header, header);
    assert_eq!(cells.rows[0], ["a", "2.00", "50.0", "33.3", "25.0", "1000", "1.50", "yes"]);
    assert_eq!(cells.rows[1], ["b", "—", "error", "20.0", "—", "—", "—", "no"]);
    assert_eq!(cells.rows.len(), 2);
    let text = markdown(&suite(), Detail::Groups, &[]);
    assert!(text.starts_with("### `s` on G\n\n2 cases, 1 with a result of blockflash: 1.50 ×"));
    assert!(text.contains("| a | 2.00 | **50.0** | 33.3 |"), "{text}");
    assert!(text.contains("1 case without a result of blockflash: it failed."), "{text}");
    assert!(text.contains("`dense` does another job"), "{text}");
}

#[test]
fn kernels_deterministic_competitors_and_unverified_times_are_told_apart() {
    let repeats = |record| Record { deterministic: true, ..record };
    let records = [
        record("a", OURS, Some(2.0)),
        record("a", "fast", Some(1.0)),
        repeats(record("a", "repeats", Some(3.0))),
        record("b", OURS, Some(2.0)),
        Record { verified: false, ..record("b", "fast", Some(4.0)) },
        repeats(record("b", "repeats", Some(12.0))),
    ];
    let cells = table(&records);
    assert_eq!(cells.header[5..7], ["× best competitor", "× best deterministic"]);
    let ratios: Vec<_> = cells.rows.iter().map(|row| row[5..].to_vec()).collect();
    assert_eq!(ratios, [["0.50", "1.50", "yes"], ["2.00", "6.00", "NO"], ["1.00", "3.00", ""]]);
    let forced = |symbol: &str| Record {
        symbol: Some(format!("blockflash_{symbol}")),
        ceiling: Some("l2".into()),
        ceiling_fraction: Some(0.416),
        ..record("a", OURS, Some(1.0))
    };
    let cells = table(&[forced("p"), forced("q")]);
    assert_eq!(cells.header, ["case", "kernel", "µs", "blockflash", "ceiling", "verified"]);
    assert_eq!([&cells.rows[0][1], &cells.rows[1][1], &cells.rows[0][4]], ["p", "q", "l2 0.42"]);
}

#[test]
fn notes_name_older_runs_reasons_and_windows() {
    let mut records = suite();
    let error = Some("no\n |such| `thing`.".into());
    records.push(Record { error, ..record("b", "z", None) });
    records.push(Record { rounds: 2, window_ms: 7.0, ..record("c", OURS, Some(1.0)) });
    let text = markdown(&records, Detail::Groups, &[]);
    assert!(text.contains("`z` in every case (no 'such' 'thing')"), "{text}");
    assert!(text.contains("caches warm; 1 case of 2 windows of 7 ms;"), "{text}");
    let date = "2026-11-22T08:00:00Z".to_owned();
    let newer = record("a", OURS, Some(1.0));
    records.push(Record { run: "r2".into(), commit: "other".into(), date, ..newer });
    let text = markdown(&records, Detail::Groups, &[]);
    let hidden = "An older run (commit abcdef012345, 2026-11-21) has 3 cases and 2 competitors, \
                  this one 1 case and 0 competitors.";
    assert!(text.ends_with(hidden), "{text}");
}

#[test]
fn text_is_replaced_between_the_marks_and_tables_are_aligned() {
    let document = format!("x\n{BEGIN}\nold\n{END}\ny\n");
    assert_eq!(insert(&document, "new").unwrap(), format!("x\n{BEGIN}\nnew\n{END}\ny\n"));
    assert_eq!(insert("no marks", "new"), None);
    let words = ["word"; 21].join(" ");
    let text = insert(&document, &format!("| {words} |\n\n{words}")).unwrap();
    let folded = format!("\n| {words} |\n\n{}\nword\n{END}", ["word"; 20].join(" "));
    assert!(text.contains(&folded), "{text}");
    let aligned = align("x\n\n| case | µs |\n|---|---:|\n| long name | 1 |\n| b | — |\n\ny");
    let expected = "x\n\n| case      | µs |\n|-----------|---:|\n| long name |  1 |\n\
                    | b         |  — |\n\ny";
    assert_eq!(aligned, expected);
}

/// Case, ours, competitor.
type Measured<'a> = &'a [(&'a str, Option<f64>, f64)];

/// `before` is a run of commit 0123456789ab, `now` a later one of another commit.
fn history(before: Measured<'_>, now: Measured<'_>) -> Vec<Record> {
    let run = |cases: Measured<'_>, run: &str, commit: &str, date: &str| {
        let of = |&(case, ours, other): &(&str, Option<f64>, f64)| {
            [record(case, OURS, ours), record(case, "x", Some(other))]
        };
        let (run, commit, date) = (run.to_owned(), commit.to_owned(), format!("{date}T08:00:00Z"));
        let late = |record| Record {
            run: run.clone(),
            commit: commit.clone(),
            date: date.clone(),
            ..record
        };
        cases.iter().flat_map(of).map(late).collect::<Vec<_>>()
    };
    let before = run(before, "r1", "0123456789ab", "2026-11-20");
    [before, run(now, "r2", "cafe00000000-dirty", "2026-11-21")].concat()
}

#[test]
fn slower_beyond_the_spread_is_a_regression() {
    let same = ("a", Some(10.0), 10.0);
    let before = [same, ("b", Some(10.0), 10.0), ("c", Some(10.0), 10.0), ("gone", None, 1.0)];
    let now = [("a", Some(10.5), 10.0), ("b", Some(10.08), 10.0), ("c", Some(8.0), 10.0)];
    let records = history(&before, &now);
    let result = against(&records, "0123").unwrap();
    assert_eq!(result.regressions, 1);
    for line in [
        "### `s` on G: cafe00000000-dirty (2026-11-21) against 0123456789ab",
        "| a | 10.0 | 10.5 | +5.0 % | 1.00 → 0.95 (-4.8 %) | **slower** |",
        "| b | 10.0 | 10.1 | +0.8 % | 1.00 → 0.99 (-0.8 %) |  |",
        "| c | 10.0 | 8.00 | -20.0 % | 1.00 → 1.25 (+25.0 %) | faster |",
        "3 cases: 1 slower, 1 faster, 1 within spread and 2 %",
        "1 case only in the older run",
    ] {
        assert!(result.text.contains(line), "{line} is not in {}", result.text);
    }
    // A full hash is a commit as well.
    assert_eq!(against(&records, "0123456789abcdef0123").unwrap(), result);

    // Windows that overlap, a lost result, a slower machine, other caches, a newcomer.
    let regressions = |now: Measured<'_>, change: &dyn Fn(&mut Vec<Record>)| {
        let mut records = history(&[same], now);
        change(&mut records);
        let result = against(&records, "0123").unwrap();
        (result.regressions, result.text)
    };
    let slower = [("a", Some(11.0), 11.0)];
    assert_eq!(regressions(&slower, &|records| records[0].us_max = Some(11.1)).0, 0);
    let (count, text) = regressions(&[("a", None, 10.0)], &|_| ());
    assert!(count == 1 && text.contains("| a | 10.0 | — | — | — | **lost** |"), "{text}");
    let (count, text) = regressions(&slower, &|_| ());
    assert!(count == 1 && text.contains("**slower**, as is the competitor |"), "{text}");
    assert!(text.contains("perhaps the machine was"), "{text}");
    let cold = |records: &mut Vec<Record>| {
        records[2..].iter_mut().for_each(|record| record.cache = "cold".into());
    };
    assert_eq!(regressions(&slower, &cold).0, 0);
    let newcomer = |records: &mut Vec<Record>| {
        let fast = Record { implementation: "new".into(), us: Some(1.0), ..records[3].clone() };
        records.push(fast);
    };
    assert!(regressions(&[same], &newcomer).1.contains("1.00 → 1.00"));

    let error = against(&records, "beef").unwrap_err().to_string();
    let present = "cafe00000000-dirty (2026-11-21), 0123456789ab (2026-11-20)";
    assert_eq!(error, format!("no earlier run has commit beef; there are {present}"));
    // The newest run is not its own past.
    assert!(against(&records, "cafe").is_err());
    assert_eq!(against(&records, "").unwrap_err(), AgainstError::Short(String::new()));
}

/// Forty drawn shapes, in which the competitor takes 0.61, 0.62, … 1.00 of our time.
#[test]
fn drawn_shapes_are_summed_up_by_setting_and_the_worst_are_named() {
    let record = |at: usize, implementation: &str, us: f64| {
        let queries = if at.is_multiple_of(4) { 1 } else { 3 };
        let layout = if at < 20 { "contiguous_full" } else { "page16_power" };
        let case = format!("decode_b{at}_q{queries}_kv1600_h32kv8_d128_{layout}_bf16");
        let suite = "drawn_decode_7".to_owned();
        let record = record(&case, implementation, Some(us));
        let symbol = (implementation == OURS).then(|| "blockflash_attention_decode_x".to_owned());
        Record { suite, op: "attention_decode".into(), symbol, ..record }
    };
    let of = |at| [record(at, OURS, 1.0), record(at, "x", 0.6 + at as f64 / 100.0)];
    let records: Vec<_> = (1..=40).flat_map(of).collect();
    let [all, worst] = &drawn_cells(&records.iter().collect::<Vec<_>>())[..] else {
        panic!("two tables");
    };
    assert_eq!(
        all.header,
        ["shapes", "cases", "× best competitor", "10th percentile", "least", "behind"]
    );
    // 0.64 is the fourth of forty; 1.00 is not behind.
    assert_eq!(all.rows[0], ["all", "40", "**0.80**", "0.64", "0.61", "39"]);
    assert_eq!(all.rows[1], ["one query", "10", "**0.81**", "0.64", "0.64", "9"]);
    let labels: Vec<_> = all.rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(
        labels[2..],
        [
            "several queries",
            "contiguous",
            "pages of 16",
            "lengths: full",
            "lengths: power",
            "all keys",
            "2 to 4 on one",
            "head_dim 128",
            "bf16"
        ]
    );
    assert_eq!(worst.header, ["worst", "µs", "kernel", "best competitor", "its µs", "×"]);
    assert_eq!(worst.rows.len(), 5);
    let first = "decode_b1_q3_kv1600_h32kv8_d128_contiguous_full_bf16 (warm)";
    assert_eq!(worst.rows[0], [first, "1.00", "attention_decode_x", "`x`", "0.6100", "0.61"]);
    let ours: Vec<_> = records.iter().filter(|record| record.implementation == OURS).collect();
    let alone = drawn_cells(&ours);
    assert_eq!(
        (alone.len(), &alone[0].header[..]),
        (1, &["shapes", "cases", "compared"].map(String::from)[..])
    );
    let mut lost = records.clone();
    lost[0].us = None;
    let [all, _] = &drawn_cells(&lost.iter().collect::<Vec<_>>())[..] else { panic!("two tables") };
    assert_eq!(all.rows[0][..4], ["all", "40", "39", "**0.80**"]);
    assert_eq!(all.rows[1][..4], ["one query", "10", "—", "**0.81**"]);
    let text = markdown(&records, Detail::Groups, &[]);
    for line in [
        "### Drawn shapes on G",
        "| `drawn_decode_7` | 40 | **0.80** | 0.64 | 0.61 | 39 |",
        "| all | 40 | **0.80** | 0.64 | 0.61 | 39 |",
        "| competitor | cases |",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    assert!(!text.contains("| case |"));
    let full = markdown(&records, Detail::Cases, &[]);
    assert!(full.contains("| case |") && full.contains("decode_b40_q1"));
    let plots = plots(&records).unwrap();
    assert_eq!(
        plots.iter().map(|p| p.file.as_str()).collect::<Vec<_>>(),
        ["drawn_decode_7_ratio.svg"]
    );
    assert!(drawn_cells(&suite().iter().collect::<Vec<_>>()).is_empty());
}
