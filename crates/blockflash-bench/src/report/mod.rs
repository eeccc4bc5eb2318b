//! Reports from records: Markdown tables of the newest runs, and changes since a commit.

mod against;
mod break_even;
mod cells;
mod energy;
mod host;
mod limits;
mod markdown;
mod notes;
mod rate;
pub(crate) mod run;
#[cfg(test)]
pub(crate) mod sample;
pub(crate) mod shape;
mod summary;

pub use against::{Against, AgainstError, against};
pub use break_even::{BreakEven, break_even};
pub use cells::{Cells, Detail, cells};
pub use energy::cells as energy_cells;
pub use markdown::{Image, align, markdown};
pub(crate) use notes::day;
pub use rate::{rate, unit};
pub(crate) use run::fastest;

/// Start marker of the part that `blockflash report --into` replaces.
pub const BEGIN: &str = "<!-- results:begin -->";
/// End marker of that part.
pub const END: &str = "<!-- results:end -->";

/// Columns of prose in a document.
const COLUMNS: usize = 100;

/// The document with the text between the markers replaced, with prose broken into lines of at most
/// 100 columns; `None` if it has no markers.
pub fn insert(document: &str, text: &str) -> Option<String> {
    let begin = document.find(BEGIN)? + BEGIN.len();
    let end = begin + document[begin..].find(END)?;
    let text: Vec<String> = text.lines().map(folded).collect();
    Some(format!("{}\n{}\n{}", &document[..begin], text.join("\n"), &document[end..]))
}

/// A long line broken between words, unless it is one of a table, a heading or an image.
fn folded(line: &str) -> String {
    if line.chars().count() <= COLUMNS || line.starts_with(['|', '#', '!']) {
        return line.to_owned();
    }
    let (mut folded, mut columns) = (String::new(), 0);
    for word in line.split_whitespace() {
        let width = word.chars().count();
        if columns > 0 {
            let fits = columns + 1 + width <= COLUMNS;
            folded.push(if fits { ' ' } else { '\n' });
            columns = if fits { columns + 1 } else { 0 };
        }
        folded += word;
        columns += width;
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_replaced_between_the_marks() {
        let document = format!("x\n{BEGIN}\nold\n{END}\ny\n");
        assert_eq!(insert(&document, "new").unwrap(), format!("x\n{BEGIN}\nnew\n{END}\ny\n"));
        assert_eq!(insert("no marks", "new"), None);
        let words = ["word"; 21].join(" ");
        let two_lines = format!("{}\nword", ["word"; 20].join(" "));
        let text = insert(&document, &format!("| {words} |\n\n{words}")).unwrap();
        assert!(text.contains(&format!("\n| {words} |\n\n{two_lines}\n{END}")), "{text}");
    }
}
