//! The layout of a matrix.

use serde::{Deserialize, Serialize};

/// Which elements of a matrix are neighbours in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Major {
    /// The elements of a row.
    Row,
    /// The elements of a column: the transposed matrix is row-major.
    Column,
}

impl Major {
    /// Both.
    pub const ALL: [Major; 2] = [Major::Row, Major::Column];

    /// `row` or `column`.
    pub const fn name(self) -> &'static str {
        match self {
            Major::Row => "row",
            Major::Column => "column",
        }
    }
}
