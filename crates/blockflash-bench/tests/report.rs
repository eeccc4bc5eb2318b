//! `blockflash report` as a user runs it, on records that were never measured.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn report(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_blockflash")).arg("report").args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one line on stderr of a command that refuses, with exit code 2.
fn refusal(arguments: &[&str]) -> String {
    let output = report(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    assert_eq!((text.lines().count(), text.starts_with("error: ")), (1, true), "{text}");
    text
}

/// A line of a record: 100 GFLOP in `us`.
fn line(commit: &str, day: u32, case: &str, implementation: &str, us: f64) -> String {
    let tflops = 1e5 / us;
    [
        format!(r#"{{"schema":1,"suite":"lengths","op":"attention_fwd","case":"{case}","#),
        format!(r#""impl":"{implementation}","symbol":null,"us":{us},"us_min":{us},"#),
        format!(r#""us_max":{us},"tflops":{tflops},"flops":1e11,"verified":true,"#),
        format!(r#""rel_err":1e-3,"run":"r{day}","rounds":3,"window_ms":10,"gap_ms":5,"#),
        format!(r#""launches":1,"commit":"{commit}","gpu":"Test GPU","driver":null,"#),
        r#""clock_mhz":null,"power_w":null,"temperature_c":null,"cache":"warm","#.into(),
        format!(r#""date":"2026-11-{day}T08:00:00Z"}}"#),
    ]
    .concat()
        + "\n"
}

/// Two runs of twelve cases, of which one has become slower.
fn records(name: &str) -> (PathBuf, String) {
    let folder =
        std::env::temp_dir().join(format!("blockflash-report-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut text = String::new();
    for (commit, day) in [("0123456789ab", 20), ("cafe00000000", 21)] {
        for (index, length) in [256, 512, 1024, 2048].into_iter().enumerate() {
            for head_dim in [64, 128, 256] {
                let case = format!("b{}_s{length}_h8_d{head_dim}_full_bf16", 2048 / length);
                let slower = if day == 21 && length == 512 && head_dim == 64 { 1.1 } else { 1.0 };
                let us = 100.0 + index as f64;
                text += &line(commit, day, &case, "blockflash", us * slower);
                text += &line(commit, day, &case, "flash_attention_3", us * 0.8);
            }
        }
    }
    let file = folder.join("lengths.jsonl");
    fs::write(&file, text).unwrap();
    (folder, file.to_str().unwrap().to_owned())
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_summary_by_default_and_every_case_on_request() {
    let (folder, file) = records("detail");
    let summary = stdout(&report(&[&file]));
    assert!(
        summary.starts_with("### `lengths` on Test GPU\n\n12 cases: 0.79 × the best rival"),
        "{summary}"
    );
    assert!(
        summary.contains("| head_dim 64, full | 4 |") && !summary.contains("b8_s256"),
        "{summary}"
    );
    let full = stdout(&report(&[&file, "--full", "--suite", "lengths"]));
    assert!(
        full.contains("| b8_s256_h8_d64_full_bf16 | 100 | 1000 | **1250** | 0.80 | yes |"),
        "{full}"
    );
    let refused = refusal(&[&file, "--suite", "nothing"]);
    assert!(refused.contains("\"nothing\"") && refused.contains("lengths"), "{refused}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn plots_are_written_and_shown_where_the_file_is() {
    let (folder, file) = records("plots");
    let (plots, page) = (folder.join("plots"), folder.join("page.md"));
    let (plots_name, page_name) = (plots.to_str().unwrap(), page.to_str().unwrap());
    let listed = stdout(&report(&[&file, "--plots", plots_name]));
    assert_eq!(listed.lines().count(), 4, "{listed}");
    let svg = text(&plots.join("lengths_d128.svg"));
    assert!(
        svg.contains("blockflash") && svg.contains("flash_attention_3") && svg.contains("Test GPU")
    );

    // A missing file is made; without --full it shows one plot of the suite.
    assert!(report(&[&file, "--plots", plots_name, "--into", page_name]).status.success());
    let short = text(&page);
    assert!(short.starts_with("# Results\n\n<!-- results:begin -->\n### `lengths`"), "{short}");
    assert!(
        short.contains("](plots/lengths_d128.svg)") && short.matches(".svg").count() == 1,
        "{short}"
    );
    assert!(
        report(&[&file, "--plots", plots_name, "--into", page_name, "--full"]).status.success()
    );
    assert_eq!(text(&page).matches(".svg").count(), 4);
    // The link is relative to the file.
    let deep = folder.join("a").join("b");
    fs::create_dir_all(&deep).unwrap();
    let deep = deep.join("page.md");
    assert!(
        report(&[&file, "--plots", plots_name, "--into", deep.to_str().unwrap()]).status.success()
    );
    assert!(text(&deep).contains("](../../plots/lengths_d128.svg)"));

    let other = text(Path::new(&file)).replace("Test GPU", "Other GPU") + &text(Path::new(&file));
    fs::write(&file, other).unwrap();
    let refused = refusal(&[&file, "--plots", plots_name]);
    assert!(refused.contains("Other GPU, Test GPU"), "{refused}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn regressions_exit_with_1() {
    let (folder, file) = records("against");
    let slower = report(&[&file, "--against", "01234567"]);
    let table = stdout(&slower);
    assert_eq!(slower.status.code(), Some(1), "{table}");
    assert!(table.contains("| b4_s512_h8_d64_full_bf16 | 101 | 111 | +10.0 % |"), "{table}");
    assert!(table.contains("12 cases: 1 slower, 0 faster"), "{table}");
    let refused = refusal(&[&file, "--against", "beef"]);
    assert!(refused.contains("cafe00000000 (2026-11-21), 0123456789ab (2026-11-20)"), "{refused}");
    refusal(&[&file, "--against", "0123", "--full"]);

    let healthy = text(Path::new(&file)).replace("111.10000000000001", "101");
    fs::write(&file, healthy).unwrap();
    let same = report(&[&file, "--against", "0123"]);
    assert_eq!(same.status.code(), Some(0), "{}", stdout(&same));
    fs::remove_dir_all(&folder).unwrap();
}
