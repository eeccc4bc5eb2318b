//! Block masks by number: an operator of torch takes tensors and numbers only, so a mask is passed
//! as the number under which it is kept here.

use crate::error::{Failure, Result};
use blockflash_ops::BlockMask;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

static MASKS: LazyLock<RwLock<HashMap<i64, Arc<BlockMask>>>> = LazyLock::new(RwLock::default);

/// The mask of this number; `None` for 0, which means no mask.
pub(crate) fn lookup(number: i64) -> Result<Option<Arc<BlockMask>>> {
    if number == 0 {
        return Ok(None);
    }
    let masks = MASKS.read().unwrap_or_else(PoisonError::into_inner);
    let missing = || Failure::value(format!("there is no block mask of number {number}"));
    masks.get(&number).cloned().map(Some).ok_or_else(missing)
}
