//! Files that are read are not trusted. Files that are written appear all or none, never in place
//! of an input, and old ones survive every failure.

use crate::harness::{Folder, integers, random};
use blockflash_bench::io::Array;
use blockflash_ops::DType;

fn array(value: f32) -> Array {
    Array::new(&[1, 8, 1, 8], vec![value; 64]).unwrap()
}

#[test]
fn bad_inputs_are_one_line() {
    let folder = Folder::new();
    folder.put("text.npy", "these are not the tensors you are looking for");
    folder.write("integers.npy", &[("", &integers(&[1, 1, 1, 2], &[1, 2]))]);
    folder.write("flat.npy", &[("", &random(DType::F32, &[8], 0))]);
    folder.write("large.npy", &[("", &Array::new(&[1, 1, 1, 8], vec![1e6f32; 8]).unwrap())]);
    for (file, expected) in [
        ("text.npy", "not a .npy or .safetensors file"),
        ("missing.npy", "No such file"),
        (".", "not a regular file"),
        ("integers.npy", "cannot be converted to f16"),
        ("flat.npy", "q has shape [8]"),
        ("large.npy", "--dtype bf16"),
    ] {
        let words = format!("attention --q {file} --k {file} --v {file} --device cpu");
        assert!(!folder.refused(&words, expected).contains("panicked"));
    }
    folder.refused("attention --input missing.npy", "");
}

/// A limit on the size of files simulates a full disk: a write beyond it fails in the middle of a
/// file.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_old_files() {
    let folder = Folder::new();
    // o has 32 KiB, lse 1 KiB; the limit is 4 KiB.
    let run = "attention --random 1x256x1x64 --device cpu --repeat 0 --lse lse.npy";
    for before in [None, Some("before")] {
        for name in ["o.npy", "lse.npy"] {
            before.iter().for_each(|before| folder.put(name, before));
        }
        let output = folder.limited(8, &format!("{run} --out o.npy"));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains("o.npy: a file may have") && text.contains("(ulimit -f)"), "{text}");
        let found =
            ["o.npy", "lse.npy"].map(|name| std::fs::read_to_string(folder.path(name)).ok());
        assert_eq!(found, [before, before].map(|text| text.map(str::to_owned)));
        assert_eq!(folder.names().len(), before.map_or(0, |_| 2), "{:?}", folder.names());
    }
    // The smaller file alone is below the limit, so only the rollback can explain that it is
    // missing.
    assert!(folder.limited(8, run).status.success());
    assert_eq!(folder.load("lse.npy", "", DType::F32).shape(), [1, 1, 256]);
}

/// Problems with outputs are reported before the computation, which may take hours.
#[test]
fn outputs_are_checked_before_anything_is_computed() {
    let folder = Folder::new();
    folder.write("q.npy", &[("", &array(1.0))]);
    std::fs::create_dir(folder.path("folder.npy")).unwrap();
    // The inputs do not exist either, but the output is checked first.
    let missing = "attention --q missing.npy --k missing.npy --v missing.npy";
    folder.refuses(
        missing,
        &[
            ("--out no/such/o.npy", "no/such does not exist"),
            ("--out folder.npy", "not a regular file"),
            ("--out o.npy --lse no/lse.npy", "no does not exist"),
            ("--out o.npy --lse ./o.npy", "same .npy file"),
            ("--out o.npy", "missing.npy: No such file"),
        ],
    );
    assert_eq!(folder.names(), ["folder.npy", "q.npy"]);

    // Permissions do not stop root from writing.
    folder.put("protected.npy", "old");
    let protected = folder.path("protected.npy");
    let mut permissions = std::fs::metadata(&protected).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&protected, permissions).unwrap();
    if std::fs::OpenOptions::new().write(true).open(&protected).is_err() {
        folder.refused(&format!("{missing} --out protected.npy"), "Permission denied");
    }
}

#[test]
fn inputs_are_not_replaced() {
    let folder = Folder::new();
    ["q.npy", "k.npy"].iter().for_each(|name| folder.write(name, &[("", &array(1.0))]));
    let run = "attention --q q.npy --k k.npy --v k.npy";
    folder.refuses(
        run,
        &[
            ("--out q.npy", "--out names the file that --q reads"),
            ("--out o.npy --lse ./k.npy", "--lse names the file that --k reads"),
        ],
    );
    folder.json(&format!("{run} --out o.npy"));

    // The old C is an input: the new C is the sum with it.
    let product = "bsr-matmul --random 32x8x32 --block 16 --out c.npy --out-dtype f32";
    folder.json(product);
    let first = folder.load("c.npy", "", DType::F32).to_f32(0..256);
    folder.json(&format!("{product} --c c.npy --beta 1"));
    let doubled: Vec<f32> = first.iter().map(|value| 2.0 * value).collect();
    assert_eq!(folder.load("c.npy", "", DType::F32).to_f32(0..256), doubled);
}

#[cfg(unix)]
#[test]
fn two_names_of_one_file_are_one_file() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new();
    folder.put("file.safetensors", "");
    symlink("file.safetensors", folder.path("link.safetensors")).unwrap();
    let run = "attention --random 1x8x1x8";
    folder.json(&format!("{run} --out file.safetensors --lse link.safetensors"));
    for name in ["o", "lse"] {
        folder.load("file.safetensors", name, DType::F32);
    }
    assert!(folder.path("link.safetensors").is_symlink());
    symlink("file.safetensors", folder.path("array.npy")).unwrap();
    folder.refuses(
        run,
        &[
            ("--out array.npy --lse file.safetensors", "name the same .npy file"),
            ("--out file.safetensors --lse array.npy", "name the same .npy file"),
        ],
    );
}

fn safetensors(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}

/// Sizes in a header are untrusted: they are checked against the length of the file, and against
/// the memory for all tensors, before any tensor is read.
#[cfg(unix)]
#[test]
fn huge_claims_are_refused_at_once() {
    let folder = Folder::new();
    let bytes = 2u64 << 40;
    let tensor = |(name, at): (&str, u64)| {
        let [begin, end] = [at * bytes, (at + 1) * bytes];
        format!(
            r#""{name}":{{"dtype":"F16","shape":[1024,{},1,1],"data_offsets":[{begin},{end}]}}"#,
            1 << 30
        )
    };
    let tensors = ["q", "k", "v"].into_iter().zip(0..).map(tensor).collect::<Vec<_>>();
    let file = safetensors(&format!("{{{}}}", tensors.join(",")));
    folder.put("huge.safetensors", &file);
    folder.refused("attention --input huge.safetensors", "truncated or damaged");
    // A sparse file as long as the claimed size, if the file system supports it: then only memory
    // is insufficient.
    let sparse = std::fs::OpenOptions::new().write(true).open(folder.path("huge.safetensors"));
    if sparse.unwrap().set_len(file.len() as u64 + 3 * bytes).is_ok() {
        let text = folder.refused("attention --input huge.safetensors", "of host memory");
        assert!(text.contains("q, k, v and the result need"), "{text}");
    }
}

/// Names from a file must not send control sequences to a terminal.
#[test]
fn control_characters_of_files_are_escaped() {
    let folder = Folder::new();
    let header =
        r#"{"\u001b[2J\u0007\nerror: no":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}}"#;
    folder.put("x.safetensors", safetensors(header));
    folder.refused("attention --input x.safetensors", r"\u{1b}[2J\u{7}\nerror: no");
}

#[test]
fn options_that_do_not_fit_are_refused_before_anything_is_drawn() {
    // Drawing these tensors takes seconds.
    let folder = Folder::new();
    let start = std::time::Instant::now();
    folder.refuses(
        "attention --device cpu --random 8x4096x32x128",
        &[
            ("--kv-heads 135", "32 query heads are not a multiple of 135"),
            ("--scale -1", "softmax_scale is -1"),
        ],
    );
    folder.refuses(
        "attention-decode --device cpu --random 8x1x32x128 --seqlen-kv 4096",
        &[
            ("--kv-heads 135", "32 query heads are not a multiple of 135"),
            ("--softcap -1", "softcap is -1"),
            ("--page-size 0", "pages of 0"),
        ],
    );
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
