//! One call of attention by an index with its data: what is computed, from what, on which device,
//! and whether the result is right. Suites and the command share it.

use super::cache_inputs::CacheInputs;
use super::decode_data::DecodeData;
use super::decode_rows::Gathered;
use super::index::IndexShape;
use super::index_lists;
use super::operands::{Operands, Progress, TensorInfo, launched, rotation_bytes};
use super::scores;
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::{
    AttentionDecodeWorkspace, CudaProperties, DType, IndexAttention,
    IndexAttentionOperands as Written, IndexAttentionProblem, IndexLists, Kernel, Operation,
    PreparedIndexAttention, Scores, Stream, Tensor, attention_index,
};
use blockflash_oracle::{self as oracle, AttentionCase, Comparison, Elements};
use std::collections::BTreeSet;
use std::ops::Range;

/// Most lists that launches take in turn.
const MAX_COPIES: usize = 64;
/// Fewest queries that are compared, and most elements of the keys that they list: all queries of
/// small calls.
const SAMPLES: usize = 12;
const MOST_LISTED: usize = 1 << 24;

/// The data of one call, in host memory.
#[derive(Debug)]
pub struct IndexData {
    /// Queries and the cache.
    pub decode: DecodeData,
    /// i32 `[groups, batch · queries, room]`.
    pub lists: Array,
    /// Keys of a block.
    pub granularity: usize,
}

/// Queries, the cache, the lists, perhaps several, and the outputs.
#[derive(Debug)]
pub struct IndexOperands {
    inputs: CacheInputs,
    /// Where the keys of all sequences are stored, one sequence behind the other, where each begins
    /// in that order, and where the last one ends.
    slots: Vec<usize>,
    starts: Vec<usize>,
    /// Lists of launches, and the numbers in the first.
    lists: Vec<Tensor>,
    entries: Array,
    granularity: usize,
    /// What further lists are drawn for.
    shape: Option<IndexShape>,
    o: Tensor,
    lse: Option<Tensor>,
    /// Number of the next launch.
    next: usize,
    prepared: Option<PreparedIndexAttention>,
}

impl IndexOperands {
    /// Places the data on the stream's device and allocates the outputs, with the log-sum-exp if it
    /// is wanted.
    ///
    /// # Errors
    /// If lengths or pages are out of range, there is a bias or slopes, of which there is no
    /// reference here, the library refuses the call, or there is not enough memory.
    pub fn new(
        scores: Scores<Array>,
        data: IndexData,
        wants_lse: bool,
        stream: &Stream,
    ) -> Result<Self> {
        let unchecked =
            scores.bias.as_ref().map(|_| "bias").or(scores.alibi.as_ref().map(|_| "alibi"));
        if let Some(name) = unchecked {
            return Err(Error::Option(format!("attention by an index is not checked with {name}")));
        }
        let IndexData { decode, lists, granularity } = data;
        let (slots, counts) = decode.visited()?;
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        let mut operands = Self {
            inputs: CacheInputs::new(scores, decode, stream)?,
            slots,
            starts,
            lists: vec![lists.upload(stream)?],
            entries: lists,
            granularity,
            shape: None,
            o: Tensor::empty(stream, DType::F32, &[1])?,
            lse: None,
            next: 0,
            prepared: None,
        };
        let attention = operands.problem(None)?.attention;
        operands.o = Tensor::empty(stream, attention.types.o, &attention.o_shape())?;
        if wants_lse {
            operands.lse = Some(Tensor::empty(stream, DType::F32, &attention.lse_shape())?);
        }
        let (call, written) = operands.call(None)?;
        let bytes = call.workspace_bytes(&written.cache, stream.device())?;
        operands.next = 0;
        if bytes > 0 {
            operands.inputs.workspace = Some(AttentionDecodeWorkspace::new(stream, bytes)?);
        }
        Ok(operands)
    }

    /// The same with further lists of this shape for [`rotate`](Operands::rotate).
    pub(super) fn of_shape(self, shape: IndexShape) -> Self {
        Self { shape: Some(shape), ..self }
    }

    /// The next call, with its outputs.
    fn call(&mut self, _: Option<&Kernel>) -> Result<(IndexAttention<'_>, Written<'_>)> {
        let (q, cache) = self.inputs.read(0)?;
        let entries = self.lists[self.next % self.lists.len()].view();
        self.next += 1;
        let lists = IndexLists { entries, granularity: self.granularity };
        let call = IndexAttention {
            scores: self.inputs.scores()?,
            workspace: self.inputs.workspace.as_ref(),
            ..IndexAttention::new(q, lists)
        };
        let (o, lse) = (self.o.view_mut(), self.lse.as_mut().map(Tensor::view_mut));
        Ok((call, Written { cache, o, lse }))
    }

    fn problem(&mut self, kernel: Option<&Kernel>) -> Result<IndexAttentionProblem> {
        let next = self.next;
        let (call, written) = self.call(kernel)?;
        let problem = call.problem(&written.cache)?;
        self.next = next;
        Ok(problem)
    }

    /// Queries of a sequence, and heads of queries.
    fn queries(&self) -> [usize; 2] {
        let shape = self.inputs.q.host().shape();
        [shape[1], shape[2]]
    }

    /// The list of a query, and the keys that the mask shows it.
    fn list(&self, group: usize, query: usize) -> (&[i32], Range<usize>) {
        let &[_, rows, room] = self.entries.shape() else { return (&[], 0..0) };
        let at = (group * rows + query) * room;
        let entries = self.entries.as_i32().unwrap_or_default();
        let [queries, _] = self.queries();
        let entry = query / queries;
        let keys = self.starts[entry + 1] - self.starts[entry];
        let seen = self.inputs.scores.mask.visible(query % queries, queries, keys);
        (entries.get(at..at + room).unwrap_or_default(), seen)
    }

    /// Queries that are compared, the first and the last among them.
    fn samples(&self, seed: u64) -> BTreeSet<usize> {
        let queries: usize = self.inputs.q.host().shape().iter().take(2).product();
        let [groups, room] = [0, 2].map(|axis| self.entries.shape()[axis]);
        let keys = room.saturating_mul(self.granularity).min(self.slots.len());
        let width = self.inputs.k.host().shape()[2..].iter().product::<usize>() * groups;
        let most = MOST_LISTED / keys.saturating_mul(width).max(1);
        let count = most.max(SAMPLES).min(queries);
        let some = crate::random::choose(count, queries, seed, u64::MAX - 1);
        some.into_iter().chain([0, queries.saturating_sub(1)]).filter(|&at| at < queries).collect()
    }
}

impl Operands for IndexOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        let mut inputs = self.inputs.infos();
        inputs.push(("lists", self.entries.shape().to_vec(), DType::I32));
        inputs
    }

    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        let problem = self.problem(None)?;
        let mut details = scores::details(&problem.attention.scores, true);
        details.extend(self.inputs.details(&problem.cache, self.slots.len()));
        let [groups, room] = [0, 2].map(|axis| self.entries.shape()[axis]);
        let lists =
            format!("{groups} for each query, of {room} blocks of {} keys", self.granularity);
        details.push(("lists", lists));
        Ok(details)
    }

    /// Those of the pairs that are listed and shown, as often as they are listed.
    fn flops(&mut self) -> Result<f64> {
        let attention = self.problem(None)?.attention;
        let (groups, queries) = (self.entries.shape()[0], self.entries.shape()[1]);
        let mut pairs = 0;
        for group in 0..groups {
            for query in 0..queries {
                let (list, seen) = self.list(group, query);
                pairs +=
                    list.iter().map(|&entry| listed(entry, self.granularity, &seen)).sum::<usize>();
            }
        }
        let heads = attention.num_heads_q / groups.max(1);
        Ok(2.0 * pairs as f64 * (heads * attention.head_dims.sum()) as f64)
    }

    launched!(attention_index::accepts);

    fn rotate(&mut self, stream: &Stream) -> Result<()> {
        let Some(shape) = self.shape else { return Ok(()) };
        let copies = rotation_bytes(stream).div_ceil(shape.read_bytes().max(1));
        for copy in 1..copies.min(MAX_COPIES) {
            let seed = self.inputs.seed.wrapping_add(copy as u64);
            let entries = index_lists::draw(&shape, seed);
            self.lists.push(Tensor::from_slice(stream, &entries, self.entries.shape())?);
        }
        Ok(())
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let lse = self.lse.as_mut().map(|lse| ("lse", lse));
        [Some(("o", &mut self.o)), lse].into_iter().flatten().collect()
    }

    /// Each sampled query in the heads of a list is a sequence of the keys that it sees.
    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let Some(o) = results.first() else { return Ok(Vec::new()) };
        let lse = results.get(1);
        let ([queries, heads], counts) = (self.queries(), self.starts.windows(2));
        let counts: Vec<_> = counts.map(|pair| pair[1] - pair[0]).collect();
        let [k, v] = self.inputs.rows(&self.slots, &counts);
        let (q, heads_kv, groups) = (self.inputs.q.host(), k.shape()[1], self.entries.shape()[0]);
        let [of_qk, of_v] = [&k, &v].map(|rows| rows.shape()[2]);
        let units = groups.max(heads_kv);
        let (group, samples, mut parts) = (heads / units, self.samples(seed), Vec::new());
        let (call, written) = (self.inputs.read(0)?, self.inputs.scores()?);
        let lists = IndexLists { entries: self.lists[0].view(), granularity: self.granularity };
        let call = IndexAttention { scores: written, ..IndexAttention::new(call.0, lists) };
        let problem = call.problem(&self.inputs.cache(0)?)?.attention.scores;
        for unit in 0..units {
            let head = unit * heads_kv / units;
            let seen = |&query: &usize| {
                let (list, seen) = self.list(unit * groups / units, query);
                oracle::listed_keys(list, self.granularity, seen)
            };
            let of_keys: Vec<_> = samples.iter().map(|query| seen(query).len()).collect();
            let rows = |width: usize| {
                let first = move |&query: &usize| (query * heads + unit * group) * width;
                samples.iter().map(first)
            };
            let keys = |width: usize| {
                samples.iter().flat_map(move |query| {
                    let start = self.starts[query / queries];
                    let first = move |key: usize| ((start + key) * heads_kv + head) * width;
                    seen(query).into_iter().map(first)
                })
            };
            let q = Gathered::new(q, rows(of_qk), [group, of_qk]);
            let k = Gathered::new(&k, keys(of_qk), [1, of_qk]);
            let v = Gathered::new(&v, keys(of_v), [1, of_v]);
            let o = Gathered::new(o, rows(of_v), [group, of_v]);
            let ones = vec![1; samples.len()];
            // What the mask hides is not among the keys.
            let scores = scores::of_heads(&self.inputs.scores, unit * group..(unit + 1) * group)?;
            let case = AttentionCase {
                lengths: Some([&ones, &of_keys]),
                left: None,
                right: None,
                ..scores::for_oracle(&problem, [&q, &k, &v], &scores)?
            };
            parts.push(match lse {
                None => vec![oracle::attention_output(&case, &o, seed, progress)?],
                Some(lse) => {
                    // `[batch, heads, queries]` as `[heads, samples]`.
                    let at = |head: usize, query: usize| {
                        let entry = query / queries * heads + unit * group + head;
                        entry * queries + query % queries
                    };
                    let of_head = |head| samples.iter().map(move |&query| at(head, query));
                    let places = (0..group).flat_map(of_head);
                    let values: Vec<f32> = places.flat_map(|at| lse.to_f32(at..at + 1)).collect();
                    let lse = Array::new(&[group, samples.len()], values);
                    let lse = lse.ok_or_else(|| Error::Option("lse is no tensor".to_owned()))?;
                    oracle::attention(&case, &o, &lse, seed, progress)?.to_vec()
                }
            });
        }
        let lengths = [Some(o), lse].into_iter().flatten().map(|result| result.len());
        let of =
            |(at, length)| Comparison::of_parts(parts.iter().map(|of: &Vec<_>| of[at]), length);
        Ok(lengths.enumerate().map(of).collect())
    }
}

/// Keys of a block in a range.
fn listed(entry: i32, granularity: usize, seen: &Range<usize>) -> usize {
    let Ok(block) = usize::try_from(entry) else { return 0 };
    let start = block.saturating_mul(granularity);
    start.saturating_add(granularity).min(seen.end).saturating_sub(start.max(seen.start))
}
