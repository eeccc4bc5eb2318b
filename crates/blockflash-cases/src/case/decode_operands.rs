//! One call of attention to a cache with its data: what is computed, from what, on which device, and
//! whether the result is right. Suites and the command share it.

use super::decode::{DecodeShape, Fill};
use super::decode_rows::{CacheRows, QueryRows};
use super::operands::{Operands, TensorInfo, rotation_bytes};
use super::scores::{Scores, sides};
use crate::error::{Error, Result};
use crate::io::Array;
use crate::memory::count;
use crate::random;
use blockflash_ops::{
    Align, AttentionDecode, AttentionDecodeOperands, AttentionDecodeProblem,
    AttentionDecodeWorkspace, CacheAccess, CudaProperties, DType, Kernel, KvCache, Operation,
    PageLists, PreparedAttentionDecode, Stream, Tensor, View, ViewMut, attention_decode,
};
use blockflash_oracle::{self as oracle, AttentionCase, Comparison};
use blockflash_sys::manifest;

/// Most copies of a cache.
const MAX_COPIES: usize = 256;

/// Most elements of keys, and as many of values, that are drawn. A larger cache repeats its pages
/// (or sequences), of which an odd number is drawn: 17 GB of numbers take half a minute.
const MOST_DRAWN: usize = 1 << 28;

/// How many of these pages are drawn.
fn drawn_pages(pages: usize, elements_per_page: usize) -> usize {
    match MOST_DRAWN / elements_per_page.max(1) {
        most if most >= pages => pages,
        most => most.saturating_sub(1) | 1,
    }
}

/// A cache of a given number of pages from those that were drawn, in their order, again and again.
fn repeated(drawn: &Array, pages: usize, stream: &Stream) -> Result<Tensor> {
    let first = drawn.upload(stream)?;
    let mut shape = first.shape().to_vec();
    let period = shape[0].max(1);
    if period >= pages {
        return Ok(first);
    }
    shape[0] = pages;
    let mut cache = Tensor::empty(stream, first.dtype(), &shape)?;
    for start in (0..pages).step_by(period) {
        let end = pages.min(start + period);
        let part = first.view().slice(0, 0..end - start)?;
        cache.view_mut().slice(0, start..end)?.copy_from(&part, stream)?;
    }
    Ok(cache)
}

/// The pages of all sequences in a random order.
fn shuffled(pages: usize, seed: u64) -> Vec<i32> {
    let mut table: Vec<_> = (0..pages as i32).collect();
    random::shuffle(&mut table, seed);
    table
}

/// The data of one call, in host memory.
#[derive(Debug)]
pub struct DecodeData {
    /// `[batch, queries, heads, head_dim]`.
    pub q: Array,
    /// Keys `[pages, page_size, heads_kv, head_dim]`; without a table, a page is a sequence.
    pub k: Array,
    /// Shape of `k`.
    pub v: Array,
    /// Pages of the cache: more than `k` and `v` have if theirs are repeated.
    pub pages: usize,
    /// i32 `[batch, pages of a sequence]`.
    pub block_table: Option<Array>,
    /// i32 `[batch]`: keys of each sequence; `None`: all that there is room for.
    pub seqused_kv: Option<Array>,
    /// Columns of the table that each sequence visits, ascending; `None`: all.
    pub chosen: Option<Vec<Vec<usize>>>,
    /// f32 `[heads]`.
    pub sink: Option<Array>,
    /// Seed of the block tables of further copies.
    pub seed: u64,
}

impl DecodeData {
    /// Sequences, and the slots of a page and of a sequence.
    fn sizes(&self) -> Result<[usize; 3]> {
        let &[_, page_size, _, _] = self.k.shape() else {
            let text = format!("k is {:?}, expected four sizes", self.k.shape());
            return Err(Error::Option(text));
        };
        match self.block_table.as_ref().map(Array::shape) {
            None => Ok([self.pages, page_size, page_size]),
            Some(&[batch, columns]) => Ok([batch, page_size, columns.saturating_mul(page_size)]),
            Some(shape) => {
                let text = format!("the block table is {shape:?}, expected [batch, pages]");
                Err(Error::Option(text))
            }
        }
    }

    /// Keys of each sequence.
    fn lengths(&self) -> Result<Vec<usize>> {
        let [batch, _, capacity] = self.sizes()?;
        let Some(array) = &self.seqused_kv else { return Ok(vec![capacity; batch]) };
        let entries = array.as_i32().filter(|_| array.shape() == [batch]).ok_or_else(|| {
            Error::Option(format!("the lengths are {:?}, expected [{batch}]", array.shape()))
        })?;
        let length = |(entry, &length): (usize, &i32)| {
            usize::try_from(length).ok().filter(|&length| length <= capacity).ok_or_else(|| {
                let text = format!("sequence {entry} has {length} keys, expected 0 to {capacity}");
                Error::Option(text)
            })
        };
        entries.iter().enumerate().map(length).collect()
    }

    /// Where the keys that each sequence visits are stored in `k`, one sequence behind the other,
    /// and how many they are. The library takes any entry of the table for some page; here one that
    /// is none is a mistake.
    fn visited(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let ([batch, page_size, capacity], lengths) = (self.sizes()?, self.lengths()?);
        let columns = capacity / page_size.max(1);
        let table = self.block_table.as_ref().map(|table| table.as_i32().unwrap_or_default());
        let page = |entry: usize, column: usize| {
            let Some(table) = table else { return Ok(entry) };
            let page = table[entry * columns + column];
            usize::try_from(page).ok().filter(|&page| page < self.pages).ok_or_else(|| {
                Error::Option(format!(
                    "page {column} of sequence {entry} is {page}, but there are {}",
                    self.pages
                ))
            })
        };
        let (mut slots, mut counts) = (Vec::new(), Vec::with_capacity(batch));
        let stored = self.k.shape()[0].max(1);
        for (entry, &length) in lengths.iter().enumerate() {
            let (all, before) = (0..length.div_ceil(page_size.max(1)), slots.len());
            let columns = match &self.chosen {
                Some(chosen) => chosen[entry].clone(),
                None => all.collect(),
            };
            for column in columns {
                let first = page(entry, column)? % stored * page_size;
                let used = page_size.min(length.saturating_sub(column * page_size));
                slots.extend(first..first + used);
            }
            counts.push(slots.len() - before);
        }
        Ok((slots, counts))
    }
}

impl DecodeShape {
    /// The data of a case: arrays by `draw`, from a name, a shape and the random stream of the seed.
    ///
    /// # Errors
    /// Those of `draw`.
    pub fn data<E: From<Error>>(
        &self,
        seed: u64,
        draw: impl Fn(&'static str, &[usize], u64) -> Result<Array, E>,
    ) -> Result<DecodeData, E> {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, .. } = *self;
        let page_size = self.page_size.unwrap_or(seqlen_kv);
        let columns = self.page_size.map_or(1, |size| seqlen_kv / size.max(1));
        let pages = batch * columns;
        let drawn = drawn_pages(pages, page_size * num_heads_kv * head_dim);
        let kv = [drawn, page_size, num_heads_kv, head_dim];
        let no_table = || Error::Option("the block table is no matrix".to_owned());
        let table = || Array::new(&[batch, columns], shuffled(pages, seed)).ok_or_else(no_table);
        let chosen = |entry: usize, chosen: usize| {
            let mut some = random::choose(chosen - 1, columns - 1, seed, 3 + entry as u64);
            some.push(columns - 1);
            some
        };
        let lengths = || self.lengths().into_iter().map(|length| length as i32).collect::<Vec<_>>();
        Ok(DecodeData {
            q: draw("q", &[batch, seqlen_q, num_heads_q, head_dim], 0)?,
            k: draw("k", &kv, 1)?,
            v: draw("v", &kv, 2)?,
            pages,
            block_table: self.page_size.map(|_| table()).transpose()?,
            seqused_kv: (self.fill != Fill::Full).then(|| lengths().into()),
            chosen: self.chosen.map(|count| (0..batch).map(|at| chosen(at, count)).collect()),
            sink: None,
            seed,
        })
    }
}

/// Queries, the cache, perhaps several times, and the outputs.
#[derive(Debug)]
pub struct DecodeOperands {
    inputs: Inputs,
    o: Tensor,
    lse: Option<Tensor>,
    /// Number of the next launch.
    next: usize,
    prepared: Option<PreparedAttentionDecode>,
    /// Where the keys that each sequence visits are stored, and how many they are.
    slots: Vec<usize>,
    counts: Vec<usize>,
}

#[derive(Debug)]
struct Inputs {
    scores: Scores,
    data: DecodeData,
    q: Tensor,
    sink: Option<Tensor>,
    /// Keys and values: at least one copy. On the CPU, the first one is that of the host.
    copies: Vec<[Option<Tensor>; 2]>,
    /// Block tables of a cache in pages: more than one if pages are chosen, so that the chosen ones
    /// are stored elsewhere.
    block_tables: Vec<Tensor>,
    lengths: Option<Tensor>,
    /// Lists of chosen pages, and how many each sequence has.
    chosen: Option<[Tensor; 2]>,
    workspace: Option<AttentionDecodeWorkspace>,
}

impl Inputs {
    fn new(scores: Scores, data: DecodeData, stream: &Stream) -> Result<Self> {
        let upload = |array: &Option<Array>| -> Result<Option<Tensor>> {
            Ok(array.as_ref().map(|array| array.upload(stream)).transpose()?)
        };
        let in_place = stream.device().is_cpu() && data.k.shape().first() == Some(&data.pages);
        let cache = |host: &Array| -> Result<Option<Tensor>> {
            Ok(if in_place { None } else { Some(repeated(host, data.pages, stream)?) })
        };
        let heads = data.k.shape().get(2).copied().unwrap_or(0);
        let lists = |chosen: &Vec<Vec<usize>>| -> Result<[Tensor; 2]> {
            let (batch, longest) = (chosen.len(), chosen.first().map_or(0, Vec::len));
            let columns = chosen.iter().flat_map(|columns| columns.repeat(heads));
            let columns: Vec<_> = columns.map(|column| column as i32).collect();
            Ok([
                Tensor::from_slice(stream, &columns, &[batch, heads, longest])?,
                Tensor::from_slice(stream, &vec![longest as i32; batch], &[batch])?,
            ])
        };
        Ok(Self {
            scores,
            q: data.q.upload(stream)?,
            sink: upload(&data.sink)?,
            copies: vec![[cache(&data.k)?, cache(&data.v)?]],
            block_tables: upload(&data.block_table)?.into_iter().collect(),
            lengths: upload(&data.seqused_kv)?,
            chosen: data.chosen.as_ref().map(lists).transpose()?,
            workspace: None,
            data,
        })
    }

    fn call(&self) -> AttentionDecode<'_> {
        let Scores { mask, softmax_scale, softcap } = self.scores;
        let pages = self.chosen.as_ref();
        AttentionDecode {
            mask,
            softmax_scale,
            softcap,
            sink: self.sink.as_ref().map(Tensor::view),
            pages: pages
                .map(|[lists, counts]| PageLists { lists: lists.view(), counts: counts.view() }),
            workspace: self.workspace.as_ref(),
            ..AttentionDecode::new(self.q.view())
        }
    }

    /// What the launch with this number reads.
    fn cache(&self, launch: usize) -> Result<KvCache<'_>> {
        let [k, v] = &self.copies[launch % self.copies.len()];
        let block_table = self.block_tables.get(launch % self.block_tables.len().max(1));
        Ok(KvCache {
            block_table: block_table.map(Tensor::view),
            seqused_kv: self.lengths.as_ref().map(Tensor::view),
            ..KvCache::new(stored(k, &self.data.k)?, stored(v, &self.data.v)?)
        })
    }

    fn problem(&self) -> Result<AttentionDecodeProblem> {
        Ok(self.call().problem(&self.cache(0)?)?)
    }

    /// Bytes that suffice for every kernel, also those that the library does not select.
    fn workspace_bytes(&self, stream: &Stream) -> Result<usize> {
        let (problem, mut most) = (self.problem()?, 0);
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

    fn operands<'o>(
        &'o self,
        launch: usize,
        o: ViewMut<'o>,
        lse: Option<ViewMut<'o>>,
    ) -> Result<AttentionDecodeOperands<'o>> {
        Ok(AttentionDecodeOperands { cache: CacheAccess::Read(self.cache(launch)?), o, lse })
    }
}

/// A tensor, or the array in its place.
fn stored<'a>(tensor: &'a Option<Tensor>, host: &'a Array) -> Result<View<'a>> {
    match tensor {
        Some(tensor) => Ok(tensor.view()),
        None => Ok(host.view()?),
    }
}

impl DecodeOperands {
    /// Places the data on the stream's device and allocates the outputs, with the log-sum-exp if it
    /// is wanted.
    ///
    /// # Errors
    /// If lengths or pages are out of range, the library refuses the call, or there is not enough
    /// memory.
    pub fn new(scores: Scores, data: DecodeData, wants_lse: bool, stream: &Stream) -> Result<Self> {
        let (slots, counts) = data.visited()?;
        let mut inputs = Inputs::new(scores, data, stream)?;
        let bytes = inputs.workspace_bytes(stream)?;
        if bytes > 0 {
            inputs.workspace = Some(AttentionDecodeWorkspace::new(stream, bytes)?);
        }
        let attention = inputs.problem()?.attention;
        let shape = [attention.batch, attention.num_heads_q, attention.seqlen_q];
        let lse = wants_lse.then(|| Tensor::empty(stream, DType::F32, &shape)).transpose()?;
        let o = Tensor::empty(stream, attention.dtype, inputs.data.q.shape())?;
        Ok(Self { inputs, o, lse, next: 0, prepared: None, slots, counts })
    }
}

impl Operands for DecodeOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        let DecodeData { q, k, v, pages, .. } = &self.inputs.data;
        let cache = |array: &Array| [&[*pages], &array.shape()[1..]].concat();
        vec![
            ("q", q.shape().to_vec(), q.dtype()),
            ("k", cache(k), k.dtype()),
            ("v", cache(v), v.dtype()),
        ]
    }

    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        let problem = self.inputs.problem()?;
        let mut details = Scores::details(&problem.attention, true);
        let cache = &problem.cache;
        let pages = match cache.table {
            None => "contiguous".to_owned(),
            Some(_) => format!("{} pages of {}", count(cache.pages as u64), cache.page_size),
        };
        let keys = count(self.slots.len() as u64);
        details.push(("cache", format!("{pages}, {keys} keys of {} sequences", cache.batch)));
        Ok(details)
    }

    /// Those of the pairs that are visited.
    fn flops(&mut self) -> Result<f64> {
        let attention = self.inputs.problem()?.attention;
        let queries = attention.seqlen_q;
        let visible = |&keys: &usize| -> usize {
            (0..queries).map(|query| attention.mask.visible(query, queries, keys).len()).sum()
        };
        let pairs: usize = self.counts.iter().map(visible).sum();
        Ok(4.0 * pairs as f64 * (attention.num_heads_q * attention.head_dim) as f64)
    }

    fn is_empty(&mut self) -> Result<bool> {
        Ok(self.inputs.problem()?.is_empty())
    }

    fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel> {
        Ok(attention_decode::select(&self.inputs.problem()?, gpu)?)
    }

    fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool> {
        Ok(attention_decode::accepts(kernel, &self.inputs.problem()?, gpu).is_ok())
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let lse = self.lse.as_mut().map(Tensor::view_mut);
        let out = self.inputs.operands(self.next, self.o.view_mut(), lse)?;
        self.next += 1;
        Ok(match kernel {
            None => self.inputs.call().run(out, stream)?,
            Some(kernel) => self.inputs.call().run_with(kernel, out, stream)?,
        })
    }

    fn rotate(&mut self, stream: &Stream) -> Result<()> {
        let inputs = &mut self.inputs;
        let most = |bytes: usize| rotation_bytes(stream).div_ceil(bytes.max(1)).min(MAX_COPIES);
        let size = |keys: usize| {
            let DecodeData { k, .. } = &inputs.data;
            2 * keys * k.shape()[2..].iter().product::<usize>() * k.dtype().size()
        };
        let visited = size(self.slots.len());
        let all = size(inputs.data.pages * inputs.data.k.shape()[1]);
        if let (Some(_), Some(first)) = (&inputs.chosen, inputs.block_tables.first()) {
            let shape = first.shape().to_vec();
            for turn in 1..most(visited) {
                let table =
                    shuffled(shape.iter().product(), inputs.data.seed.wrapping_add(turn as u64));
                inputs.block_tables.push(Tensor::from_slice(stream, &table, &shape)?);
            }
        }
        for _ in 1..most(if inputs.chosen.is_some() { all } else { visited }) {
            let copy = |tensor: &Option<Tensor>| {
                tensor.as_ref().map(|tensor| tensor.copy_to(stream)).transpose()
            };
            let [k, v] = &inputs.copies[0];
            let copy = [copy(k)?, copy(v)?];
            inputs.copies.push(copy);
        }
        Ok(())
    }

    fn prepare(&mut self, stream: &Stream) -> Result<bool> {
        let lse = self.lse.as_mut().map(Tensor::view_mut);
        let out = self.inputs.operands(0, self.o.view_mut(), lse)?;
        self.prepared = Some(self.inputs.call().prepare(&out, stream)?);
        Ok(true)
    }

    fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
        let Some(prepared) = &self.prepared else { return self.launch(None, stream) };
        let lse = self.lse.as_mut().map(Tensor::view_mut);
        let out = self.inputs.operands(self.next, self.o.view_mut(), lse)?;
        self.next += 1;
        Ok(self.inputs.call().run_prepared(prepared, out, stream)?)
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let lse = self.lse.as_mut().map(|lse| ("lse", lse));
        [Some(("o", &mut self.o)), lse].into_iter().flatten().collect()
    }

    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Result<Vec<Comparison>> {
        let (DecodeData { q, k, v, sink, .. }, slots) = (&self.inputs.data, &self.slots);
        let attention = self.inputs.problem()?.attention;
        let (left, right, align) = sides(attention.mask)?;
        let queries = vec![attention.seqlen_q; self.counts.len()];
        let case = AttentionCase {
            q: &QueryRows::new(q),
            k: &CacheRows::new(k, slots),
            v: &CacheRows::new(v, slots),
            sink: sink.as_ref().map(|sink| sink as _),
            lengths: Some([&queries, &self.counts]),
            blocks: None,
            bottom_right: align == Align::BottomRight,
            left,
            right,
            softmax_scale: attention.softmax_scale,
            softcap: attention.softcap,
        };
        Ok(match results {
            [o, lse] => {
                // The oracle's packed sequences have the rows of a head side by side.
                let (o, lse) = (QueryRows::new(o), by_heads(lse));
                oracle::attention(&case, &o, &lse, seed, progress)?.to_vec()
            }
            [o] => vec![oracle::attention_output(&case, &QueryRows::new(o), seed, progress)?],
            _ => Vec::new(), // the output is always there
        })
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
mod tests {
    use super::*;
    use crate::case::Case;
    use blockflash_ops::Device;

    #[test]
    fn large_caches_repeat_an_odd_number_of_pages() {
        assert_eq!([drawn_pages(7, 1 << 20), drawn_pages(256, 1 << 20)], [7, 256]);
        assert_eq!([drawn_pages(257, 1 << 20), drawn_pages(300, 1 << 29)], [255, 1]);
        let stream = Device::cpu().stream().unwrap();
        let drawn = super::super::operands::normal(&[3, 2, 1, 2], DType::F32, 0, 0).unwrap();
        let (period, cache) = (drawn.to_f32(0..12), repeated(&drawn, 8, &stream).unwrap());
        assert_eq!(cache.shape(), [8, 2, 1, 2]);
        let values = cache.to_vec::<f32>(&stream).unwrap();
        assert!(values.iter().zip(period.iter().cycle()).all(|(one, other)| one == other));
    }

    #[test]
    fn what_cannot_be_drawn_is_no_case() {
        for id in [
            "decode_b2_q1_kv100_h4_d16_page16_full_bf16",
            "decode_b2_q1_kv96_h4_d16_page16top7_full_bf16",
            "decode_b2_q1_kv96_h4_d16_page16top2_power_bf16",
            "decode_b2_q17_kv96_h4_d16_page16top2_full_bf16",
            "decode_b2_q97_kv96_h4_d16_contiguous_full_bf16",
            "decode_b0_q1_kv96_h4_d16_contiguous_full_bf16",
        ] {
            assert!(id.parse::<Case>().is_err(), "{id}");
        }
    }

    #[test]
    fn work_counts_what_is_read() {
        let work = |id: &str| id.parse::<Case>().unwrap().work();
        let row = (2 * 2 * 16 * 2) as f64; // a key and a value of two heads
        let queries = |count: usize| (2 * count * 4 * 16 * 2) as f64;
        let full = work("decode_b2_q1_kv96_h4kv2_d16_contiguous_full_bf16");
        assert_eq!(full.bytes, 192.0 * row + queries(2));
        assert_eq!((full.flops, full.exps), (4.0 * 192.0 * 4.0 * 16.0, 192.0 * 4.0));
        // 96 / 3, 96 / 2 and 96 keys; each of two queries.
        let power = work("decode_b3_q2_kv96_h4kv2_d16_page16_power_bf16");
        assert_eq!(power.bytes, 176.0 * row + queries(6));
        assert_eq!(power.exps, (2.0 * 176.0 - 3.0) * 4.0);
        let chosen = work("decode_b2_q1_kv96_h4kv2_d16_page16top2_full_bf16");
        assert_eq!(chosen.bytes, 64.0 * row + queries(2));
    }
}
