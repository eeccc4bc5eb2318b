//! `report`, on records that were never measured.

use crate::harness::Folder;

/// A line of a record: 100 GFLOP in `us`.
fn line(commit: &str, day: u32, case: &str, implementation: &str, us: f64) -> String {
    let tflops = 1e5 / us;
    format!(
        "{{\"schema\":1,\"suite\":\"lengths\",\"op\":\"attention_fwd\",\"case\":\"{case}\",\
         \"impl\":\"{implementation}\",\"symbol\":null,\"us\":{us},\"us_min\":{us},\
         \"us_max\":{us},\"tflops\":{tflops},\"flops\":1e11,\"verified\":true,\"rel_err\":1e-3,\
         \"run\":\"r{day}\",\"rounds\":3,\"window_ms\":10,\"gap_ms\":5,\"launches\":1,\
         \"commit\":\"{commit}\",\"gpu\":\"Test GPU\",\"driver\":null,\"clock_mhz\":null,\
         \"power_w\":null,\"temperature_c\":null,\"cache\":\"warm\",\
         \"date\":\"2026-11-{day}T08:00:00Z\"}}\n"
    )
}

/// Two runs of twelve cases, of which one has become slower, in `lengths.jsonl`.
fn records() -> Folder {
    let (folder, mut text) = (Folder::new(), String::new());
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
    folder.put("lengths.jsonl", text);
    folder
}

#[test]
fn a_summary_by_default_and_every_case_on_request() {
    let folder = records();
    let summary = folder.ok("report lengths.jsonl");
    assert!(
        summary.starts_with("### `lengths` on Test GPU\n\n12 cases: 0.79 × the best "),
        "{summary}"
    );
    assert!(summary.contains("| head_dim 64, full | 4 |"), "{summary}");
    assert!(!summary.contains("b8_s256"), "{summary}");
    let full = folder.ok("report lengths.jsonl --full --suite lengths");
    let row = "| b8_s256_h8_d64_full_bf16 | 100 | 1000 | **1250** | 0.80 | yes |";
    assert!(full.contains(row), "{full}");
    let refused = folder.refused("report lengths.jsonl --suite nothing", "\"nothing\"");
    assert!(refused.contains("lengths"), "{refused}");
}

#[test]
fn plots_are_written_and_shown_where_the_file_is() {
    let folder = records();
    let plots = "report lengths.jsonl --plots plots";
    let listed = folder.ok(plots);
    assert_eq!(listed.lines().count(), 4, "{listed}");
    let svg = folder.text("plots/lengths_d128.svg");
    for words in ["blockflash", "flash_attention_3", "Test GPU"] {
        assert!(svg.contains(words), "{words}");
    }
    // A missing file is made; without --full it shows one plot of the suite.
    folder.ok(&format!("{plots} --into page.md"));
    let short = folder.text("page.md");
    assert!(short.starts_with("# Results\n\n<!-- results:begin -->\n### `lengths`"), "{short}");
    assert!(short.contains("](plots/lengths_d128.svg)"), "{short}");
    assert_eq!(short.matches(".svg").count(), 1);
    folder.ok(&format!("{plots} --into page.md --full"));
    assert_eq!(folder.text("page.md").matches(".svg").count(), 4);
    // The link is relative to the file.
    std::fs::create_dir_all(folder.path("a/b")).unwrap();
    folder.ok(&format!("{plots} --into a/b/page.md"));
    assert!(folder.text("a/b/page.md").contains("](../../plots/lengths_d128.svg)"));

    let text = folder.text("lengths.jsonl");
    folder.put("lengths.jsonl", text.replace("Test GPU", "Other GPU") + &text);
    folder.refused(plots, "Other GPU, Test GPU");
}

#[test]
fn only_the_marked_part_of_a_page_changes() {
    let folder = records();
    let into = "report lengths.jsonl --into page.md";
    folder.put("page.md", "a\n<!-- results:begin -->\n<!-- results:end -->\nb\n");
    folder.ok(into);
    let page = folder.text("page.md");
    assert!(page.starts_with("a\n<!-- results:begin -->\n### `lengths` on Test GPU"), "{page}");
    assert!(page.ends_with("-->\nb\n"), "{page}");
    folder.put("page.md", "no marks");
    folder.refused(into, "results:begin");
}

#[test]
fn regressions_exit_with_1() {
    let folder = records();
    let [table, _] = folder.ends(1, "report lengths.jsonl --against 01234567");
    assert!(table.contains("| b4_s512_h8_d64_full_bf16 | 101 | 111 | +10.0 % |"), "{table}");
    assert!(table.contains("12 cases: 1 slower, 0 faster"), "{table}");
    let both = "cafe00000000 (2026-11-21), 0123456789ab (2026-11-20)";
    folder.refused("report lengths.jsonl --against beef", both);
    folder.refused("report lengths.jsonl --against 0123 --full", "");
    let healthy = folder.text("lengths.jsonl").replace("111.10000000000001", "101");
    folder.put("lengths.jsonl", healthy);
    folder.ends(0, "report lengths.jsonl --against 0123");
}
