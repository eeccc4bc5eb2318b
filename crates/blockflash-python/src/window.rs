//! Sides of a token mask, as Python names them.

use crate::error::{Failure, Result};
use blockflash_ops::{Align, Mask};

/// The mask of a window.
pub(crate) fn token_mask(left: i64, right: i64, top_left: bool) -> Result<Mask> {
    Ok(Mask::Window {
        left: side("left", left)?,
        right: side("right", right)?,
        align: align(top_left),
    })
}

pub(crate) fn align(top_left: bool) -> Align {
    if top_left { Align::TopLeft } else { Align::BottomRight }
}

/// A side of the window; -1 is unlimited.
pub(crate) fn side(which: &str, keys: i64) -> Result<Option<usize>> {
    let wrong = || Failure::value(format!("the {which} side of the window is {keys} keys"));
    if keys == -1 { Ok(None) } else { usize::try_from(keys).map(Some).map_err(|_| wrong()) }
}
