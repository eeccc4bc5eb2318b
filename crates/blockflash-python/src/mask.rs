//! Block masks by number: an operator of torch takes tensors and numbers only, so a mask is passed
//! as the number under which it is kept here.

use crate::error::{Failure, Result};
use crate::foreign::{Foreign, views};
use blockflash_ops::{BlockGeometry, BlockMask as Mask};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

type Masks = HashMap<i64, Arc<Mask>>;

static MASKS: LazyLock<RwLock<Masks>> = LazyLock::new(RwLock::default);

/// Which blocks of queries and keys attention visits. Owns the mask behind its number: whoever
/// passes the number keeps this object for as long, and as long as graphs that captured it.
#[pyclass(frozen)]
pub(crate) struct BlockMask {
    /// The argument `block_mask` of the operators; never 0.
    #[pyo3(get)]
    id: i64,
}

#[pymethods]
impl BlockMask {
    /// A mask from its lists, int32 tensors on one device, where the mask will be: `row_ptr`
    /// `[batch, heads, rows + 1]` holds offsets into `col_idx`, whose block columns ascend within a
    /// row. They are copied and checked, which waits for the stream.
    #[staticmethod]
    fn from_lists(
        row_ptr: &Bound<'_, PyAny>,
        col_idx: &Bound<'_, PyAny>,
        seqlens: (usize, usize),
        blocks: (usize, usize),
    ) -> PyResult<BlockMask> {
        let lists = [Foreign::of("row_ptr", row_ptr)?, Foreign::of("col_idx", col_idx)?];
        let mask = row_ptr.py().detach(|| from_lists(lists, seqlens, blocks))?;
        static NEXT: AtomicI64 = AtomicI64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        MASKS.write().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(mask));
        Ok(BlockMask { id })
    }
}

impl Drop for BlockMask {
    fn drop(&mut self) {
        let mask = MASKS.write().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        // Freed after the lock is released.
        drop(mask);
    }
}

fn from_lists(
    [row_ptr, col_idx]: [Foreign<'_>; 2],
    (seqlen_q, seqlen_k): (usize, usize),
    (block_q, block_k): (usize, usize),
) -> Result<Mask> {
    let stream = row_ptr.stream()?;
    let ([Some(row_ptr), Some(col_idx)], []) = views([Some(row_ptr), Some(col_idx)], [])? else {
        return Err(Failure::value("row_ptr and col_idx are needed"));
    };
    let &[batch, heads, _] = row_ptr.shape() else {
        let text = format!("row_ptr has shape {:?}, not [batch, heads, rows + 1]", row_ptr.shape());
        return Err(Failure::value(text));
    };
    let geometry = BlockGeometry::new(seqlen_q, seqlen_k, block_q, block_k)?;
    let (row_ptr, col_idx) = (row_ptr.to_vec(&stream)?, col_idx.to_vec(&stream)?);
    let mask = Mask::from_parts(geometry, batch, heads, &row_ptr, &col_idx)?;
    Ok(if stream.device().is_cpu() { mask } else { mask.to(&stream)? })
}

/// The mask of this number; `None` for 0, which means no mask.
pub(crate) fn lookup(number: i64) -> Result<Option<Arc<Mask>>> {
    if number == 0 {
        return Ok(None);
    }
    let masks = MASKS.read().unwrap_or_else(PoisonError::into_inner);
    let missing = || Failure::value(format!("there is no block mask of number {number}"));
    masks.get(&number).cloned().map(Some).ok_or_else(missing)
}
