//! Output files: all of them are written or none, never in place of an input, and old files survive
//! every failure.

mod common;

use blockflash_bench::io::{Array, TensorFile, write};
use blockflash_sys::DType;
use common::{Folder, json, refused};
use std::process::Command;

fn array(value: f32) -> Array {
    Array::new(&[1, 8, 1, 8], vec![value; 64]).unwrap()
}

fn names(folder: &Folder) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path("")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

/// A limit on the size of files simulates a full disk: a write beyond it fails in the middle of a
/// file.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_old_files() {
    let folder = Folder::new("full");
    let [o, lse] = ["o.npy", "lse.npy"].map(|name| folder.path(name));
    // o has 32 KiB, lse 1 KiB; the limit is 4 KiB.
    let run = [
        "attention",
        "--random",
        "1x256x1x64",
        "--device",
        "cpu",
        "--repeat",
        "0",
        "--out",
        &o,
        "--lse",
        &lse,
    ];
    let limited = |args: &[&str]| {
        let script = "ulimit -f 8; exec \"$@\"";
        let program = env!("CARGO_BIN_EXE_blockflash");
        Command::new("sh").args(["-c", script, "sh", program]).args(args).output().unwrap()
    };
    for before in [None, Some("before")] {
        if let Some(before) = before {
            [&o, &lse].iter().for_each(|path| std::fs::write(path, before).unwrap());
        }
        let output = limited(&run);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains("o.npy: a file may have") && text.contains("(ulimit -f)"), "{text}");
        let found = [&o, &lse].map(|path| std::fs::read_to_string(path).ok());
        assert_eq!(found, [before, before].map(|text| text.map(str::to_owned)));
        assert_eq!(names(&folder).len(), before.map_or(0, |_| 2), "{:?}", names(&folder));
    }
    // The smaller file alone is below the limit, so only the rollback can explain that it is
    // missing.
    assert!(
        limited(&["attention", "--random", "1x256x1x64", "--device", "cpu", "--lse", &lse])
            .status
            .success()
    );
    assert_eq!(TensorFile::open(&lse).unwrap().load("", DType::F32).unwrap().shape(), [1, 1, 256]);
}

/// Problems with outputs are reported before the computation, which may take hours.
#[test]
fn outputs_are_checked_before_anything_is_computed() {
    let folder = Folder::new("before");
    let [q, o, missing] = ["q.npy", "o.npy", "missing.npy"].map(|name| folder.path(name));
    write(&q, &[("", &array(1.0))]).unwrap();
    std::fs::create_dir(folder.path("folder.npy")).unwrap();
    // The inputs do not exist either, but the output is checked first.
    let first = |options: &[&str]| {
        let input = ["attention", "--q", &missing, "--k", &missing, "--v", &missing];
        refused(&[&input[..], options].concat())
    };
    assert!(first(&["--out", &folder.path("no/such/o.npy")]).contains("no/such does not exist"));
    assert!(first(&["--out", &folder.path("folder.npy")]).contains("not a regular file"));
    assert!(
        first(&["--out", &o, "--lse", &folder.path("no/lse.npy")]).contains("no does not exist")
    );
    assert!(first(&["--out", &o, "--lse", &folder.path("./o.npy")]).contains("same .npy file"));
    assert!(first(&["--out", &o]).contains("missing.npy: No such file"));
    assert_eq!(names(&folder), ["folder.npy", "q.npy"]);

    // Permissions do not stop root from writing.
    let protected = folder.path("protected.npy");
    std::fs::write(&protected, "old").unwrap();
    let mut permissions = std::fs::metadata(&protected).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&protected, permissions).unwrap();
    if std::fs::OpenOptions::new().write(true).open(&protected).is_err() {
        assert!(first(&["--out", &protected]).contains("Permission denied"));
    }
}

#[test]
fn inputs_are_not_replaced() {
    let folder = Folder::new("inputs");
    let [q, k, o] = ["q.npy", "k.npy", "o.npy"].map(|name| folder.path(name));
    [&q, &k].iter().for_each(|path| write(path, &[("", &array(1.0))]).unwrap());
    let run = ["attention", "--q", &q, "--k", &k, "--v", &k];
    let with = |options: &[&str]| refused(&[&run[..], options].concat());
    assert!(with(&["--out", &q]).contains("--out names the file that --q reads"));
    assert!(
        with(&["--out", &o, "--lse", &folder.path("./k.npy")])
            .contains("--lse names the file that --k reads")
    );
    json(&[&run[..], &["--out", &o]].concat());

    // The old C is an input: the new C is the sum with it.
    let c = folder.path("c.npy");
    let product =
        ["bsr-matmul", "--random", "32x8x32", "--block", "16", "--out", &c, "--out-dtype", "f32"];
    json(&product);
    let first = TensorFile::open(&c).unwrap().load("", DType::F32).unwrap();
    json(&[&product[..], &["--c", &c, "--beta", "1"]].concat());
    let sum = TensorFile::open(&c).unwrap().load("", DType::F32).unwrap();
    let doubled: Vec<f32> = first.to_f32(0..256).iter().map(|value| 2.0 * value).collect();
    assert_eq!(sum.to_f32(0..256), doubled);
}

#[cfg(unix)]
#[test]
fn two_names_of_one_file_are_one_file() {
    let folder = Folder::new("links");
    let [file, link] = ["file.safetensors", "link.safetensors"].map(|name| folder.path(name));
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink("file.safetensors", &link).unwrap();
    json(&["attention", "--random", "1x8x1x8", "--out", &file, "--lse", &link]);
    let written = TensorFile::open(&file).unwrap();
    assert!(written.entry("o").is_ok() && written.entry("lse").is_ok());
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    let array = folder.path("array.npy");
    std::os::unix::fs::symlink("file.safetensors", &array).unwrap();
    for [o, lse] in [[&array, &file], [&file, &array]] {
        let text = refused(&["attention", "--random", "1x8x1x8", "--out", o, "--lse", lse]);
        assert!(text.contains("name the same .npy file"), "{text}");
    }
}

/// Sizes in a header are untrusted: they are checked against the length of the file, and against
/// the memory for all tensors, before any tensor is read.
#[cfg(unix)]
#[test]
fn huge_claims_are_refused_at_once() {
    let folder = Folder::new("claims");
    let path = folder.path("huge.safetensors");
    let (rows, elements) = (1u64 << 30, [1u64 << 40; 3]);
    let mut begin = 0;
    let tensors = ["q", "k", "v"].iter().zip(elements).map(|(name, count)| {
        let end = begin + 2 * count;
        let text = format!(
            r#""{name}":{{"dtype":"F16","shape":[1024,{rows},1,1],"data_offsets":[{begin},{end}]}}"#
        );
        begin = end;
        text
    });
    let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    std::fs::write(&path, &bytes).unwrap();
    assert!(refused(&["attention", "--input", &path]).contains("truncated or damaged"));
    // A sparse file as long as the claimed size, if the file system supports it: then only memory
    // is insufficient.
    let length = bytes.len() as u64 + 2 * elements.iter().sum::<u64>();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    if file.set_len(length).is_ok() {
        let text = refused(&["attention", "--input", &path]);
        assert!(
            text.contains("q, k, v and the result need") && text.contains("of host memory"),
            "{text}"
        );
    }
}

/// Names from a file must not send control sequences to a terminal.
#[test]
fn control_characters_of_files_are_escaped() {
    let folder = Folder::new("control");
    let path = folder.path("x.safetensors");
    let header =
        r#"{"\u001b[2J\u0007\nerror: no":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    std::fs::write(&path, &bytes).unwrap();
    let text = refused(&["attention", "--input", &path]);
    assert!(text.contains(r"\u{1b}[2J\u{7}\nerror: no"), "{text}");
}
