//! Patterns of block-sparse matrices, which the operators of [`linear`](crate::linear) find by
//! number.

use crate::error::{Failure, Result};
use crate::foreign::{direct, views};
use crate::table::{Entry, Table};
use blockflash_ops::{BsrPattern, BsrTranspose, BsrWorkspace, Device, Stream};
use pyo3::prelude::*;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

static PATTERNS: Table<Pattern> = Table::new("pattern");

/// A pattern on the CPU and on every GPU on which it was used.
///
/// Its number is a hash of its content: graphs that torch has compiled or exported, and keeps on
/// disk, contain the number, and mean the same pattern in every process.
pub(crate) struct Pattern {
    row_ptr: Vec<i32>,
    col_idx: Vec<i32>,
    host: Arc<Placed>,
    gpus: RwLock<Vec<Arc<Placed>>>,
}

/// A pattern on one device, and its transpose.
pub(crate) struct Placed {
    pub(crate) pattern: BsrPattern,
    pub(crate) transpose: BsrTranspose,
}

impl Pattern {
    fn new(sizes: [usize; 3], row_ptr: &[i32], col_idx: &[i32]) -> Result<Pattern> {
        let [rows, cols, block_size] = sizes;
        let pattern = BsrPattern::from_parts(rows, cols, block_size, row_ptr, col_idx)?;
        if rows % block_size != 0 || cols % block_size != 0 {
            let text = format!("{rows} x {cols} are not multiples of the block size {block_size}");
            return Err(Failure::value(text));
        }
        let transpose = BsrTranspose::new(&pattern, &Device::cpu().stream()?)?;
        let host = Arc::new(Placed { pattern, transpose });
        let (row_ptr, col_idx) = (row_ptr.to_vec(), col_idx.to_vec());
        Ok(Pattern { row_ptr, col_idx, host, gpus: RwLock::default() })
    }

    /// Rows, columns and block size, and the blocks.
    fn content(&self) -> ([usize; 3], &[i32], &[i32]) {
        let pattern = &self.host.pattern;
        let sizes = [pattern.rows(), pattern.cols(), pattern.block_size()];
        (sizes, &self.row_ptr, &self.col_idx)
    }

    fn hash(&self) -> i64 {
        let mut hasher = DefaultHasher::new();
        self.content().hash(&mut hasher);
        (hasher.finish() >> 1) as i64
    }

    /// The pattern on the stream's device, where the first use copies it.
    fn on(&self, stream: &Stream) -> Result<Arc<Placed>> {
        let device = stream.device();
        if device.is_cpu() {
            return Ok(Arc::clone(&self.host));
        }
        let find = |places: &[Arc<Placed>]| {
            places.iter().find(|place| place.pattern.device() == *device).cloned()
        };
        if let Some(place) = find(&self.gpus.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(place);
        }
        let mut places = self.gpus.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = find(&places) {
            return Ok(place);
        }
        let Placed { pattern, transpose } = &*self.host;
        let place = Placed { pattern: pattern.to(stream)?, transpose: transpose.to(stream)? };
        let place = Arc::new(place);
        places.push(Arc::clone(&place));
        Ok(place)
    }
}

/// The pattern of this number on the stream's device.
pub(crate) fn lookup(number: i64, stream: &Stream) -> Result<Arc<Placed>> {
    let entry = PATTERNS.find(number)?;
    entry.outlive_capture(stream)?;
    entry.on(stream)
}

/// Memory for partial sums of products on this stream, which each stream has for itself.
///
/// `None` on the CPU, and while a graph is captured: torch may launch the graph beside other work
/// with the same memory, which would wait for each other forever.
pub(crate) fn workspace(stream: &Stream) -> Result<Option<Arc<BsrWorkspace>>> {
    static WORKSPACES: Mutex<Vec<(Stream, Arc<BsrWorkspace>)>> = Mutex::new(Vec::new());
    if stream.device().is_cpu() || stream.is_capturing()? {
        return Ok(None);
    }
    let mut workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let found = workspaces.iter().find(|(owner, _)| owner.is_same_queue(stream));
    if let Some((_, workspace)) = found {
        return Ok(Some(Arc::clone(workspace)));
    }
    let workspace = Arc::new(BsrWorkspace::new(stream)?);
    workspaces.push((stream.clone(), Arc::clone(&workspace)));
    Ok(Some(workspace))
}

/// A pattern that lives at least as long as this object. Equal patterns are one.
#[pyclass(frozen, name = "BsrPattern", module = "blockflash._native")]
pub(crate) struct Handle(Arc<Entry<Pattern>>);

#[pymethods]
impl Handle {
    /// From int32 tensors on the CPU: `row_ptr` `[rows / block_size + 1]`, and `col_idx` `[nnz]`,
    /// ascending within a block row.
    #[new]
    fn new(
        rows: usize,
        cols: usize,
        block_size: usize,
        row_ptr: &Bound<'_, PyAny>,
        col_idx: &Bound<'_, PyAny>,
    ) -> PyResult<Handle> {
        let py = row_ptr.py();
        let arrays = [direct("row_ptr", row_ptr)?, direct("col_idx", col_idx)?].map(Some);
        Ok(py.detach(|| {
            let ([Some(row_ptr), Some(col_idx)], [], []) = views((arrays.each_ref(), []), [])?
            else {
                return Err(Failure::value("row_ptr and col_idx are needed"));
            };
            let (row_ptr, col_idx) = (row_ptr.as_slice::<i32>()?, col_idx.as_slice::<i32>()?);
            let pattern = Pattern::new([rows, cols, block_size], row_ptr, col_idx)?;
            let same = |a: &Pattern, b: &Pattern| a.content() == b.content();
            Ok(Handle(PATTERNS.insert(pattern.hash(), pattern, same)))
        })?)
    }

    /// The pattern of a number that is in use.
    #[staticmethod]
    fn of(number: i64) -> PyResult<Handle> {
        Ok(Handle(PATTERNS.find(number)?))
    }

    #[getter]
    fn number(&self) -> i64 {
        self.0.number()
    }

    /// `(rows, cols, block_size, nnz)`
    #[getter]
    fn sizes(&self) -> (usize, usize, usize, usize) {
        let ([rows, cols, block_size], _, blocks) = self.0.content();
        (rows, cols, block_size, blocks.len())
    }
}
