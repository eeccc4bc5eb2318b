use super::IndexRows;
use crate::attention::{MAX_SEQLEN, Mask, check_maximum};
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::check::{Operand, to_i32, vector};
use crate::kv_cache::PackedTokens;
use crate::operation::Operation;
use crate::{Error, Result};
use blockflash_safe::{Device, Stream, Tensor, View, ViewMut};
use blockflash_sys::DType;

/// Chooses for each query the blocks with the largest scores: the lists of
/// [`IndexAttention`](crate::IndexAttention).
///
/// ```
/// # use blockflash_ops::{Device, Mask, Tensor, TopK};
/// # let stream = Device::cpu().stream()?;
/// // Two queries at the end of a sequence of 320 keys, which are 5 blocks.
/// let scores = [3.0, 9.0, 4.0, 9.0, 1.0, 0.0, 7.0, f32::NAN, f32::NEG_INFINITY, 2.0];
/// let scores = Tensor::from_slice(&stream, &scores, &[1, 2, 5])?;
/// let top_k = TopK { mask: Mask::causal(), last: 1, ..TopK::new(scores.view(), 64) };
/// let lists = top_k.choose(4, &stream)?;
/// // The last block is that of the query itself.
/// assert_eq!(lists.to_vec::<i32>(&stream)?, [1, 2, 3, 4, 0, 1, 4, -1]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// A query chooses among the blocks that hold keys that it sees: by the mask, and by the length of
/// its sequence. Of these, those below [`first`](Self::first) and the [`last`](Self::last) ones are
/// chosen whatever their scores are. Then come those with the largest scores, of equal scores the
/// lower ones (0 and −0 are equal), until the list is full; none whose score is −∞ or NaN. Lists
/// ascend and have no block twice; −1 fills what is left. The scores of other blocks are not read.
///
/// Lengths and offsets are read on the device at each launch, so a captured graph follows them. The
/// result is the same in every run and on every device.
///
/// A GPU takes lists of up to 2048 blocks out of up to 2²⁰, granularities of 1, 4, 16, 64 and 128
/// tokens, and masks that are aligned bottom-right. The CPU takes every problem.
#[derive(Clone, Copy, Debug)]
pub struct TopK<'a> {
    /// f32 `[groups, rows, blocks]` with contiguous rows of blocks and any other strides, where
    /// rows are the packed queries, or `batch * seqlen_q`, sequence by sequence, and blocks those
    /// of the capacity: for example those of [`IndexScores`](super::IndexScores).
    pub scores: View<'a>,
    /// Sequences with equally many queries; not looked at if queries are
    /// [packed](Self::packed).
    pub batch: usize,
    /// Set when the sequences have unequal numbers of queries.
    pub packed: Option<PackedTokens<'a>>,
    /// Most keys of a sequence, besides the maximum of [packed](Self::packed_kv) ones.
    pub capacity: usize,
    /// Set when offsets of packed keys tell how many keys each sequence has.
    pub packed_kv: Option<PackedTokens<'a>>,
    /// i32 `[batch]`: how many keys each sequence has; `None` is the whole capacity. A length
    /// counts as 0 if it is negative, and as the capacity if it is greater.
    pub seqused_kv: Option<View<'a>>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Tokens of a block, at least 1.
    pub granularity: usize,
    /// Blocks at the start of a sequence that are always chosen.
    pub first: usize,
    /// Blocks up to that of the last key that the query sees that are always chosen.
    pub last: usize,
    /// Memory for the choices of parts of a row, of at least
    /// [`workspace_bytes`](Self::workspace_bytes). The same for any number of calls.
    pub workspace: Option<&'a AttentionDecodeWorkspace>,
}

/// A call of [`TopK`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKProblem {
    /// Queries and what they see.
    pub rows: IndexRows,
    /// Scores, and lists, of each query.
    pub groups: usize,
    /// Strides of the scores, from group to group and from row to row.
    pub scores: [usize; 2],
    /// Room of a list.
    pub k: usize,
    /// Strides of the lists, from group to group and from row to row.
    pub chosen: [usize; 2],
    /// Blocks that are always chosen, at the start and at the end.
    pub forced: [usize; 2],
}

impl<'a> TopK<'a> {
    /// The largest scores of rows that are the queries of one sequence and see all blocks.
    pub fn new(scores: View<'a>, granularity: usize) -> Self {
        let blocks = scores.shape().last().copied().unwrap_or_default();
        Self {
            scores,
            batch: 1,
            packed: None,
            capacity: blocks.saturating_mul(granularity),
            packed_kv: None,
            seqused_kv: None,
            mask: Mask::Full,
            granularity,
            first: 0,
            last: 0,
            workspace: None,
        }
    }

    /// Writes the lists, i32 `[groups, rows, k]` with contiguous lists and any other strides. On a
    /// GPU nothing is allocated and the stream is not synchronised, so a graph can capture the
    /// call. On the CPU it returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem); [`Error::DeviceMismatch`] if an operand is not on
    /// the stream's device; on the CPU [`Error::InvalidCuSeqlens`]; on a GPU
    /// [`Error::Unsupported`] for what no kernel takes, and [`Error::Shape`] for a workspace that
    /// is too small.
    pub fn choose_into(&self, chosen: ViewMut<'_>, stream: &Stream) -> Result<()> {
        self.run(chosen, stream)
    }

    /// Allocates lists with room for k blocks, and a workspace if there is none, and chooses.
    ///
    /// # Errors
    /// As [`choose_into`](Self::choose_into), and out of memory.
    pub fn choose(&self, k: usize, stream: &Stream) -> Result<Tensor> {
        let scores = Operand::new("scores", &self.scores);
        let &[groups, rows, _] = scores.shape else {
            return Err(scores.wrong_shape("[groups, rows, blocks]"));
        };
        if k == 0 {
            let expected = "at least 1".into();
            return Err(Error::Number { what: "k", value: k, expected });
        }
        let mut chosen = Tensor::zeros(stream, DType::I32, &[groups, rows, k])?;
        let own = match (self.workspace, self.workspace_bytes(k, stream.device())?) {
            (None, bytes @ 1..) => Some(AttentionDecodeWorkspace::new(stream, bytes)?),
            _ => None,
        };
        let workspace = self.workspace.or(own.as_ref());
        TopK { workspace, ..*self }.choose_into(chosen.view_mut(), stream)?;
        Ok(chosen)
    }

    /// Bytes of workspace that a choice of k blocks needs on a device; 0 on the CPU. They follow
    /// from the sizes, not from lengths.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem), and of `select`.
    pub fn workspace_bytes(&self, k: usize, device: &Device) -> Result<usize> {
        self.sizes(k)?.workspace_bytes(device)
    }

    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Shape`], [`Error::Stride`], [`Error::MaxSeqlen`] and
    /// [`Error::TooLarge`].
    pub fn problem(&self, chosen: &ViewMut<'_>) -> Result<TopKProblem> {
        let operand = Operand::of_mut("chosen", chosen);
        operand.dtype_in(&[DType::I32])?;
        let &[_, _, k @ 1..=usize::MAX] = operand.shape else {
            return Err(operand.wrong_shape("[groups, rows, at least 1]"));
        };
        let problem = self.sizes(k)?;
        operand.shape_is(&[problem.groups, problem.rows.rows(), k])?;
        operand.last_dim_contiguous()?;
        Ok(TopKProblem { chosen: [operand.strides[0], operand.strides[1]], ..problem })
    }

    /// The problem for contiguous lists.
    fn sizes(&self, k: usize) -> Result<TopKProblem> {
        let operand = Operand::new("scores", &self.scores);
        operand.dtype_in(&[DType::F32])?;
        let &[groups, rows, blocks] = operand.shape else {
            return Err(operand.wrong_shape("[groups, rows, blocks]"));
        };
        operand.last_dim_contiguous()?;
        let sizes = self.rows(rows)?;
        if blocks != sizes.blocks() {
            let (capacity, granularity) = (sizes.capacity, sizes.granularity);
            return Err(operand.wrong_shape(format!(
                "[{groups}, {rows}, {}]: blocks of {granularity} of {capacity} keys",
                sizes.blocks()
            )));
        }
        for (what, size) in [("groups", groups), ("k", k)] {
            to_i32(what, size)?;
        }
        let (first, last) = (self.first, self.last);
        let value = first.saturating_add(last);
        if value > k {
            return Err(Error::TooLarge { what: "first + last", value, limit: k });
        }
        Ok(TopKProblem {
            rows: sizes,
            groups,
            scores: [operand.strides[0], operand.strides[1]],
            k,
            chosen: [rows.saturating_mul(k), k],
            forced: [first, last],
        })
    }

    /// This many rows and what they see.
    fn rows(&self, rows: usize) -> Result<IndexRows> {
        let (mut batch, mut seqlen_q) = (self.batch, rows / self.batch.max(1));
        if let Some(packed) = &self.packed {
            (batch, seqlen_q) = (sequences("cu_seqlens.q", packed)?, packed.max_seqlen);
            check_maximum("max_seqlen", [batch, seqlen_q], rows)?;
        } else if batch.checked_mul(seqlen_q) != Some(rows) {
            let expected = format!("[groups, a multiple of {batch} sequences, blocks]");
            return Err(Operand::new("scores", &self.scores).wrong_shape(expected));
        }
        let mut capacity = self.capacity;
        if let Some(packed) = &self.packed_kv {
            let what = "packed_kv.cu_seqlens";
            if sequences(what, packed)? != batch {
                let expected = format!("[{}]", batch.saturating_add(1));
                return Err(Operand::new(what, &packed.cu_seqlens).wrong_shape(expected));
            }
            capacity = capacity.min(packed.max_seqlen);
        }
        if let Some(seqused) = &self.seqused_kv {
            if self.packed_kv.is_some() {
                return Err(
                    Operand::new("seqused_kv", seqused).wrong_shape("none beside packed_kv")
                );
            }
            vector("seqused_kv", seqused, DType::I32, &[batch])?;
        }
        to_i32("batch", batch)?;
        for (what, value) in [("capacity", capacity), ("seqlen_q", seqlen_q)] {
            if value > MAX_SEQLEN {
                return Err(Error::TooLarge { what, value, limit: MAX_SEQLEN });
            }
        }
        let sizes = IndexRows {
            batch,
            seqlen_q,
            total_q: self.packed.map(|_| rows),
            capacity,
            packed_kv: self.packed_kv.is_some(),
            seqused_kv: self.seqused_kv.is_some(),
            mask: self.mask,
            granularity: self.granularity,
        };
        sizes.checked()
    }
}

/// The number of packed sequences.
fn sequences(what: &'static str, packed: &PackedTokens<'_>) -> Result<usize> {
    let offsets = Operand::new(what, &packed.cu_seqlens);
    let &[count @ 1..=usize::MAX] = offsets.shape else {
        return Err(offsets.wrong_shape("[batch + 1]"));
    };
    vector(what, &packed.cu_seqlens, DType::I32, &[count])?;
    Ok(count - 1)
}

impl TopKProblem {
    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.groups == 0 || self.rows.rows() == 0
    }
}
