//! One call of attention by an index with its data: what is computed, from what, on which device,
//! and whether the result is right.

use super::decode_data::{CacheValues, DecodeData};
use super::decode_operands::repeated;
use super::index::IndexShape;
use super::index_lists;
use super::operands::{Operands, Placed, Progress, TensorInfo, launched, rotation_bytes};
use super::scores;
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::{
    AttentionDecodeWorkspace, CudaProperties, DType, IndexAttention,
    IndexAttentionOperands as Written, IndexAttentionProblem, IndexLists, Kernel, KvCache, Mask,
    Operation, PreparedIndexAttention, Scores, ScoresProblem, Stream, Tensor, attention_index,
};
use blockflash_oracle::{self as oracle, AttentionCase, Comparison};
use std::collections::BTreeSet;

/// Most lists that launches take in turn.
const MAX_COPIES: usize = 64;
/// Queries that are compared.
const SAMPLES: usize = 12;

/// Queries, the cache, the lists, perhaps several, and the output.
#[derive(Debug)]
pub(super) struct IndexOperands {
    shape: IndexShape,
    q: Placed,
    /// Keys and values. The host may have fewer pages than the device.
    k: Placed,
    v: CacheValues<Placed>,
    block_table: Option<Tensor>,
    lengths: Option<Placed>,
    /// Where the keys of all sequences are stored, one sequence behind the other.
    slots: Vec<usize>,
    /// Lists of launches, and the numbers in the first.
    lists: Vec<Tensor>,
    entries: Vec<i32>,
    seed: u64,
    workspace: Option<AttentionDecodeWorkspace>,
    o: Tensor,
    /// Number of the next launch.
    next: usize,
    prepared: Option<PreparedIndexAttention>,
}

impl IndexOperands {
    /// Places the data on the stream's device and allocates the output.
    ///
    /// # Errors
    /// If the library refuses the call, or there is not enough memory.
    pub(super) fn new(
        shape: IndexShape,
        data: DecodeData,
        entries: Vec<i32>,
        seed: u64,
        stream: &Stream,
    ) -> Result<Self> {
        let (slots, _) = data.visited()?;
        let DecodeData { q, k, v, pages, block_table, seqused_kv, .. } = data;
        let place = |array| Placed::new(array, stream);
        let cache = |host: Array| match host.shape().first() == Some(&pages) {
            true => place(host),
            false => Ok(Placed::with(repeated(&host, pages, stream)?, host)),
        };
        let o = [shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dims.v];
        let mut operands = Self {
            shape,
            q: place(q)?,
            k: cache(k)?,
            v: v.try_map(cache)?,
            block_table: block_table.map(|table| table.upload(stream)).transpose()?,
            lengths: seqused_kv.map(place).transpose()?,
            slots,
            lists: vec![Tensor::from_slice(stream, &entries, &list_shape(&shape))?],
            entries,
            seed,
            workspace: None,
            o: Tensor::empty(stream, shape.dtype, &o)?,
            next: 0,
            prepared: None,
        };
        let (call, written) = operands.call(None)?;
        let bytes = call.workspace_bytes(&written.cache, stream.device())?;
        operands.next = 0;
        if bytes > 0 {
            operands.workspace = Some(AttentionDecodeWorkspace::new(stream, bytes)?);
        }
        Ok(operands)
    }

    /// The next call, with its output.
    fn call(&mut self, _: Option<&Kernel>) -> Result<(IndexAttention<'_>, Written<'_>)> {
        let k = self.k.view()?;
        let cache = match &self.v {
            CacheValues::Own(v) => KvCache::new(k, v.view()?),
            &CacheValues::FirstColumns(columns) => KvCache::latent(k, columns)?,
        };
        let block_table = self.block_table.as_ref().map(Tensor::view);
        let seqused_kv = self.lengths.as_ref().map(Placed::view).transpose()?;
        let cache = KvCache { block_table, seqused_kv, ..cache };
        let entries = self.lists[self.next % self.lists.len()].view();
        self.next += 1;
        let lists = IndexLists { entries, granularity: self.shape.granularity };
        let call = IndexAttention {
            scores: Mask::causal().into(),
            workspace: self.workspace.as_ref(),
            ..IndexAttention::new(self.q.view()?, lists)
        };
        Ok((call, Written { cache, o: self.o.view_mut(), lse: None }))
    }

    fn problem(&mut self, kernel: Option<&Kernel>) -> Result<IndexAttentionProblem> {
        let next = self.next;
        let (call, written) = self.call(kernel)?;
        let problem = call.problem(&written.cache)?;
        self.next = next;
        Ok(problem)
    }

    /// Positions of the keys that a query sees in the heads of a list.
    fn seen(&self, group: usize, query: usize) -> Vec<usize> {
        let &IndexShape { batch, seqlen_q, granularity, entries, .. } = &self.shape;
        let at = (group * batch * seqlen_q + query) * entries;
        let list = self.entries.get(at..at + entries).unwrap_or_default();
        let last = self.shape.position(query % seqlen_q);
        oracle::listed_keys(list, granularity, 0..last + 1)
    }

    /// Queries that are compared, the first and the last among them.
    fn samples(&self, seed: u64) -> BTreeSet<usize> {
        let queries = self.shape.batch * self.shape.seqlen_q;
        let some = crate::random::choose(SAMPLES - 2, queries, seed, u64::MAX - 1);
        some.into_iter().chain([0, queries - 1]).collect()
    }
}

/// `[groups, batch · seqlen_q, entries]`.
fn list_shape(shape: &IndexShape) -> [usize; 3] {
    [shape.groups, shape.batch * shape.seqlen_q, shape.entries]
}

/// Elements of several pieces of an array, side by side, as `[rows, heads, width]`.
fn gathered(
    array: &Array,
    pieces: impl Iterator<Item = usize>,
    [heads, width]: [usize; 2],
) -> Result<Array> {
    let values: Vec<f32> =
        pieces.flat_map(|first| array.to_f32(first..first + heads * width)).collect();
    let shape = [values.len() / (heads * width).max(1), heads, width];
    let array = Array::rounded(&shape, &values, array.dtype());
    array.ok_or_else(|| Error::Option("the sampled rows are no tensor".to_owned()))
}

impl Operands for IndexOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        vec![
            self.q.info("q"),
            self.k.info("k"),
            ("entries", list_shape(&self.shape).to_vec(), DType::I32),
        ]
    }

    fn flops(&mut self) -> Result<f64> {
        use super::shape::Shape;
        Ok(self.shape.work().flops)
    }

    launched!(attention_index::accepts);

    fn rotate(&mut self, stream: &Stream) -> Result<()> {
        let copies = rotation_bytes(stream).div_ceil(self.shape.read_bytes().max(1));
        for copy in 1..copies.min(MAX_COPIES) {
            let entries = index_lists::draw(&self.shape, self.seed.wrapping_add(copy as u64));
            self.lists.push(Tensor::from_slice(stream, &entries, &list_shape(&self.shape))?);
        }
        Ok(())
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        vec![("o", &mut self.o)]
    }

    /// Each sampled query in the heads of a list is a sequence of the keys that it sees.
    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let [o] = results else { return Ok(Vec::new()) };
        let IndexShape { seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, groups, .. } = self.shape;
        let dims = self.shape.head_dims;
        let units = groups.max(num_heads_kv);
        let group = num_heads_q / units;
        let (samples, mut parts) = (self.samples(seed), Vec::new());
        let plain = Scores::of(Mask::Full);
        for unit in 0..units {
            let head = unit * num_heads_kv / units;
            let seen = |&query: &usize| self.seen(unit * groups / units, query);
            let counts: Vec<_> = samples.iter().map(|query| seen(query).len()).collect();
            let rows = |width: usize| {
                let first = move |&query: &usize| (query * num_heads_q + unit * group) * width;
                samples.iter().map(first)
            };
            let keys = |width: usize| {
                let first = move |slot: usize| (slot * num_heads_kv + head) * width;
                let slots = samples.iter().flat_map(|query| {
                    let start = query / seqlen_q * seqlen_kv;
                    seen(query).into_iter().map(move |key| self.slots[start + key])
                });
                slots.map(first)
            };
            let q = gathered(self.q.host(), rows(dims.qk), [group, dims.qk])?;
            let k = gathered(self.k.host(), keys(dims.qk), [1, dims.qk])?;
            let v = match &self.v {
                CacheValues::Own(v) => gathered(v.host(), keys(dims.v), [1, dims.v])?,
                &CacheValues::FirstColumns(columns) => {
                    gathered(self.k.host(), keys(dims.qk), [1, columns])?
                }
            };
            let o = gathered(o, rows(dims.v), [group, dims.v])?;
            let ones = vec![1; samples.len()];
            let problem = ScoresProblem::of(dims.qk);
            let case = AttentionCase {
                lengths: Some([&ones, &counts]),
                ..scores::for_oracle(&problem, [&q, &k, &v], &plain)?
            };
            parts.push(oracle::attention_output(&case, &o, seed, progress)?);
        }
        Ok(vec![Comparison::of_parts(parts.into_iter(), o.len())])
    }
}
