//! Operands of attention to a cache.

use super::decode::{DecodeShape, Fill};
use super::decode_rows::{CacheRows, QueryRows};
use super::operands::rotation_bytes;
use super::operands::{Operands, normal};
use crate::error::Result;
use crate::io::Array;
use crate::random;
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, AttentionDecodeProblem, AttentionDecodeWorkspace,
    CacheAccess, CudaProperties, Kernel, KvCache, Mask, Operation, PageLists,
    PreparedAttentionDecode, Stream, Tensor, ViewMut, attention_decode,
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

/// A cache of so many pages from those that were drawn, in their order, again and again.
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

/// Queries, the cache, perhaps several times, and the output.
#[derive(Debug)]
pub(super) struct DecodeOperands {
    shape: DecodeShape,
    seed: u64,
    inputs: Inputs,
    o: Tensor,
    /// Number of the next launch.
    next: usize,
    prepared: Option<PreparedAttentionDecode>,
    /// q, keys and values as they lie in memory, for the oracle; of a cache what was drawn.
    host: [Array; 3],
    /// Where the keys that each sequence visits lie there, one sequence behind the other.
    slots: Vec<usize>,
}

#[derive(Debug)]
struct Inputs {
    q: Tensor,
    /// Keys and values: at least one copy.
    copies: Vec<[Tensor; 2]>,
    /// Block tables of a cache in pages: more than one if pages are chosen, so that the chosen ones
    /// lie elsewhere.
    block_tables: Vec<Tensor>,
    lengths: Option<Tensor>,
    /// Lists of chosen pages, and how many each sequence has.
    chosen: Option<[Tensor; 2]>,
    workspace: Option<AttentionDecodeWorkspace>,
}

impl Inputs {
    fn call(&self) -> AttentionDecode<'_> {
        let pages = self.chosen.as_ref();
        AttentionDecode {
            mask: Mask::causal(),
            pages: pages
                .map(|[lists, counts]| PageLists { lists: lists.view(), counts: counts.view() }),
            workspace: self.workspace.as_ref(),
            ..AttentionDecode::new(self.q.view())
        }
    }

    /// What the launch with this number reads.
    fn cache(&self, launch: usize) -> KvCache<'_> {
        let [k, v] = &self.copies[launch % self.copies.len()];
        let block_table = self.block_tables.get(launch % self.block_tables.len().max(1));
        KvCache {
            block_table: block_table.map(Tensor::view),
            seqused_kv: self.lengths.as_ref().map(Tensor::view),
            ..KvCache::new(k.view(), v.view())
        }
    }
}

/// The pages of all sequences in a random order.
fn block_table(pages: usize, seed: u64) -> Vec<i32> {
    let mut table: Vec<_> = (0..pages as i32).collect();
    random::shuffle(&mut table, seed);
    table
}

/// Those that each sequence visits: numbers of its own pages, ascending.
fn visited_pages(shape: &DecodeShape, pages: usize, seed: u64) -> Vec<Vec<usize>> {
    let visited = |entry: usize| match shape.chosen {
        None => (0..pages).collect(),
        Some(chosen) => {
            let mut some = random::choose(chosen - 1, pages - 1, seed, 3 + entry as u64);
            some.push(pages - 1);
            some
        }
    };
    (0..shape.batch).map(visited).collect()
}

impl DecodeOperands {
    /// Draws the queries and one copy of the cache.
    pub(super) fn new(shape: &DecodeShape, stream: &Stream, seed: u64) -> Result<Self> {
        let DecodeShape { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim, .. } =
            *shape;
        let page_size = shape.page_size.unwrap_or(seqlen_kv);
        let pages = seqlen_kv / page_size;
        let q_shape = [batch, seqlen_q, num_heads_q, head_dim];
        let all_pages = batch * pages;
        let drawn = drawn_pages(all_pages, page_size * num_heads_kv * head_dim);
        let kv_shape = [drawn, page_size, num_heads_kv, head_dim];
        let host = [
            normal(&q_shape, shape.dtype, seed, 0)?,
            normal(&kv_shape, shape.dtype, seed, 1)?,
            normal(&kv_shape, shape.dtype, seed, 2)?,
        ];
        let mut inputs = Inputs {
            q: host[0].upload(stream)?,
            copies: vec![[
                repeated(&host[1], all_pages, stream)?,
                repeated(&host[2], all_pages, stream)?,
            ]],
            block_tables: Vec::new(),
            lengths: None,
            chosen: None,
            workspace: None,
        };
        let lengths = shape.lengths();
        if shape.fill != Fill::Full {
            let lengths: Vec<_> = lengths.iter().map(|&length| length as i32).collect();
            inputs.lengths = Some(Tensor::from_slice(stream, &lengths, &[batch])?);
        }
        let mut slots = Vec::new();
        if shape.page_size.is_none() {
            let of_entry =
                |(entry, length): (usize, usize)| (0..length).map(move |key| (entry, key));
            let all = lengths.into_iter().enumerate().flat_map(of_entry);
            slots.extend(all.map(|(entry, key)| entry * seqlen_kv + key));
        } else {
            let (table, visited) =
                (block_table(all_pages, seed), visited_pages(shape, pages, seed));
            for (entry, (columns, length)) in visited.iter().zip(lengths).enumerate() {
                let keys = columns.iter().flat_map(|page| page * page_size..(page + 1) * page_size);
                slots.extend(keys.filter(|&key| key < length).map(|key| {
                    table[entry * pages + key / page_size] as usize * page_size + key % page_size
                }));
            }
            inputs.block_tables.push(Tensor::from_slice(stream, &table, &[batch, pages])?);
            if let Some(chosen) = shape.chosen {
                let heads = |columns: &Vec<usize>| columns.repeat(num_heads_kv);
                let lists: Vec<_> =
                    visited.iter().flat_map(heads).map(|column| column as i32).collect();
                let lists = Tensor::from_slice(stream, &lists, &[batch, num_heads_kv, chosen])?;
                let counts = Tensor::from_slice(stream, &vec![chosen as i32; batch], &[batch])?;
                inputs.chosen = Some([lists, counts]);
            }
        }
        slots.iter_mut().for_each(|slot| *slot %= drawn * page_size);
        let o = Tensor::empty(stream, shape.dtype, &q_shape)?;
        let (shape, next, prepared) = (*shape, 0, None);
        let mut operands = Self { shape, seed, inputs, o, next, prepared, host, slots };
        let bytes = operands.workspace_bytes(stream)?;
        if bytes > 0 {
            operands.inputs.workspace = Some(AttentionDecodeWorkspace::new(stream, bytes)?);
        }
        Ok(operands)
    }

    fn problem(&self) -> Result<AttentionDecodeProblem> {
        Ok(self.inputs.call().problem(&self.inputs.cache(0))?)
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
}

fn operands<'o>(inputs: &'o Inputs, launch: usize, o: ViewMut<'o>) -> AttentionDecodeOperands<'o> {
    AttentionDecodeOperands { cache: CacheAccess::Read(inputs.cache(launch)), o, lse: None }
}

impl Operands for DecodeOperands {
    fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Kernel> {
        Ok(attention_decode::select(&self.problem()?, gpu)?)
    }

    fn accepts(&mut self, kernel: &Kernel, gpu: &CudaProperties) -> Result<bool> {
        Ok(attention_decode::accepts(kernel, &self.problem()?, gpu).is_ok())
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let out = operands(&self.inputs, self.next, self.o.view_mut());
        self.next += 1;
        match kernel {
            None => self.inputs.call().run(out, stream)?,
            Some(kernel) => self.inputs.call().run_with(kernel, out, stream)?,
        }
        Ok(())
    }

    fn rotate(&mut self, stream: &Stream) -> Result<()> {
        let most = |bytes: usize| rotation_bytes(stream).div_ceil(bytes).min(MAX_COPIES);
        let visited = self.shape.cache_bytes();
        let keys = &self.inputs.copies[0][0];
        let all = 2 * keys.layout().elements() * keys.dtype().size();
        if self.shape.chosen.is_some() {
            for turn in 1..most(visited) {
                let first = &self.inputs.block_tables[0];
                let pages = first.shape().iter().product();
                let table = block_table(pages, self.seed.wrapping_add(turn as u64));
                let table = Tensor::from_slice(stream, &table, first.shape())?;
                self.inputs.block_tables.push(table);
            }
        }
        for _ in 1..most(if self.shape.chosen.is_some() { all } else { visited }) {
            let [k, v] = &self.inputs.copies[0];
            let copy = [k.copy_to(stream)?, v.copy_to(stream)?];
            self.inputs.copies.push(copy);
        }
        Ok(())
    }

    fn prepare(&mut self, stream: &Stream) -> Result<bool> {
        let out = operands(&self.inputs, 0, self.o.view_mut());
        self.prepared = Some(self.inputs.call().prepare(&out, stream)?);
        Ok(true)
    }

    fn launch_prepared(&mut self, stream: &Stream) -> Result<()> {
        let Some(prepared) = &self.prepared else { return self.launch(None, stream) };
        let out = operands(&self.inputs, self.next, self.o.view_mut());
        self.next += 1;
        Ok(self.inputs.call().run_prepared(prepared, out, stream)?)
    }

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        vec![("o", &mut self.o)]
    }

    fn compare(
        &self,
        outputs: &[Array],
        seed: u64,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Result<Vec<Comparison>> {
        let [o] = outputs else { return Ok(Vec::new()) }; // it is always there
        let [q, k, v] = &self.host;
        let (k, v) = (CacheRows::new(k, &self.slots), CacheRows::new(v, &self.slots));
        let lengths = [vec![self.shape.seqlen_q; self.shape.batch], self.shape.visited()];
        let case = AttentionCase {
            q: &QueryRows::new(q),
            k: &k,
            v: &v,
            sink: None,
            lengths: Some([&lengths[0], &lengths[1]]),
            blocks: None,
            bottom_right: true,
            left: None,
            right: Some(0),
            softmax_scale: (self.shape.head_dim as f32).sqrt().recip(),
            softcap: None,
        };
        Ok(vec![oracle::attention_output(&case, &QueryRows::new(o), seed, progress)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;
    use blockflash_ops::{DType, Device};

    #[test]
    fn large_caches_repeat_an_odd_number_of_pages() {
        assert_eq!([drawn_pages(7, 1 << 20), drawn_pages(256, 1 << 20)], [7, 256]);
        assert_eq!([drawn_pages(257, 1 << 20), drawn_pages(300, 1 << 29)], [255, 1]);
        let stream = Device::cpu().stream().unwrap();
        let drawn = normal(&[3, 2, 1, 2], DType::F32, 0, 0).unwrap();
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
