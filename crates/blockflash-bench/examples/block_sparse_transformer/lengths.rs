//! Attention apart from the network: time and memory over the length of a window.

use super::attention::{Pattern, call};
use super::model::Sizes;
use super::training::Options;
use blockflash_bench::timing::{Cache, Repeat};
use blockflash_bench::{Result, random};
use blockflash_ops::{AttentionBackward, DType, Mask, Tensor};
use serde::Serialize;

/// One window length, one pattern.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Length {
    pub seqlen: usize,
    /// Attended pairs of tokens, relative to those of a causal mask.
    pub density: f64,
    /// Microseconds of a forward pass with the log-sum-exp, and of a backward pass.
    pub us: [f64; 2],
    /// Bytes that the forward pass leaves to the backward pass: q, k, v, o and the log-sum-exp.
    pub kept: usize,
    /// Bytes that are needed while the backward pass runs.
    pub workspace: usize,
    /// Bytes of the probabilities that a computation without blocks keeps in their place.
    pub probabilities: usize,
}

/// Measures one window of so many tokens.
///
/// # Errors
/// A device that has no such kernels or fails.
pub fn measure(options: &Options, sizes: &Sizes, seqlen: usize) -> Result<Length> {
    let place = options.place()?;
    let (stream, dtype) = (&place.stream, place.dtype);
    let shape = [1, seqlen, sizes.heads, sizes.head_dim];
    let count = shape.iter().product();
    let tensor = |lane| place.upload(&random::normals(count, options.seed ^ lane), &shape);
    let [q, k, v, d_o] = [tensor(1)?, tensor(2)?, tensor(3)?, tensor(4)?];
    let mask = sizes.pattern.mask(seqlen, stream)?;
    let attention = call([q.view(), k.view(), v.view()], mask.as_ref());
    let mut o = Tensor::empty(stream, dtype, &shape)?;
    let mut lse = Tensor::empty(stream, DType::F32, &[1, sizes.heads, seqlen])?;
    let forward = Repeat::new(stream, Cache::Warm, |stream| {
        Ok(attention.forward_into(o.view_mut(), Some(lse.view_mut()), stream)?)
    })?;
    let (o, lse) = (o.view(), lse.view());
    let backward = AttentionBackward { attention, o, lse, d_o: d_o.view() };
    let mut gradients = backward.backward(stream)?;
    let workspace = backward.workspace_bytes(stream.device())?;
    let mut lent = Tensor::empty(stream, DType::U8, &[workspace])?;
    let timed = Repeat::new(stream, Cache::Warm, |stream| {
        let lent = (workspace > 0).then(|| lent.view_mut());
        Ok(backward.backward_into(gradients.view_mut(), lent, stream)?)
    })?;
    let causal = Mask::causal();
    let all = causal.visited_pairs(seqlen, seqlen);
    let on_host = Pattern::mask(&sizes.pattern, seqlen, &blockflash_ops::Device::cpu().stream()?)?;
    let pairs = on_host.map_or(Ok(all), |mask| mask.visited_pairs(causal))?;
    Ok(Length {
        seqlen,
        density: pairs as f64 / all as f64,
        us: [forward.launch_us(), timed.launch_us()],
        kept: 4 * count * dtype.size() + sizes.heads * seqlen * size_of::<f32>(),
        workspace,
        probabilities: sizes.heads * pairs as usize * dtype.size(),
    })
}

/// Measures dense attention and that of the options for lengths around the window's; on a CPU only
/// for shorter ones.
///
/// # Errors
/// As [`measure`].
pub fn run(options: &Options) -> Result<Vec<[Length; 2]>> {
    let seqlen = options.windows[1];
    let longest = if options.device.is_cpu() { seqlen } else { 4 * seqlen };
    let lengths = [8, 4, 2, 1].map(|part| longest / part);
    let [dense, sparse] = options.patterns();
    let both = |seqlen| Ok([measure(options, &dense, seqlen)?, measure(options, &sparse, seqlen)?]);
    lengths.into_iter().filter(|&seqlen| seqlen > 0).map(both).collect()
}
