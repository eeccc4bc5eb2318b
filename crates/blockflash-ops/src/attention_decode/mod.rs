//! Attention of new queries to a cache of keys and values.

mod cpu;
mod division;
pub(crate) mod estimate;
pub(crate) mod items;
mod launches;
mod many;
mod operands;
mod pages;
mod params;
mod plan;
mod prefill;
mod problem;
mod select;
mod support;
mod tail;
pub(crate) mod tile;
mod workspace;

pub use operands::{AttentionDecodeOperands, CacheAccess};
pub use pages::{PageListSizes, PageLists};
pub use plan::{AttentionDecodePlan, plan, workspace_bytes};
pub use problem::AttentionDecodeProblem;
pub use select::{accepts, select};
pub use tail::TailMaskSizes;
pub use tile::{CacheTile, LatentTile, tile};
pub use workspace::AttentionDecodeWorkspace;

pub(crate) use support::support;

use self::launches::{Launches, Planned, launch_few};
use self::pages::HostPages;
use self::prefill::PrefillPlan;
use crate::attention::{AttentionOutput, Mask, Scores};
use crate::check::{Operand, aligned};
use crate::kv_append::{self, AppendKv};
use crate::kv_cache::{HostCache, KvCache, KvCacheMut, PackedTokens, Rotary, token_ranges};
use crate::operation::{Operation, Prepared, Steps};
use crate::{Error, Result};
use blockflash_safe::{
    AttentionCombineOperands, CudaProperties, Device, KvCacheViews, Stream, Tensor, TurnedQueries,
    View, ViewMut,
};
use blockflash_sys::{DType, Kernel, manifest};

/// Attention of the last tokens of each sequence to the keys and values in a cache: what
/// [`Attention`](crate::Attention) computes with the keys of the sequence as `k` and `v`. A call
/// can also append the keys and values of these tokens first.
///
/// ```
/// # use blockflash_ops::{
/// #     AppendKv, AttentionDecode, Device, DType, KvCacheMut, Mask, PackedTokens, Tensor,
/// # };
/// # let stream = Device::cpu().stream()?;
/// // 8 pages of 16 slots; two sequences.
/// let mut k = Tensor::zeros(&stream, DType::F32, &[8, 16, 2, 64])?;
/// let mut v = Tensor::zeros(&stream, DType::F32, &[8, 16, 2, 64])?;
/// let block_table = Tensor::from_slice(&stream, &[4, 1, 7, 2], &[2, 2])?;
/// // A prompt of 20 tokens, and one token after 9 that are in the cache.
/// let cu_seqlens = Tensor::from_slice(&stream, &[0, 20, 21], &[3])?;
/// let seqused_kv = Tensor::from_slice(&stream, &[20, 10], &[2])?;
/// let q = Tensor::zeros(&stream, DType::F32, &[21, 4, 64])?;
/// let new = Tensor::zeros(&stream, DType::F32, &[21, 2, 64])?;
///
/// let packed = Some(PackedTokens { cu_seqlens: cu_seqlens.view(), max_seqlen: 20 });
/// let decode =
///     AttentionDecode { scores: Mask::causal().into(), packed, ..AttentionDecode::new(q.view()) };
/// let cache = KvCacheMut {
///     block_table: Some(block_table.view()),
///     seqused_kv: Some(seqused_kv.view()),
///     ..KvCacheMut::new(k.view_mut(), v.view_mut())
/// };
/// let new = AppendKv { packed, ..AppendKv::new(new.view(), new.view()) };
/// let output = decode.append(&new, cache, &stream)?;
/// assert_eq!((output.o.shape(), output.lse.shape()), (&[21, 4, 64][..], &[4, 21][..]));
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// Query `i` of `n` of a sequence with `length` keys stands at key `length - n + i` under a mask
/// that is aligned bottom-right. What [`Attention`](crate::Attention) promises about NaN, about
/// queries that see nothing and about precision holds here, whatever is in slots beyond the
/// length. With [`batch_invariant`](Self::batch_invariant) the bits of a sequence depend on no
/// other sequence of the batch. They may depend on how the call names it: sequences with lengths on
/// the device, packed ones and those with listed pages may be divided in another way than those
/// whose length the host knows.
///
/// A cache of codes (`e4m3`, `e5m2`, `i8`) stands for codes times scales ([`KvCache::k_scale`]),
/// beside queries and an output of f16, bf16 or f32. The codes are exact in all of these.
///
/// A GPU takes f16 and bf16 with a `head_dim` of any multiple of 8 up to 512 (beside codes of 16 up
/// to 256), pages of a multiple of 16 slots, and pointers and strides of multiples of 16 bytes; a
/// bias, ALiBi and [`tail_mask`](Self::tail_mask) up to a `head_dim` of 256, beside all of that but
/// codes. The CPU takes every problem.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDecode<'a> {
    /// Queries, `[batch, seqlen_q, num_heads_q, head_dim]`, or packed
    /// `[total_q, num_heads_q, head_dim]`, in the element type of the cache; beside codes in f16,
    /// bf16 or f32.
    pub q: View<'a>,
    /// Set when the sequences have unequal numbers of queries.
    pub packed: Option<PackedTokens<'a>>,
    /// What happens to a score.
    pub scores: Scores<View<'a>>,
    /// Turns the queries by their positions: query `i` of `n` by position `seqused_kv - n + i`,
    /// clamped to the positions of the tables. The keys in the cache are turned already, or by
    /// [`AppendKv::rotary`]. Queries of a [latent cache](KvCache::latent) come turned.
    pub rotary: Option<Rotary<'a>>,
    /// Visits only these pages of a paged cache; keys of others do not exist for the softmax.
    pub pages: Option<PageLists<'a>>,
    /// Hides some of the last keys of each sequence from each of its queries, as a tree of drafted
    /// tokens does: u8 `[batch, seqlen_q, tail]`, where the batch may be 1 instead and then serves
    /// all, or `[total_q, tail]` for packed queries, with `tail` from 1 to the capacity, contiguous
    /// keys and any other strides. Of a sequence with `length` keys, query `i` sees key
    /// `length - tail + j` only where entry `j` of its row is not 0. The mask of the scores holds
    /// as well, and alone for keys before the tail. Entries for keys below 0 are ignored.
    pub tail_mask: Option<View<'a>>,
    /// Makes the bits of a sequence depend on no other sequence of the batch, nor on their number.
    /// Otherwise kernels and splits of the keys are chosen so that the batch fills the GPU. Packed
    /// sequences and those with listed pages are split by their own length alone in any case,
    /// unless the cache is [latent](KvCache::latent).
    pub batch_invariant: bool,
    /// Memory for the results of parts of sequences, of at least
    /// [`workspace_bytes`](Self::workspace_bytes). The same for any number of calls.
    pub workspace: Option<&'a AttentionDecodeWorkspace>,
}

/// See [`Operation::prepare`].
pub type PreparedAttentionDecode = Prepared<AttentionDecodeProblem>;

impl<'a> AttentionDecode<'a> {
    /// Full attention with the default scale and equally many queries for every sequence.
    pub const fn new(q: View<'a>) -> Self {
        Self {
            q,
            packed: None,
            scores: Scores::of(Mask::Full),
            rotary: None,
            pages: None,
            tail_mask: None,
            batch_invariant: false,
            workspace: None,
        }
    }

    /// Computes into the caller's tensors. On a GPU nothing is allocated and the stream is not
    /// synchronised, so a graph can capture the call, and its replays follow the lengths. On the
    /// CPU it returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; [`Error::Shape`] for outputs that
    /// do not fit and for a workspace that is too small; [`Error::DeviceMismatch`] if an operand is
    /// not on the stream's device; on the CPU [`Error::InvalidCuSeqlens`].
    pub fn forward_into(
        &self,
        operands: AttentionDecodeOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.run(operands, stream)
    }

    /// Allocates the outputs, and a workspace if there is none, and computes. Packed rows that
    /// belong to no sequence are 0.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into), and out of memory.
    pub fn forward(&self, cache: KvCache<'_>, stream: &Stream) -> Result<AttentionOutput> {
        self.allocated(CacheAccess::Read(cache), stream)
    }

    /// Like [`forward`](Self::forward) after new keys and values are appended to the cache.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and all checks of [`AppendKv::problem`].
    pub fn append(
        &self,
        new: &AppendKv<'_>,
        cache: KvCacheMut<'_>,
        stream: &Stream,
    ) -> Result<AttentionOutput> {
        self.allocated(CacheAccess::Append(new, cache), stream)
    }

    fn allocated(&self, cache: CacheAccess<'_>, stream: &Stream) -> Result<AttentionOutput> {
        let problem = self.problem(&cache.as_cache()?)?;
        let attention = &problem.attention;
        let mut o = Tensor::zeros(stream, attention.types.o, &attention.o_shape())?;
        let mut lse = Tensor::zeros(stream, DType::F32, &attention.lse_shape())?;
        let own = match (self.workspace, problem.workspace_bytes(stream.device())?) {
            (None, bytes @ 1..) => Some(AttentionDecodeWorkspace::new(stream, bytes)?),
            _ => None,
        };
        let workspace = self.workspace.or(own.as_ref());
        let call = AttentionDecode { workspace, ..*self };
        let operands =
            AttentionDecodeOperands { cache, o: o.view_mut(), lse: Some(lse.view_mut()) };
        call.forward_into(operands, stream)?;
        Ok(AttentionOutput { o, lse })
    }

    /// Bytes of workspace that a call needs on a device; 0 on the CPU. They follow from the sizes
    /// of q and from the capacity, not from the lengths.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`.
    pub fn workspace_bytes(&self, cache: &KvCache<'_>, device: &Device) -> Result<usize> {
        self.problem(cache)?.workspace_bytes(device)
    }

    /// The operands of a launch.
    pub(crate) fn operands<'s>(
        &'s self,
        cache: KvCacheViews<'s>,
        o: ViewMut<'s>,
        lse: Option<ViewMut<'s>>,
    ) -> blockflash_safe::AttentionDecodeOperands<'s> {
        blockflash_safe::AttentionDecodeOperands {
            // The output holds turned queries.
            q: self.rotary.is_none().then_some(self.q),
            cache,
            o,
            lse,
            sink: self.scores.sink,
            cu_seqlens_q: self.packed.map(|packed| packed.cu_seqlens),
            pages: self.pages.map(|pages| [pages.lists, pages.counts]),
            terms: self.scores.terms(),
            tail_mask: self.tail_mask,
            workspace: self.workspace.map(AttentionDecodeWorkspace::memory),
        }
    }
}

impl Steps for AttentionDecode<'_> {
    type Problem = AttentionDecodeProblem;
    type Plan = Launches;
    type Out<'o> = AttentionDecodeOperands<'o>;

    fn is_empty(problem: &AttentionDecodeProblem) -> bool {
        problem.is_empty()
    }

    fn checked(
        &self,
        operands: &AttentionDecodeOperands<'_>,
        stream: &Stream,
    ) -> Result<AttentionDecodeProblem> {
        let AttentionDecodeOperands { cache, o, lse } = operands;
        let (read, device) = (cache.as_cache()?, stream.device());
        let mut problem = self.problem(&read)?;
        problem.attention = problem.attention.with_outputs(o, lse.as_ref())?;
        problem.append = match cache {
            CacheAccess::Append(new, cache) => Some(new.checked_with(cache, device)?),
            CacheAccess::Read(_) => None,
        };
        if problem.append.is_some_and(|append| append.is_latent()) {
            self.not_turned()?;
        }
        self.on(device)?;
        read.on(device)?;
        Operand::of_mut("o", o).on(device)?;
        lse.as_ref().map_or(Ok(()), |lse| Operand::of_mut("lse", lse).on(device))?;
        Ok(problem)
    }

    fn has_data(problem: &AttentionDecodeProblem) -> bool {
        let packed = problem.attention.packed.is_some()
            || problem.append.is_some_and(|append| append.packed.is_some());
        packed || HostCache::has_data(&problem.cache)
    }

    fn verify(
        &self,
        problem: &AttentionDecodeProblem,
        operands: &AttentionDecodeOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let AttentionDecodeProblem { attention, cache: sizes, append, .. } = problem;
        let cache = operands.cache.as_cache()?;
        let host = HostCache::new(&cache, *sizes, stream)?;
        host.verify()?;
        let total = attention.packed.map(|packed| packed.total_q);
        token_ranges(self.packed.as_ref(), [sizes.batch, attention.seqlen_q], total, stream)?;
        match (operands.cache.new_tokens(), append) {
            (Some(new), Some(append)) => new.verify_in(&host, &cache, append, stream)?,
            _ => host.verify_scales(&cache, [false; 2], |_| 0, stream)?,
        }
        match &self.pages {
            Some(pages) => HostPages::new(pages, *sizes, stream)?.verify(),
            None => Ok(()),
        }
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &AttentionDecodeProblem,
        gpu: &CudaProperties,
    ) -> Result<Launches> {
        Launches::of(kernel, problem, gpu)
    }

    fn kernels(_: &'static Kernel, plan: &Launches) -> Vec<&'static Kernel> {
        plan.kernels()
    }

    fn launch(
        &self,
        _: &Kernel,
        plan: &Launches,
        problem: &AttentionDecodeProblem,
        operands: AttentionDecodeOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        // Everything is planned and checked before anything is queued.
        let needed = plan.workspace_bytes;
        let bytes = self.workspace.map_or(0, AttentionDecodeWorkspace::bytes);
        if bytes < needed {
            let expected = format!("[at least {needed}]");
            return Err(Error::Shape { what: "workspace", expected, found: vec![bytes] });
        }
        let attends = !problem.attention.is_empty();
        let AttentionDecodeOperands { mut cache, mut o, mut lse } = operands;
        aligned("q", &self.q)?;
        aligned("cache.k", &cache.as_cache()?.k)?;
        aligned("cache.v", &cache.as_cache()?.v)?;
        aligned("o", &o.as_view())?;
        if let CacheAccess::Append(new, cache) = &cache {
            new.aligned(cache)?;
        }
        if let Some((kernel, plan)) = &plan.first_step {
            let queries = self.rotary.filter(|_| attends).map(|rotary| TurnedQueries {
                q: self.q,
                turned: o.reborrow(),
                cu_seqlens: self.packed.map(|packed| packed.cu_seqlens),
                rotary: [rotary.cos, rotary.sin],
            });
            let append = problem.append.as_ref().filter(|append| !append.is_empty());
            let seqused = cache.seqused_kv();
            let new = cache.appended().zip(append);
            let new = new.map(|((new, cache), append)| (new, append, cache));
            kv_append::launch(kernel, plan, seqused, new, queries, stream)?;
        }
        let Some(Planned { many, few }) = &plan.attention else { return Ok(()) };
        let cache = cache.as_cache()?.views();
        if let Some((kernel, PrefillPlan { plan, config, combine })) = many {
            let operands = self.operands(cache, o.reborrow(), lse.as_mut().map(ViewMut::reborrow));
            stream.launch::<manifest::AttentionCacheHopper>(kernel, config, plan, operands)?;
            if let (Some((kernel, config)), Some(workspace)) = (combine, self.workspace) {
                let (o, lse) = (o.reborrow(), lse.as_mut().map(ViewMut::reborrow));
                let workspace = workspace.memory();
                let operands = AttentionCombineOperands { o, lse, workspace };
                let splits = &plan.splits;
                stream.launch::<manifest::AttentionCombine>(kernel, config, splits, operands)?;
            }
        }
        if let Some((kernel, AttentionDecodePlan { scalars, config, .. })) = few {
            let operands = self.operands(cache, o, lse);
            launch_few(kernel, config, scalars, operands, stream)?;
        }
        Ok(())
    }

    fn compute(
        &self,
        problem: &AttentionDecodeProblem,
        operands: AttentionDecodeOperands<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let AttentionDecodeOperands { cache, o, lse } = operands;
        match cache {
            CacheAccess::Read(cache) => cpu::forward(self, problem, &cache, (o, lse), stream),
            CacheAccess::Append(new, mut cache) => {
                new.run(cache.reborrow(), stream)?;
                cpu::forward(self, problem, &cache.as_cache()?, (o, lse), stream)
            }
        }
    }
}

#[cfg(test)]
mod codes_append_tests;
#[cfg(test)]
mod codes_tests;
#[cfg(test)]
mod latent_codes_tests;
#[cfg(test)]
mod latent_select_tests;
#[cfg(test)]
mod latent_tests;
#[cfg(test)]
mod tests;
