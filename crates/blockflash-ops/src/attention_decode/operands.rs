use super::AttentionDecode;
use crate::Result;
use crate::check::Operand;
use crate::kv_append::AppendKv;
use crate::kv_cache::{KvCache, KvCacheMut};
use blockflash_safe::{Device, View, ViewMut};

/// What a call of [`AttentionDecode`](super::AttentionDecode) works with besides the queries.
#[derive(Debug)]
pub struct AttentionDecodeOperands<'o> {
    /// The cache.
    pub cache: CacheAccess<'o>,
    /// The output, in the shape of q with the `head_dim` of v, in the element type of q.
    pub o: ViewMut<'o>,
    /// The log-sum-exp, f32 `[batch, num_heads_q, seqlen_q]`, or `[num_heads_q, total_q]`.
    pub lse: Option<ViewMut<'o>>,
}

/// What a call of [`AttentionDecode`](super::AttentionDecode) does with the cache.
#[derive(Debug)]
pub enum CacheAccess<'o> {
    /// Reads it.
    Read(KvCache<'o>),
    /// Appends to it first.
    Append(&'o AppendKv<'o>, KvCacheMut<'o>),
}

impl<'o> CacheAccess<'o> {
    pub(super) fn as_cache(&self) -> Result<KvCache<'_>> {
        match self {
            Self::Read(cache) => Ok(*cache),
            Self::Append(_, cache) => cache.as_cache(),
        }
    }

    pub(super) fn seqused_kv(&self) -> Option<View<'o>> {
        match self {
            Self::Read(cache) => cache.seqused_kv,
            Self::Append(_, cache) => cache.seqused_kv,
        }
    }

    /// What is appended, and to what.
    pub(super) fn appended(&mut self) -> Option<(&AppendKv<'_>, KvCacheMut<'_>)> {
        match self {
            Self::Read(_) => None,
            Self::Append(new, cache) => Some((new, cache.reborrow())),
        }
    }

    pub(super) fn new_tokens(&self) -> Option<&AppendKv<'_>> {
        match self {
            Self::Read(_) => None,
            Self::Append(new, _) => Some(new),
        }
    }
}

impl AttentionDecode<'_> {
    /// Checks that every input is on this device.
    pub(super) fn on(&self, device: &Device) -> Result<()> {
        let inputs = [
            ("q", Some(&self.q)),
            ("cu_seqlens.q", self.packed.as_ref().map(|packed| &packed.cu_seqlens)),
            ("pages.lists", self.pages.as_ref().map(|pages| &pages.lists)),
            ("pages.counts", self.pages.as_ref().map(|pages| &pages.counts)),
            ("tail_mask", self.tail_mask.as_ref()),
        ];
        for (what, view) in inputs {
            view.map_or(Ok(()), |view| Operand::new(what, view).on(device))?;
        }
        self.scores.on(device)?;
        self.rotary.map_or(Ok(()), |rotary| rotary.on(device))?;
        self.workspace.map_or(Ok(()), |workspace| workspace.on(device))
    }
}
