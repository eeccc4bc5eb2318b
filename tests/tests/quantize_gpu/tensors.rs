//! The tensors of a case, quantising them, and what that should give.

use crate::case::{Case, MARGIN, Scaled};
use blockflash_ops::{
    DType, Error, Graph, Operation, PackedTokens, Quantize, QuantizeOutputMut, QuantizeScale,
    Stream, Tensor,
};
use blockflash_sys::Kernel;
use blockflash_tests::gpu::wait;
use blockflash_tests::host::{cpu, download, poisoned, refill, upload};
use blockflash_tests::number::{POISON, decode, rng};
use rand::Rng;

pub(crate) type Outcome<T = usize> = Result<T, String>;

/// The tensors of a case on one device.
pub(crate) struct Tensors {
    x: Tensor,
    offsets: Option<Tensor>,
    given: Option<Tensor>,
    codes: Tensor,
    chosen: Option<Tensor>,
    mean: Option<Tensor>,
}

/// All bits of what is written, and of the margins: codes, scales and means.
pub(crate) type Written = [Vec<u32>; 3];

impl Tensors {
    pub(crate) fn new(case: &Case, x: &[u32], stream: &Stream) -> Outcome<Self> {
        let (batch, heads) = (case.batch, case.heads);
        let offsets = case.packed.as_ref().map(|(offsets, _)| {
            Tensor::from_slice(stream, offsets, &[offsets.len()]).map_err(told)
        });
        let given = match case.scaled {
            Scaled::One => Some(vec![1]),
            Scaled::OfSequences => Some(vec![batch, 1]),
            Scaled::OfHeads => Some(vec![1, heads]),
            Scaled::Given => Some(vec![batch, heads]),
            _ => None,
        };
        let given = given.map(|shape| {
            let mut random = rng(case.seed + 20);
            let odd = [f32::NAN, 0.0, -0.5, f32::INFINITY, 1e-42, 1e-30, 1e30];
            let value = |_| match random.random_range(0..10) {
                0 => odd[random.random_range(0..7)],
                _ => random.random_range(0.5f32..1.0) * 2f32.powi(random.random_range(-9..=3)),
            };
            let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
            Tensor::from_slice(stream, &values, &shape).map_err(told)
        });
        let chosen = match case.scaled {
            Scaled::Tensor => Some(vec![1 + 2 * MARGIN]),
            Scaled::Head => Some(vec![batch + 2 * MARGIN, heads + 1]),
            Scaled::Token => Some(case.physical(None)),
            _ => None,
        };
        let of_mean = [batch + 2 * MARGIN, heads + 1, case.head_dim];
        let mean = case.subtract_mean.then(|| poisoned(stream, DType::F32, &of_mean));
        let physical = case.physical(Some(case.head_dim));
        Ok(Self {
            x: upload(stream, case.dtype, x, &physical)?,
            offsets: offsets.transpose()?,
            given: given.transpose()?,
            codes: poisoned(stream, case.codes, &physical)?,
            chosen: chosen.map(|shape| poisoned(stream, DType::F32, &shape)).transpose()?,
            mean: mean.transpose()?,
        })
    }

    /// Other numbers and offsets in the same memory.
    pub(crate) fn refill(&mut self, case: &Case, x: &[u32], stream: &Stream) -> Outcome<()> {
        refill(&mut self.x, stream, x)?;
        if let (Some(tensor), Some((offsets, _))) = (&mut self.offsets, &case.packed) {
            let bits: Vec<u32> = offsets.iter().map(|&offset| offset as u32).collect();
            refill(tensor, stream, &bits)?;
        }
        Ok(())
    }

    /// Poisons what was written.
    pub(crate) fn poison(&mut self, stream: &Stream) -> Outcome<()> {
        let others = self.chosen.iter_mut().chain(&mut self.mean);
        let mut all = others.chain([&mut self.codes]);
        all.try_for_each(|tensor| tensor.fill_bytes(stream, POISON).map_err(told))
    }

    /// Quantises, with this kernel or with the selected one.
    pub(crate) fn quantize(
        &mut self,
        case: &Case,
        kernel: Option<&'static Kernel>,
        stream: &Stream,
    ) -> Outcome<()> {
        let (batch, heads, max_seqlen) = (case.batch, case.heads, case.longest());
        let packed = self.offsets.as_ref().map(Tensor::view);
        let packed = packed.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
        let scale = match (case.scaled, &self.given) {
            (_, Some(given)) => QuantizeScale::Given(given.view()),
            (Scaled::Tensor, _) => QuantizeScale::Tensor,
            (Scaled::Head, _) => QuantizeScale::Head,
            _ => QuantizeScale::Token,
        };
        let call = Quantize {
            x: case.inside_read(&self.x)?,
            packed,
            scale,
            subtract_mean: case.subtract_mean,
            rotate: case.rotate,
        };
        let of_groups = |tensor| {
            let view = Tensor::view_mut(tensor).slice(0, MARGIN..MARGIN + batch)?;
            view.slice(1, 0..heads)
        };
        let chosen = self.chosen.as_mut().map(|tensor| match case.scaled {
            Scaled::Tensor => tensor.view_mut().slice(0, MARGIN..MARGIN + 1).map_err(told),
            Scaled::Head => of_groups(tensor).map_err(told),
            _ => case.inside(tensor),
        });
        let out = QuantizeOutputMut {
            codes: case.inside(&mut self.codes)?,
            scale: chosen.transpose()?,
            mean: self.mean.as_mut().map(of_groups).transpose().map_err(told)?,
        };
        run(&call, out, kernel, stream).map_err(|error| format!("{error}\n    {case:?}"))
    }

    /// A graph of a call.
    pub(crate) fn captured(
        &mut self,
        case: &Case,
        kernel: &'static Kernel,
        stream: &Stream,
    ) -> Outcome<Graph> {
        let mut refused = None;
        let graph = stream.capture(|stream| {
            refused = self.quantize(case, Some(kernel), stream).err();
            Ok::<(), Error>(())
        });
        refused.map_or(graph.map_err(told), Err)
    }

    pub(crate) fn written(&self, case: &Case, stream: &Stream) -> Outcome<Written> {
        wait(stream, &|| format!("{case:?}"))?;
        let bits = |tensor: Option<&Tensor>| {
            tensor.map_or(Ok(Vec::new()), |tensor| download(stream, tensor))
        };
        Ok([bits(Some(&self.codes))?, bits(self.chosen.as_ref())?, bits(self.mean.as_ref())?])
    }
}

/// Quantises, with this kernel or with the selected one.
pub(crate) fn run(
    call: &Quantize<'_>,
    out: QuantizeOutputMut<'_>,
    kernel: Option<&'static Kernel>,
    stream: &Stream,
) -> Outcome<()> {
    match kernel {
        Some(kernel) => call.run_with(kernel, out, stream),
        None => call.quantize_into(out, stream),
    }
    .map_err(told)
}

/// What the CPU makes of these numbers, with means that were found elsewhere.
pub(crate) fn expected(case: &Case, x: &[u32], means: &[u32]) -> Outcome<Written> {
    let stream = cpu();
    let mut tensors = Tensors::new(case, x, &stream)?;
    if !case.subtract_mean || case.batch * case.heads == 0 {
        tensors.quantize(case, None, &stream)?;
        return tensors.written(case, &stream);
    }
    // The means of the CPU, and the rows without those that were found.
    tensors.quantize(case, None, &stream)?;
    let [.., own_means] = tensors.written(case, &stream)?;
    let mut rest: Vec<f32> = x.iter().map(|&bits| decode(case.dtype, bits)).collect();
    for (sequence, (entry, tokens)) in case.ranges().into_iter().enumerate() {
        for (token, head) in tokens.flat_map(|token| (0..case.heads).map(move |head| (token, head)))
        {
            let mean = ((sequence + MARGIN) * (case.heads + 1) + head) * case.head_dim;
            let start = case.place([entry, token, head]);
            for column in 0..case.head_dim {
                rest[start + column] -= f32::from_bits(means[mean + column]);
            }
        }
    }
    let rest: Vec<u32> = rest.into_iter().map(f32::to_bits).collect();
    let plain = Case { dtype: DType::F32, subtract_mean: false, ..case.clone() };
    let mut tensors = Tensors::new(&plain, &rest, &stream)?;
    tensors.quantize(&plain, None, &stream)?;
    let [codes, scales, _] = tensors.written(&plain, &stream)?;
    Ok([codes, scales, own_means])
}

/// Whether means agree but for rounding: of at most 256 sums of f32 one after another, up to 16 in
/// a class, 16 of classes and, in the longest case, 158 of chunks.
pub(crate) fn are_means(found: &[u32], expected: &[u32], x: &[u32], dtype: DType) -> bool {
    let numbers = x.iter().map(|&bits| decode(dtype, bits)).filter(|x| x.is_finite());
    let most = numbers.fold(0f32, |most, x| most.max(x.abs()));
    let limit = 256.0 * f32::EPSILON / 2.0 * most;
    let agree = |(&found, &expected): (&u32, &u32)| {
        let apart = (f32::from_bits(found) - f32::from_bits(expected)).abs();
        found == expected || apart <= limit
    };
    found.len() == expected.len() && found.iter().zip(expected).all(agree)
}

pub(crate) fn told<E: std::fmt::Display>(error: E) -> String {
    error.to_string()
}
