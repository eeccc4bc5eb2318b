//! Finds words in Rust and C++ code; comments and strings do not count.

use anyhow::{Result, anyhow};
use proc_macro2::{TokenStream, TokenTree};

/// Lines of Rust code that contain a word for which `matches` holds.
pub fn in_rust(code: &str, matches: fn(&str) -> bool) -> Result<Vec<usize>> {
    fn search(tokens: TokenStream, matches: fn(&str) -> bool, lines: &mut Vec<usize>) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => search(group.stream(), matches, lines),
                TokenTree::Ident(word) if matches(&word.to_string()) => {
                    lines.push(word.span().start().line)
                }
                _ => {}
            }
        }
    }
    let tokens: TokenStream = code.parse().map_err(|error| anyhow!("not Rust code: {error}"))?;
    let mut lines = Vec::new();
    search(tokens, matches, &mut lines);
    Ok(lines)
}

/// Lines of C++ code that contain a word for which `matches` holds.
pub fn in_cpp(code: &str, matches: fn(&str) -> bool) -> Vec<usize> {
    let mut lines = Vec::new();
    let mut in_comment = false;
    for (number, mut line) in code.lines().enumerate() {
        let mut found = false;
        while !line.is_empty() {
            let (part, rest) = match in_comment {
                true => ("", line.split_once("*/").map(|(_, rest)| rest)),
                false => match (line.find("//"), line.find("/*")) {
                    (Some(end), start) if start.is_none_or(|start| end < start) => {
                        (&line[..end], None)
                    }
                    (_, Some(start)) => (&line[..start], Some(&line[start + 2..])),
                    (_, None) => (line, Some("")),
                },
            };
            found |= part.split(|c: char| !c.is_alphanumeric() && c != '_').any(matches);
            // A part that ends at a block comment delimiter switches between code and comment.
            in_comment ^= rest.is_some_and(|rest| part.len() + rest.len() < line.len());
            line = rest.unwrap_or("");
        }
        lines.extend(found.then_some(number + 1));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_code_are_found() {
        let lines = |text| in_rust(text, |word| word == "unsafe").unwrap();
        assert_eq!(lines("fn f() {\n    unsafe { g() }\n}\nunsafe impl X {}"), [2, 4]);
        assert_eq!(lines("let a = '\"'; unsafe {}"), [1]);
        assert_eq!(lines("fn f<'a>(x: &'a str) { unsafe {} }"), [1]);
        assert_eq!(lines("let s = r#\"a \"b\" \"#; unsafe {}"), [1]);
        assert!(in_rust("fn f( {", |_| true).is_err());
        let lines = |text| in_cpp(text, |word| word == "asm");
        assert_eq!(
            lines("/* why */ asm(\"x\");\nint x = 1'000; asm();\n/* a\nb */ asm"),
            [1, 2, 4]
        );
    }

    #[test]
    fn words_in_comments_literals_and_longer_words_are_not() {
        let lines = |text| in_rust(text, |word| word == "unsafe").unwrap();
        assert!(lines("// unsafe\n/* unsafe\nunsafe */ #![forbid(unsafe_code)]").is_empty());
        assert!(lines("\"unsafe\"; r\"unsafe\"; r#\"unsafe\"#; \"a\\\"unsafe\"").is_empty());
        let lines = |text| in_cpp(text, |word| word == "asm");
        assert!(lines("// asm /*\n/* asm\nasm // */ int asm_x; // asm\n/**/ /* asm */").is_empty());
    }
}
