//! The width of lines: 100 columns, as rustfmt and clang-format are configured.

const COLUMNS: usize = 100;
/// Generated files: bindings, lists of archives and reports of measurements.
const GENERATED: [&str; 4] = [
    "crates/blockflash-sys/src/params.rs",
    "crates/blockflash-sys/prebuilt/",
    "crates/blockflash-images/prebuilt/",
    "benches/results/",
];

/// Numbers of the lines that are too long. In Markdown the rule applies to prose; tables, fenced
/// code, links, and generated parts between `begin` and `end` are exempt.
pub fn too_long(name: &str, text: &str) -> Vec<usize> {
    if GENERATED.iter().any(|start| name.starts_with(start)) {
        return Vec::new();
    }
    let markdown = name.ends_with(".md");
    let (mut fenced, mut generated) = (false, false);
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        if line.starts_with("<!-- ") {
            generated = line.ends_with(":begin -->");
        }
        let excepted = fenced || generated || line.starts_with('|') || line.contains("](");
        if line.chars().count() > COLUMNS && !(markdown && excepted) {
            found.push(at + 1);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_count_and_not_bytes() {
        assert!(too_long("kernels/a.cu", &"·".repeat(100)).is_empty());
        assert_eq!(too_long("kernels/a.cu", &format!("\n{}", "·".repeat(101))), [2]);
        assert!(too_long(GENERATED[0], &"x".repeat(101)).is_empty());
    }

    #[test]
    fn what_markdown_cannot_wrap_is_excepted() {
        let long = "x".repeat(101);
        let excepted = format!(
            "| {long} |\n[a link]({long})\n```\n{long}\n```\n\
            <!-- a:begin -->\n{long}\n<!-- a:end -->\n"
        );
        assert!(too_long("kernels/README.md", &excepted).is_empty());
        assert_eq!(too_long("kernels/README.md", &format!("{excepted}{long}\n")), [9]);
        assert_eq!(too_long("kernels/a.cuh", &format!("// [a link]({long})\n")), [1]);
    }
}
