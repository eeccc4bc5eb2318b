//! In how many source files an option of attention is named. It is a field of `Scores`: what only
//! passes scores on does not look into them. Tests may name it anywhere.

use super::findings::Findings;

/// Options, and how many files name them at most: each of these has something to do with it, such
/// as the kernel that applies it, or a front end that translates a keyword of its own.
const OPTIONS: [(&str, usize); 2] = [("softcap", 37), ("sink", 75)];

/// Counts the files that name each option.
pub(super) fn check(files: &[(String, String)], findings: &mut Findings) {
    for (option, most) in OPTIONS {
        let naming = files.iter().filter(|(name, text)| is_counted(name) && names(text, option));
        let naming: Vec<&str> = naming.map(|(name, _)| name.as_str()).collect();
        let count = naming.len();
        if count > most {
            findings.errors.push(format!(
                "{count} files name `{option}`, at most {most}: pass `Scores` on instead, see \
                 {}: {}",
                file!(),
                naming.join(", ")
            ));
        } else if count < most {
            let note = format!("{count} files name `{option}`: lower the limit of {most} to that");
            findings.warnings.push(note);
        }
    }
}

/// Whether a file is a source that is no test; the oracle is a source.
fn is_counted(name: &str) -> bool {
    let ends = [".rs", ".py", ".cu", ".cuh", ".h"];
    let is_test = |part: &str| part == "tests" || part.ends_with("_tests.rs");
    ends.iter().any(|end| name.ends_with(end))
        && name != file!()
        && (name.starts_with("tests/oracle/src/") || !name.split('/').any(is_test))
        && !name.ends_with("/tests.rs")
}

/// Whether a word is in a text, in any case.
fn names(text: &str, word: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.split(|letter| !is_part(letter)).any(|found| found.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_that_are_no_tests_count() {
        let counted = ["crates/a/src/b.rs", "kernels/c/kernel.cu", "tests/oracle/src/row.rs"];
        assert!(counted.iter().all(|name| is_counted(name)));
        let others = [
            "tests/src/case.rs",
            "tests/oracle/src/tests.rs",
            "crates/a/src/b_tests.rs",
            "crates/a/src/tests.rs",
            "crates/a/tests/b.py",
            "README.md",
        ];
        assert!(!others.iter().any(|name| is_counted(name)));
    }

    #[test]
    fn whole_words_count() {
        assert!(names("a.softcap", "softcap") && names("// Softcap: x", "softcap"));
        assert!(!names("d_sink sinks has_softcap", "sink") && !names("has_softcap", "softcap"));
    }

    #[test]
    fn more_files_than_the_limit_are_an_error() {
        let files = |count: usize| -> Vec<_> {
            (0..count).map(|at| (format!("src/{at}.rs"), "softcap sink".to_owned())).collect()
        };
        let errors = |count| {
            let mut findings = Findings::default();
            check(&files(count), &mut findings);
            findings.errors.len()
        };
        let most = OPTIONS.map(|(_, most)| most);
        assert_eq!((errors(most[0]), errors(most[0] + 1), errors(most[1] + 1)), (0, 1, 2));
    }
}
