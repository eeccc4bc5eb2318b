//! Attention over a cache whose lengths, block table, lists of pages and offsets are garbage, with
//! append and rotary embedding.

use super::attention::ended;
use super::guarded::{Guarded, Use};
use super::operands::Choice;
use super::values::{damaged, numbers, one_of, overwritten, token_mask};
use super::{Checked, Ended, Place, Turn};
use crate::attention::dims_of_tile;
use crate::number::POISON;
use crate::placement::Placement;
use blockflash_ops::attention_decode::{CacheTile, accepts, select, workspace_bytes};
use blockflash_ops::{
    AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess,
    DType, Error, KvCacheMut, Mask, Operation, PackedTokens, PageLists, Rotary, RotaryPairs,
};
use blockflash_sys::manifest;
use bytemuck::cast_slice;
use rand::Rng;

#[derive(Debug)]
struct Cached {
    kernel: Choice,
    dtype: DType,
    /// Element type of the cache.
    kv: DType,
    heads: [usize; 2],
    head_dim: usize,
    /// Rows of all sequences, and the most of one.
    tokens: [usize; 2],
    page_size: usize,
    pages: usize,
    max_pages: usize,
    mask: Mask,
    append: bool,
    rotary: Option<(RotaryPairs, usize)>,
    listed: bool,
    lengths: Vec<i32>,
    table: Vec<i32>,
    offsets: Vec<i32>,
    lists: Vec<i32>,
    counts: Vec<i32>,
    /// What another stream overwrites the lengths with while kernels read them.
    overwritten: Option<u8>,
}

impl Cached {
    fn new(turn: &mut Turn<'_>) -> Self {
        let (kernel, tile) = turn.pick(&turn.place.caches);
        let on_gpu = turn.place.other.is_some();
        let random = &mut turn.random;
        let batch = one_of(&[1, 2, 3, 5, 40], random);
        let most = if batch == 40 { 2 } else { one_of(&[1, 4, 70], random) };
        let of_sequences: Vec<usize> = (0..batch).map(|_| random.random_range(0..=most)).collect();
        let mut right = vec![0];
        right.extend(of_sequences.iter().scan(0, |end, &length| {
            *end += length as i32;
            Some(*end)
        }));
        let total = right[batch] as usize + one_of(&[0, 0, 1, 9], random);
        let page_size = one_of(&[16, 48, 128], random);
        let (pages, max_pages) = (random.random_range(1..=12), random.random_range(1..=9));
        let (heads_kv, capacity) = (random.random_range(1..=3), max_pages * page_size);
        let mut some = |limit: usize, count: usize| {
            let right: Vec<i32> =
                (0..count).map(|_| random.random_range(0..=limit as i32)).collect();
            damaged(&right, limit, random)
        };
        let (lengths, table) = (some(capacity, batch), some(pages - 1, batch * max_pages));
        let lists = some(max_pages - 1, batch * heads_kv * max_pages);
        let counts = some(max_pages, batch);
        let kv = tile.types().kv;
        // Rows of the cache are multiples of 16 bytes.
        let head_dim =
            one_of(&dims_of_tile(tile.head_dims().qk), random).next_multiple_of(16 / kv.size());
        let pairs = one_of(&[RotaryPairs::Halves, RotaryPairs::Interleaved], random);
        let half = random.random_range(1..=head_dim / 2);
        Self {
            kernel: Choice(random.random_bool(0.75).then_some(kernel)),
            dtype: tile.types().q,
            kv,
            heads: [heads_kv * one_of(&[1, 4, 7], random), heads_kv],
            head_dim,
            tokens: [total, one_of(&[most, most, most / 2 + 1, 3 * most + 7], random)],
            page_size,
            pages,
            max_pages,
            mask: token_mask(capacity, random),
            append: random.random(),
            rotary: random.random_bool(0.5).then_some((pairs, half)),
            // Kernels for many queries visit all pages.
            listed: random.random_bool(0.25) && matches!(tile, CacheTile::Few(_)),
            lengths,
            table,
            offsets: match random.random_bool(0.4) {
                true => right,
                false => damaged(&right, total, random),
            },
            lists,
            counts,
            overwritten: overwritten(on_gpu, random),
        }
    }
}

/// Runs a case.
pub(super) fn cached(turn: &mut Turn<'_>) -> Checked<Ended> {
    let case = Cached::new(turn);
    attend(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn attend(case: &Cached, turn: &mut Turn<'_>) -> Checked<Ended> {
    let place = turn.place;
    let mut tensors = Tensors::new(case, turn)?;
    tensors.lengths.used_on(place.other.as_ref())?;
    let launched = tensors.launch(case, place);
    tensors.lengths.overwrite(case.overwritten, place.other.as_ref())?;
    turn.wait(case)?;
    tensors.judge(case, place)?;
    ended(launched, place)
}

struct Tensors {
    q: Guarded,
    /// Keys and values.
    new: [Guarded; 2],
    cache: [Guarded; 2],
    /// Cosines and sines.
    angles: Option<[Guarded; 2]>,
    table: Guarded,
    lengths: Guarded,
    offsets: Guarded,
    /// Lists of pages, and how many they hold.
    lists: [Guarded; 2],
    o: Guarded,
}

impl Tensors {
    fn new(case: &Cached, turn: &mut Turn<'_>) -> Checked<Self> {
        let (stream, random) = (&turn.place.stream, &mut turn.random);
        let seed: u8 = random.random();
        let Cached { dtype, head_dim, max_pages, heads: [heads_q, heads_kv], .. } = *case;
        let (batch, total) = (case.lengths.len(), case.tokens[0]);
        let around = Placement { order: Vec::new(), padding: vec![(1, 2), (1, 0)] };
        let mut rows = |name, shape: &[usize]| {
            let content = numbers(dtype, shape.iter().product(), random);
            Guarded::new(name, dtype, (shape, &around, POISON), &content, stream)
        };
        let cache_shape = [case.pages, case.page_size, heads_kv, head_dim];
        let q_shape = [total, heads_q, head_dim];
        let mut cache = |name| {
            if case.kv == dtype {
                return rows(name, &cache_shape);
            }
            // Finite and small: a NaN would come from outside.
            let count = cache_shape.iter().product::<usize>();
            let codes: Vec<u8> = (0..count).map(|at| ((at * 89) as u8 ^ seed) & 0xBF).collect();
            Guarded::new(name, case.kv, (&cache_shape, &around, POISON), &codes, stream)
        };
        let cache = [cache("cache.k")?, cache("cache.v")?];
        let angles = match case.rotary {
            None => None,
            Some((_, half)) => {
                let shape = [max_pages * case.page_size, half];
                Some([rows("cos", &shape)?, rows("sin", &shape)?])
            }
        };
        let beside = Placement { order: Vec::new(), padding: vec![(3, 3)] };
        let alone = Placement { order: Vec::new(), padding: Vec::new() };
        let ints = |name, entries: &[i32], shape: &[usize], place: &Placement| {
            let content = cast_slice(entries);
            Guarded::new(name, DType::I32, (shape, place, POISON), content, stream)
        };
        Ok(Self {
            q: rows("q", &q_shape)?,
            new: [
                rows("new.k", &[total, heads_kv, head_dim])?,
                rows("new.v", &[total, heads_kv, head_dim])?,
            ],
            cache,
            angles,
            table: ints("block_table", &case.table, &[batch, max_pages], &beside)?,
            lengths: ints("seqused_kv", &case.lengths, &[batch], &beside)?,
            offsets: ints("cu_seqlens", &case.offsets, &[batch + 1], &beside)?,
            // Lists have no gaps.
            lists: [
                ints("lists", &case.lists, &[batch, heads_kv, max_pages], &alone)?,
                ints("counts", &case.counts, &[batch], &beside)?,
            ],
            o: Guarded::output("o", dtype, (&q_shape, &around), stream)?,
        })
    }

    fn launch(&mut self, case: &Cached, place: &Place) -> Result<(), Error> {
        let (stream, [k, v]) = (&place.stream, &mut self.cache);
        let cache = KvCacheMut {
            block_table: Some(self.table.view()),
            seqused_kv: Some(self.lengths.view()),
            ..KvCacheMut::new(k.view_mut(), v.view_mut())
        };
        let max_seqlen = case.tokens[1];
        let packed = Some(PackedTokens { cu_seqlens: self.offsets.view(), max_seqlen });
        let rotary = self.angles.as_ref().zip(case.rotary).map(|([cos, sin], (pairs, _))| Rotary {
            cos: cos.view(),
            sin: sin.view(),
            pairs,
        });
        let [lists, counts] = self.lists.each_ref().map(Guarded::view);
        let mut call = AttentionDecode {
            packed,
            scores: case.mask.into(),
            rotary,
            pages: case.listed.then_some(PageLists { lists, counts }),
            ..AttentionDecode::new(self.q.view())
        };
        let problem = call.problem(&cache.as_cache()?)?;
        if let Some(gpu) = &place.imagined {
            match case.kernel.0 {
                Some(kernel) => accepts(kernel, &problem, gpu)?,
                None => drop(select(&problem, gpu)?),
            }
        }
        // With room for every kernel.
        let bytes = stream.device().cuda_properties().map_or(0, |gpu| {
            let kernels = manifest::kernels().iter();
            kernels
                .filter_map(|kernel| workspace_bytes(kernel, &problem, gpu).ok())
                .max()
                .unwrap_or(0)
        });
        let workspace = AttentionDecodeWorkspace::new(stream, bytes)?;
        call.workspace = Some(&workspace);
        let [new_k, new_v] = self.new.each_ref().map(Guarded::view);
        let new = AppendKv { packed, rotary, ..AppendKv::new(new_k, new_v) };
        let cache = match case.append {
            true => CacheAccess::Append(&new, cache),
            false => CacheAccess::Read(cache.as_cache()?),
        };
        let operands = AttentionDecodeOperands { cache, o: self.o.view_mut(), lse: None };
        match case.kernel.0 {
            Some(kernel) if place.imagined.is_none() => call.run_with(kernel, operands, stream),
            _ => call.forward_into(operands, stream),
        }
    }

    fn judge(&self, case: &Cached, place: &Place) -> Checked<()> {
        let stream = &place.stream;
        let inputs = [&self.q, &self.table, &self.offsets].into_iter();
        let inputs = inputs.chain(&self.new).chain(self.angles.iter().flatten()).chain(&self.lists);
        inputs.into_iter().try_for_each(|input| input.judge(Use::Read, stream))?;
        if case.overwritten.is_none() {
            self.lengths.judge(Use::Read, stream)?;
        }
        let appended = if case.append { Use::Written } else { Use::Read };
        self.cache.iter().try_for_each(|cache| cache.judge(appended, stream))?;
        // Rows that offsets assign twice are turned once at most, so their queries may be anything.
        let anything = case.rotary.is_some() || case.overwritten.is_some();
        self.o.judge(if anything { Use::Filled } else { Use::Written }, stream)
    }
}
