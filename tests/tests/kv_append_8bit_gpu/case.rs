//! Drawn appends to caches of codes, and their tensors.

use blockflash_ops::{
    AppendKv, CacheScale, DType, KvCacheMut, PackedTokens, Rotary, RotaryPairs, Stream, Tensor,
    ViewMut,
};
use blockflash_tests::host::{download, poisoned, upload};
use blockflash_tests::number::{encode, normal, rng};
use rand::Rng;
use rand::rngs::StdRng;

pub(crate) type Outcome<T = usize> = Result<T, String>;

/// What scales keys or values have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scaled {
    No,
    One,
    Heads,
    Pages,
    Keys,
    Chosen,
}

/// Pages before and after the ones that a call is given.
pub(crate) const MARGIN: usize = 2;

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) codes: DType,
    pub(crate) of_new: DType,
    /// Of k and of v.
    pub(crate) head_dims: [usize; 2],
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    /// Offsets of packed tokens.
    pub(crate) offsets: Option<Vec<i32>>,
    /// Rows of new tokens.
    pub(crate) total: usize,
    /// Slots of a page, and pages of a sequence in a table.
    pub(crate) page: usize,
    pub(crate) columns: Option<usize>,
    pub(crate) table: Vec<i32>,
    pub(crate) lengths: Option<Vec<i32>>,
    pub(crate) scaled: [Scaled; 2],
    pub(crate) rotary: Option<(RotaryPairs, usize, DType)>,
    /// Heads before slots in memory.
    pub(crate) heads_first: bool,
}

pub(crate) fn garbage(random: &mut StdRng, near: i32) -> i32 {
    match random.random_range(0..6) {
        0 => [i32::MIN, i32::MAX, -1][random.random_range(0..3)],
        1 => random.random(),
        _ => random.random_range(-2..near + 3),
    }
}

impl Case {
    /// With `hostile`, tables and lengths hold anything; with `races`, also where several rows
    /// could go to one slot, and offsets that do not ascend.
    pub(crate) fn draw(seed: u64, hostile: bool, races: bool) -> Self {
        let mut random = rng(seed);
        let mut of = |choices: &[usize]| choices[random.random_range(0..choices.len())];
        let dims = [16, 32, 64, 80, 128, 192, 256, 528];
        let qk = of(&dims);
        let v = if of(&[0, 0, 1]) == 1 { of(&dims) } else { qk };
        let codes = [DType::E4M3, DType::E5M2, DType::I8][of(&[0, 1, 2])];
        let of_new = [DType::F16, DType::BF16][of(&[0, 1])];
        let batch = if hostile && !races { 1 } else { of(&[1, 2, 3, 9]) };
        let (heads, columns) = (of(&[1, 2, 3, 8]), [None, Some(1), Some(5)][of(&[0, 1, 2])]);
        let page = if columns == Some(5) { of(&[16, 48, 64]) } else { of(&[7, 16, 100]) };
        let most = if hostile && !races { page.min(9) } else { of(&[1, 2, 9, 40]) };
        let tokens = most.min(page * columns.unwrap_or(1));
        let kinds =
            [Scaled::No, Scaled::One, Scaled::Heads, Scaled::Pages, Scaled::Keys, Scaled::Chosen];
        let scaled = [0, 1].map(|_| kinds[of(&[0, 1, 2, 3, 4, 5, 5, 5])]);
        let pairs = [RotaryPairs::Halves, RotaryPairs::Interleaved][of(&[0, 1])];
        let turned = of(&[qk, qk / 2, 2]);
        let rotary =
            (of(&[0, 1, 1]) == 1).then(|| (pairs, turned, [of_new, DType::F32][of(&[0, 1])]));
        let (packed, given, heads_first) =
            (of(&[0, 1]) == 1, of(&[0, 1, 1]) == 1, of(&[0, 1]) == 1);
        let entries = batch * columns.unwrap_or(1);
        let mut table: Vec<_> = (0..entries as i32).map(|i| (i * 7 + 3) % entries as i32).collect();
        if entries % 7 == 0 || hostile {
            table = (0..entries as i32).collect();
        }
        let capacity = (page * columns.unwrap_or(1)) as i32;
        let mut lengths: Vec<_> =
            (0..batch).map(|_| random.random_range(0..capacity + 4)).collect();
        let mut offsets = vec![0];
        for _ in 0..batch {
            let more = random.random_range(0..=tokens as i32);
            offsets.push(offsets[offsets.len() - 1] + more);
        }
        let total = match offsets[batch] {
            last if packed && last > 0 => last as usize,
            _ => batch * tokens,
        };
        if hostile {
            table.iter_mut().for_each(|x| *x = garbage(&mut random, entries as i32));
            lengths.iter_mut().for_each(|x| *x = garbage(&mut random, capacity));
        }
        if races {
            offsets.iter_mut().for_each(|x| *x = garbage(&mut random, (batch * tokens) as i32));
        }
        let offsets = packed.then_some(offsets);
        let lengths = (given || packed).then_some(lengths);
        let head_dims = [qk, v];
        Self {
            seed,
            codes,
            of_new,
            head_dims,
            batch,
            heads,
            tokens,
            offsets,
            total,
            page,
            columns,
            table,
            lengths,
            scaled,
            rotary,
            heads_first,
        }
    }

    pub(crate) fn pages(&self) -> usize {
        self.batch * self.columns.unwrap_or(1)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.page * self.columns.unwrap_or(1)
    }

    /// Rows of all new tokens.
    pub(crate) fn rows(
        &self,
        dtype: DType,
        seed: u64,
        heads: usize,
        width: usize,
    ) -> (Vec<u32>, Vec<usize>) {
        let total = self.total;
        let mut random = rng(self.seed + seed);
        let mut values = normal(self.seed + seed, total * heads * width);
        for row in values.chunks_mut(width) {
            let size = 2f32.powi(random.random_range(-12..=12));
            match random.random_range(0..8) {
                0 => row.fill(0.0),
                1 => row.iter_mut().step_by(5).for_each(|x| {
                    *x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]
                        [random.random_range(0..4)];
                }),
                _ => row.iter_mut().for_each(|x| *x *= size),
            }
        }
        let bits = values.into_iter().map(|x| encode(dtype, x)).collect();
        let shape = match self.offsets {
            Some(_) => vec![total, heads, width],
            None => vec![self.batch, self.tokens, heads, width],
        };
        (bits, shape)
    }

    /// Scales that are given, and what they hold, or room for chosen ones.
    pub(crate) fn scales(&self, at: usize, stream: &Stream) -> Outcome<Option<Tensor>> {
        let shape = match self.scaled[at] {
            Scaled::No => return Ok(None),
            Scaled::Chosen => {
                let shape = [self.pages() + 2 * MARGIN, self.page, self.heads];
                return poisoned(stream, DType::F32, &shape).map(Some);
            }
            Scaled::One => vec![1],
            Scaled::Heads => vec![self.batch, self.heads],
            Scaled::Pages => vec![self.pages(), 1, self.heads],
            Scaled::Keys => vec![self.pages(), self.page, self.heads],
        };
        let mut random = rng(self.seed + 20 + at as u64);
        let odd = [f32::NAN, 0.0, -0.5, f32::INFINITY, 1e-42];
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| match random.random_range(0..12) {
                0 => odd[random.random_range(0..5)],
                _ => random.random_range(0.5f32..1.0) * 2f32.powi(random.random_range(-9..=3)),
            })
            .collect();
        Tensor::from_slice(stream, &values, &shape).map(Some).map_err(told)
    }
}

impl Case {
    /// Pages, slots, heads and elements of a cache.
    pub(crate) fn between_margins<'t>(
        &self,
        tensor: &'t mut Tensor,
    ) -> Result<ViewMut<'t>, blockflash_safe::Error> {
        let pages = tensor.view_mut().slice(0, MARGIN..MARGIN + self.pages())?;
        if self.heads_first { pages.permute(&[0, 2, 1, 3]) } else { Ok(pages) }
    }

    pub(crate) fn scale_of<'t>(
        &self,
        tensor: &'t mut Option<Tensor>,
        at: usize,
    ) -> Outcome<Option<CacheScale<'t>>> {
        let Some(tensor) = tensor else { return Ok(None) };
        if self.scaled[at] != Scaled::Chosen {
            return Ok(Some(CacheScale::Given(tensor.view())));
        }
        let pages = tensor.view_mut().slice(0, MARGIN..MARGIN + self.pages());
        pages.map(CacheScale::PerToken).map(Some).map_err(told)
    }
}

pub(crate) fn told<E: std::fmt::Display>(error: E) -> String {
    error.to_string()
}

/// A cache with poison in all slots, and tensors beside it.
pub(crate) struct Tensors {
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) scales: [Option<Tensor>; 2],
    pub(crate) table: Option<Tensor>,
    pub(crate) lengths: Option<Tensor>,
    pub(crate) offsets: Option<Tensor>,
    pub(crate) new: [Tensor; 2],
    pub(crate) angles: Option<[Tensor; 2]>,
}

impl Tensors {
    pub(crate) fn new(case: &Case, stream: &Stream) -> Outcome<Self> {
        let [k, v] = case.head_dims.map(|width| {
            let pages = case.pages() + 2 * MARGIN;
            let shape = match case.heads_first {
                true => [pages, case.heads, case.page, width],
                false => [pages, case.page, case.heads, width],
            };
            poisoned(stream, case.codes, &shape)
        });
        let ints = |values: &[i32], shape: &[usize]| {
            Tensor::from_slice(stream, values, shape).map_err(told)
        };
        let new = |at: usize| {
            let (bits, shape) =
                case.rows(case.of_new, 10 + at as u64, case.heads, case.head_dims[at]);
            upload(stream, case.of_new, &bits, &shape)
        };
        let table = |columns| ints(&case.table, &[case.batch, columns]);
        let angles = |(_, dim, dtype): (RotaryPairs, usize, DType)| -> Outcome<[Tensor; 2]> {
            let shape = [case.capacity(), dim / 2];
            let bits = |turn: fn(f32) -> f32| -> Vec<u32> {
                (0..shape[0] * shape[1]).map(|i| encode(dtype, turn(i as f32 * 0.37))).collect()
            };
            Ok([
                upload(stream, dtype, &bits(f32::cos), &shape)?,
                upload(stream, dtype, &bits(f32::sin), &shape)?,
            ])
        };
        Ok(Self {
            k: k?,
            v: v?,
            scales: [case.scales(0, stream)?, case.scales(1, stream)?],
            table: case.columns.map(table).transpose()?,
            lengths: case.lengths.as_ref().map(|x| ints(x, &[case.batch])).transpose()?,
            offsets: case.offsets.as_ref().map(|x| ints(x, &[case.batch + 1])).transpose()?,
            new: [new(0)?, new(1)?],
            angles: case.rotary.map(angles).transpose()?,
        })
    }

    /// The append of a case, and the cache between its margins.
    pub(crate) fn operands(&mut self, case: &Case) -> Outcome<(AppendKv<'_>, KvCacheMut<'_>)> {
        let [k_scale, v_scale] = &mut self.scales;
        let cache = KvCacheMut {
            k_scale: case.scale_of(k_scale, 0)?,
            v_scale: case.scale_of(v_scale, 1)?,
            block_table: self.table.as_ref().map(Tensor::view),
            seqused_kv: self.lengths.as_ref().map(Tensor::view),
            ..KvCacheMut::new(
                case.between_margins(&mut self.k).map_err(told)?,
                case.between_margins(&mut self.v).map_err(told)?,
            )
        };
        let packed = self
            .offsets
            .as_ref()
            .map(|offsets| PackedTokens { cu_seqlens: offsets.view(), max_seqlen: case.tokens });
        let rotary = case
            .rotary
            .zip(self.angles.as_ref())
            .map(|((pairs, ..), [cos, sin])| Rotary { cos: cos.view(), sin: sin.view(), pairs });
        let [k, v] = self.new.each_ref().map(Tensor::view);
        Ok((AppendKv { packed, rotary, ..AppendKv::new(k, v) }, cache))
    }

    /// Everything that an append may write, with the margins.
    pub(crate) fn written(&self, stream: &Stream) -> Outcome<Vec<Vec<u32>>> {
        let scales = self.scales.iter().flatten();
        [&self.k, &self.v].into_iter().chain(scales).map(|x| download(stream, x)).collect()
    }
}
