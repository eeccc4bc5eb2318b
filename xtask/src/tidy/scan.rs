//! Looking for words in Rust and C++ code.

/// The text with comments and the insides of string literals blanked out; lines keep their numbers.
pub fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = skipped_length(rest, code.chars().next_back());
        if length == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            code.extend(rest[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[length..];
        }
    }
    code
}

/// Bytes of the comment or literal that starts here, 0 when none does.
fn skipped_length(text: &str, before: Option<char>) -> usize {
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if let Some(comment) = text.strip_prefix("/*") {
        return comment.find("*/").map_or(text.len(), |end| end + 4);
    }
    // b'x' and br"x" are byte literals.
    let in_word = before.is_some_and(|c| is_word(c) && c != 'b');
    if !in_word && (text.starts_with("r\"") || text.starts_with("r#")) {
        let hashes = text[1..].bytes().take_while(|&byte| byte == b'#').count();
        if text[1 + hashes..].starts_with('"') {
            let close = format!("\"{}", "#".repeat(hashes));
            let open = 2 + hashes;
            return text[open..].find(&close).map_or(text.len(), |end| open + end + close.len());
        }
    }
    if text.starts_with('"') {
        return quoted_length(text, b'"');
    }
    // 'a' and '\n' are characters, 'a without an end is a lifetime, and 1'000 a C++ number.
    if text.starts_with('\'') && !in_word {
        let mut inside = text[1..].chars();
        let (first, second) = (inside.next(), inside.next());
        if first == Some('\\') || second == Some('\'') {
            return quoted_length(text, b'\'');
        }
    }
    0
}

fn quoted_length(text: &str, quote: u8) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    // An escape at the very end must not step into the middle of a character.
    let mut end = (at + 1).min(bytes.len());
    while !text.is_char_boundary(end) {
        end += 1;
    }
    end
}

/// Numbers of the lines that contain a word for which `matches` holds.
pub fn lines_with_word(code: &str, matches: impl Fn(&str) -> bool) -> Vec<usize> {
    let has = |line: &str| line.split(|c| !is_word(c)).any(&matches);
    code.lines().enumerate().filter(|(_, line)| has(line)).map(|(at, _)| at + 1).collect()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        lines_with_word(&code_only(text), |word| word == "unsafe")
    }

    #[test]
    fn words_in_code_are_found() {
        assert_eq!(lines("fn f() {\n    unsafe { g() }\n}\nunsafe impl X {}"), [2, 4]);
        assert_eq!(lines("let a = '\"'; unsafe {}"), [1]);
        assert_eq!(lines("fn f<'a>(x: &'a str) { unsafe {} }"), [1]);
        assert_eq!(lines("let s = r#\"a \"b\" \"#; unsafe {}"), [1]);
        assert_eq!(lines("let a = b'\"'; unsafe {}"), [1]);
        assert_eq!(lines("constexpr int x = 1'000; unsafe"), [1]);
    }

    #[test]
    fn words_in_comments_literals_and_longer_words_are_not() {
        assert!(lines("// unsafe\n/* unsafe\nunsafe */ #![forbid(unsafe_code)]").is_empty());
        assert!(lines("\"unsafe\"; r\"unsafe\"; r#\"unsafe\"#; \"a\\\"unsafe\"").is_empty());
        assert!(lines("\"\\é unsafe").is_empty());
    }
}
