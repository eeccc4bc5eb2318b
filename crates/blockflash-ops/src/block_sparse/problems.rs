//! Errors in the data that a GPU found while it built a mask.

use super::validate::Sizes;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_PROBLEM_NAN, BLOCKFLASH_BLOCK_PROBLEM_NO_COLUMN,
    BLOCKFLASH_BLOCK_PROBLEM_TWICE,
};

/// The byte that fills the words when the data is valid.
pub(super) const NOTHING: u8 = 0xFF;

/// Describes the first error, if there is one, from the four words that kernels leave: two numbers
/// of 64 bits, the low half first.
pub(super) fn describe(words: &[i32], sizes: &Sizes, capacity: usize) -> Option<String> {
    let &[low, high, needed_low, needed_high] = words else {
        return Some(format!("a report of {} words, expected 4", words.len()));
    };
    let number = |low: i32, high: i32| u64::from(high as u32) << 32 | u64::from(low as u32);
    let (code, needed) = (number(low, high), !number(needed_low, needed_high));
    if code == u64::MAX {
        return None;
    }
    let (row, position) = ((code >> 33) as usize, code >> 2 & 0x7FFF_FFFF);
    let rows = sizes.geometry.rows().max(1);
    let place = sizes.place(row / rows, row % rows);
    let cols = sizes.geometry.cols();
    Some(match (code & 3) as i32 {
        BLOCKFLASH_BLOCK_PROBLEM_NO_COLUMN => {
            format!(
                "a column does not exist at {place}, position {position}; there are {cols} columns"
            )
        }
        BLOCKFLASH_BLOCK_PROBLEM_TWICE => {
            format!("a column comes twice at {place}, position {position}")
        }
        BLOCKFLASH_BLOCK_PROBLEM_NAN => format!("score is NaN at {place}, position {position}"),
        _ => no_room(needed, capacity, &place, position),
    })
}

/// Not all visited blocks have room: the columns of this row from a position on are left out.
pub(super) fn no_room(needed: u64, capacity: usize, place: &str, position: u64) -> String {
    format!(
        "{needed} blocks are visited, but the capacity is {capacity}: it ends at {place}, \
         position {position}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::BlockGeometry;
    use super::*;

    #[test]
    fn every_problem_has_its_words() {
        let sizes = Sizes::new(BlockGeometry::new(100, 150, 64, 64).unwrap(), 2, 2).unwrap();
        assert_eq!(describe(&[-1; 4], &sizes, 5), None);
        // Row 7 is the last one: batch entry 1, head 1, row 1.
        let words = |position: u64, problem: u64| {
            let code = 7u64 << 33 | position << 2 | problem;
            [code as u32 as i32, (code >> 32) as i32, !9, !1]
        };
        let said = |position, problem| describe(&words(position, problem), &sizes, 5).unwrap();
        assert_eq!(
            said(0, 0),
            "a column does not exist at batch 1, head 1, row 1, position 0; there are 3 columns"
        );
        assert_eq!(said(2, 1), "a column comes twice at batch 1, head 1, row 1, position 2");
        assert_eq!(said(1 << 30, 2), "score is NaN at batch 1, head 1, row 1, position 1073741824");
        assert_eq!(
            said(1, 3),
            "4294967305 blocks are visited, but the capacity is 5: it ends at batch 1, head 1, \
             row 1, position 1"
        );
    }
}
