//! The rows of a cache in host memory.

use super::{HostCache, HostScale, KvCache, Stored};
use crate::Result;
use blockflash_safe::{Stream, Tensor};
use blockflash_sys::{DType, HeadDims};
use std::ops::Range;

/// Keys and values of all sequences, where they are and what they stand for.
pub(crate) struct HostRows<'a, C> {
    pub(crate) host: HostCache,
    /// The elements of keys and values.
    kv: [&'a [C]; 2],
    scales: [Option<HostScale<'a>>; 2],
}

impl<'a, C: Stored> HostRows<'a, C> {
    pub(crate) fn new(cache: &KvCache<'a>, host: HostCache, stream: &Stream) -> Result<Self> {
        let kv = [cache.k.as_slice()?, cache.v.as_slice()?];
        let scales = HostScale::both([cache.k_scale, cache.v_scale], &host.sizes, stream)?;
        Ok(Self { host, kv, scales })
    }

    /// Copies of the keys and values at these positions, `[keys, heads, head_dim]`; of codes what
    /// they stand for, in f32.
    pub(crate) fn gather(
        &self,
        entry: usize,
        keys: impl ExactSizeIterator<Item = usize> + Clone,
        heads: Range<usize>,
        stream: &Stream,
    ) -> Result<[Tensor; 2]> {
        let copy = |at: usize, strides, width: usize| -> Result<Tensor> {
            let (source, shape) = (self.kv[at], [keys.len(), heads.len(), width]);
            let rows = keys.clone().flat_map(|key| heads.clone().map(move |head| [key, head]));
            let row = |[key, head]: [usize; 2]| {
                &source[self.host.row(strides, [entry, key, head])..][..C::stored(width)]
            };
            if !C::IS_CODED {
                let mut tensor = Tensor::empty(stream, C::DTYPE, &shape)?;
                let mut view = tensor.view_mut();
                let targets = view.as_mut_slice::<C>()?.chunks_exact_mut(width);
                targets.zip(rows).for_each(|(target, at)| target.copy_from_slice(row(at)));
                return Ok(tensor);
            }
            let mut tensor = Tensor::empty(stream, DType::F32, &shape)?;
            let mut view = tensor.view_mut();
            let targets = view.as_mut_slice::<f32>()?.chunks_exact_mut(width);
            for (target, [key, head]) in targets.zip(rows) {
                C::decode(row([key, head]), target);
                if let Some(scale) = &self.scales[at] {
                    let scale = scale.get(entry, self.host.slot(entry, key), head);
                    target.iter_mut().for_each(|x| *x *= scale);
                }
            }
            Ok(tensor)
        };
        let (sizes, HeadDims { qk, v }) = (&self.host.sizes, self.host.sizes.head_dims);
        Ok([copy(0, sizes.k, qk)?, copy(1, sizes.v, v)?])
    }
}
