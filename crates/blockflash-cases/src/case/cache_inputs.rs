//! Queries, the keys and values of a cache, and what happens to scores, on a device: what calls of
//! attention to a cache read.

use super::decode_data::{CacheValues, DecodeData};
use super::decode_rows::Rows;
use super::operands::{Placed, TensorInfo};
use crate::error::{Error, Result};
use crate::io::Array;
use crate::memory::count;
use blockflash_ops::kv_cache::CacheSizes;
use blockflash_ops::{AttentionDecodeWorkspace, KvCache, Scores, Stream, Tensor, View};

/// A cache of a given number of pages from those that were drawn, in their order, again and again.
pub(super) fn repeated(drawn: &Array, pages: usize, stream: &Stream) -> Result<Tensor> {
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

/// Queries and the cache, perhaps several times.
#[derive(Debug)]
pub(super) struct CacheInputs {
    pub(super) scores: Scores<Placed>,
    pub(super) q: Placed,
    /// Keys and values, and how many pages they have, of which the host may have fewer.
    pub(super) k: Placed,
    pub(super) v: CacheValues<Placed>,
    pub(super) pages: usize,
    /// Scales of keys and of values.
    pub(super) scales: [Option<Placed>; 2],
    /// Further copies of keys and values.
    pub(super) copies: Vec<(Tensor, CacheValues<Tensor>)>,
    /// Block tables of a cache in pages: more than one if pages are chosen, so that the chosen ones
    /// are stored elsewhere.
    pub(super) block_tables: Vec<Tensor>,
    pub(super) seed: u64,
    pub(super) lengths: Option<Placed>,
    pub(super) workspace: Option<AttentionDecodeWorkspace>,
}

impl CacheInputs {
    pub(super) fn new(scores: Scores<Array>, data: DecodeData, stream: &Stream) -> Result<Self> {
        let DecodeData { q, k, v, scales, pages, block_table, seqused_kv, chosen: _, seed } = data;
        let place = |array| Placed::new(array, stream);
        let cache = |host: Array| match host.shape().first() == Some(&pages) {
            true => place(host),
            false => Ok(Placed::with(repeated(&host, pages, stream)?, host)),
        };
        let [k_scale, v_scale] = scales;
        let table = block_table.map(|table| table.upload(stream)).transpose()?;
        Ok(Self {
            scores: scores.try_map(|_, array| place(array))?,
            q: place(q)?,
            k: cache(k)?,
            v: v.try_map(cache)?,
            pages,
            scales: [k_scale.map(place).transpose()?, v_scale.map(place).transpose()?],
            copies: Vec::new(),
            block_tables: table.into_iter().collect(),
            seed,
            lengths: seqused_kv.map(place).transpose()?,
            workspace: None,
        })
    }

    /// What happens to a score.
    pub(super) fn scores(&self) -> Result<Scores<View<'_>>> {
        self.scores.as_ref().try_map(|_, placed| placed.view())
    }

    /// What the launch with this number reads.
    pub(super) fn cache(&self, launch: usize) -> Result<KvCache<'_>> {
        let (k, v) = match (launch % (1 + self.copies.len())).checked_sub(1) {
            None => (self.k.view()?, self.v.as_ref().try_map(Placed::view)?),
            Some(copy) => {
                let (k, v) = &self.copies[copy];
                (k.view(), v.as_ref().try_map(|v| Ok::<_, Error>(v.view()))?)
            }
        };
        let cache = match v {
            CacheValues::Own(v) => KvCache::new(k, v),
            CacheValues::FirstColumns(columns) => KvCache::latent(k, columns)?,
        };
        let block_table = self.block_tables.get(launch % self.block_tables.len().max(1));
        let seqused_kv = self.lengths.as_ref().map(Placed::view).transpose()?;
        let block_table = block_table.map(Tensor::view);
        let [k_scale, v_scale] =
            self.scales.each_ref().map(|scale| scale.as_ref().map(Placed::view).transpose());
        let (k_scale, v_scale) = (k_scale?, v_scale?);
        Ok(KvCache { block_table, seqused_kv, k_scale, v_scale, ..cache })
    }

    /// Queries and cache of the launch with this number.
    pub(super) fn read(&self, launch: usize) -> Result<(View<'_>, KvCache<'_>)> {
        Ok((self.q.view()?, self.cache(launch)?))
    }

    /// Keys and values in some slots, of sequences that have `counts` of them, as the oracle takes
    /// packed sequences.
    pub(super) fn rows<'a>(&'a self, slots: &'a [usize], counts: &[usize]) -> [Rows<'a>; 2] {
        let (q, k) = (self.q.host().dtype(), self.k.host());
        let v = match &self.v {
            CacheValues::Own(v) => Rows::of_cache(v.host(), slots),
            &CacheValues::FirstColumns(columns) => Rows::of_cache(k, slots).columns(columns),
        };
        [(Rows::of_cache(k, slots), 0), (v, 1)].map(|(rows, at)| {
            let scale = self.scales[at].as_ref().map(Placed::host);
            if k.dtype().is_code() { rows.of_codes(q, scale, counts) } else { rows }
        })
    }

    /// Name, shape and type of each tensor.
    pub(super) fn infos(&self) -> Vec<TensorInfo> {
        let Self { q, k, v, pages, .. } = self;
        let cache = |name, cache: &Placed| {
            let host = cache.host();
            (name, [&[*pages], &host.shape()[1..]].concat(), host.dtype())
        };
        let mut inputs = vec![q.info("q"), cache("k", k)];
        if let CacheValues::Own(v) = v {
            inputs.push(cache("v", v));
        }
        inputs
    }

    /// Where the keys are, in words.
    pub(super) fn details(&self, cache: &CacheSizes, keys: usize) -> Vec<(&'static str, String)> {
        let pages = match cache.table {
            None => "contiguous".to_owned(),
            Some(_) => format!("{} pages of {}", count(cache.pages as u64), cache.page_size),
        };
        let mut details = Vec::new();
        if let CacheValues::FirstColumns(columns) = self.v {
            details.push(("v", format!("the first {columns} columns of k")));
        }
        let keys = count(keys as u64);
        details.push(("cache", format!("{pages}, {keys} keys of {} sequences", cache.batch)));
        details
    }
}
