//! The width of lines: 100 columns, which is also what rustfmt and clang-format are set to.

const COLUMNS: usize = 100;
/// The rule holds for files whose path begins with one of these.
const ENFORCED: [&str; 1] = ["kernels/"];

/// Numbers of the lines that are too long. Tables, fenced code and links in Markdown cannot be
/// wrapped and are excepted.
pub fn too_long(name: &str, text: &str) -> Vec<usize> {
    if !ENFORCED.iter().any(|start| name.starts_with(start)) {
        return Vec::new();
    }
    let markdown = name.ends_with(".md");
    let mut fenced = false;
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        let excepted = fenced || line.starts_with('|') || line.contains("](");
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
        assert!(too_long("elsewhere/a.cu", &"x".repeat(101)).is_empty());
    }

    #[test]
    fn what_markdown_cannot_wrap_is_excepted() {
        let long = "x".repeat(101);
        let excepted = format!("| {long} |\n[a link]({long})\n```\n{long}\n```\n");
        assert!(too_long("kernels/README.md", &excepted).is_empty());
        assert_eq!(too_long("kernels/README.md", &format!("{excepted}{long}\n")), [6]);
        assert_eq!(too_long("kernels/a.cuh", &format!("// [a link]({long})\n")), [1]);
    }
}
