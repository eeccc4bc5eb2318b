//! One word, one meaning: the glossary of the guide is short and in order, and texts and sources
//! use its words.

use std::collections::BTreeSet;

/// The glossary, which may name what it refuses.
pub const GLOSSARY: &str = "docs/src/glossary.md";

const TERMS_MAX: usize = 60;

/// Files whose words are not checked, by the beginnings of their paths.
const EXEMPT: [(&str, &str); 5] = [
    (GLOSSARY, "it names what is refused"),
    ("xtask/src/tidy/vocabulary.rs", "its tests do, too"),
    ("kernels/", "a change of a comment there is a rebuild of images"),
    ("crates/blockflash-sys/src/params.rs", "it has the comments of the headers of kernels"),
    ("CHANGELOG.md", "notes of releases keep the words they were written with"),
];

/// The words that the glossary refuses, in lower case.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Vocabulary(BTreeSet<String>);

impl Vocabulary {
    /// Reads the glossary: rows of a word, its meaning, and other names for it, of which those in
    /// backquotes are refused. Returns what is wrong with it, too, as line and reason.
    pub fn of(glossary: &str) -> (Self, Vec<(usize, String)>) {
        let (mut refused, mut wrong) = (BTreeSet::new(), Vec::new());
        let mut before = String::new();
        let rows = glossary.lines().zip(1..).filter(|(line, _)| line.starts_with("| "));
        let mut count = 0;
        for (line, number) in rows.skip(1) {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let [word, meaning, others] = cells[..] else {
                wrong.push((number, "a row is a word, its meaning, and other names".to_owned()));
                continue;
            };
            if word.is_empty() || meaning.is_empty() {
                wrong.push((number, "a word without a meaning".to_owned()));
            }
            let word = word.to_lowercase();
            if word <= before {
                wrong.push((number, format!("{word:?} does not come after {before:?}")));
            }
            before = word;
            refused.extend(others.split('`').skip(1).step_by(2).map(str::to_lowercase));
            count += 1;
        }
        if count > TERMS_MAX {
            wrong.push((1, format!("{count} words, at most {TERMS_MAX}")));
        }
        (Self(refused), wrong)
    }

    /// The refused words of a file, with their lines.
    pub fn refused(&self, name: &str, text: &str) -> Vec<(usize, &str)> {
        if EXEMPT.iter().any(|(start, _)| name.starts_with(start)) {
            return Vec::new();
        }
        let lines = text.lines().zip(1..);
        lines
            .flat_map(|(line, number)| self.in_line(line).map(move |word| (number, word)))
            .collect()
    }

    fn in_line(&self, line: &str) -> impl Iterator<Item = &str> {
        let line = line.to_lowercase();
        self.0.iter().map(String::as_str).filter(move |word| {
            let found = line.match_indices(word);
            let is_part = |at: Option<char>| at.is_some_and(|c| c.is_alphanumeric() || c == '_');
            found.into_iter().any(|(at, _)| {
                let (before, after) = (&line[..at], &line[at + word.len()..]);
                !is_part(before.chars().next_back()) && !is_part(after.chars().next())
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "# Glossary\n\n| word | meaning | not |\n|---|---|---|\n\
                         | competitor | others | `rival`, foe |\n\
                         | this many | a number | `so many` |\n";

    #[test]
    fn words_in_code_of_the_last_column_are_refused() {
        let (words, wrong) = Vocabulary::of(TABLE);
        assert!(wrong.is_empty(), "{wrong:?}");
        let found =
            words.refused("README.md", "Rivals are foes.\nA rival, so many\nso_many arrivals");
        assert_eq!(found, [(2, "rival"), (2, "so many")]);
        assert!(words.refused("kernels/README.md", "a rival").is_empty());
        assert_eq!(words.refused("benches/README.md", "a rival").len(), 1);
    }

    #[test]
    fn the_glossary_is_in_order_and_short() {
        let (_, wrong) = Vocabulary::of(&format!("{TABLE}| block | a square |  |\n| tile | \n"));
        assert_eq!(wrong.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [7, 8]);
        let long: String = (0..61).map(|i| format!("| w{i:02} | m |  |\n")).collect();
        let (_, wrong) = Vocabulary::of(&format!("| word | meaning | not |\n{long}"));
        assert_eq!(wrong, [(1, "61 words, at most 60".to_owned())]);
    }
}
