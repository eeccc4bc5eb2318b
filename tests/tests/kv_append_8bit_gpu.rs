//! Appends to caches of codes on the GPU against those on the CPU, bit by bit.
#![forbid(unsafe_code)]

use blockflash_ops::{
    AppendKv, AttentionDecode, CacheScale, DType, KvCacheMut, Mask, Operation, PackedTokens,
    Rotary, RotaryPairs, Stream, Tensor, ViewMut,
};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::Variant;
use blockflash_tests::gpu::{Report, gpu, wait};
use blockflash_tests::host::{cpu, download, poisoned, upload};
use blockflash_tests::number::{encode, normal, rng};
use rand::Rng;
use rand::rngs::StdRng;

type Outcome<T = usize> = Result<T, String>;

fn told(error: blockflash_ops::Error) -> String {
    error.to_string()
}

/// What scales keys or values have.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaled {
    No,
    One,
    Heads,
    Pages,
    Keys,
    Chosen,
}

/// Pages before and after the ones that a call is given.
const MARGIN: usize = 2;

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    codes: DType,
    of_new: DType,
    /// Of k and of v.
    head_dims: [usize; 2],
    batch: usize,
    heads: usize,
    tokens: usize,
    /// Offsets of packed tokens.
    offsets: Option<Vec<i32>>,
    /// Rows of new tokens.
    total: usize,
    /// Slots of a page, and pages of a sequence in a table.
    page: usize,
    columns: Option<usize>,
    table: Vec<i32>,
    lengths: Option<Vec<i32>>,
    scaled: [Scaled; 2],
    rotary: Option<(RotaryPairs, usize, DType)>,
    /// Heads before slots in memory.
    heads_first: bool,
}

fn garbage(random: &mut StdRng, near: i32) -> i32 {
    match random.random_range(0..6) {
        0 => [i32::MIN, i32::MAX, -1][random.random_range(0..3)],
        1 => random.random(),
        _ => random.random_range(-2..near + 3),
    }
}

impl Case {
    /// With `hostile`, tables and lengths hold anything; with `races`, also where several rows
    /// could go to one slot, and offsets that do not ascend.
    fn draw(seed: u64, hostile: bool, races: bool) -> Self {
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

    fn pages(&self) -> usize {
        self.batch * self.columns.unwrap_or(1)
    }

    fn capacity(&self) -> usize {
        self.page * self.columns.unwrap_or(1)
    }

    /// Rows of all new tokens.
    fn rows(&self, dtype: DType, seed: u64, heads: usize, width: usize) -> (Vec<u32>, Vec<usize>) {
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
    fn scales(&self, at: usize, stream: &Stream) -> Outcome<Option<Tensor>> {
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
        Tensor::from_slice(stream, &values, &shape).map(Some).map_err(told_by)
    }
}

impl Case {
    /// Pages, slots, heads and elements of a cache.
    fn between_margins<'t>(
        &self,
        tensor: &'t mut Tensor,
    ) -> Result<ViewMut<'t>, blockflash_safe::Error> {
        let pages = tensor.view_mut().slice(0, MARGIN..MARGIN + self.pages())?;
        if self.heads_first { pages.permute(&[0, 2, 1, 3]) } else { Ok(pages) }
    }

    fn scale_of<'t>(
        &self,
        tensor: &'t mut Option<Tensor>,
        at: usize,
    ) -> Outcome<Option<CacheScale<'t>>> {
        let Some(tensor) = tensor else { return Ok(None) };
        if self.scaled[at] != Scaled::Chosen {
            return Ok(Some(CacheScale::Given(tensor.view())));
        }
        let pages = tensor.view_mut().slice(0, MARGIN..MARGIN + self.pages());
        pages.map(CacheScale::PerToken).map(Some).map_err(told_by)
    }
}

fn told_by<E: std::fmt::Display>(error: E) -> String {
    error.to_string()
}

/// A cache with poison in all slots, and tensors beside it.
struct Tensors {
    k: Tensor,
    v: Tensor,
    scales: [Option<Tensor>; 2],
    table: Option<Tensor>,
    lengths: Option<Tensor>,
    offsets: Option<Tensor>,
    new: [Tensor; 2],
    angles: Option<[Tensor; 2]>,
}

impl Tensors {
    fn new(case: &Case, stream: &Stream) -> Outcome<Self> {
        let [k, v] = case.head_dims.map(|width| {
            let pages = case.pages() + 2 * MARGIN;
            let shape = match case.heads_first {
                true => [pages, case.heads, case.page, width],
                false => [pages, case.page, case.heads, width],
            };
            poisoned(stream, case.codes, &shape)
        });
        let ints = |values: &[i32], shape: &[usize]| {
            Tensor::from_slice(stream, values, shape).map_err(told_by)
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
    fn operands(&mut self, case: &Case) -> Outcome<(AppendKv<'_>, KvCacheMut<'_>)> {
        let [k_scale, v_scale] = &mut self.scales;
        let cache = KvCacheMut {
            k_scale: case.scale_of(k_scale, 0)?,
            v_scale: case.scale_of(v_scale, 1)?,
            block_table: self.table.as_ref().map(Tensor::view),
            seqused_kv: self.lengths.as_ref().map(Tensor::view),
            ..KvCacheMut::new(
                case.between_margins(&mut self.k).map_err(told_by)?,
                case.between_margins(&mut self.v).map_err(told_by)?,
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
    fn written(&self, stream: &Stream) -> Outcome<Vec<Vec<u32>>> {
        let scales = self.scales.iter().flatten();
        [&self.k, &self.v].into_iter().chain(scales).map(|x| download(stream, x)).collect()
    }
}

fn check(seed: u64, hostile: bool, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let case = Case::draw(seed, hostile, false);
    let story = |error: String| format!("{error}\n    {case:?}");
    let mut exact = Tensors::new(&case, &cpu())?;
    let (append, cache) = exact.operands(&case)?;
    append.append_into(cache, &cpu()).map_err(told).map_err(story)?;
    let exact = exact.written(&cpu())?;
    let mut compared = 0;
    for own in [true, false] {
        let mut found = Tensors::new(&case, stream)?;
        let (append, cache) = found.operands(&case)?;
        match own {
            true => append.run_with(kernel, cache, stream),
            false => append.append_into(cache, stream),
        }
        .map_err(told)
        .map_err(story)?;
        wait(stream, &|| format!("{case:?}"))?;
        for (which, (found, exact)) in found.written(stream)?.iter().zip(&exact).enumerate() {
            let differs = found.iter().zip(exact).position(|(x, y)| x != y);
            if let Some(at) = differs {
                let what = ["k", "v", "the first scales", "the second scales"][which];
                let (x, y) = (found[at], exact[at]);
                return Err(story(format!("{what}[{at}] is {x:#x} in place of {y:#x}")));
            }
            compared += found.len();
        }
    }
    Ok(compared)
}

/// Rows may race for slots here, so only the margins are known.
fn survives(seed: u64, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let case = Case::draw(seed, true, true);
    let mut tensors = Tensors::new(&case, stream)?;
    let (append, cache) = tensors.operands(&case)?;
    append.run_with(kernel, cache, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    wait(stream, &|| format!("{case:?}"))?;
    let chosen = tensors.scales.iter().zip(case.scaled).filter(|(_, kind)| *kind == Scaled::Chosen);
    for tensor in [&tensors.k, &tensors.v].into_iter().chain(chosen.filter_map(|(x, _)| x.as_ref()))
    {
        let all = download(stream, tensor)?;
        let margin = all.len() / (case.pages() + 2 * MARGIN) * MARGIN;
        let untouched = [&all[..margin], &all[all.len() - margin..]];
        let poison = u32::MAX >> (32 - 8 * tensor.dtype().size());
        if untouched.into_iter().flatten().any(|&x| x != poison) {
            return Err(format!("a margin is written\n    {case:?}"));
        }
    }
    Ok(2)
}

/// An append within attention leaves the bits that an append before attention leaves, and so do the
/// queries that are turned with it.
fn check_with_attention(seed: u64, stream: &Stream) -> Outcome {
    let mut case = Case::draw(seed, false, false);
    let width = [64, 128, 256][seed as usize % 3];
    case.head_dims = [width; 2];
    case.rotary = case.rotary.map(|(pairs, _, _)| (pairs, width, DType::F32));
    let story = |error: String| format!("{error}\n    {case:?}");
    let of_q = [DType::F16, DType::BF16][seed as usize / 3 % 2];
    let (bits, shape) = case.rows(of_q, 30, 2 * case.heads, width);
    let q = upload(stream, of_q, &bits, &shape)?;
    let mut results = Vec::new();
    for together in [true, false] {
        let mut tensors = Tensors::new(&case, stream)?;
        // Slots that no append reaches hold numbers.
        for tensor in [&mut tensors.k, &mut tensors.v] {
            tensor.fill_bytes(stream, 0x21).map_err(told_by)?;
        }
        for (tensor, kind) in tensors.scales.iter_mut().zip(case.scaled) {
            if let (Some(tensor), Scaled::Chosen) = (tensor, kind) {
                tensor.fill_bytes(stream, 0x3c).map_err(told_by)?;
            }
        }
        let (append, mut cache) = tensors.operands(&case)?;
        let decode = AttentionDecode {
            packed: append.packed,
            rotary: append.rotary,
            scores: Mask::causal().into(),
            ..AttentionDecode::new(q.view())
        };
        let output = if together {
            decode.append(&append, cache, stream)
        } else {
            append.append_into(cache.reborrow(), stream).map_err(told).map_err(story)?;
            decode.forward(cache.as_cache(), stream)
        };
        let output = output.map_err(told).map_err(story)?;
        let mut bits = tensors.written(stream)?;
        bits.push(download(stream, &output.o)?);
        bits.push(download(stream, &output.lse)?);
        results.push(bits);
    }
    match results[0] == results[1] {
        true => Ok(results[0].iter().map(Vec::len).sum()),
        false => Err(story("attention with an append has other bits".into())),
    }
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("kv_append_8bit_gpu::every_kernel") else { return };
    let appends = |kernel: &&Kernel| matches!(kernel.variant, Variant::KvAppendCodes(_));
    let kernels: Vec<_> = gpu.kernels().filter(appends).map(|kernel| (kernel, ())).collect();
    let mut report = Report::default();
    report.run_each(&gpu, &kernels, |kernel, (), stream| {
        let exact = (0..400).map(|seed| check(seed * 100, seed % 4 == 3, kernel, stream));
        let garbage = (0..200).map(|seed| survives(seed * 100 + 7, kernel, stream));
        exact.chain(garbage).sum()
    });
    report.finish(&gpu, "kv_append_8bit_gpu");
}

#[test]
fn appends_within_attention() {
    let Some(gpu) = gpu("kv_append_8bit_gpu::appends_within_attention") else { return };
    for seed in 0..60 {
        check_with_attention(seed * 101, &gpu.stream).unwrap();
    }
}
