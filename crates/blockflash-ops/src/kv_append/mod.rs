//! Appends new keys and values to a cache, with rotary position embedding.

mod cpu;
mod latent;
mod latent_codes;
mod plan;
mod problem;
mod select;

pub use latent_codes::{AppendLatentCodes, LatentCodesMut};
pub use plan::{AppendKvPlan, plan};
pub use problem::AppendKvProblem;
pub use select::{accepts, select};

pub(crate) use plan::plan_with;
pub(crate) use select::select_for;

use crate::Result;
use crate::check::{Operand, aligned};
use crate::kv_cache::{
    CacheValues, HostCache, KvCache, KvCacheMut, PackedTokens, Rotary, token_ranges,
};
use crate::operation::{Operation, Prepared, Steps};
use blockflash_safe::{
    CudaProperties, Device, KvAppendOperands, Launch as _, NewKeys, NewScales, Stream,
    TurnedQueries, View,
};
use blockflash_sys::{Kernel, manifest};

/// New keys and values for a cache: one append without attention, or the first half of
/// [`AttentionDecode::append`](crate::AttentionDecode::append).
///
/// The lengths of the cache count the new tokens: of a sequence with `n` of them, token `i` goes to
/// position `seqused_kv - n + i`. A token whose position is negative or beyond the capacity is
/// dropped. Sequences must not append to a page that they share: it would hold the token of either.
/// Lengths and offsets are read on the device, and whatever they hold, nothing outside the cache is
/// written.
///
/// [`latent`](Self::latent) appends to a cache whose values are columns of the keys.
///
/// Into a cache of codes (`e4m3`, `e5m2`, `i8`) rows of f16, bf16 and f32 go divided by their scale
/// ([`KvCache::k_scale`], 1 without one), rounded to nearest with ties to even, and saturated at
/// ±448, ±57344 or ±127, infinities as well; keys are turned before that, in f32. NaN is NaN, and 0
/// for `i8`. Scales are given, or the append chooses those of its rows
/// ([`CacheScale::PerToken`](crate::CacheScale::PerToken)).
///
/// A GPU takes new rows of f16 and bf16 with a `head_dim` of any multiple of 8, of 16 for a cache
/// of codes, pages of a multiple of 16 slots, and pointers and strides of multiples of 16 bytes.
/// The CPU takes every problem, and stores the same bits.
///
/// ```
/// # use blockflash_ops::{AppendKv, Device, DType, KvCacheMut, Tensor};
/// # let stream = Device::cpu().stream()?;
/// let mut k = Tensor::zeros(&stream, DType::F32, &[1, 100, 2, 64])?; // room for 100 tokens
/// let mut v = Tensor::zeros(&stream, DType::F32, &[1, 100, 2, 64])?;
/// let seqused_kv = Tensor::from_slice(&stream, &[5], &[1])?; // three before, two new ones
/// let new = Tensor::from_slice(&stream, &vec![1f32; 2 * 2 * 64], &[1, 2, 2, 64])?;
///
/// let cache = KvCacheMut {
///     seqused_kv: Some(seqused_kv.view()),
///     ..KvCacheMut::new(k.view_mut(), v.view_mut())
/// };
/// AppendKv::new(new.view(), new.view()).append_into(cache, &stream)?;
/// assert_eq!(k.to_vec::<f32>(&stream)?[2 * 128..6 * 128].iter().sum::<f32>(), 256.0);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AppendKv<'a> {
    /// Keys, `[batch, tokens, num_heads_kv, head_dim]`, or packed
    /// `[total, num_heads_kv, head_dim]`, in the element type of the cache; for a cache of codes in
    /// f16, bf16 or f32.
    pub k: View<'a>,
    /// Values, in the shape of the keys but for the `head_dim` of the cached values. `None` for a
    /// [latent cache](KvCache::latent): `k` has all columns, see [`latent`](Self::latent).
    pub v: Option<View<'a>>,
    /// Set when the sequences have unequal numbers of new tokens.
    pub packed: Option<PackedTokens<'a>>,
    /// Turns the keys by their positions before they are stored.
    pub rotary: Option<Rotary<'a>>,
}

/// See [`Operation::prepare`].
pub type PreparedAppendKv = Prepared<AppendKvProblem>;

impl<'a> AppendKv<'a> {
    /// Equally many tokens for every sequence, stored as they are.
    pub const fn new(k: View<'a>, v: View<'a>) -> Self {
        Self { k, v: Some(v), packed: None, rotary: None }
    }

    /// Appends. On a GPU nothing is allocated and the stream is not synchronised, so a graph can
    /// capture the call. On the CPU it returns when the cache is written.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`;
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if an operand is not on the stream's
    /// device; on the CPU [`Error::InvalidCuSeqlens`](crate::Error::InvalidCuSeqlens).
    pub fn append_into(&self, cache: KvCacheMut<'_>, stream: &Stream) -> Result<()> {
        self.run(cache, stream)
    }

    /// Checks that every input is on this device.
    pub(crate) fn on(&self, device: &Device) -> Result<()> {
        Operand::new("new.k", &self.k).on(device)?;
        if let Some(v) = &self.v {
            Operand::new("new.v", v).on(device)?;
        }
        if let Some(packed) = &self.packed {
            Operand::new("cu_seqlens.q", &packed.cu_seqlens).on(device)?;
        }
        self.rotary.map_or(Ok(()), |rotary| rotary.on(device))
    }

    /// Checks addresses for a kernel.
    pub(crate) fn aligned(&self, cache: &KvCacheMut<'_>) -> Result<()> {
        aligned("new.k", &self.k)?;
        self.v.map_or(Ok(()), |v| aligned("new.v", &v))?;
        let cache = cache.as_cache()?;
        aligned("cache.k", &cache.k)?;
        aligned("cache.v", &cache.v)
    }

    /// Everything of [`Steps::checked`].
    pub(crate) fn checked_with(
        &self,
        cache: &KvCacheMut<'_>,
        device: &Device,
    ) -> Result<AppendKvProblem> {
        let read = cache.as_cache()?;
        let problem = self.problem(&read)?;
        self.check_form(&problem, cache)?;
        self.on(device)?;
        read.on(device)?;
        Ok(AppendKvProblem { chooses: cache.chooses(&problem.cache)?, ..problem })
    }

    /// Verifies where the new tokens go in a cache that was verified.
    pub(crate) fn verify_in(
        &self,
        host: &HostCache,
        cache: &KvCache<'_>,
        problem: &AppendKvProblem,
        stream: &Stream,
    ) -> Result<()> {
        let sizes = [problem.cache.batch, problem.tokens];
        let ranges = token_ranges(self.packed.as_ref(), sizes, problem.packed, stream)?;
        host.verify_append(&ranges)?;
        host.verify_scales(cache, problem.chooses, |entry| ranges[entry].len(), stream)
    }
}

/// Queues a planned append, and the turning of queries that was planned with it.
pub(crate) fn launch(
    kernel: &Kernel,
    AppendKvPlan { plan, config }: &AppendKvPlan,
    seqused: Option<View<'_>>,
    new: Option<(&AppendKv<'_>, &AppendKvProblem, KvCacheMut<'_>)>,
    queries: Option<TurnedQueries<'_>>,
    stream: &Stream,
) -> Result<()> {
    let new = new.map(|(new, problem, cache)| -> Result<_> {
        let [k, v] = new.parts(problem)?;
        let (cache_k, cache_v) = match cache.v {
            CacheValues::Own(v) => (cache.k, v),
            // The keys of the kernel are the columns behind the values, which may be turned.
            CacheValues::FirstColumns(_) => {
                let (values, behind) = cache.k.split_columns(problem.head_dims.v)?;
                (behind, values)
            }
        };
        Ok(NewKeys {
            cache_k,
            cache_v,
            block_table: cache.block_table,
            k,
            v,
            cu_seqlens: new.packed.map(|packed| packed.cu_seqlens),
            rotary: new.rotary.map(|rotary| [rotary.cos, rotary.sin]),
            scales: [cache.k_scale, cache.v_scale].map(|scale| scale.map(NewScales::from)),
        })
    });
    let operands = KvAppendOperands { seqused, new: new.transpose()?, queries };
    if manifest::KvAppendCodes::of(kernel).is_some() {
        stream.launch::<manifest::KvAppendCodes>(kernel, config, plan, operands)?;
    } else {
        stream.launch::<manifest::KvAppend>(kernel, config, plan, operands)?;
    }
    Ok(())
}

impl Steps for AppendKv<'_> {
    type Problem = AppendKvProblem;
    type Plan = AppendKvPlan;
    type Out<'o> = KvCacheMut<'o>;

    fn is_empty(problem: &AppendKvProblem) -> bool {
        problem.is_empty()
    }

    fn checked(&self, cache: &KvCacheMut<'_>, stream: &Stream) -> Result<AppendKvProblem> {
        self.checked_with(cache, stream.device())
    }

    fn has_data(problem: &AppendKvProblem) -> bool {
        problem.packed.is_some() || HostCache::has_data(&problem.cache)
    }

    fn verify(
        &self,
        problem: &AppendKvProblem,
        cache: &KvCacheMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let cache = cache.as_cache()?;
        let host = HostCache::new(&cache, problem.cache, stream)?;
        host.verify()?;
        self.verify_in(&host, &cache, problem, stream)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &AppendKvProblem,
        gpu: &CudaProperties,
    ) -> Result<AppendKvPlan> {
        plan::plan(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        plan: &AppendKvPlan,
        problem: &AppendKvProblem,
        cache: KvCacheMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.aligned(&cache)?;
        let seqused = cache.seqused_kv;
        launch(kernel, plan, seqused, Some((self, problem, cache)), None, stream)
    }

    fn compute(
        &self,
        problem: &AppendKvProblem,
        cache: KvCacheMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::append(self, problem, cache, stream)
    }
}

#[cfg(test)]
mod latent_tests;
#[cfg(test)]
mod tests;
