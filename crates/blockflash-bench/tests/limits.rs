//! What is refused before memory and time are spent on it, and files that cannot be written.

mod common;

use common::{Folder, blockflash, refused};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn options_that_do_not_fit_are_refused_before_anything_is_drawn() {
    // Drawing these tensors takes seconds.
    let attention = ["attention", "--random", "8x4096x32x128"];
    let decode = ["attention-decode", "--random", "8x1x32x128", "--seqlen-kv", "4096"];
    let start = Instant::now();
    for (command, options, expected) in [
        (&attention[..], ["--kv-heads", "135"], "32 query heads are not a multiple of 135"),
        (&attention[..], ["--scale", "-1"], "softmax_scale is -1"),
        (&decode[..], ["--kv-heads", "135"], "32 query heads are not a multiple of 135"),
        (&decode[..], ["--softcap", "-1"], "softcap is -1"),
        (&decode[..], ["--page-size", "0"], "pages of 0"),
    ] {
        let text = refused(&[command, &options, &["--device", "cpu"]].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn suites_of_any_sizes_are_refused() {
    let folder = Folder::new("suites");
    let path = folder.path("x.toml");
    let decode = "[[attention_decode]]\nbatch = [BATCH]\nseqlen_kv = [1024]\nnum_heads_q = 8\n\
                  head_dim = 64\ndtype = ['bf16']\n";
    let attention = "[[attention_fwd]]\nbatch = BATCH\nseqlen = [1024]\nnum_heads_q = 8\n\
                     head_dim = 64\nmask = ['full']\ndtype = ['bf16']\n";
    let product = "[[bsr_matmul]]\nm = BATCH\nk = BATCH\nn = [64]\nblock_size = [1]\n\
                   density = [0.5]\npattern = ['uniform']\ndtype = ['f16']\n";
    for (grid, number) in [
        (decode, "9223372036854775807"),
        (decode, "4000000000"),
        (attention, "9223372036854775807"),
        (attention, "4000000000"),
        (product, "9223372036854775807"),
        (product, "4000000000"),
        (product, "1000000"),
    ] {
        let text = format!("description = 'x'\n{}", grid.replace("BATCH", number));
        std::fs::write(&path, text).unwrap();
        let text = refused(&["bench", &path, "--device", "cpu"]);
        assert!(text.contains("the limit is"), "{grid} {number}: {text}");
    }
    // A case of this size can be counted, but not drawn: its record says so.
    let text = format!("description = 'x'\n{}", attention.replace("BATCH", "60000"));
    std::fs::write(&path, text.replace("[1024]", "[256]").replace("= 8", "= 256")).unwrap();
    let out = folder.path("record.jsonl");
    let output = blockflash(&["bench", &path, "--device", "cpu", "--out", &out]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(1) && text.contains("of host memory"), "{text}");
}

#[cfg(unix)]
#[test]
fn a_record_keeps_whole_lines_under_a_limit_of_files() {
    let folder = Folder::new("ulimit");
    let record = folder.path("record.jsonl");
    let options = ["--device", "cpu", "--rounds", "1", "--window-ms", "1", "--out", &record];
    let smoke = [&["bench", "smoke", "--filter", "d64_full,b64"], &options[..]].concat();
    // In blocks of 512 or 1024 bytes.
    let script = "ulimit -f 2; exec \"$0\" \"$@\"";
    let program = env!("CARGO_BIN_EXE_blockflash");
    let output = Command::new("sh").args(["-c", script, program]).args(smoke).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && text.contains("(ulimit -f)"), "{text}");
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "{text}");
    assert_eq!(std::fs::read_dir(folder.path(".")).unwrap().count(), 1);
}

#[test]
fn a_torn_record_is_repaired_and_named() {
    let folder = Folder::new("torn");
    let record = folder.path("record.jsonl");
    let options = ["--device", "cpu", "--rounds", "1", "--window-ms", "1", "--out", &record];
    let smoke = [&["bench", "smoke", "--filter", "m1024"], &options[..]].concat();
    let run = || {
        let output = blockflash(&smoke);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(run(), "");
    let whole = std::fs::read_to_string(&record).unwrap();
    let lines = whole.lines().count();
    assert!(lines > 0);
    std::fs::write(&record, format!("{whole}{}", &whole[..100])).unwrap();
    let report = || blockflash(&["report", &record]);
    let output = report();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains(&format!("line {}: the last line is torn", lines + 1)), "{text}");
    assert!(run().contains("the last line was torn, and is removed"));
    assert_eq!(std::fs::read_to_string(&record).unwrap().lines().count(), 2 * lines);
    assert_eq!(report().stderr, b"");
}
