//! Reports from records: Markdown tables of the newest runs, and changes since a commit.

mod against;
mod break_even;
mod cells;
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
pub use markdown::{Image, align, markdown};
pub(crate) use notes::day;
pub use rate::{rate, unit};
pub(crate) use run::fastest;

/// Start marker of the part that `blockflash report --into` replaces.
pub const BEGIN: &str = "<!-- results:begin -->";
/// End marker of that part.
pub const END: &str = "<!-- results:end -->";

/// The document with the text between the markers replaced; `None` if it has no markers.
pub fn insert(document: &str, text: &str) -> Option<String> {
    let begin = document.find(BEGIN)? + BEGIN.len();
    let end = begin + document[begin..].find(END)?;
    Some(format!("{}\n{text}\n{}", &document[..begin], &document[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_replaced_between_the_marks() {
        let document = format!("x\n{BEGIN}\nold\n{END}\ny\n");
        assert_eq!(insert(&document, "new").unwrap(), format!("x\n{BEGIN}\nnew\n{END}\ny\n"));
        assert_eq!(insert("no marks", "new"), None);
    }
}
