//! Block masks, which the operators of attention find by number.

use crate::error::{Failure, Kind, Result, with_memory};
use crate::foreign::{direct, views};
use crate::table::{Entry, Table};
use crate::window::{align, side, token_mask};
use blockflash_ops::{
    BlockChoice, BlockGeometry, BlockMask, BlockMaskBuffer, BlockScores, BlockSource, Device,
    Stream, View,
};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

static MASKS: Table<Kept> = Table::new("block mask");

/// A mask, and what its backward pass on a GPU needs.
pub(crate) struct Kept {
    made: Made,
    /// The mask with its transpose, once it was needed.
    for_backward: OnceLock<BlockMask>,
}

/// A mask that was made on the host, or one that the device has built.
enum Made {
    Host(Box<BlockMask>),
    Built(Box<BlockMaskBuffer>),
}

impl Kept {
    pub(crate) fn mask(&self) -> &BlockMask {
        match &self.made {
            Made::Host(mask) => mask,
            Made::Built(buffer) => buffer.mask(),
        }
    }

    /// The mask for a backward pass. On a GPU it has a transpose, which the first call makes there,
    /// in memory that no graph can allocate.
    pub(crate) fn for_backward(&self, stream: &Stream) -> Result<&BlockMask> {
        if self.mask().device().is_cpu() {
            return Ok(self.mask());
        }
        if let Some(mask) = self.for_backward.get() {
            return Ok(mask);
        }
        if stream.is_capturing()? {
            let text = "the first backward pass with a block mask transposes the mask, which a \
                        CUDA graph cannot capture: run one before the capture";
            return Err(Failure { kind: Kind::Unsupported, text: text.into() });
        }
        let mask = self.mask().to(stream)?.with_transpose()?;
        Ok(self.for_backward.get_or_init(|| mask))
    }
}

/// The mask of this number; `None` for 0, which means no mask.
pub(crate) fn lookup(number: i64, stream: &Stream) -> Result<Option<Arc<Entry<Kept>>>> {
    if number == 0 {
        return Ok(None);
    }
    let entry = MASKS.find(number)?;
    entry.outlive_capture(stream)?;
    Ok(Some(entry))
}

/// A mask that lives at least as long as this object.
#[pyclass(frozen, name = "BlockMask", module = "blockflash._native")]
pub(crate) struct Handle(Arc<Entry<Kept>>);

impl Handle {
    fn keep(made: Made) -> Handle {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        let mask = Kept { made, for_backward: OnceLock::new() };
        Handle(MASKS.insert(NEXT.fetch_add(1, Ordering::Relaxed), mask, |_, _| false))
    }

    pub(crate) fn host(mask: blockflash_ops::Result<BlockMask>) -> Result<Handle> {
        Ok(Self::keep(Made::Host(Box::new(mask?))))
    }

    pub(crate) fn mask(&self) -> &BlockMask {
        self.0.mask()
    }
}

/// `(seqlen_q, seqlen_kv, block_q, block_kv)`
pub(crate) type Sizes = (usize, usize, usize, usize);

pub(crate) fn geometry((seqlen_q, seqlen_kv, block_q, block_kv): Sizes) -> Result<BlockGeometry> {
    Ok(BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv)?)
}

/// How blocks are chosen by their scores: blocks of each row, the token mask (`left`, `right`,
/// `top_left`), and whether to wait for the device and raise if a score is NaN.
type Choice = (usize, i64, i64, bool, bool);

#[pymethods]
impl Handle {
    /// The blocks that are not 0 in a uint8 tensor `[batch, heads, rows, cols]`, of which there are
    /// `nnz`; on its device.
    #[staticmethod]
    fn from_bool(blocks: &Bound<'_, PyAny>, sizes: Sizes, nnz: usize) -> PyResult<Handle> {
        let py = blocks.py();
        let blocks = direct("blocks", blocks)?;
        let build = || {
            let (stream, blocks) = (blocks.stream()?, blocks.view()?);
            let source = BlockSource::Bool(blocks);
            build(sizes, &blocks, nnz, &BlockChoice::new(source), true, &stream)
        };
        Ok(py.detach(|| with_memory(build))?)
    }

    /// From int32 lists on one device, where the mask will be: `row_ptr` `[batch, heads, rows + 1]`
    /// holds offsets into `col_idx`, whose block columns ascend within a row. `bits` are
    /// `block_bits` and `words` of partial blocks: see [`BlockMask::with_bits`]. They are copied
    /// and checked, which waits for the stream.
    #[staticmethod]
    #[pyo3(signature = (row_ptr, col_idx, sizes, bits=None))]
    fn from_lists(
        row_ptr: &Bound<'_, PyAny>,
        col_idx: &Bound<'_, PyAny>,
        sizes: Sizes,
        bits: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<Handle> {
        let py = row_ptr.py();
        let lists = [direct("row_ptr", row_ptr)?, direct("col_idx", col_idx)?];
        let bits = bits.as_ref().map(|(block_bits, words)| {
            PyResult::Ok([direct("block_bits", block_bits)?, direct("words", words)?])
        });
        let bits = bits.transpose()?;
        let build = || {
            let (stream, [row_ptr, col_idx]) = (lists[0].stream()?, [&lists[0], &lists[1]]);
            let (row_ptr, col_idx) = (row_ptr.view()?, col_idx.view()?);
            let &[batch, heads, _] = row_ptr.shape() else {
                let shape = row_ptr.shape();
                let text = format!("row_ptr has shape {shape:?}, not [batch, heads, rows + 1]");
                return Err(Failure::value(text));
            };
            let (row_ptr, col_idx) = (row_ptr.to_vec(&stream)?, col_idx.to_vec(&stream)?);
            let mut mask =
                BlockMask::from_parts(geometry(sizes)?, batch, heads, &row_ptr, &col_idx)?;
            if let Some([block_bits, words]) = &bits {
                let words: Vec<i32> = words.view()?.to_vec(&stream)?;
                let words: Vec<u32> = words.into_iter().map(i32::cast_unsigned).collect();
                mask = mask.with_bits(&block_bits.view()?.to_vec(&stream)?, &words)?;
            }
            Self::host(if stream.device().is_cpu() { Ok(mask) } else { mask.to(&stream) })
        };
        Ok(py.detach(|| with_memory(build))?)
    }

    /// The best blocks of each row by float32 scores `[batch, heads, rows, cols]`, and those of
    /// `always`; on the device of the scores.
    #[staticmethod]
    fn from_scores(
        scores: &Bound<'_, PyAny>,
        sizes: Sizes,
        choice: Choice,
        always: Option<&Bound<'_, Handle>>,
    ) -> PyResult<Handle> {
        let (py, always) = (scores.py(), always.map(Bound::get));
        let scores = direct("scores", scores)?;
        let build = || choose(scores.view()?, sizes, choice, always, &scores.stream()?);
        Ok(py.detach(|| with_memory(build))?)
    }

    /// The same by the products of the mean query and the mean key of each block, of q
    /// `[batch, seqlen_q, heads, head_dim]` and k `[batch, seqlen_kv, heads_kv, head_dim]`.
    #[staticmethod]
    fn from_means(
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        sizes: Sizes,
        choice: Choice,
        always: Option<&Bound<'_, Handle>>,
    ) -> PyResult<Handle> {
        let (py, always) = (q.py(), always.map(Bound::get));
        let (q, k) = (direct("q", q)?, direct("k", k)?);
        let build = || {
            let (stream, q, k) = (q.stream()?, q.view()?, k.view()?);
            let mut scores = BlockScores::new(geometry(sizes)?, q, k, &stream)?;
            scores.compute(q, k, &stream)?;
            choose(scores.scores().view(), sizes, choice, always, &stream)
        };
        Ok(py.detach(|| with_memory(build))?)
    }

    /// See [`BlockMask::window`]; on the CPU. -1 does not limit a side.
    #[staticmethod]
    fn window(sizes: Sizes, left: i64, right: i64, top_left: bool) -> PyResult<Handle> {
        let (left, right) = (side("left", left)?, side("right", right)?);
        Ok(Self::host(BlockMask::window(geometry(sizes)?, left, right, align(top_left)))?)
    }

    /// See [`BlockMask::sink`]; on the CPU.
    #[staticmethod]
    fn sink(sizes: Sizes, count: usize) -> PyResult<Handle> {
        Ok(Self::host(BlockMask::sink(geometry(sizes)?, count))?)
    }

    /// See [`BlockMask::union`]; both on the CPU.
    fn union(&self, other: &Bound<'_, Handle>) -> PyResult<Handle> {
        Ok(Self::host(self.mask().union(other.get().mask()))?)
    }

    /// See [`BlockMask::intersection`]; both on the CPU.
    fn intersection(&self, other: &Bound<'_, Handle>) -> PyResult<Handle> {
        Ok(Self::host(self.mask().intersection(other.get().mask()))?)
    }

    /// The mask of a packed batch from the masks of its sequences; on the CPU.
    #[staticmethod]
    fn packed(py: Python<'_>, masks: Vec<Py<Handle>>) -> PyResult<Handle> {
        let pack = || -> Result<Handle> {
            let host = Device::cpu().stream()?;
            let masks: Vec<BlockMask> =
                masks.iter().map(|mask| Ok(mask.get().mask().to(&host)?)).collect::<Result<_>>()?;
            Self::host(BlockMask::packed(&masks.iter().collect::<Vec<_>>()))
        };
        Ok(py.detach(pack)?)
    }

    /// The masks of the sequences of a packed mask, on the CPU; none if it is not packed.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<Handle>> {
        let mask = self.mask();
        let read = || -> Result<Vec<Handle>> {
            let count = mask.sequences().map_or(0, <[_]>::len);
            let mask = mask.to(&Device::cpu().stream()?)?;
            (0..count).map(|at| Self::host(mask.entry(at))).collect()
        };
        Ok(py.detach(read)?)
    }

    /// Whether it is the mask of a packed batch.
    #[getter]
    fn is_packed(&self) -> bool {
        self.mask().sequences().is_some()
    }

    /// A copy on the device of a tensor, on the current stream there.
    fn to_device_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Handle> {
        let place = direct("tensor", tensor)?;
        let copy = || Self::host(self.mask().to(&place.stream()?));
        Ok(tensor.py().detach(|| with_memory(copy))?)
    }

    /// Writes which blocks are visited into a uint8 tensor `[batch, heads, rows, cols]` on the CPU.
    fn write_bool(&self, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let out = direct("out", out)?;
        let write = || -> Result<()> {
            let ([], [], [Some(mut out)]) = views(([], []), [Some(out)])? else {
                return Err(Failure::value("out is needed"));
            };
            let visited = self.mask().to(&Device::cpu().stream()?)?.to_bool()?;
            let out = out.as_mut_slice::<u8>()?;
            if out.len() != visited.len() {
                return Err(Failure::value(format!("out is not of {} blocks", visited.len())));
            }
            out.iter_mut().zip(visited).for_each(|(out, visited)| *out = visited.into());
            Ok(())
        };
        Ok(Python::attach(|py| py.detach(write))?)
    }

    /// How many visited blocks there are, and how many tiles of bits; `None` if all are full.
    #[getter]
    fn counts(&self) -> (usize, Option<usize>) {
        let mask = self.mask();
        (mask.nnz(), mask.bits().map(|[_, words]| words.shape()[0]))
    }

    /// Writes what [`from_lists`](Self::from_lists) takes into contiguous int32 tensors on the CPU.
    #[pyo3(signature = (row_ptr, col_idx, bits=None))]
    fn write_lists(
        &self,
        row_ptr: &Bound<'_, PyAny>,
        col_idx: &Bound<'_, PyAny>,
        bits: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let py = row_ptr.py();
        let lists = [Some(direct("row_ptr", row_ptr)?), Some(direct("col_idx", col_idx)?)];
        let bits = bits.as_ref().map(|(block_bits, words)| {
            PyResult::Ok([Some(direct("block_bits", block_bits)?), Some(direct("words", words)?)])
        });
        let [block_bits, words] = bits.transpose()?.unwrap_or_default();
        let [row_ptr, col_idx] = lists;
        let write = || -> Result<()> {
            let host = Device::cpu().stream()?;
            let mask = self.mask().to(&host)?;
            let read = [Some(mask.row_ptr()), Some(mask.col_idx())];
            let bits = mask.bits().map_or([None; 2], |bits| bits.map(Some));
            let from = read.into_iter().chain(bits);
            let ([], [], written) = views(([], []), [row_ptr, col_idx, block_bits, words])?;
            for (from, into) in from.zip(written) {
                if let (Some(from), Some(mut into)) = (from, into) {
                    let (from, into) = (from.view().as_slice::<i32>()?, into.as_mut_slice()?);
                    if from.len() != into.len() {
                        let text = format!("{} numbers do not fit {}", from.len(), into.len());
                        return Err(Failure::value(text));
                    }
                    into.copy_from_slice(from);
                }
            }
            Ok(())
        };
        Ok(py.detach(write)?)
    }

    /// The mask of a number that is in use.
    #[staticmethod]
    fn of(number: i64) -> PyResult<Handle> {
        Ok(Handle(MASKS.find(number)?))
    }

    #[getter]
    fn number(&self) -> i64 {
        self.0.number()
    }

    /// `(batch, heads, rows, cols)`
    #[getter]
    fn shape(&self) -> (usize, usize, usize, usize) {
        let mask = self.mask();
        (mask.batch(), mask.heads(), mask.rows(), mask.cols())
    }

    /// `(seqlen_q, seqlen_kv, block_q, block_kv)`
    #[getter]
    fn sizes(&self) -> Sizes {
        let mask = self.mask();
        (mask.seqlen_q(), mask.seqlen_kv(), mask.block_q(), mask.block_kv())
    }
}

/// The mask of a choice on the stream's device; `values` has its batch entries and heads.
fn build(
    sizes: Sizes,
    values: &View<'_>,
    nnz: usize,
    choice: &BlockChoice<'_>,
    check: bool,
    stream: &Stream,
) -> Result<Handle> {
    let &[batch, heads, _, _] = values.shape() else {
        let shape = values.shape();
        return Err(Failure::value(format!("{shape:?} is not [batch, heads, rows, cols]")));
    };
    let mut buffer = BlockMaskBuffer::new(geometry(sizes)?, batch, heads, nnz, stream)?;
    buffer.build(choice, stream)?;
    if check {
        buffer.check(stream)?;
    }
    Ok(Handle::keep(Made::Built(Box::new(buffer))))
}

fn choose(
    scores: View<'_>,
    sizes: Sizes,
    choice: Choice,
    always: Option<&Handle>,
    stream: &Stream,
) -> Result<Handle> {
    let (k, left, right, top_left, check) = choice;
    let always = always.map(|always| always.mask().to(stream)).transpose()?;
    let source = BlockSource::Scores { scores, k };
    let mask = token_mask(left, right, top_left)?;
    let (rows, cols) = (geometry(sizes)?.rows(), geometry(sizes)?.cols());
    let groups = scores.shape().iter().take(2).product::<usize>();
    // A row has at most the chosen blocks and those of `always`, which may be one for all groups.
    let each = always.as_ref().map_or(0, |always| {
        always.nnz().saturating_mul(groups / (always.batch() * always.heads()).max(1))
    });
    let most = groups.saturating_mul(rows).saturating_mul(k.min(cols)).saturating_add(each);
    let all = groups.saturating_mul(rows).saturating_mul(cols);
    let choice = BlockChoice { always: always.as_ref(), mask, ..BlockChoice::new(source) };
    build(sizes, &scores, most.min(all), &choice, check, stream)
}
