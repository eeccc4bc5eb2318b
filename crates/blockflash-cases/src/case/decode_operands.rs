//! One call of attention to a cache with its data: what is computed, from what, on which device,
//! and whether the result is right. Suites and the command share it.

use super::cache_inputs::CacheInputs;
use super::decode_data::{CacheValues, DecodeData, shuffled};
use super::decode_pages::{PageSelection, Pages, SelectionCheck};
use super::decode_rows::Rows;
use super::operands::{Operands, Progress, TensorInfo, downloaded, launched, rotation_bytes};
use super::scores;
use crate::error::Result;
use crate::io::Array;
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands as Written, AttentionDecodeProblem,
    AttentionDecodeWorkspace, CacheAccess, CudaProperties, DType, Kernel, Operation,
    PreparedAttentionDecode, Scores, Stream, Tensor, attention_decode,
};
use blockflash_oracle::{self as oracle, AttentionCase, Blocks, Comparison};
use blockflash_sys::manifest;
use std::mem;

/// Most copies of a cache.
const MAX_COPIES: usize = 256;

/// Queries, the cache, perhaps several times, and the outputs.
#[derive(Debug)]
pub struct DecodeOperands {
    inputs: CacheInputs,
    o: Tensor,
    lse: Option<Tensor>,
    /// Number of the next launch.
    next: usize,
    prepared: Option<PreparedAttentionDecode>,
    /// Pages that a call visits.
    pages: Pages,
    /// Where the keys that each sequence may visit are stored, and how many they are.
    slots: Vec<usize>,
    counts: Vec<usize>,
}

impl CacheInputs {
    fn call<'a>(&'a self, pages: &'a Pages) -> Result<AttentionDecode<'a>> {
        Ok(AttentionDecode {
            scores: self.scores()?,
            pages: pages.lists(),
            workspace: self.workspace.as_ref(),
            ..AttentionDecode::new(self.q.view()?)
        })
    }

    fn problem(&self, pages: &Pages) -> Result<AttentionDecodeProblem> {
        Ok(self.call(pages)?.problem(&self.cache(0)?)?)
    }

    /// Bytes that suffice for every kernel, also those that the library does not select.
    fn workspace_bytes(&self, pages: &Pages, stream: &Stream) -> Result<usize> {
        let (problem, mut most) = (self.problem(pages)?, 0);
        if let Some(gpu) = stream.device().cuda_properties() {
            for kernel in manifest::kernels() {
                if attention_decode::accepts(kernel, &problem, gpu).is_ok() {
                    let bytes = attention_decode::workspace_bytes(kernel, &problem, gpu)?;
                    most = bytes.max(most);
                }
            }
        }
        Ok(most)
    }
}

impl DecodeOperands {
    /// Places the data on the stream's device and allocates the outputs, with the log-sum-exp if it
    /// is wanted.
    ///
    /// # Errors
    /// If lengths or pages are out of range, the library refuses the call, or there is not enough
    /// memory.
    pub fn new(
        scores: Scores<Array>,
        mut data: DecodeData,
        wants_lse: bool,
        stream: &Stream,
    ) -> Result<Self> {
        let (slots, counts) = data.visited()?;
        let (chosen, table) = (mem::take(&mut data.chosen), data.block_table.clone());
        let mut inputs = CacheInputs::new(scores, data, stream)?;
        let pages = Pages::new(chosen, table, &counts, inputs.read(0)?, stream)?;
        let bytes = inputs.workspace_bytes(&pages, stream)?;
        if bytes > 0 {
            inputs.workspace = Some(AttentionDecodeWorkspace::new(stream, bytes)?);
        }
        let attention = inputs.problem(&pages)?.attention;
        let shape = [attention.batch, attention.num_heads_q, attention.seqlen_q];
        let lse = wants_lse.then(|| Tensor::empty(stream, DType::F32, &shape)).transpose()?;
        let o = Tensor::empty(stream, attention.types.o, &attention.o_shape())?;
        Ok(Self { inputs, o, lse, next: 0, prepared: None, pages, slots, counts })
    }

    /// Before a call: selects the pages that it visits, unless they are given.
    fn select_pages(&mut self, stream: &Stream) -> Result<()> {
        self.pages.select(self.inputs.read(self.next)?, stream)
    }

    /// The next call, with its outputs.
    fn call(&mut self, _: Option<&Kernel>) -> Result<(AttentionDecode<'_>, Written<'_>)> {
        let cache = CacheAccess::Read(self.inputs.cache(self.next)?);
        self.next += 1;
        let (o, lse) = (self.o.view_mut(), self.lse.as_mut().map(Tensor::view_mut));
        Ok((self.inputs.call(&self.pages)?, Written { cache, o, lse }))
    }

    fn problem(&self, _: Option<&Kernel>) -> Result<AttentionDecodeProblem> {
        self.inputs.problem(&self.pages)
    }
}

impl Operands for DecodeOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        self.inputs.infos()
    }

    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        let problem = self.problem(None)?;
        let mut details = scores::details(&problem.attention.scores, true);
        details.extend(self.inputs.details(&problem.cache, self.slots.len()));
        if let Some(PageSelection { room, statistics }) = self.pages.selection() {
            let by = if statistics == 1 { "mean" } else { "minimum and maximum" };
            details.push(("selected", format!("at most {room} pages, by the {by} of their keys")));
        }
        Ok(details)
    }

    /// Those of the pairs that are visited.
    fn flops(&mut self) -> Result<f64> {
        let attention = self.problem(None)?.attention;
        let (queries, heads) = (attention.seqlen_q, attention.num_heads_kv);
        let mut pairs = 0;
        for (entry, &keys) in self.counts.iter().enumerate() {
            for query in 0..queries {
                let visible = attention.scores.mask.visible(query, queries, keys);
                let seen = |head| self.pages.seen([entry, head], visible.clone());
                pairs += (0..heads).map(seen).sum::<usize>();
            }
        }
        let group = attention.num_heads_q / heads.max(1);
        Ok(2.0 * pairs as f64 * (group * attention.head_dims.sum()) as f64)
    }

    launched!(attention_decode::accepts, select_pages);

    fn rotate(&mut self, stream: &Stream) -> Result<()> {
        let attention = self.problem(None)?.attention;
        let inputs = &mut self.inputs;
        let most = |bytes: usize| rotation_bytes(stream).div_ceil(bytes.max(1)).min(MAX_COPIES);
        let k = inputs.k.host();
        let tensors = if matches!(inputs.v, CacheValues::Own(_)) { 2 } else { 1 };
        let of_a_key = tensors * k.shape()[2..].iter().product::<usize>() * k.dtype().size();
        let (queries, mask) = (attention.seqlen_q, attention.scores.mask);
        let seen = |&keys: &usize| {
            let [first, last] = [0, queries - 1].map(|query| mask.visible(query, queries, keys));
            last.end - first.start
        };
        let visited = most(of_a_key * self.counts.iter().map(seen).sum::<usize>());
        let all = most(of_a_key * inputs.pages * k.shape()[1]);
        let given = self.pages.are_given();
        if let (true, Some(first)) = (given, inputs.block_tables.first()) {
            let shape = first.shape().to_vec();
            for turn in 1..visited {
                let seed = inputs.seed.wrapping_add(turn as u64);
                let table = shuffled(shape.iter().product(), seed);
                inputs.block_tables.push(Tensor::from_slice(stream, &table, &shape)?);
            }
        }
        for _ in 1..if given { all } else { visited } {
            let v = inputs.v.as_ref().try_map(|v| v.copy(stream))?;
            inputs.copies.push((inputs.k.copy(stream)?, v));
        }
        Ok(())
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let lse = self.lse.as_mut().map(|lse| ("lse", lse));
        [Some(("o", &mut self.o)), lse].into_iter().flatten().collect()
    }

    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let CacheInputs { scores, q, .. } = &self.inputs;
        let problem = self.problem(None)?;
        let queries = vec![problem.attention.seqlen_q; self.counts.len()];
        let [k, v] = self.inputs.rows(&self.slots, &self.counts);
        let (results, check) = match results {
            [results @ .., lists, summaries] if self.pages.selection().is_some() => {
                let (q, counts) = (q.host(), &self.counts[..]);
                let page_size = problem.cache.page_size;
                (results, Some(SelectionCheck { q, k: &k, counts, page_size, lists, summaries }))
            }
            results => (results, None),
        };
        let lists = check.as_ref().map(SelectionCheck::blocks);
        let blocks = lists.as_ref().filter(|_| problem.attention.seqlen_q > 0);
        let q = Rows::of_queries(q.host());
        let case = AttentionCase {
            lengths: Some([&queries, &self.counts]),
            blocks: blocks.map(|(row_ptr, col_idx)| Blocks {
                block_q: problem.attention.seqlen_q,
                block_kv: problem.cache.page_size,
                heads: problem.attention.num_heads_kv,
                row_ptr,
                col_idx,
                bits: None,
            }),
            ..scores::for_oracle(&problem.attention.scores, [&q, &k, &v], scores)?
        };
        let mut comparisons = match results {
            [o, lse] => {
                // The oracle's packed sequences have the rows of a head side by side.
                let (o, lse) = (Rows::of_queries(o), by_heads(lse));
                oracle::attention(&case, &o, &lse, seed, progress)?.to_vec()
            }
            [o] => vec![oracle::attention_output(&case, &Rows::of_queries(o), seed, progress)?],
            _ => Vec::new(), // the output is always there
        };
        comparisons.extend(check.iter().flat_map(|check| check.compare(self.pages.table())));
        Ok(comparisons)
    }

    fn results(
        &mut self,
        kernel: Option<&Kernel>,
        stream: &Stream,
    ) -> Result<Vec<(&'static str, Array)>> {
        let mut results = downloaded(self.outputs(kernel), stream)?;
        results.extend(self.pages.results(stream)?);
        Ok(results)
    }
}

/// `[batch, heads, queries]` as `[heads, batch * queries]`.
fn by_heads(lse: &Array) -> Array {
    let &[batch, heads, queries] = lse.shape() else { return lse.clone() };
    let values = lse.to_f32(0..lse.len());
    let row = |entry: usize, head: usize| &values[(entry * heads + head) * queries..][..queries];
    let values: Vec<f32> = (0..heads)
        .flat_map(|head| (0..batch).flat_map(move |entry| row(entry, head)))
        .copied()
        .collect();
    Array::new(&[heads, batch * queries], values).unwrap_or_else(|| lse.clone())
}

#[cfg(test)]
#[path = "decode_operands_tests.rs"]
mod tests;
