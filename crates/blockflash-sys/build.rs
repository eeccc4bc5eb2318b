//! Turns the archives `prebuilt/*.zst` into a sorted table of `include_bytes!`. Nothing is compiled
//! here: the images are committed.

use std::{env, fmt::Write, fs, path::Path};

fn main() {
    let prebuilt =
        Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("prebuilt");
    println!("cargo:rerun-if-changed={}", prebuilt.display());
    let mut names: Vec<String> = fs::read_dir(&prebuilt)
        .unwrap_or_else(|error| panic!("cannot list {}: {error}", prebuilt.display()))
        .map(|entry| {
            entry
                .expect("readable entry")
                .file_name()
                .into_string()
                .expect("archive names are ASCII")
        })
        .filter(|name| name.ends_with(".zst"))
        .collect();
    names.sort();
    let mut table = String::from("&[\n");
    for name in &names {
        let path = prebuilt.join(name);
        println!("cargo:rerun-if-changed={}", path.display());
        let stem = name.trim_end_matches(".zst");
        writeln!(
            table,
            "    ({stem:?}, include_bytes!({:?}) as &[u8]),",
            path.display().to_string()
        )
        .expect("writing to a String cannot fail");
    }
    table.push(']');
    fs::write(Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("archives.rs"), table)
        .expect("OUT_DIR is writable");
}
