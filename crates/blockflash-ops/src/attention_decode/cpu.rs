//! Attention to a cache on the CPU: each sequence is one call of ordinary attention to its keys,
//! which are copied out of their pages, or a call for each set of keys that its queries see. So its
//! bits depend on no other sequence.

use super::pages::HostPages;
use super::tail::HostTail;
use super::{AttentionDecode, AttentionDecodeProblem};
use crate::Result;
use crate::attention::cpu::sequence::Sequence;
use crate::attention::cpu::terms::Terms;
use crate::attention::{Attention, Mask, Scores};
use crate::float::Float;
use crate::kv_cache::{HostCache, HostRotary, HostRows, KvCache, Stored, token_ranges};
use blockflash_safe::{E4M3, E5M2, Stream, Tensor, View, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Computes a problem that was checked and has outputs.
pub(super) fn forward(
    op: &AttentionDecode<'_>,
    problem: &AttentionDecodeProblem,
    cache: &KvCache<'_>,
    out: (ViewMut<'_>, Option<ViewMut<'_>>),
    stream: &Stream,
) -> Result<()> {
    match problem.attention.types.q {
        DType::F16 => beside::<f16>(op, problem, cache, out, stream),
        DType::BF16 => beside::<bf16>(op, problem, cache, out, stream),
        _ => beside::<f32>(op, problem, cache, out, stream),
    }
}

/// The keys and values beside queries of this type.
fn beside<T: Float>(
    op: &AttentionDecode<'_>,
    problem: &AttentionDecodeProblem,
    cache: &KvCache<'_>,
    out: (ViewMut<'_>, Option<ViewMut<'_>>),
    stream: &Stream,
) -> Result<()> {
    match problem.attention.types.kv {
        DType::E4M3 => Call::<T, E4M3>::new(op, problem, cache, stream)?.run(out),
        DType::E5M2 => Call::<T, E5M2>::new(op, problem, cache, stream)?.run(out),
        DType::I8 => Call::<T, i8>::new(op, problem, cache, stream)?.run(out),
        DType::U8 => Call::<T, u8>::new(op, problem, cache, stream)?.run(out),
        _ => Call::<T, T>::new(op, problem, cache, stream)?.run(out),
    }
}

/// A call whose tables, lengths and lists are in host memory, with queries of a type and keys and
/// values of that type, or codes. Codes times their scales are f32, and so is then everything that
/// is computed of them, up to the output.
struct Call<'a, T, C> {
    op: &'a AttentionDecode<'a>,
    problem: &'a AttentionDecodeProblem,
    cache: &'a KvCache<'a>,
    cached: HostRows<'a, C>,
    pages: Option<HostPages>,
    tail: Option<HostTail<'a>>,
    rotary: Option<HostRotary>,
    terms: Option<Terms<'a>>,
    stream: &'a Stream,
    of_queries: PhantomData<T>,
}

/// Rows of one sequence: q and o `[rows, heads, their head_dim]`, lse `[heads, rows]`.
struct Rows<'r> {
    q: View<'r>,
    o: ViewMut<'r>,
    lse: Option<ViewMut<'r>>,
}

impl Rows<'_> {
    /// Some rows of some heads.
    fn part(&mut self, rows: Range<usize>, heads: Range<usize>) -> Result<Rows<'_>> {
        let lse = self.lse.as_mut().map(ViewMut::reborrow);
        Ok(Rows {
            q: self.q.slice(0, rows.clone())?.slice(1, heads.clone())?,
            o: self.o.reborrow().slice(0, rows.clone())?.slice(1, heads.clone())?,
            lse: lse.map(|lse| lse.slice(0, heads)?.slice(1, rows)).transpose()?,
        })
    }
}

impl<'a, T: Float, C: Stored> Call<'a, T, C> {
    fn new(
        op: &'a AttentionDecode<'a>,
        problem: &'a AttentionDecodeProblem,
        cache: &'a KvCache<'a>,
        stream: &'a Stream,
    ) -> Result<Self> {
        let host = HostCache::new(cache, problem.cache, stream)?;
        let cached = HostRows::new(cache, host, stream)?;
        let pages = op.pages.map(|pages| HostPages::new(&pages, problem.cache, stream));
        let rotary = op.rotary.map(|rotary| HostRotary::new(&rotary, stream));
        let (pages, rotary) = (pages.transpose()?, rotary.transpose()?);
        let terms = Terms::of(&op.scores)?;
        let tail = op.tail_mask.as_ref().map(HostTail::new).transpose()?;
        let of_queries = PhantomData;
        Ok(Self { op, problem, cache, cached, pages, tail, rotary, terms, stream, of_queries })
    }

    fn run(&self, (mut o, mut lse): (ViewMut<'_>, Option<ViewMut<'_>>)) -> Result<()> {
        let attention = &self.problem.attention;
        let total = attention.packed.map(|packed| packed.total_q);
        let sizes = [attention.batch, attention.seqlen_q];
        let ranges = token_ranges(self.op.packed.as_ref(), sizes, total, self.stream)?;
        for (entry, tokens) in ranges.into_iter().enumerate() {
            if tokens.is_empty() || attention.num_heads_q == 0 {
                continue;
            }
            let turned = self.turned(entry, &tokens)?;
            let first = if total.is_some() { tokens.start } else { 0 };
            let lse = lse.as_mut().map(ViewMut::reborrow);
            let mut all = Rows { q: self.op.q, o: o.reborrow(), lse };
            let rows = match total {
                Some(_) => all.part(tokens, 0..attention.num_heads_q)?,
                None => {
                    let (Rows { q, o, lse }, one) = (all, entry..entry + 1);
                    Rows {
                        q: q.slice(0, one.clone())?.flatten(0..2)?,
                        o: o.slice(0, one.clone())?.flatten(0..2)?,
                        lse: lse.map(|lse| lse.slice(0, one)?.flatten(0..2)).transpose()?,
                    }
                }
            };
            let q = turned.as_ref().map_or(rows.q, Tensor::view);
            let rows = Rows { q, ..rows };
            let at = [entry, first];
            if C::IS_CODED { self.in_f32(at, rows)? } else { self.sequence(at, rows)? }
        }
        Ok(())
    }

    /// One sequence whose output is computed in f32 and rounded to its type.
    fn in_f32(&self, at: [usize; 2], Rows { q, mut o, lse }: Rows<'_>) -> Result<()> {
        let elements = q.to_vec::<T>(self.stream)?;
        let mut wide = vec![0.0; elements.len()];
        T::widen(&elements, &mut wide);
        let wide = Tensor::from_slice(self.stream, &wide, q.shape())?;
        let mut sums = Tensor::zeros(self.stream, DType::F32, o.shape())?;
        self.sequence(at, Rows { q: wide.view(), o: sums.view_mut(), lse })?;
        let (sums, strides) = (sums.view().as_slice::<f32>()?, [o.strides()[0], o.strides()[1]]);
        let (heads, width) = (o.shape()[1], o.shape()[2]);
        let target = o.as_mut_slice::<T>()?;
        for (row, sums) in sums.chunks_exact(width).enumerate() {
            let start = row / heads * strides[0] + row % heads * strides[1];
            T::narrow(sums, &mut target[start..][..width]);
        }
        Ok(())
    }

    /// One sequence, whose first query has row `first_row` of the mask of the last keys.
    fn sequence(&self, [entry, first_row]: [usize; 2], rows: Rows<'_>) -> Result<()> {
        match self.pages.is_some() || self.tail.is_some() {
            false => self.whole(entry, rows),
            true => self.chosen([entry, first_row], rows),
        }
    }

    /// Attention to all keys of a sequence.
    fn whole(&self, entry: usize, rows: Rows<'_>) -> Result<()> {
        let length = self.cached.host.length(entry);
        let heads = 0..self.problem.cache.num_heads_kv;
        let scores = self.op.scores.of_sequence(entry, length)?;
        if self.cache.block_table.is_none() && !C::IS_CODED {
            let keys = |view: &View<'a>| -> Result<View<'a>> {
                Ok(view.slice(0, entry..entry + 1)?.flatten(0..2)?.slice(0, 0..length)?)
            };
            let (k, v) = (keys(&self.cache.k)?, keys(&self.cache.v)?);
            return self.attend(rows, [k, v], scores);
        }
        let kv = self.cached.gather(entry, 0..length, heads, self.stream)?;
        self.attend(rows, [kv[0].view(), kv[1].view()], scores)
    }

    /// Attention to keys in listed pages, or to those that the mask of the last keys leaves, head
    /// by head. Masks look at true positions, so queries that see the same keys share a call
    /// without a mask.
    fn chosen(&self, [entry, first_row]: [usize; 2], mut rows: Rows<'_>) -> Result<()> {
        let (length, attention) = (self.cached.host.length(entry), &self.problem.attention);
        let (tokens, group) = (rows.q.shape()[0], attention.num_heads_q / attention.num_heads_kv);
        for head in 0..attention.num_heads_kv {
            let keys = match &self.pages {
                Some(pages) => pages.keys([entry, head], length),
                None => (0..length).collect(),
            };
            let seen = |token: usize| -> Vec<usize> {
                let shown = attention.scores.mask.visible(token, tokens, length);
                let [start, end] =
                    [shown.start, shown.end].map(|end| keys.partition_point(|&key| key < end));
                let sees = |key: usize| match &self.tail {
                    Some(tail) => tail.shows([entry, first_row + token], key, length),
                    None => true,
                };
                keys[start..end.max(start)].iter().copied().filter(|&key| sees(key)).collect()
            };
            let (mut first, mut shown) = (0, seen(0));
            while first < tokens {
                let next = (first + 1..tokens).map(|token| (token, seen(token)));
                let (end, following) =
                    next.into_iter().find(|(_, seen)| *seen != shown).unwrap_or((tokens, vec![]));
                let (same, keys) = (first..end, std::mem::replace(&mut shown, following));
                let heads = head * group..(head + 1) * group;
                let kv =
                    self.cached.gather(entry, keys.iter().copied(), head..head + 1, self.stream)?;
                let sequence = Sequence {
                    entry,
                    first_q: 0,
                    first_kv: 0,
                    seqlen_q: tokens,
                    seqlen_kv: length,
                };
                let added = self.added(&sequence, [heads.clone(), same.clone()], &keys)?;
                let scores = Scores {
                    mask: Mask::Full,
                    bias: added.as_ref().map(Tensor::view),
                    alibi: None,
                    ..self.op.scores.of_heads(heads.clone())?
                };
                let rows = rows.part(same.clone(), heads)?;
                self.attend(rows, [kv[0].view(), kv[1].view()], scores)?;
                first = same.end;
            }
        }
        Ok(())
    }

    /// What is added to the scores of some heads and queries of a sequence at these keys, f32
    /// `[1, heads, queries, keys]`.
    fn added(
        &self,
        sequence: &Sequence,
        [heads, queries]: [Range<usize>; 2],
        keys: &[usize],
    ) -> Result<Option<Tensor>> {
        let Some(terms) = &self.terms else { return Ok(None) };
        let mut added = vec![0f32; heads.len() * queries.len() * keys.len()];
        let at = heads.clone().flat_map(|head| queries.clone().map(move |query| [head, query]));
        for (at, row) in at.zip(added.chunks_exact_mut(keys.len().max(1))) {
            for (&key, term) in keys.iter().zip(row) {
                terms.load(sequence, at, key..key + 1, std::slice::from_mut(term));
            }
        }
        let shape = [1, heads.len(), queries.len(), keys.len()];
        Ok(Some(Tensor::from_slice(self.stream, &added, &shape)?))
    }

    /// One call of attention.
    fn attend(
        &self,
        Rows { q, o, lse }: Rows<'_>,
        [k, v]: [View<'_>; 2],
        scores: Scores<View<'_>>,
    ) -> Result<()> {
        let [q, k, v] = [q.insert(0)?, k.insert(0)?, v.insert(0)?];
        let lse = lse.map(|lse| lse.insert(0)).transpose()?;
        Attention { scores, ..Attention::new(q, k, v) }.forward_into(o.insert(0)?, lse, self.stream)
    }

    /// The queries of a sequence after rotation, `[rows, heads, head_dim]`, rounded to their type.
    fn turned(&self, entry: usize, tokens: &Range<usize>) -> Result<Option<Tensor>> {
        let (Some(rotary), Some(sizes)) = (&self.rotary, self.problem.rotary) else {
            return Ok(None);
        };
        if sizes.positions == 0 {
            // The capacity is 0, too: there are no keys to score.
            return Ok(None);
        }
        let attention = &self.problem.attention;
        let (width, heads) = (attention.head_dims.qk, attention.num_heads_q);
        let shape = [tokens.len(), heads, width];
        let mut tensor = Tensor::empty(self.stream, T::DTYPE, &shape)?;
        let mut view = tensor.view_mut();
        let mut rows = view.as_mut_slice::<T>()?.chunks_exact_mut(width);
        let (q, strides) = (self.op.q.as_slice::<T>()?, attention.q);
        let first = self.cached.host.stored_length(entry) - tokens.len() as i64;
        let mut turned = vec![0.0; width];
        for (token, position) in tokens.clone().zip(first..) {
            let position = position.clamp(0, sizes.positions as i64 - 1) as usize;
            for (head, row) in (0..heads).zip(&mut rows) {
                let start = entry * strides.batch + token * strides.seq + head * strides.head;
                T::widen(&q[start..][..width], &mut turned);
                rotary.turn(&mut turned, position);
                T::narrow(&turned, row);
            }
        }
        Ok(Some(tensor))
    }
}
